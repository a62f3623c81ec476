"""Ingest as a whole: what is stored, what is rejected, and what any interruption leaves."""

from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import Photos, encode_photo, picture
from lmdbstore import ImageStore, IngestOptions, ingest, verify
from lmdbstore.errors import (
    IngestBusy,
    IngestError,
    OptionError,
    OptionsChanged,
    RowsRejected,
    StoreExists,
    TemplateError,
)
from lmdbstore.ingestion import pipeline
from lmdbstore.ingestion.writer import Staging


def content(path: Path) -> dict[str, object]:
    """Return everything in a store but the time it was made."""
    with ImageStore(path) as store:
        columns = {column.name: list(store.column(column.name)) for column in store.manifest.columns}
        values = {id: store.read(id) for id in store.ids}
        manifest = replace(store.manifest, created="")
        return {"columns": columns, "values": values, "manifest": manifest, "rejects": store.rejects()}


def test_report_and_manifest(photos: Photos, tmp_path: Path) -> None:
    report = ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb")
    size = sum(len(photos.data(id)) for id in photos.ids)
    assert (report.rows, report.images, report.bytes, report.rejects) == (40, 40, size, [])
    assert report.template == "train/{id[0]}/{id[1]}/{id[2]}/{id}.jpg"
    assert sorted(os.listdir(tmp_path)) == ["o.lmdb", "photos"]
    with ImageStore(report.path) as store:
        assert store.manifest.image_bytes == size
        kinds = [photos.kinds[id] for id in store.ids]
        formats = [("unknown", "jpeg", "png", "webp")[code] for code in store.column("format")]
        assert formats == [kind if kind in ("png", "webp") else "jpeg" for kind in kinds]
        orientation = [int(kind[4:]) if kind.startswith("exif") else 1 for kind in kinds]
        assert store.column("orientation").tolist() == orientation
        for i in range(len(store)):
            height, width = store.decode_at(i).shape[:2]
            turned = orientation[i] >= 5
            assert (store.column("height")[i], store.column("width")[i]) == (
                (width, height) if turned else (height, width)
            )


@pytest.mark.parametrize("order", ["id", "csv", "shuffle"])
@pytest.mark.parametrize("check", ["decode", "header", "none"])
def test_orders_and_checks_store_the_same(photos: Photos, tmp_path: Path, order: str, check: str) -> None:
    ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb", options=IngestOptions(order=order, check=check))
    with ImageStore(tmp_path / "o.lmdb") as store:
        assert sorted(store.ids) == sorted(photos.ids)
        assert all(store.read(id) == photos.data(id) for id in photos.ids)
    assert verify(tmp_path / "o.lmdb", decode=True).problems == []


