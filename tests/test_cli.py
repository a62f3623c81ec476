"""The commands as a user runs them: a real process, its output and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import pytest

from conftest import Photos

COMMANDS = ("ingest", "info", "verify", "get", "export", "warm", "evict", "doctor", "bench", "show", "ls")


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from lmdbstore.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


def ingest(photos: Photos, out: Path, *more: object) -> subprocess.CompletedProcess[str]:
    return run("ingest", photos.csv, "--images", photos.images, "--out", out, *more)


def test_help_names_every_command() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    assert all(f"\n  {command} " in shown.stdout for command in COMMANDS)
    for command in COMMANDS:
        assert run(command, "--help").returncode == 0


def test_the_whole_story(photos: Photos, tmp_path: Path) -> None:
    out = tmp_path / "o.lmdb"
    done = ingest(photos, out)
    assert done.returncode == 0 and "40 images" in done.stdout and done.stderr == ""
    assert "layout train/{id[0]}/{id[1]}/{id[2]}/{id}.jpg" in done.stdout
    facts = json.loads(run("info", out, "--json").stdout)
    assert {"images", "bytes", "columns", "rejected", "format_version", "build_id", "order"} <= set(facts)
    assert (facts["images"], facts["rejected"], facts["order"]) == (40, 0, "id")
    assert "40" in run("info", out).stdout
    verified = run("verify", out, "--decode")
    assert verified.returncode == 0 and "whole" in verified.stdout
    id = photos.ids[0]
    assert run("get", out, id, "-o", tmp_path / "x.jpg").returncode == 0
    assert (tmp_path / "x.jpg").read_bytes() == photos.data(id)
    piped = subprocess.run([sys.executable, "-m", "lmdbstore", "get", str(out), id], capture_output=True)
    assert piped.stdout == photos.data(id)
    assert run("export", out, "--out", tmp_path / "again").returncode == 0
    assert subprocess.run(["diff", "-r", tmp_path / "again", photos.csv.parent]).returncode == 0
    (tmp_path / "ids").write_text(f"{id}\n")
    assert "1 images" in run("export", out, "--out", tmp_path / "one", "--ids", tmp_path / "ids").stdout


def test_rejected_rows_have_their_exit_code_and_lists(photos: Photos, tmp_path: Path) -> None:
    out = tmp_path / "o.lmdb"
    photos.path(photos.ids[2]).unlink()
    done = ingest(photos, out)
    assert done.returncode == 3
    assert "1 of 40 rows were rejected" in done.stdout and f"line 4: id '{photos.ids[2]}'" in done.stdout
    assert run("info", out, "--rejects").stdout.startswith(f"4: '{photos.ids[2]}': train/")
    assert json.loads(run("info", out, "--rejects", "--json").stdout)[0]["line"] == 4
    assert (tmp_path / "o.lmdb.rejects.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["ingest", "{csv}", "--images", "{images}", "--out", "{new}", "--strict"], 1),
        (["ingest", "{csv}", "--images", "{images}", "--out", "{store}"], 1),
        (["ingest", "none.csv", "--images", "{images}", "--out", "{new}"], 1),
        (["ingest", "{csv}", "--images", "nowhere", "--out", "{new}"], 1),
        (["ingest", "{csv}", "--images", "{images}", "--out", "{new}", "--check", "all"], 2),
        (["ingest", "{csv}", "--images", "{images}", "--out", "{new}", "--path", "{{id.x}}"], 1),
        (["ingest", "{csv}", "--images", "{images}", "--out", "{new}", "--id-column", "x"], 1),
        (["ingest", "{csv}", "--images", "{images}"], 2),
        (["ingest"], 2),
        (["nothing"], 2),
        (["info"], 2),
        (["info", "none.lmdb"], 1),
        (["info", "{csv}"], 1),
        (["verify", "none.lmdb"], 1),
        (["verify", "{store}", "--what"], 2),
        (["get", "{store}", "gone"], 1),
        (["get", "{store}", "{id}", "-o", "no/such/folder"], 1),
        (["export", "{store}", "--out", "{store}"], 1),
        (["bench", "{store}", "--workers", "-1"], 2),
        (["bench", "{store}", "--pipeline", "x"], 2),
        (["bench", "{store}", "--csv", "{csv}"], 2),
        (["bench", "none.lmdb"], 1),
        (["doctor"], 2),
        (["doctor", "--csv", "{csv}"], 2),
        (["doctor", "none.lmdb"], 1),
        (["doctor", "--csv", "none.csv", "--images", "{images}"], 1),
        (["warm", "none.lmdb"], 1),
        (["warm", "{store}", "--ids", "none"], 1),
        (["evict", "{csv}"], 1),
        (["info", "{store}", "--shuffle-quality", "--label", "x"], 1),
        (["export", "{store}", "--out", "{new}", "--ids", "none"], 1),
    ],
)
def test_mistakes_are_one_clear_line(photos: Photos, tmp_path: Path, arguments: list[str], code: int) -> None:
    store, new = tmp_path / "o.lmdb", tmp_path / "new"
    ingest(photos, store)
    photos.path(photos.ids[1]).unlink()
    before = sorted(os.listdir(tmp_path))
    names = {"csv": photos.csv, "images": photos.images, "store": store, "new": new, "id": photos.ids[0]}
    shown = run(*(argument.format(**names) for argument in arguments), cwd=tmp_path)
    assert shown.returncode == code, shown.stderr
    assert "Traceback" not in shown.stderr and shown.stderr + shown.stdout
    if code == 1:
        lines = (shown.stderr or shown.stdout).splitlines()
        assert len(lines) <= 2 and len(shown.stderr) < 500
    assert set(os.listdir(tmp_path)) - set(before) <= {"new.partial", "new.rejects.csv"}


def test_a_damaged_store_fails_verify(photos: Photos, tmp_path: Path) -> None:
    out = tmp_path / "o.lmdb"
    ingest(photos, out)
    data = bytearray(out.read_bytes())
    data[data.index(photos.data(photos.ids[5])) + 30] ^= 1
    out.write_bytes(data)
    shown = run("verify", out)
    assert shown.returncode == 1 and photos.ids[5] in shown.stdout and "1 problems" in shown.stdout
    assert len(json.loads(run("verify", out, "--json").stdout)["problems"]) == 1


def test_quiet_says_nothing(photos: Photos, tmp_path: Path) -> None:
    done = ingest(photos, tmp_path / "o.lmdb", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_closed_pipe_is_no_error(store_path: Path) -> None:
    command = f"{sys.executable} -m lmdbstore info {store_path} | true"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert shown.stderr == ""


SLOW = """
import time
from lmdbstore import cli
from lmdbstore.ingestion import pipeline
pipeline._BATCH_ROWS = 2
real = pipeline.Staging.append
def slowly(self, batch):
    real(self, batch)
    print(batch.settled, flush=True)
    time.sleep(0.1)
