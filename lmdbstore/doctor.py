"""Why is my first epoch slow: measures disk and cores for some seconds, predicts epochs, and explains.

Each figure is measured here and now: reads of data that was dropped from the page cache first, and the parts of the
pipeline on one core.  What it drops is a sample of the user's own files, which the next epoch reads again.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from lmdbstore import codec, costs, folder, machine, pagecache
from lmdbstore.costs import Costs
from lmdbstore.errors import OptionError
from lmdbstore.store import ImageStore
from lmdbstore.template import probe_layout

_SECONDS = 4.0  # for each measurement of a disk: 200 images of a slow one, and enough of a fast one
_IMAGES = 200
_SEQUENTIAL_BYTES = 512 << 20
_FOLIO = 2 << 20
_TRIAL_BYTES = 128 << 20  # of the file that is made where there is no store to read in order

Extent = tuple[str, int, int]  # path, offset and length in bytes


@dataclasses.dataclass(frozen=True)
class Side:
    """One way to keep the images: a folder of files, or a store.

    Attributes
    ----------
    name : {"folder", "store"}
    images : int
    bytes : int
        Of all images; for a folder estimated from a sample.
    resident : float or None
        Share in the page cache when the measurement began; None where the kernel won't tell.
    random_ms : float or None
        Milliseconds an image, read cold in random order by all workers together; None if nothing could be dropped.
    """

    name: str
    images: int
    bytes: int
    resident: float | None
    random_ms: float | None


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What was measured, and what follows from it.

    Attributes
    ----------
    sides : tuple of Side
    sequential : float or None
        Bytes per second that the disk gives when a file is read in order, cold.
    costs : Costs
        What an image costs one core, in milliseconds.
    workers : int
        The recommended num_workers; predictions are for it.
    machine : dict
    """

    sides: tuple[Side, ...]
    sequential: float | None
    costs: Costs
    workers: int
    machine: dict[str, Any]

    def warm_seconds(self, side: Side) -> float:
        """Return the predicted time of an epoch whose bytes are all in memory."""
        return side.images * self.costs.total / 1e3 / self.workers

    def cold_seconds(self, side: Side, *, in_order: bool) -> float | None:
        """Return the predicted time of an epoch with nothing in memory: the cores' or the disk's, whichever is longer.

        Parameters
        ----------
        in_order : bool
            Read ahead block by block, as BlockShuffleSampler does; else image by image in random order.
        """
        if in_order:
            disk = None if self.sequential is None else side.bytes / self.sequential
        else:
            disk = None if side.random_ms is None else side.images * side.random_ms / 1e3
        return None if disk is None else max(disk, self.warm_seconds(side))

    def to_dict(self) -> dict[str, Any]:
        """Return everything, predictions included, ready for JSON."""
        predicted = {
            side.name: {
                "warm_seconds": self.warm_seconds(side),
                "cold_random_seconds": self.cold_seconds(side, in_order=False),
                "cold_in_order_seconds": self.cold_seconds(side, in_order=True) if side.name == "store" else None,
            }
            for side in self.sides
        }
        return {**dataclasses.asdict(self), "predicted": predicted}

    def lines(self) -> Iterator[str]:
        """Yield the findings, a sentence each, with their figures."""
        yield f"cores          {self.machine['cores']} ({self.machine['processor']}); JPEG decoder {codec.backend()}"
        yield from self._disk_lines()
        c = self.costs
        yield (
            f"one image      read {c.read:.2f}, decode {c.decode:.2f}, augment {c.augment:.2f}, "
            f"hand over {c.transfer:.2f} ms: {1e3 * self.workers / c.total:,.0f} images/s with {self.workers} workers"
        )
        for side in self.sides:
            yield from self._epoch_lines(side)
        yield f"why            {self._verdict()}"
        yield f"what to do     {self._advice()}"

    def _disk_lines(self) -> Iterator[str]:
        if self.sequential is not None:
            yield f"disk           {self.sequential / 1e6:,.0f} MB/s in order"
        for side in self.sides:
            share = "unknown (not your file)" if side.resident is None else f"{side.resident:.0%}"
            cold = "" if side.random_ms is None else f"; cold in random order {side.random_ms:.2f} ms an image"
            yield f"{side.name:14} {side.images:,} images, {side.bytes / 1e6:,.0f} MB, {share} in memory{cold}"

    def _epoch_lines(self, side: Side) -> Iterator[str]:
        yield f"{side.name:14} a warm epoch takes {_time(self.warm_seconds(side))}"
        at_random = self.cold_seconds(side, in_order=False)
        if at_random is not None:
            yield f"{'':14} a cold one in random order {_time(at_random)}"
        if side.name == "store" and (in_order := self.cold_seconds(side, in_order=True)) is not None:
            yield f"{'':14} a cold one with BlockShuffleSampler {_time(in_order)}"

    def _verdict(self) -> str:
        slow = self.sides[0]
        if slow.random_ms is None:
            return "what a cold read costs can't be measured here: the files stay in memory or aren't yours"
        disk, core = f"{slow.random_ms:.2f} ms", self.costs.total / self.workers
        workers = f"{core:.2f} ms of the {self.workers} workers"
        if slow.random_ms < core:
            return f"the disk isn't the reason: an image takes it {disk} even at random, and {workers}"
        return (
            f"in random order each image costs the disk {disk}, and only {workers}: "
            "until the page cache has it, an epoch waits for the disk"
        )

    def _advice(self) -> str:
        if self.sides[-1].name == "folder":
            return "ingest the folder into a store (lmdbstore ingest), and train with BlockShuffleSampler"
        store = self.sides[-1]
        random, in_order = (self.cold_seconds(store, in_order=way) for way in (False, True))
        if random is not None and in_order is not None and random <= 1.1 * in_order:
            return f"num_workers={self.workers}; BlockShuffleSampler(dataset, order='random') costs no more than blocks"
        return f"num_workers={self.workers}, sampler=BlockShuffleSampler(dataset)"


