"""Fixtures: leaks fail every test; `photos` is a small Kaggle folder, `shared` the real one."""

from __future__ import annotations

import csv
import dataclasses
import gc
import multiprocessing.resource_tracker
import os
import shutil
import struct
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import cv2
import numpy as np
import pytest

from lmdbstore import ingest

REPOSITORY = Path(__file__).parent.parent
PATIENCE = 5.0  # seconds that workers and threads get to go away by themselves


# Leaks


@dataclasses.dataclass(frozen=True)
class Held:
    """What this process holds: each a set of names, so that a difference can be read."""

    descriptors: frozenset[str]
    threads: frozenset[str]
    children: frozenset[str]
    maps: frozenset[str]

    def grown(self, before: Held) -> dict[str, list[str]]:
        """Return what is there now, and wasn't before, by kind."""
        kinds = (field.name for field in dataclasses.fields(self))
        new = {kind: sorted(getattr(self, kind) - getattr(before, kind)) for kind in kinds}
        return {kind: names for kind, names in new.items() if names}


def held() -> Held:
    """Look at this process; on systems without /proc only its threads are seen."""
    threads = frozenset(f"{t.name} ({t.ident})" for t in threading.enumerate() if type(t).__name__ != "TMonitor")
    if not sys.platform.startswith("linux"):
        return Held(frozenset(), threads, frozenset(), frozenset())
    return Held(frozenset(_descriptors()), threads, frozenset(_children()), frozenset(_maps()))


def _descriptors() -> Iterator[str]:
    own = {multiprocessing.resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_alive_fd}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed the folder
            continue
        # multiprocessing has one of each for the whole process; libraries keep the random device and their fonts open
        if int(name) not in own and not target.startswith(("/dev/urandom", sys.prefix, sys.base_prefix)):
            yield f"{name} -> {target}"