pipeline.Staging.append = slowly
cli.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_one_line_and_the_same_command_goes_on(
    photos: Photos, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out = tmp_path / "o.lmdb"
    arguments = ["ingest", str(photos.csv), "--images", str(photos.images), "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(number)
    _, stderr = process.communicate()
    assert process.returncode == code, stderr
    assert len(stderr.splitlines()) == 1 and "the same command goes on from there" in stderr
    assert not out.exists()
    again = run(*arguments)
    assert again.returncode == 0 and "went on after" in again.stdout
    assert run("verify", out).returncode == 0


# Looking


def test_show_draws_a_sheet(photos: Photos, store_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "ids").write_text("\n".join(photos.ids[:3]))
    label = photos.labels[photos.ids[0]]
    sheet = tmp_path / "sheet.png"
    for choice in (
        ["--random", 5],
        [photos.ids[0], photos.ids[1]],
        ["--ids", tmp_path / "ids"],
        ["--label", label, "--column", "landmark_id"],
        ["--rejects"],
    ):
        shown = run("show", store_path, *choice, "-o", sheet)
        assert (shown.returncode, shown.stderr, shown.stdout) == (0, "", f"{sheet}\n"), choice
        assert cv2.imread(str(sheet)).shape[1] == 1900
        sheet.unlink()
    assert run("show", store_path, "-o", sheet, "--quiet").stdout == ""


def test_show_of_rejects_draws_what_is_left_of_them(photos: Photos, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    whole = photos.data(photos.ids[20])
    photos.path(photos.ids[20]).write_bytes(whole[: len(whole) * 2 // 3])
    ingest(photos, tmp_path / "o.lmdb")
    grey = []  # what libjpeg puts where there is no data
    for more in ([], ["--images", photos.images]):
        assert run("show", tmp_path / "o.lmdb", "--rejects", *more, "-o", tmp_path / "r.png").returncode == 0
        grey.append(int((cv2.imread(str(tmp_path / "r.png")) == 128).all(2).sum()))
    assert grey[1] > grey[0] + 10_000


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{id}"], 2, "'-o'"),
        (["-o", "{new}.txt"], 1, "ending chooses the format"),
        (["-o", "{new}.png", "gone"], 1, "'gone'"),
        (["-o", "{new}.png", "--label", "x"], 1, "isn't one"),
        (["-o", "{new}.png", "--label", "5"], 1, "no image has '5'"),
        (["-o", "{new}.png", "--label", "27", "--column", "landmark"], 1, "landmark_id"),
        (["-o", "{new}.png", "--label", "27", "--rejects"], 2, "one of them"),
        (["-o", "{new}.png", "--random", "-1"], 2, "-1"),
        (["-o", "no/folder/x.png"], 1, "no/folder"),
    ],
)
def test_mistakes_of_show(
    photos: Photos, store_path: Path, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    pytest.importorskip("matplotlib")
    names = {"id": photos.ids[0], "new": tmp_path / "new"}
    shown = run("show", store_path, *(argument.format(**names) for argument in arguments))
    assert shown.returncode == code and said in shown.stderr and "Traceback" not in shown.stderr, shown.stderr
    assert not list(tmp_path.glob("new*"))


def test_ls_lists_the_columns(photos: Photos, store_path: Path) -> None:
    head, *rows = run("ls", store_path, "--csv").stdout.splitlines()
    assert head == "id,landmark_id,width,height,orientation,format,length"
    assert {row.split(",")[0]: int(row.split(",")[1]) for row in rows} == photos.labels
    label = photos.labels[photos.ids[0]]
    lines = run("ls", store_path, "--label", label).stdout.splitlines()
    assert {line.split()[0] for line in lines[1:]} == {id for id in photos.ids if photos.labels[id] == label}
    assert run("ls", store_path, "--label", "x").returncode == 1
