"""tools/ and the packaging: the sample is what it promises, the scripts parse, the metadata fits the code."""

from __future__ import annotations

import configparser
import csv
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import pytest

import lmdbstore
from conftest import REPOSITORY
from test_architecture import TABLE

MAKE_SAMPLE = REPOSITORY / "tools" / "make_sample.py"
SCRIPTS = ("tools/check", "tools/demo", "tools/bootstrap.sh", ".ci/run")
# The distribution that an import comes from, where the names differ; cv2 comes with albumentations.
DISTRIBUTIONS = {"turbojpeg": "pyturbojpeg", "cv2": "albumentations"}
EXTRAS = {"matplotlib", "pandas", "ray", "fsspec"}  # asked for by the modules that need them


def make_sample(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MAKE_SAMPLE), "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = "".join(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in files)
    return hashlib.sha256(names.encode()).hexdigest()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sample") / "made"
    made = make_sample(out, "--images", "24", "--seed", "5")
    assert made.returncode == 0, made.stderr
    return out


def test_sample_has_the_kaggle_layout(sample: Path) -> None:
    with (sample / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24
    assert list(rows[0]) == ["id", "landmark_id"]
    for row in rows:
        id = row["id"]
        assert re.fullmatch("[0-9a-f]{16}", id)
        path = sample / "train" / id[0] / id[1] / id[2] / f"{id}.jpg"
        assert 50_000 <= path.stat().st_size <= 100_000
        assert cv2.imread(str(path)) is not None
    assert len(list(sample.rglob("*.jpg"))) == 24


def test_sample_is_the_same_for_the_same_options(sample: Path, tmp_path: Path) -> None:
    for seed in ("5", "6"):
        assert make_sample(tmp_path / seed, "--images", "24", "--seed", seed).returncode == 0
    assert digest(tmp_path / "5") == digest(sample)
    assert digest(tmp_path / "6") != digest(sample)


def test_sample_that_is_there_is_left_alone(sample: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    shutil.copytree(sample, out)
    next(out.rglob("*.jpg")).unlink()
    before = digest(out)
    again = make_sample(out, "--images", "24", "--seed", "5")
    assert (again.returncode, "already there" in again.stdout, digest(out)) == (0, True, before)


def test_sample_that_was_interrupted_is_made_again(sample: Path, tmp_path: Path) -> None:
    out = tmp_path / "half"
    shutil.copytree(sample, out)
    (out / "train.csv").unlink()
    marker = out / "sample.json"
    marker.write_text(marker.read_text().replace("true", "false"))
    assert make_sample(out, "--images", "24", "--seed", "5").returncode == 0
    assert digest(out) == digest(sample)


def test_sample_never_goes_into_what_is_not_its_own(sample: Path, tmp_path: Path) -> None:
    other = make_sample(sample, "--images", "25", "--seed", "5")
    assert (other.returncode, other.stdout) == (1, "")
    assert "holds another sample" in other.stderr
    (tmp_path / "mine.txt").write_text("mine")
    foreign = make_sample(tmp_path, "--images", "1")
    assert foreign.returncode == 1
    assert "isn't empty" in foreign.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script: str) -> None:
    path = REPOSITORY / script
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert os.access(path, os.X_OK) == (path.suffix != ".sh")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_an_unusable_python_is_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": str(tmp_path / "none")}
    command = ["bash", str(REPOSITORY / "tools" / "check")]
    said = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert (said.returncode, said.stdout, said.stderr.count("\n")) == (1, "", 1)
    assert "PYTHON=" in said.stderr


def test_bench_peers_explains_itself_without_an_environment(tmp_path: Path) -> None:
    tool = REPOSITORY / "tools" / "bench_peers"
    for path in (tool, *sorted((tool.parent / "peers").glob("*.py"))):
        compile(path.read_text(), str(path), "exec")
    command = [sys.executable, tool, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (shown.returncode, os.access(tool, os.X_OK)) == (0, True), shown.stderr
    assert "TRAIN_CSV IMAGES" in shown.stdout and not list(tmp_path.iterdir())


# The metadata


@pytest.fixture(scope="module")
def metadata() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(REPOSITORY / "setup.cfg")
    return parser


def names(requirements: str) -> set[str]:
    return {re.split(r"[^\w-]", line.strip())[0].lower() for line in requirements.strip().splitlines()}


def test_version_is_stated_once_in_effect(metadata: configparser.ConfigParser) -> None:
    assert metadata["metadata"]["version"] == lmdbstore.__version__


def test_every_library_that_is_imported_is_required(metadata: configparser.ConfigParser) -> None:
    required = names(metadata["options"]["install_requires"])
    imported = set().union(*TABLE.values()) - EXTRAS | {"numpy"}
    assert {DISTRIBUTIONS.get(library, library) for library in imported} == required


def test_every_requirement_is_pinned_for_every_python(metadata: configparser.ConfigParser) -> None:
    pins = [line.split("==")[0].lower() for line in (REPOSITORY / "constraints.txt").read_text().splitlines()]
    assert names(metadata["options"]["install_requires"]) <= set(pins)
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines():
        if "python_version" in line:
            assert pins.count(line.split("==")[0].lower()) == 2, f"{line}: the other Pythons have no pin"


def test_the_package_says_that_it_is_typed() -> None:
    assert (REPOSITORY / "lmdbstore" / "py.typed").exists()


def test_a_short_run_of_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, REPOSITORY / "tools" / "fuzz", "--seconds", "4"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert re.search(r"\d+ store refused", shown.stdout) and not list(tmp_path.iterdir())
