"""BatchLoader: threads decode and augment straight into the batch."""

from __future__ import annotations

import operator
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch.utils.data
from torch.utils.data import BatchSampler, SequentialSampler

from lmdbstore import machine
from lmdbstore.assembly import Assembly, Job
from lmdbstore.buffers import BufferPool
from lmdbstore.crew import crew
from lmdbstore.errors import OptionError
from lmdbstore.samplers import BlockShuffleSampler


@dataclass(frozen=True)
class LoaderOptions:
    """The numbers and flags of a BatchLoader, checked."""

    batch_size: int | None
    num_threads: int
    drop_last: bool
    pin_memory: bool
    prefetch_batches: int
    seed: int

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("num_threads", 1), ("prefetch_batches", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise OptionError(f"{name}={value!r}: expected {least} or more")


@dataclass
class _Progress:
    """What the loop has received of an epoch."""

    epoch: int
    samples: int = 0
    digest: int = 0  # of their indices


class BatchLoader:
    """Batches of a dataset, made by threads of this process: what DataLoader gives, without its copies.

    ::

        loader = BatchLoader(dataset, 64, shuffle=True)
        for images, labels in loader: ...

    Each thread decodes and augments an image and writes it into its row of the batch; nothing is pickled, nothing
    crosses a process.  A batch is what `torch.utils.data.default_collate` makes of the items.

    Parameters
    ----------
    dataset : ImageDataset
        Or a Subset or ConcatDataset of them; or any map-style dataset that several threads may read.
    batch_size : int or None
        None with a BatchSampler as `sampler`.
    sampler : iterable of int, optional
        Any torch sampler.  Default: in order.
    shuffle : bool
        By a `BlockShuffleSampler` with `seed`: cold epochs at the speed of the disk.
    num_threads : int, optional
        Default: the cores that this process may use.
    drop_last : bool
        Leave out the last batch if it isn't full.
    pin_memory : bool
        Batches in page-locked memory, for ``.to(device, non_blocking=True)``.
    prefetch_batches : int
        How many batches are made ahead of the loop.
    seed : int
        Of `shuffle`; other than 0, it also changes the augmentations, which otherwise are the dataset's.
    collate : callable, optional
        Makes a batch of a list of items, in a thread, instead of the above.

    Raises
    ------
    OptionError
        For an argument that makes no sense.

    Notes
    -----
    Validity: a batch is yours.  Its memory is used for another one only after every tensor, view and array that shares
    it is gone.  (Without `pin_memory`, copies that go on after ``.to(..., non_blocking=True)`` has returned aren't
    known here: CUDA's don't.)
    Order and randomness: batches come in the sampler's order, and an item depends on seeds, epoch and image alone, so
    the number of threads changes nothing.  Epochs count up from 0; `set_epoch` chooses.  An image that a sampler
    repeats within an epoch is augmented anew.
    Errors: raised where the batch would have come, of the type they had in the thread; `DecodeError` names the image.
    Threads: they live while an epoch is iterated; `break` ends them with the iterator.  While any BatchLoader is
    iterated, OpenCV works in the calling thread only, in the whole process; torch does so in the loader's threads.
    Memory: `prefetch_batches` + 2 batches, and those that you hold; free ones are kept for the next epoch.
    Processes: iterate in the process that made the iterator.
    """

    def __init__(
        self,
        dataset: torch.utils.data.Dataset[Any],
        batch_size: int | None,
        *,
        sampler: Iterable[Any] | None = None,
        shuffle: bool = False,
        num_threads: int | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        prefetch_batches: int = 2,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        threads = machine.cores() if num_threads is None else num_threads
        self.options = LoaderOptions(batch_size, threads, drop_last, pin_memory, prefetch_batches, seed)
        if (batch_size is None) != isinstance(sampler, BatchSampler):
            raise OptionError(f"batch_size={batch_size!r} with {sampler!r}: batches come from a BatchSampler or a size")
        if shuffle and sampler is not None:
            raise OptionError(f"shuffle=True, sampler={sampler!r}: a sampler decides the order, give one of the two")
        self.dataset, self.collate = dataset, collate
        self.sampler: Any = sampler if sampler is not None else _default_sampler(dataset, shuffle, seed)
        self._pool = BufferPool(keep=prefetch_batches + 1, pinned=pin_memory and _can_pin())
        self._epoch = 0  # of the next iterator
        self._progress: _Progress | None = None
        self._resume: _Progress | None = None

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        size, count = self.options.batch_size, len(self.sampler)
        if size is None:
            return count
        return count // size if self.options.drop_last else -(-count // size)

    def __iter__(self) -> Iterator[Any]:
        return self._batches()

    def __repr__(self) -> str:
        return f"<BatchLoader of {self.dataset!r}: {self.options}>"

    def set_epoch(self, epoch: int) -> None:
        """Choose order and augmentations of the next epoch; without it, epochs count up from 0."""
        self._epoch, self._resume, self._progress = epoch, None, None
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop is: what it has received, not what was made ahead of it."""
        now = self._resume or self._progress
        state = vars(now or _Progress(self._epoch)) | {"seed": self.options.seed, "length": len(self.dataset)}  # type: ignore[arg-type]
        if isinstance(self.sampler, BlockShuffleSampler):
            there = {} if now is None else {"epoch": now.epoch, "yielded": now.samples}
            state["sampler"] = self.sampler.state_dict() | there
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iterator go on where the state was taken, then epochs count on.

        A sampler without a state of its own is run up to there, and has to give the indices that it gave before.

        Raises
        ------
        OptionError
            The state is another dataset's, seed's or sampler's.  For indices that differ: from the iterator.
        """
        for name, here in (("seed", self.options.seed), ("length", len(self.dataset))):  # type: ignore[arg-type]
            if state[name] != here:
                raise OptionError(f"the state was saved with {name}={state[name]!r}, this loader has {here!r}")
        self.set_epoch(state["epoch"])
        if isinstance(self.sampler, BlockShuffleSampler):
            self.sampler.load_state_dict(state["sampler"])
        self._resume = _Progress(state["epoch"], state["samples"], state["digest"])

    def _batches(self) -> Iterator[Any]:
        progress, batches = self._begin()
        with ExitStack() as stack:
            stack.enter_context(closing(batches))
            threads = stack.enter_context(crew(self.options.num_threads))
            work = Assembly(
                self.dataset,
                threads=self.options.num_threads,
                seed=self.options.seed,
                pool=self._pool,
                collate=self.collate,
            )
            stack.callback(work.stop)
            pending: deque[Job] = deque()
            for indices in batches:
                if isinstance(self.sampler, BlockShuffleSampler):  # it knows the epoch once it gave an index
                    progress.epoch = self.sampler.state_dict()["epoch"]
                    self._epoch = progress.epoch + 1
                pending.append(work.start(indices, progress.epoch, threads))
                if len(pending) > self.options.prefetch_batches:
                    yield self._received(progress, pending.popleft())
            while pending:
                yield self._received(progress, pending.popleft())
        self._progress = _Progress(progress.epoch + 1)

    def _begin(self) -> tuple[_Progress, Generator[list[int], None, None]]:
        # What DataLoader draws from torch's generator as well, for its workers: a sampler that draws its seed from
        # there gives the same order here.
        torch.empty((), dtype=torch.int64).random_()
        resume, self._resume = self._resume, None
        progress = resume or _Progress(self._epoch)
        self._progress, self._epoch = progress, progress.epoch + 1
        indices: Iterator[Any] = iter(self.sampler)
        if resume is not None and not isinstance(self.sampler, BlockShuffleSampler):
            indices = _skipped(indices, resume)
        return progress, _grouped(indices, self.options.batch_size, self.options.drop_last)

    def _received(self, progress: _Progress, job: Job) -> Any:
        batch = job.result()
        progress.samples += len(job.indices)
        progress.digest = _digest(job.indices, progress.digest)
        return batch


# The order


def _default_sampler(dataset: Any, shuffle: bool, seed: int) -> Iterable[int]:
    if not shuffle:
        return SequentialSampler(dataset)
    if not hasattr(dataset, "extents"):
        raise OptionError(f"shuffle=True with {type(dataset).__name__}: pass a torch RandomSampler as sampler")
    return BlockShuffleSampler(dataset, seed=seed)


def _grouped(indices: Iterator[Any], size: int | None, drop_last: bool) -> Generator[list[int], None, None]:
    """Yield the indices of each batch."""
    if size is None:
        yield from ([operator.index(i) for i in batch] for batch in indices)
        return
    while batch := [operator.index(i) for i in islice(indices, size)]:
        if len(batch) == size or not drop_last:
            yield batch


def _skipped(indices: Iterator[Any], done: _Progress) -> Iterator[Any]:
    """Advance to what comes after the samples of an interrupted epoch; batches of a BatchSampler count whole."""
    left, digest = done.samples, 0
    while left > 0:
        drawn = next(indices, None)
        batch = [] if drawn is None else [operator.index(i) for i in (drawn if isinstance(drawn, list) else [drawn])]
        digest, left = _digest(batch, digest), left - len(batch)
        if not batch or left < 0:
            break
    if left or digest != done.digest:
        raise OptionError("the sampler gives another order than in the epoch to be resumed: seed it, or set its epoch")
    return indices


def _digest(indices: list[int], before: int) -> int:
    return zlib.crc32(np.array(indices, np.int64).tobytes(), before)


def _can_pin() -> bool:
    if torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available():
        return True
    warnings.warn("pin_memory=True without an accelerator: batches are in ordinary memory", stacklevel=3)
    return False
