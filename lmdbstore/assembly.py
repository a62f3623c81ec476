"""A batch in the making: which thread makes which rows, where they go, and what becomes of them."""

from __future__ import annotations

import operator
import threading
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.utils.data
from torch.utils.data import ConcatDataset, Subset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from lmdbstore import opencv
from lmdbstore.buffers import BufferPool
from lmdbstore.crew import at_work
from lmdbstore.dataset import ImageDataset

_CHUNKS_A_THREAD = 4  # parts of a batch: threads end together, and a part is worth the 25 us that a future costs
_PLAIN = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
          torch.float16, torch.float32, torch.float64}  # fmt: skip


@dataclass
class Job:
    """A batch that is being made; `lock` guards what isn't one row's own."""

    indices: list[int]
    keys: list[tuple[int, ...]]
    epoch: int
    items: list[Any]
    left: int  # rows that aren't done
    placed: int = 0  # rows that are in `array`
    array: np.ndarray | None = None
    tensor: torch.Tensor | None = None
    batch: Any = None
    parts: list[Future[None]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def result(self) -> Any:
        """Wait for the batch; raise the error of its first image that has one."""
        for part in self.parts:
            part.result()
        return self.batch


class Assembly:
    """What the threads do in one epoch."""

    def __init__(
        self,
        dataset: Any,
        *,
        threads: int,
        seed: int,
        pool: BufferPool,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self.dataset, self.collate = dataset, collate
        self.seed, self.threads, self.pool = seed, threads, pool
        self.repeats = np.zeros(len(dataset), np.uint16)  # how often each item has been asked for
        self.layout: tuple[tuple[int, ...], np.dtype[Any]] | None = None  # of an image: the last one's
        self.stopped = False

    def start(self, indices: list[int], epoch: int, crew: ThreadPoolExecutor) -> Job:
        """Have a batch made."""
        count = len(indices)
        job = Job(indices, self._keys(indices), epoch, [None] * count, count)
        if self.layout is not None and self.collate is None:
            job.array, job.tensor = self.pool.take((count, *self.layout[0]), self.layout[1])
        step = -(-count // (_CHUNKS_A_THREAD * self.threads))
        job.parts = [crew.submit(self._make, job, range(at, min(at + step, count))) for at in range(0, count, step)]
        return job

    def stop(self) -> None:
        """Have the threads end after the image at hand."""
        self.stopped = True

    def _keys(self, indices: list[int]) -> list[tuple[int, ...]]:
        keys: list[tuple[int, ...]] = []
        for i in indices:
            key = (int(self.repeats[i]), self.seed)
            keys.append(key if any(key) else ())
            self.repeats[i] += 1
        return keys

    def _make(self, job: Job, rows: range) -> None:
        for row in rows:
            if self.stopped:
                return
            with at_work():
                item = self._load(job, row)
                job.items[row] = item if self.collate is not None else self._placed(job, row, item)
        with job.lock:
            job.left -= len(rows)
            last = job.left == 0
        if last:
            with at_work():
                job.batch = self._batch(job)
            job.items, job.array, job.tensor = [], None, None

    def _load(self, job: Job, row: int) -> Any:
        dataset, i = _leaf(self.dataset, job.indices[row])
        if not isinstance(dataset, ImageDataset):
            return dataset[i]
        array = job.array  # held, so that nobody else is given its memory while a row of it is written
        out = None if array is None else array[row]
        return dataset.load(i, epoch=job.epoch, key=job.keys[row], out=out)

    def _placed(self, job: Job, row: int, item: Any) -> Any:
        """Put the image of an item into its row; return the item without it."""
        image, rest = item if _is_pair(item) else (item, None)
        if isinstance(image, torch.Tensor) and _is_plain(image):
            image = image.numpy()
        if not isinstance(image, np.ndarray) or image.dtype.kind not in "fiub":
            return item
        with job.lock:
            if job.array is None or (job.placed == 0 and not _fits(image, job.array)):
                self.layout = image.shape, image.dtype
                job.array, job.tensor = self.pool.take((len(job.indices), *image.shape), image.dtype)
            array = job.array
            job.placed += 1
        if not _fits(image, array):
            raise ValueError(
                f"{_where(self.dataset, job.indices[row])}: shape {image.shape}, {image.dtype} in a batch of "
                f"{array.shape[1:]}, {array.dtype}: crop or resize to one size, or pass collate="
            )
        _write(image, array[row])
        return rest

    def _batch(self, job: Job) -> Any:
        if self.collate is not None or job.placed == 0:
            batch = (self.collate or default_collate)(job.items)
            return _pinned(batch) if self.pool.pinned else batch
        if job.placed < len(job.indices):
            raise ValueError("some items of a batch are images and others aren't: pass collate=")
        if all(item is None for item in job.items):
            return job.tensor
        labels = default_collate(job.items)
        return [job.tensor, _pinned(labels) if self.pool.pinned else labels]


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and type(item[1]) in (int, float)


def _pinned(batch: Any) -> Any:
    return pin_memory(batch)  # type: ignore[no-untyped-call]  # torch's, of any structure


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _PLAIN and tensor.device.type == "cpu" and not tensor.requires_grad


def _fits(image: np.ndarray, array: np.ndarray) -> bool:
    return image.shape == array.shape[1:] and image.dtype == array.dtype


def _write(image: np.ndarray, row: np.ndarray) -> None:
    """Copy an image to its row, if it isn't there."""
    if image.ctypes.data == row.ctypes.data:
        return
    if image.ndim == 3 and image.shape[0] <= 4 and image.transpose(1, 2, 0).flags.c_contiguous:
        opencv.planes(image.transpose(1, 2, 0), row)
    else:
        row[...] = image


def _where(dataset: Any, i: int) -> str:
    leaf, at = _leaf(dataset, i)
    return leaf.store.where(int(leaf.indices[at])) if isinstance(leaf, ImageDataset) else f"item {i}"


def _leaf(dataset: Any, i: int) -> tuple[Any, int]:
    """Find the dataset that item i of a Subset or ConcatDataset comes from."""
    while True:
        if isinstance(dataset, Subset):
            dataset, i = dataset.dataset, operator.index(dataset.indices[i])
        elif isinstance(dataset, ConcatDataset):
            part = bisect_right(dataset.cumulative_sizes, i)
            dataset, i = dataset.datasets[part], i - (dataset.cumulative_sizes[part - 1] if part else 0)
        else:
            return dataset, i
