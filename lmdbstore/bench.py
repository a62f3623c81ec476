"""Epochs of a folder and of a store, side by side, cold and warm, and where their time goes.

How each number is obtained:

- An epoch's clock starts before the dataset is made (for the store that includes opening it) and stops when the last
  batch is there.  Each epoch has a fresh DataLoader and fresh workers.  The sides take turns.
- "cold" and "warm" are measured, not assumed: the share of the side's bytes that was in memory when the clock started.
  An epoch that was to be cold and isn't raises `NotCold`.
- Eviction drops a side's own file contents and nothing else.  The folder's directories and inodes stay in memory, as
  they don't after a reboot, so its cold epochs are faster here than a user's first one.
- Waiting for the disk: the store's sampler counts it.  For the folder, where reads hide in the workers, it is
  the epoch's seconds less the median of the side's warm epochs, at least 0 (a warm one has 0); None without any.
- The rest of an epoch is shared out over read, decode, augmentation and transfer in proportion to what each costs alone
  on one core (`Costs`); with several workers they overlap, and no clock could tell them apart.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils.data

from lmdbstore import codec, costs, folder, machine, pagecache
from lmdbstore.costs import Costs
from lmdbstore.dataset import ImageDataset
from lmdbstore.epochs import BenchResult, Epoch, Options, with_disk_wait
from lmdbstore.errors import NotCold
from lmdbstore.layout import TextColumn
from lmdbstore.loader import BatchLoader
from lmdbstore.samplers import BlockShuffleSampler
from lmdbstore.store import ImageStore

COSTED_IMAGES = 200  # sampled evenly over the set: the mean of a 2 ms decode is then good to a few per cent


class Progress(NamedTuple):
    """How far a benchmark is."""

    epoch: str  # "store 1/3"
    images: int
    total: int


def run(
    store: str | os.PathLike[str],
    *,
    csv: str | os.PathLike[str] | None = None,
    images: str | os.PathLike[str] | None = None,
    epochs: int = 3,
    workers: int = 2,
    batch_size: int = 64,
    pipeline: str = "seed",
    cold: bool = False,
    loader: str = "dataloader",
    progress: Callable[[Progress], None] | None = None,
) -> BenchResult:
    """Run epochs of a store and, when csv and images are given, of the folder that it came from.

    Parameters
    ----------
    store : path
        No ImageStore of it may be open anywhere when `cold` is asked for: mapped pages can't be evicted.
    csv, images : path, optional
        As they were ingested; images that aren't in the store are left out.
    epochs : int
        For each side, the sides in turn.
    workers, batch_size : int
        Of the DataLoader, or threads of the BatchLoader.
    pipeline : {"seed", "rrc"}
        See `folder.pipeline`.
    cold : bool
        Evict each side's files before its first epoch; the later epochs find what that one left.
    loader : {"dataloader", "batch"}
        Of the store's epochs; the folder's are a DataLoader's.
    progress : callable, optional
        Called with a `Progress` after every batch.

    Raises
    ------
    NotCold
        Bytes stay in memory after the eviction, or the kernel won't tell.
    ValueError, StoreError, CsvError, IngestError

    Notes
    -----
    Threads: call it from one only, it times what it does.  Processes: starts `workers` DataLoader workers.
    """
    options = Options(Path(store), _path(csv), _path(images), epochs, workers, batch_size, pipeline, cold, loader)
    sides, size = _sides(options)
    measured = []
    with folder.one_opencv_thread():  # a worker that is forked while OpenCV's threads are at work can hang for ever
        for number in range(epochs):
            for side in sides:
                resident = _evict(side) if cold and number == 0 else _resident_share(side.files)
                measured.append(_epoch(side, number, resident, options, progress))
    return BenchResult(
        options, *size, with_disk_wait(measured), {side.name: side.costs() for side in sides}, _machine()
    )


class _Side(Protocol):
    """One way to get the same images."""

    name: str
    files: list[str]

    def opened(self, number: int) -> AbstractContextManager[tuple[Any, Any]]:
        """Return a context: the dataset's loader, shuffling, and its sampler."""

    def costs(self) -> Costs:
        """Measure the parts."""