def diagnose(
    store: str | os.PathLike[str] | None = None,
    *,
    csv: str | os.PathLike[str] | None = None,
    images: str | os.PathLike[str] | None = None,
    id_column: str = "id",
    pipeline: str = "seed",
) -> Diagnosis:
    """Measure what decides how long epochs take, of a store, of a folder of images, or of both.

    Parameters
    ----------
    store : path, optional
    csv, images : path, optional
        A folder of images, both or neither.
    id_column : str
    pipeline : {"seed", "rrc"}
        The augmentation to measure with, see `folder.pipeline`.

    Raises
    ------
    OptionError
        There is nothing to look at.

    Notes
    -----
    Takes about 15 seconds.  Threads: one call at a time, it times what it does.
    """
    if (csv is None) != (images is None) or (store is None and csv is None):
        raise OptionError("name a store, or a csv and its folder of images (--csv and --images), or both")
    workers = machine.cores()
    sides, sequential, cost = [], None, None
    if csv is not None and images is not None:
        side, sequential, cost = _folder(Path(csv), Path(images), id_column, pipeline, workers)
        sides.append(side)
    if store is not None:
        side, sequential, cost = _store(Path(store), pipeline, workers)
        sides.append(side)
    assert cost is not None
    return Diagnosis(tuple(sides), sequential, cost, workers, machine.facts())