def _children() -> Iterator[str]:
    own = {multiprocessing.resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
    for task in os.listdir("/proc/self/task"):
        try:
            pids = Path(f"/proc/self/task/{task}/children").read_text().split()
        except FileNotFoundError:
            continue
        yield from (f"pid {pid}" for pid in pids if int(pid) not in own)


def _maps() -> Iterator[str]:
    """Yield the mapped data files: not libraries, nor what the interpreter and the system map."""
    system = (sys.prefix, sys.base_prefix, "/usr", "/lib", "/etc", "/dev", "/memfd", "/SYSV", "[")
    counts: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[5] if line.count(" ") >= 5 and len(line.split(maxsplit=5)) == 6 else ""
        if path and ".so" not in path and not path.startswith(system):
            counts[path] = counts.get(path, 0) + 1
    yield from (f"{path} #{number}" for path, count in counts.items() for number in range(count))


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a descriptor, thread, child process or map behind.

    `@pytest.mark.leaks_ok("reason")` opts out.
    """
    if request.node.get_closest_marker("leaks_ok"):
        yield
        return
    before = held()
    yield
    deadline = time.monotonic() + PATIENCE
    grown = held().grown(before)
    while grown and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        grown = held().grown(before)
    if grown:
        pytest.fail("left behind: " + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in grown.items()))


# Data


@dataclasses.dataclass(frozen=True)
class Photos:
    """A small image set in the Kaggle layout.

    Attributes
    ----------
    images : Path
        The folder to give as --images; files are at `images/a/b/c/<id>.jpg`.
    csv : Path
        `id,landmark_id`, in the order of `ids`.
    ids : list of str
        In no order.
    labels : dict of str to int
    kinds : dict of str to str
        What is odd about an image: "colour" (nothing), "grey", "progressive", "png", "webp", "exif1" .. "exif8".
    """

    images: Path
    csv: Path
    ids: list[str]
    labels: dict[str, int]
    kinds: dict[str, str]

    def path(self, id: str) -> Path:
        """Return where the file of an id is."""
        return photo_path(self.images, id)

    def data(self, id: str) -> bytes:
        """Return the bytes of an id's file."""
        return self.path(id).read_bytes()


PHOTO_KINDS = ("grey", "progressive", "png", "webp", *(f"exif{n}" for n in range(1, 9)))
PHOTO_COUNT = 40


@pytest.fixture(scope="session")
def photos_master(tmp_path_factory: pytest.TempPathFactory) -> Photos:
    """Make the folder that `photos` copies."""
    return make_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture
def photos(photos_master: Photos, tmp_path: Path) -> Photos:
    """A small Kaggle folder of this test's own, to read or to break."""
    root = tmp_path / "photos"
    shutil.copytree(photos_master.csv.parent, root)
    return dataclasses.replace(photos_master, images=root, csv=root / "train.csv")


@pytest.fixture
def store_path(photos: Photos, tmp_path: Path) -> Path:
    """A store of `photos`, `tmp_path/photos.lmdb`."""
    ingest(photos.csv, images=photos.images, out=tmp_path / "photos.lmdb")
    return tmp_path / "photos.lmdb"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with the sample data (`data/glr`, `data/odd`); skips where it isn't there."""
    folder = Path(os.environ.get("LMDBSTORE_SHARED", REPOSITORY.parent / "shared"))
    if not (folder / "data" / "glr" / "train.csv").is_file():
        pytest.skip("no sample data (LMDBSTORE_SHARED names its folder)")
    return folder


def photo_path(images: Path, id: str) -> Path:
    """Return where the Kaggle layout has the file of an id."""
    return images / "train" / id[0] / id[1] / id[2] / f"{id}.jpg"


def make_photos(root: Path, *, count: int = PHOTO_COUNT, seed: int = 0) -> Photos:
    """Write `count` small images, one of each kind and the rest plain, and their csv."""
    rng = np.random.default_rng(seed)
    ids = [rng.bytes(8).hex() for _ in range(count)]
    kinds = {id: PHOTO_KINDS[i] if i < len(PHOTO_KINDS) else "colour" for i, id in enumerate(ids)}
    labels = {id: int(rng.integers(0, 8)) * 1000 + 27 for id in ids}
    for id in ids:
        path = photo_path(root, id)
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = (int(side) for side in rng.integers(33, 97, 2))
        path.write_bytes(encode_photo(picture(rng, height, width), kinds[id]))
    with (root / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id", "landmark_id"))
        writer.writerows((id, labels[id]) for id in ids)
    return Photos(root, root / "train.csv", ids, labels, kinds)


def picture(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return a smooth picture, (height, width, 3) uint8, no two corners alike: a turned or mirrored one shows."""
    corners = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return cv2.resize(corners, (width, height), interpolation=cv2.INTER_CUBIC)


def encode_photo(image: np.ndarray, kind: str) -> bytes:
    """Return an image file of one of `PHOTO_KINDS`, or an ordinary JPEG."""
    if kind == "grey":
        return _encode(".jpg", cv2.cvtColor(image, cv2.COLOR_BGR2GRAY))
    if kind == "progressive":
        return _encode(".jpg", image, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    if kind in ("png", "webp"):
        return _encode(f".{kind}", image)
    data = _encode(".jpg", image, cv2.IMWRITE_JPEG_QUALITY, 92)
    return with_orientation(data, int(kind[4:])) if kind.startswith("exif") else data


def with_orientation(jpeg: bytes, orientation: int, *, order: str = ">") -> bytes:
    """Put an EXIF segment with this orientation behind the SOI marker of a JPEG; `order` as in struct."""
    tiff = (b"MM" if order == ">" else b"II") + struct.pack(order + "HI", 42, 8)
    tiff += struct.pack(order + "HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)
    payload = b"Exif\0\0" + tiff
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(payload) + 2) + payload + jpeg[2:]


def _encode(extension: str, image: np.ndarray, *options: int) -> bytes:
    encoded, data = cv2.imencode(extension, image, options)
    assert encoded, f"OpenCV has no encoder for {extension}"
    return data.tobytes()
