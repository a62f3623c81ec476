"""What the notebooks look at: a sample that they make, or a store of yours.

LMDBSTORE_STORE names a store; LMDBSTORE_CSV and LMDBSTORE_IMAGES what it was ingested from.
Without it a sample of LMDBSTORE_SAMPLE images (600) is made in LMDBSTORE_WORK (`.demo` of the repository).
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import cv2

from lmdbstore import ingest

REPOSITORY = Path(__file__).resolve().parent.parent
COLOURS = ("blue", "green", "red")


def work() -> Path:
    """Return the folder that everything is made in."""
    folder = Path(os.environ.get("LMDBSTORE_WORK", REPOSITORY / ".demo"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def source() -> tuple[Path, Path]:
    """Return the csv and the folder of images."""
    if "LMDBSTORE_STORE" in os.environ:
        return Path(os.environ["LMDBSTORE_CSV"]), Path(os.environ["LMDBSTORE_IMAGES"])
    count = os.environ.get("LMDBSTORE_SAMPLE", "600")
    folder = work() / f"notebooks-{count}"
    command = [sys.executable, REPOSITORY / "tools" / "make_sample.py", "--images", count, "--out", folder]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if not (folder / "colours.csv").exists():
        write_colours(folder)
    return folder / "colours.csv", folder


def store() -> Path:
    """Return the store, ingested if it isn't there."""
    if "LMDBSTORE_STORE" in os.environ:
        return Path(os.environ["LMDBSTORE_STORE"])
    table, folder = source()
    path = folder.with_suffix(".lmdb")
    if not path.exists():
        ingest(table, images=folder, out=path)
    return path


def write_colours(folder: Path) -> None:
    """Give each image of the sample a label that can be learnt: the channel that is brightest on average."""
    with (folder / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with (folder / "colours.part").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id", "landmark_id", "colour"))
        for row in rows:
            mean = cv2.imread(str(image(folder, row["id"])), cv2.IMREAD_REDUCED_COLOR_8).mean((0, 1))
            writer.writerow((*row.values(), COLOURS[int(mean.argmax())]))
    (folder / "colours.part").rename(folder / "colours.csv")


def spoilt() -> tuple[Path, Path]:
    """Return a store with duplicates and rejected rows, and the folder that it was ingested from."""
    table, folder = source()
    if "LMDBSTORE_STORE" in os.environ:
        return store(), folder
    bad = work() / f"{folder.name}-spoilt"
    path = bad.with_suffix(".lmdb")
    if path.exists():
        return path, bad
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(folder, bad)
    with table.open(newline="") as file:
        ids = [row["id"] for row in csv.DictReader(file)]
    spoil([image(bad, id) for id in sorted(ids)])  # the csv is sorted by label: neighbours there have the same
    ingest(bad / "colours.csv", images=bad, out=path)
    return path, bad


def spoil(paths: list[Path]) -> None:
    """Make of some files: two copies of others, a smaller and a poorer copy, and four that no store takes."""
    shutil.copy(paths[0], paths[1])
    shutil.copy(paths[2], paths[3])
    original = cv2.imread(str(paths[4]))
    cv2.imwrite(str(paths[5]), cv2.resize(original, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA))
    cv2.imwrite(str(paths[6]), original, (cv2.IMWRITE_JPEG_QUALITY, 35))
    whole = paths[7].read_bytes()
    paths[7].write_bytes(whole[: len(whole) // 2])
    paths[8].write_bytes(b"<html><body>404 Not Found</body></html>")
    paths[9].write_bytes(b"")
    paths[10].unlink()


def image(folder: Path, id: str) -> Path:
    """Return where the sample has the file of an id."""
    return folder / "train" / id[0] / id[1] / id[2] / f"{id}.jpg"