class _StoreSide:
    """What lmdbstore's users write."""

    name = "store"

    def __init__(self, options: Options, label: str | None) -> None:
        self.options, self.label, self.files = options, label, [str(options.store)]

    @contextmanager
    def opened(self, number: int) -> Iterator[tuple[Any, Any]]:
        with ImageStore(self.options.store) as store:
            dataset = ImageDataset(store, transform=folder.pipeline(self.options.pipeline), label=self.label)
            sampler = BlockShuffleSampler(dataset)
            sampler.set_epoch(number)
            if self.options.loader == "batch":
                threads = max(1, self.options.workers)
                yield BatchLoader(dataset, self.options.batch_size, sampler=sampler, num_threads=threads), sampler
            else:
                yield _data_loader(dataset, self.options, sampler=sampler), sampler

    def costs(self) -> Costs:
        with ImageStore(self.options.store) as store:
            orientation = store.column("orientation")
            return costs.measure(
                _spread(range(len(store))),
                read=store.view,
                decode=lambda i, view: codec.decode(view, orientation=int(orientation[i])),
                augment=folder.pipeline(self.options.pipeline),
                batch_size=self.options.batch_size,
            )


class _FolderSide:
    """What the question's author wrote."""

    name = "folder"

    def __init__(self, options: Options, paths: list[str], labels: Any) -> None:
        self.options, self.files = options, paths
        self.dataset = folder.FolderDataset(paths, labels, folder.pipeline(options.pipeline))

    @contextmanager
    def opened(self, number: int) -> Iterator[tuple[Any, Any]]:
        generator = torch.Generator().manual_seed(number)
        yield _data_loader(self.dataset, self.options, shuffle=True, generator=generator), None

    def costs(self) -> Costs:
        return costs.measure(
            _spread(self.files),
            read=lambda path: Path(path).read_bytes(),
            decode=lambda _, data: folder.decode_file(data),
            augment=folder.pipeline(self.options.pipeline),
            batch_size=self.options.batch_size,
        )


def _sides(options: Options) -> tuple[list[_Side], tuple[int, int]]:
    """Return the sides to measure, and the images and bytes in the store; nothing stays open."""
    with ImageStore(options.store) as store:
        label = next((name for name in store.columns if not isinstance(store.column(name), TextColumn)), None)
        sides: list[_Side] = [_StoreSide(options, label)]
        if options.csv is not None and options.images is not None:
            paths, labels = folder.read_csv(
                options.csv,
                options.images,
                id_column=store.manifest.source["id_column"],
                label=label,
                only=set(store.ids),
                template=store.manifest.source["path"],
            )
            sides.insert(0, _FolderSide(options, paths, labels))
        return sides, (len(store), int(store.column("length").sum()))


def _epoch(
    side: _Side, number: int, resident: float | None, options: Options, progress: Callable[[Progress], None] | None
) -> Epoch:
    """Run one epoch; nothing of it is left open."""
    what = f"{side.name} {number + 1}/{options.epochs}"
    timeline: list[tuple[float, int]] = []
    start = time.perf_counter()
    with side.opened(number) as (loader, sampler):
        total, done = len(loader.dataset), 0
        for batch in loader:
            done += len(batch[0] if isinstance(batch, list) else batch)
            timeline.append((time.perf_counter() - start, done))
            if progress is not None:
                progress(Progress(what, done, total))
        waited = getattr(sampler, "waited_s", None)
    return Epoch(side.name, number, resident, timeline[-1][0], timeline[0][0], waited, tuple(timeline))


def _data_loader(dataset: Any, options: Options, **order: Any) -> Any:
    return torch.utils.data.DataLoader(dataset, options.batch_size, num_workers=options.workers, **order)


def _evict(side: _Side) -> float:
    """Drop a side's files from memory; return the share that is left, 0.

    Raises
    ------
    NotCold
    """
    gc.collect()  # a store that nobody holds any more may still be mapped
    for path in side.files:
        left = pagecache.evict(path)
        if left is None:
            raise NotCold(f"{path}: this system doesn't say what is in memory; measure on Linux, as the file's owner")
        if left:
            raise NotCold(
                f"{path}: {left:,} bytes are still in memory after eviction, so its epoch wouldn't be cold; "
                "close every store and end every process that has the file open"
            )
    return 0.0


def _resident_share(files: list[str]) -> float | None:
    found = [(pagecache.resident(path), os.path.getsize(path)) for path in files]
    sizes = sum(size for _, size in found)
    known = [count for count, _ in found if count is not None]
    return sum(known) / max(1, sizes) if len(known) == len(found) else None


def _spread(items: Any) -> Any:
    """Return at most `COSTED_IMAGES` items, evenly spread."""
    return items[:: -(-len(items) // COSTED_IMAGES)]


def _path(path: str | os.PathLike[str] | None) -> Path | None:
    return None if path is None else Path(path)


def _machine() -> dict[str, Any]:
    return {**machine.facts(), "torch": torch.__version__, "decoder": codec.backend()}