@pytest.mark.parametrize(
    ("template", "at"),
    [
        (None, "{a}/{b}/{c}/{id}.jpg"),
        (None, "{id}.jpg"),
        (None, "{id}.jpeg"),
        (None, "{id}.JPG"),
        (None, "{id}.png"),
        (None, "{id}"),
        ("{id[0:2]}/{id}.jpg", "{a}{b}/{id}.jpg"),
        ("x/{landmark_id}/{id}.img", "x/{label}/{id}.img"),
        ("{id[-1]}/{id}", "{z}/{id}"),
    ],
)
def test_layouts(photos: Photos, tmp_path: Path, template: str | None, at: str) -> None:
    folder = tmp_path / "other"
    for id in photos.ids:
        path = folder / at.format(id=id, a=id[0], b=id[1], c=id[2], z=id[-1], label=photos.labels[id])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photos.data(id))
    report = ingest(photos.csv, images=folder, out=tmp_path / "o.lmdb", options=IngestOptions(path=template))
    assert report.images == 40


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{id.__class__}", "no column 'id.__class__'"),
        ("{id!r}", "can't be formatted"),
        ("{nothing}/{id}", "no column 'nothing'.*there are id, landmark_id"),
        ("{id[x]}", "isn't a position"),
        ("{id", "path"),
        ("all.jpg", "no {id} in it"),
    ],
)
def test_a_template_of_the_wrong_form(photos: Photos, tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb", options=IngestOptions(path=template))
    assert os.listdir(tmp_path) == ["photos"]


def break_files(photos: Photos, tmp_path: Path) -> dict[str, str]:
    """Break a file in each way there is; return the reason that each id must be rejected for."""
    plain = [id for id in photos.ids if photos.kinds[id] == "colour"]
    paths = {kind: photos.path(id) for kind, id in zip(REASONS, plain, strict=False)}
    data = paths["truncated"].read_bytes()
    paths["missing"].unlink()
    paths["empty"].write_bytes(b"")
    paths["folder"].unlink()
    paths["folder"].mkdir()
    paths["html"].write_bytes(b"<!DOCTYPE html><html>404 not found</html>")
    paths["gif"].write_bytes(b"GIF89a" + bytes(40))
    paths["truncated"].write_bytes(data[: len(data) // 2])
    paths["fifo"].unlink()
    os.mkfifo(paths["fifo"])
    paths["other ending"].rename(paths["other ending"].with_suffix(".JPG"))
    (tmp_path / "outside.jpg").write_bytes(data)
    paths["link"].unlink()
    paths["link"].symlink_to(tmp_path / "outside.jpg")
    return {id: REASONS[kind] for kind, id in zip(REASONS, plain, strict=False)}


REASONS = {
    "missing": "no such file",
    "empty": "an empty file",
    "folder": "not a file",
    "html": "HTML",
    "gif": "GIF",
    "truncated": "truncated",
    "fifo": "not a file",
    "other ending": ".JPG)",
    "link": "symbolic link",
}


def test_rows_that_cannot_be_stored_are_rejected_with_line_id_and_reason(photos: Photos, tmp_path: Path) -> None:
    reasons = break_files(photos, tmp_path)
    with photos.csv.open("a") as file:
        file.write("../../outside,1\n/etc/passwd,2\nab,3\n" + photos.ids[0] + ",4\n,5\n")
    report = ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb")
    lines = {row["id"]: number for number, row in enumerate(csv.DictReader(photos.csv.open()), 2)}
    found = {reject.id: reject for reject in report.rejects if reject.id in reasons}
    assert set(found) == set(reasons)
    for id, reason in reasons.items():
        assert reason in found[id].reason and found[id].line == lines[id]
    others = {reject.line: reject.reason for reject in report.rejects if reject.line > 41}
    assert "leads out of the folder" in others[42] and "no such file" in others[43], (
        "/etc is looked for below the folder"
    )
    assert "too short for the path" in others[44]
    assert "stands at line 2 already" in others[45] and others[46] == "the id is empty"
    assert report.images == 40 - len(reasons) and report.rows == 45
    with (tmp_path / "o.lmdb.rejects.csv").open() as file:
        listed = [(int(row["line"]), row["id"], row["reason"]) for row in csv.DictReader(file)]
    with ImageStore(report.path) as store:
        assert store.rejects() == report.rejects == listed == sorted(listed)
        assert store.manifest.rejected == len(listed)
        assert not set(store.ids) & set(reasons)
    assert verify(report.path, decode=True).problems == []


def test_a_mode_that_takes_more(photos: Photos, tmp_path: Path) -> None:
    reasons = break_files(photos, tmp_path)
    options = IngestOptions(keep_truncated=True, follow_links=True)
    taken = {
        reject.id for reject in ingest(photos.csv, images=photos.images, out=tmp_path / "o", options=options).rejects
    }
    assert {REASONS[k] for k in ("truncated", "link")} == {reason for id, reason in reasons.items() if id not in taken}
    report = ingest(photos.csv, images=photos.images, out=tmp_path / "n", options=IngestOptions(check="none"))
    assert {"HTML", "GIF"}.isdisjoint(reasons[reject.id] for reject in report.rejects)


def test_a_link_of_a_folder_out_of_the_tree(photos: Photos, tmp_path: Path) -> None:
    id = photos.ids[0]
    top = photos.images / "train" / id[0]
    top.rename(tmp_path / "elsewhere")
    top.symlink_to(tmp_path / "elsewhere")
    report = ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb")
    assert {reject.id for reject in report.rejects} == {other for other in photos.ids if other[0] == id[0]}


def test_strict_publishes_nothing_and_lists_all(photos: Photos, tmp_path: Path) -> None:
    out = tmp_path / "o.lmdb"
    kept = [photos.path(id).read_bytes() for id in photos.ids]
    for id in photos.ids[:3]:
        photos.path(id).unlink()
    with pytest.raises(RowsRejected, match="no such file.*3 rows can't be stored"):
        ingest(photos.csv, images=photos.images, out=out, options=IngestOptions(strict=True))
    assert not out.exists() and len((tmp_path / "o.lmdb.rejects.csv").read_text().splitlines()) == 4
    for id, data in zip(photos.ids, kept, strict=True):
        photos.path(id).write_bytes(data)
    report = ingest(photos.csv, images=photos.images, out=out, options=IngestOptions(strict=True))
    assert report.images == 40 and sorted(os.listdir(tmp_path)) == ["o.lmdb", "photos"]


def test_nothing_to_store_publishes_nothing(photos: Photos, tmp_path: Path) -> None:
    for id in photos.ids:
        photos.path(id).write_bytes(b"x")
    with pytest.raises(IngestError, match="none of 40 rows could be stored; the first: line 2"):
        ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb")
    assert sorted(os.listdir(tmp_path)) == ["o.lmdb.rejects.csv", "photos"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": "nowhere"}, "no such folder of images"),
        ({"out": "no/such/o.lmdb"}, "no such folder to put the store in"),
        ({"images": "."}, "no file for the first 40 ids.*--path"),
    ],
)
def test_wrong_places(photos: Photos, tmp_path: Path, change: dict[str, str], message: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    places = {"images": photos.images, "out": empty / "o.lmdb"} | {name: empty / at for name, at in change.items()}
    with pytest.raises((IngestError, TemplateError), match=message):
        ingest(photos.csv, images=places["images"], out=places["out"])
    assert os.listdir(empty) == []


def test_wrong_options_quote_the_value() -> None:
    for bad in ({"check": "all"}, {"order": "random"}, {"workers": 0}):
        with pytest.raises(OptionError, match=str(*bad.values())):
            IngestOptions(**bad)  # type: ignore[arg-type]


def test_a_store_is_replaced_only_when_asked(photos: Photos, tmp_path: Path) -> None:
    out = tmp_path / "o.lmdb"
    ingest(photos.csv, images=photos.images, out=out)
    before = content(out)
    with pytest.raises(StoreExists, match="--overwrite"):
        ingest(photos.csv, images=photos.images, out=out)
    with pytest.raises(RowsRejected):
        photos.path(photos.ids[0]).unlink()
        ingest(photos.csv, images=photos.images, out=out, overwrite=True, options=IngestOptions(strict=True))
    assert content(out) == before
    assert ingest(photos.csv, images=photos.images, out=out, overwrite=True).images == 39


def test_sizes_do_not_grow(photos: Photos, tmp_path: Path) -> None:
    out = tmp_path / "o.lmdb"
    sizes = set()
    for _ in range(3):
        ingest(photos.csv, images=photos.images, out=out, overwrite=True)
        sizes.add(out.stat().st_size)
        assert out.stat().st_blocks * 512 <= out.stat().st_size + 4096
    assert len(sizes) == 1
    assert sizes.pop() < sum(len(photos.data(id)) for id in photos.ids) + 4096 * (40 + 40)


# Interruptions

SCRIPT = """
import sys, time
from lmdbstore.ingestion import pipeline
pipeline._BATCH_ROWS = 3
from lmdbstore import IngestOptions, ingest
csv, images, out, order, pause = sys.argv[1:]
real = pipeline.Staging.append
def slowly(self, batch):
    real(self, batch)
    print(batch.settled, flush=True)
    time.sleep(float(pause))
pipeline.Staging.append = slowly
print(ingest(csv, images=images, out=out, options=IngestOptions(order=order, workers=2)).resumed_from, flush=True)
"""


def start(photos: Photos, out: Path, *, order: str = "id", pause: float = 0.01) -> subprocess.Popen[str]:
    arguments = [str(photos.csv), str(photos.images), str(out), order, str(pause)]
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("order", ["id", "shuffle"])
def test_killed_at_any_moment_and_resumed_gives_the_same_store(
    photos: Photos, tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_BATCH_ROWS", 3)
    photos.path(photos.ids[4]).unlink()
    whole, out = tmp_path / "whole.lmdb", tmp_path / "out.lmdb"
    ingest(photos.csv, images=photos.images, out=whole, options=IngestOptions(order=order))
    rng = random.Random(order)
    kills = 0
    while not out.exists() and kills < 60:
        process = start(photos, out, order=order)
        assert process.stdout is not None
        process.stdout.readline()  # a batch is settled
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
    assert kills >= 3, "never interrupted"
    assert out.exists(), "never got anywhere"
    assert content(out) == content(whole)
    assert out.stat().st_size == whole.stat().st_size


@pytest.mark.parametrize("step", ["put_columns", "finish", "verify", "publish", "write_rejects"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_between_the_last_steps(photos: Photos, tmp_path: Path, step: str, when: str) -> None:
    photos.path(photos.ids[4]).unlink()
    whole, out = tmp_path / "whole.lmdb", tmp_path / "out.lmdb"
    ingest(photos.csv, images=photos.images, out=whole)
    script = f"""
import os, signal, sys
from lmdbstore import ingest
from lmdbstore.ingestion import pipeline
holder = pipeline if hasattr(pipeline, {step!r}) else pipeline.Staging
real = getattr(holder, {step!r})
def killed(*args, **kwargs):
    if {when!r} == "after":
        real(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(holder, {step!r}, killed)
ingest(sys.argv[1], images=sys.argv[2], out=sys.argv[3])
"""
    done = subprocess.run([sys.executable, "-c", script, str(photos.csv), str(photos.images), str(out)])
    assert done.returncode == -signal.SIGKILL
    if not out.exists():
        report = ingest(photos.csv, images=photos.images, out=out)
        assert report.resumed_from == 40 or step in ("verify", "publish", "finish")
        assert (tmp_path / "out.lmdb.rejects.csv").exists()
    assert content(out) == content(whole)


def interrupted(photos: Photos, out: Path, options: IngestOptions, batches: int = 4) -> None:
    """Run an ingest in this process that fails after some batches."""
    count = 0

    def stop(_: object) -> None:
        nonlocal count
        count += 1
        if count == batches:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(photos.csv, images=photos.images, out=out, options=options, progress=stop)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_BATCH_ROWS", 3)


@pytest.mark.usefixtures("small_batches")
def test_an_interrupted_ingest_goes_on_and_says_so(photos: Photos, tmp_path: Path) -> None:
    out = tmp_path / "o.lmdb"
    interrupted(photos, out, IngestOptions())
    assert sorted(os.listdir(tmp_path)) == ["o.lmdb.partial", "photos"]
    assert ingest(photos.csv, images=photos.images, out=out).resumed_from in (9, 12)
    assert verify(out).problems == []


@pytest.mark.usefixtures("small_batches")
def test_other_options_are_refused(photos: Photos, tmp_path: Path) -> None:
    out = tmp_path / "o.lmdb"
    interrupted(photos, out, IngestOptions())
    with pytest.raises(OptionsChanged, match="'check': 'decode'.*now.*'header'.*delete it to start over"):
        ingest(photos.csv, images=photos.images, out=out, options=IngestOptions(check="header"))
    with photos.csv.open("a") as file:
        file.write("another,1\n")
    with pytest.raises(OptionsChanged, match="csv_digest"):
        ingest(photos.csv, images=photos.images, out=out)
    (tmp_path / "o.lmdb.partial").unlink()
    assert ingest(photos.csv, images=photos.images, out=out).resumed_from == 0


def test_a_foreign_staging_file_is_left_alone(photos: Photos, tmp_path: Path) -> None:
    (tmp_path / "o.lmdb.partial").write_text("my notes")
    with pytest.raises(IngestError, match="not an ingest that can go on"):
        ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb")
    assert (tmp_path / "o.lmdb.partial").read_text() == "my notes"


def test_two_ingests_into_one_store(photos: Photos, tmp_path: Path) -> None:
    first = start(photos, tmp_path / "o.lmdb", pause=0.4)
    while not (tmp_path / "o.lmdb.partial").exists():
        time.sleep(0.01)
    time.sleep(0.05)
    with pytest.raises(IngestBusy, match="another ingest"):
        ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb")
    assert first.communicate()[0].splitlines()[-1] == "0" and first.returncode == 0
    assert verify(tmp_path / "o.lmdb", decode=True).problems == []


@pytest.fixture
def tmpfs(tmp_path: Path) -> object:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def big_photos(photos: Photos, *, side: int = 400) -> int:
    """Make the photos large enough for the disk to fill up; return their bytes."""
    rng = np.random.default_rng(0)
    total = 0
    for id in photos.ids:
        image = picture(rng, side, side) // 2 + rng.integers(0, 128, (side, side, 3), dtype=np.uint8)
        photos.path(id).write_bytes(encode_photo(image, "colour"))
        total += photos.path(id).stat().st_size
    return total


@pytest.mark.usefixtures("small_batches")
def test_a_full_disk_loses_nothing(photos: Photos, tmp_path: Path, tmpfs: Path) -> None:
    assert big_photos(photos) > 4_000_000
    out = tmpfs / "o.lmdb"
    with pytest.raises(IngestError, match=r"no space left on the disk \(the next batch needs .* bytes\).*goes on"):
        ingest(photos.csv, images=photos.images, out=out)
    assert not out.exists()
    subprocess.run(["mount", "-o", "remount,size=30m", tmpfs], check=True)
    assert ingest(photos.csv, images=photos.images, out=out).resumed_from > 3
    assert verify(out, decode=True).problems == []


@pytest.mark.usefixtures("small_batches")
def test_a_disk_that_is_full_at_the_very_end(photos: Photos, tmp_path: Path, tmpfs: Path) -> None:
    """Fill the disk when only columns and manifest are missing."""
    real = Staging.put_columns
    filler = tmpfs / "filler"

    def full(self: Staging, columns: dict) -> object:
        with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        return real(self, columns)

    lines = photos.csv.read_text().splitlines()
    photos.csv.write_text("\n".join([lines[0] + ",note", *(f"{line},{'x' * 9000}" for line in lines[1:])]))
    out = tmpfs / "o.lmdb"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "put_columns", full)
        with pytest.raises(IngestError, match="no space left"):
            ingest(photos.csv, images=photos.images, out=out)
    assert not out.exists()
    filler.unlink()
    assert ingest(photos.csv, images=photos.images, out=out).resumed_from == 40
    assert verify(out, decode=True).problems == []


def test_a_file_that_changes_while_it_is_read(photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdbstore.ingestion import images

    victim = photos.path(photos.ids[3])
    inode = victim.stat().st_ino
    real = images._read_all

    def racing(fd: int, size: int) -> bytes:
        data = real(fd, size)
        if os.fstat(fd).st_ino == inode:
            victim.write_bytes(data[:-10])
        return data

    monkeypatch.setattr(images, "_read_all", racing)
    report = ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb")
    assert [(reject.id, "changed while" in reject.reason) for reject in report.rejects] == [(photos.ids[3], True)]


def test_a_store_is_synced_before_it_has_its_name(photos: Photos, tmp_path: Path) -> None:
    """The order of system calls: file synced, renamed, folder synced."""
    trace = tmp_path / "trace"
    command = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync,rename,renameat,renameat2", "-o", str(trace)]
    code = "import sys; from lmdbstore import ingest; ingest(sys.argv[1], images=sys.argv[2], out=sys.argv[3])"
    arguments = [photos.csv, photos.images, tmp_path / "o.lmdb"]
    try:
        subprocess.run([*command, sys.executable, "-c", code, *arguments], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("strace isn't installed")
    calls = [line.split(" ", 1)[1] for line in trace.read_text().splitlines() if str(tmp_path) in line]
    renames = [k for k, call in enumerate(calls) if call.lstrip().startswith("rename")]
    assert len(renames) == 1
    before, after = calls[renames[0] - 1], calls[renames[0] + 1]
    assert "fsync" in before and "o.lmdb.partial" in before
    assert "fsync" in after and f"<{tmp_path}>" in after


def test_the_sample_is_stored_byte_for_byte(shared: Path, tmp_path: Path) -> None:
    glr = shared / "data" / "glr"
    report = ingest(
        glr / "train.csv", images=glr / "train", out=tmp_path / "o.lmdb", options=IngestOptions(check="header")
    )
    assert report.images == 1200 and not report.rejects
    with ImageStore(report.path) as store:
        for id in store.ids[::37]:
            assert store.read(id) == (glr / "train" / id[0] / id[1] / id[2] / f"{id}.jpg").read_bytes()