def _folder(csv: Path, images: Path, id_column: str, pipeline: str, workers: int) -> tuple[Side, float | None, Costs]:
    ids = folder.read_ids(csv, id_column=id_column)
    template = probe_layout(images, ids[:100])
    chosen = [ids[i] for i in _spread(len(ids), _IMAGES)]
    paths = [path for path in (str(images / template.fill({"id": id})) for id in chosen) if os.path.isfile(path)]
    sizes = [os.path.getsize(path) for path in paths]
    resident = [pagecache.resident(path) for path in paths]
    share = None if None in resident else sum(filter(None, resident)) / max(1, sum(sizes))
    random_ms = _random_ms([(path, 0, size) for path, size in zip(paths, sizes, strict=True)], workers)
    cost = costs.measure(
        paths,
        read=lambda path: Path(path).read_bytes(),
        decode=lambda _, data: folder.decode_file(data),
        augment=folder.pipeline(pipeline),
        batch_size=64,
    )
    side = Side("folder", len(ids), int(statistics.mean(sizes) * len(ids)), share, random_ms)
    return side, _trial_file_speed(images), cost


def _store(path: Path, pipeline: str, workers: int) -> tuple[Side, float | None, Costs]:
    resident = pagecache.resident(path)
    with ImageStore(path) as store:
        offset, length = store.column("offset"), store.column("length")
        chosen = _spread(len(store), _IMAGES)
        extents = [(str(path), int(offset[i]), int(length[i])) for i in chosen]
        size, images = store.manifest.image_bytes, len(store)
    del offset, length  # views of the map: what is mapped can't be dropped
    random_ms = _random_ms(extents, workers)
    sequential = _sequential(path)
    with ImageStore(path) as store:
        cost = costs.measure(
            chosen,
            read=store.view,
            decode=lambda i, _: store.decode_at(i),
            augment=folder.pipeline(pipeline),
            batch_size=64,
        )
    share = None if resident is None else resident / max(1, os.path.getsize(path))
    return Side("store", images, size, share, random_ms), sequential, cost


def _random_ms(extents: Sequence[Extent], workers: int) -> float | None:
    """Return milliseconds an extent, read cold by `workers` threads in random order; None if none could be dropped."""
    order = np.random.default_rng(0).permutation(len(extents))
    cold = [extents[i] for i in order if _dropped(extents[i])]
    if len(cold) < max(2, len(extents) // 2):
        return None
    end = time.perf_counter() + _SECONDS

    def read(extent: Extent) -> int:
        return _read(extent) if time.perf_counter() < end else 0

    began = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        done = sum(size > 0 for size in pool.map(read, cold))
    return 1e3 * (time.perf_counter() - began) / done


def _dropped(extent: Extent) -> bool:
    path, offset, length = extent
    fd = os.open(path, os.O_RDONLY)
    try:
        pagecache.clean(fd)
        # the page cache holds pages in folios of up to 2 MiB, and drops whole ones only
        start = offset - offset % _FOLIO
        pagecache.drop(fd, start, -(-(offset + length - start) // _FOLIO) * _FOLIO)
        return pagecache.resident(fd, offset, length) == 0
    finally:
        os.close(fd)


def _read(extent: Extent) -> int:
    path, offset, length = extent
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        return len(file.read(length))


def _sequential(path: Path) -> float | None:
    """Return bytes per second of a file read in order, from its start, cold; None if it stays in memory."""
    size = min(os.path.getsize(path), _SEQUENTIAL_BYTES)
    if not _dropped((str(path), 0, size)):
        return None
    began, done = time.perf_counter(), 0
    with open(path, "rb", buffering=0) as file:
        while done < size and time.perf_counter() - began < _SECONDS:
            done += len(file.read(1 << 20))
    return done / (time.perf_counter() - began)


def _trial_file_speed(folder_: Path) -> float | None:
    """Return bytes per second in order on a folder's disk, by a file that is made and removed; None if read-only."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder_, prefix=".lmdbstore-doctor-") as file:
            for _ in range(_TRIAL_BYTES >> 20):
                file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())  # a dirty page isn't dropped
            return _sequential(Path(file.name))
    except OSError:
        return None


def _spread(n: int, count: int) -> list[int]:
    """Return at most `count` positions, evenly spread over range(n)."""
    return np.unique(np.linspace(0, n - 1, min(n, count)).astype(int)).tolist()


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 120 else f"{seconds / 60:,.1f} min"
