"""Every example of the README runs: its Python in one namespace, its commands in a folder with a small set."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import albumentations as A
import pytest

from conftest import REPOSITORY, Photos
from lmdbstore import ImageDataset, ImageStore, ingest

README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
COMMANDS = re.findall(r"^\$ (lmdbstore .*)$|`(lmdbstore [^`]*\.lmdb[^`]*)`", README, re.M)


@pytest.fixture
def folder(photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with train.csv, train/ and glr.lmdb, as the README has them; the working one."""
    photos.csv.rename(tmp_path / "train.csv")
    (photos.images / "train").rename(tmp_path / "train")
    ingest(tmp_path / "train.csv", images=tmp_path / "train", out=tmp_path / "glr.lmdb")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_runs(folder: Path, photos: Photos) -> None:
    assert len(BLOCKS) >= 3
    names: dict[str, Any] = {"ImageDataset": ImageDataset, "ImageStore": ImageStore, "resize": A.Resize(8, 8)}
    names.update(id=photos.ids[0], train_ids=photos.ids[:30], valid_ids=photos.ids[30:])
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert len(names["train"]) == 30 and names["images"].shape[1:] == (3, 224, 224)


@pytest.mark.parametrize("command", sorted({a or b for a, b in COMMANDS}))
def test_the_commands_run(folder: Path, command: str) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "ingest":
        (folder / "glr.lmdb").unlink()
    if words[0] == "bench":
        words += ["--epochs", "1", "--workers", "0"]
    done = subprocess.run([sys.executable, "-m", "lmdbstore", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_of_the_readme_exists_and_every_one_that_exists_is_there() -> None:
    shown = subprocess.run([sys.executable, "-m", "lmdbstore", "--help"], capture_output=True, text=True).stdout
    exist = set(re.findall(r"^  (\w+)  ", shown, re.M))
    table = README[README.index("## Commands") : README.index("## Python")]
    assert exist == set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", table, re.M))))


def test_the_files_that_it_names_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (REPOSITORY / target).exists(), target
    assert "@@" not in README, "a figure is missing"
