"""The fixtures do what they say: each kind of leak is seen, and the photos are what they are called."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import cv2
import pytest

from conftest import PHOTO_COUNT, PHOTO_KINDS, Photos, held, with_orientation

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@linux
def test_held_sees_a_descriptor() -> None:
    before = held()
    fd = os.open(__file__, os.O_RDONLY)
    try:
        assert held().grown(before) == {"descriptors": [f"{fd} -> {__file__}"]}
    finally:
        os.close(fd)
    assert not held().grown(before)


def test_held_sees_a_thread() -> None:
    before, stop = held(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    assert [name.split()[0] for name in held().grown(before)["threads"]] == ["forgotten"]
    stop.set()
    thread.join()
    assert not held().grown(before)


@linux
def test_held_sees_a_child_process() -> None:
    before = held()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert held().grown(before)["children"] == [f"pid {child.pid}"]
        child.communicate(b"\n")
    assert not held().grown(before)


@linux
def test_held_sees_a_map(tmp_path: Path) -> None:
    before, path = held(), tmp_path / "data"
    path.write_bytes(b"x" * 5000)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert held().grown(before)["maps"] == [f"{path} #0"]
    mapped.close()
    assert not held().grown(before)


def test_photos_are_what_the_csv_says(photos: Photos) -> None:
    lines = photos.csv.read_text().splitlines()
    assert lines[0] == "id,landmark_id"
    assert lines[1:] == [f"{id},{photos.labels[id]}" for id in photos.ids]
    assert len(set(photos.ids)) == PHOTO_COUNT
    assert set(photos.kinds.values()) == {*PHOTO_KINDS, "colour"}
    assert all(cv2.imread(str(photos.path(id))) is not None for id in photos.ids)


def test_each_test_has_photos_of_its_own(photos: Photos, photos_master: Photos) -> None:
    photos.path(photos.ids[0]).unlink()
    assert photos_master.path(photos.ids[0]).exists()


@pytest.mark.parametrize("order", [">", "<"])
def test_orientation_turns_the_picture(photos: Photos, order: str) -> None:
    id = next(id for id, kind in photos.kinds.items() if kind == "colour")
    straight = cv2.imread(str(photos.path(id)))
    photos.path(id).write_bytes(with_orientation(photos.data(id), 6, order=order))
    turned = cv2.imread(str(photos.path(id)))
    assert (turned == cv2.rotate(straight, cv2.ROTATE_90_CLOCKWISE)).all()
