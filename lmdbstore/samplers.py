"""BlockShuffleSampler: the order of an epoch, and its bytes in memory before they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Protocol

import numpy as np
import torch.distributed
from torch.utils.data import Sampler

from lmdbstore import memory
from lmdbstore.errors import OptionError
from lmdbstore.readahead import AHEAD_BYTES, ReadAhead
from lmdbstore.shuffle import BlockSchedule, Int64s, RandomSchedule, Reading, plan_blocks, share_length

BLOCK_BYTES = 8 << 20
WINDOW_BLOCKS = 4
# Of the available memory: what stays resident of a set that doesn't fit (memory.fits), the read-ahead included.
KEEP_SHARE = 0.7


class _Store(Protocol):
    @property
    def path(self) -> str | PathLike[str]: ...


class Extents(Protocol):
    """What the sampler needs of a dataset: ImageDataset has it."""

    @property
    def store(self) -> _Store: ...
    @property
    def extents(self) -> tuple[Int64s, Int64s]: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class ShuffleOptions:
    """What, with the epoch, decides the order; a state can be loaded only where all of it is the same."""

    order: str
    seed: int
    block_bytes: int
    window_blocks: int
    num_replicas: int
    drop_last: bool
    length: int

    def __post_init__(self) -> None:
        if self.order not in ("block", "random"):
            raise OptionError(f"order={self.order!r}: expected 'block' or 'random'")
        for name, least in (("seed", 0), ("block_bytes", 1), ("window_blocks", 1), ("num_replicas", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"{name}={getattr(self, name)!r}: expected {least} or more")


@dataclass
class _Progress:
    """Where one iterator is."""

    epoch: int
    yielded: int = 0


class BlockShuffleSampler(Sampler[int]):
    """Shuffled indices of a dataset, each handed out only once its bytes are in memory.

    The file is cut into blocks; blocks are shuffled, and the images within a window of several blocks.  A thread
    reads the coming blocks ahead in the process that iterates, so that workers never wait for the disk::

        DataLoader(dataset, batch_size=64, sampler=BlockShuffleSampler(dataset), num_workers=16)

    Parameters
    ----------
    dataset : ImageDataset
        Or anything with `extents`, `store.path` and a length.  Its `set_epoch`, if there is one, is called at the
        start of each epoch.
    order : {"block", "random"}
        "random" is a full shuffle: for what is resident or on a fast disk; each image costs a slow one a seek.
    seed : int
        Epoch e of seed s is the same order always, whatever is cached.
    block_bytes, window_blocks : int
        Larger blocks are read faster, more blocks in a window mix better.
        The defaults were chosen from benchmarks/io.json.
    readahead_bytes : int
        How far to read ahead, at most a quarter of the available memory.
    num_replicas, rank : int, optional
        Of torch.distributed, if it is initialised; else 1 and 0.
    drop_last : bool
        Shares of equal length by leaving out the last images rather than by repeating the first.

    Attributes
    ----------
    resident_fraction : float
        The part of the file that stays in memory, 1 if it fits; found at the start of each epoch.
    waited_s : float
        How long the last epoch waited for the disk, in seconds.

    Raises
    ------
    OptionError
        For an option that makes no sense, quoting it.

    Notes
    -----
    Threads: iterate in one.  Processes: indices are handed out in the process that iterates, workers only read.
    Resuming: `state_dict` is valid at any point, also within torchdata's StatefulDataLoader.  With a stock
    DataLoader, which draws batches ahead of the loop, put the number of samples really used in `yielded`.
    Memory: two int32 arrays at most, and a chunk of indices at a time as Python ints.
    """

    def __init__(
        self,
        dataset: Extents,
        *,
        order: str = "block",
        seed: int = 0,
        block_bytes: int = BLOCK_BYTES,
        window_blocks: int = WINDOW_BLOCKS,
        readahead_bytes: int = AHEAD_BYTES,
        num_replicas: int | None = None,
        rank: int | None = None,
        drop_last: bool = False,
    ) -> None:
        world, self.rank = _replicas(num_replicas, rank)
        self.options = ShuffleOptions(order, seed, block_bytes, window_blocks, world, drop_last, len(dataset))
        self.readahead_bytes = readahead_bytes
        self._path = dataset.store.path
        self._extents = dataset.extents
        self._tell_epoch: Callable[[int], None] | None = getattr(dataset, "set_epoch", None)
        self._plan = plan_blocks(*self._extents, block_bytes) if order == "block" else None
        self._epoch = 0  # of the next iterator
        self._progress = _Progress(0)
        self._resume: _Progress | None = None
        self._finished_resume: _Progress | None = None
        self.resident_fraction = 1.0
        self.waited_s = 0.0

    def __len__(self) -> int:
        """Return the number of indices that one epoch hands out on this rank."""
        options = self.options
        return share_length(options.length, world=options.num_replicas, drop_last=options.drop_last)

    def __iter__(self) -> Iterator[int]:
        # The epoch is taken when the first index is: loaders call iter() more often than they use what they get.
        finished, self._finished_resume = self._finished_resume, None
        return iter(()) if finished is not None else self._indices()

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch; without it, epochs count up from 0."""
        self._epoch = epoch
        self._resume = self._finished_resume = None

    def state_dict(self) -> dict[str, Any]:
        """Return where the last started iterator is: a few numbers, equal on all ranks."""
        now = self._finished_resume or self._resume or self._progress
        return {"epoch": now.epoch, "yielded": now.yielded, **asdict(self.options)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iterator go on where the state was taken, then epochs count on.

        Raises
        ------
        OptionError
            When the state was taken with other options, or of another dataset; names the first that differs.
        """
        for name, here in asdict(self.options).items():
            if state[name] != here:
                raise OptionError(f"the state was saved with {name}={state[name]!r}, this sampler has {here!r}")
        progress = _Progress(state["epoch"], state["yielded"])
        if not 0 <= progress.yielded <= len(self):
            raise OptionError(f"yielded={progress.yielded!r}: expected 0 to {len(self)}")
        self.set_epoch(progress.epoch + 1)
        # At the very end of an epoch, StatefulDataLoader makes an iterator that it may never ask for an index, and goes
        # on with another for the next epoch: there the state belongs to whoever calls iter() first.
        if progress.yielded == len(self) > 0:
            self._finished_resume = progress
        else:
            self._resume = progress

    def schedule(self, epoch: int) -> BlockSchedule | RandomSchedule:
        """Return the order of an epoch on this rank (see `shuffle.epoch_order`)."""
        options = self.options
        key: dict[str, Any] = {"seed": options.seed, "epoch": epoch, "rank": self.rank}
        key.update(world=options.num_replicas, drop_last=options.drop_last)
        if self._plan is None:
            return RandomSchedule(options.length, **key)
        return BlockSchedule(self._plan, window_blocks=options.window_blocks, **key)

    def _indices(self) -> Iterator[int]:
        progress = self._begin()
        schedule = self.schedule(progress.epoch)
        if progress.yielded == len(self):
            return
        first = int(np.searchsorted(schedule.starts, progress.yielded, "right")) - 1
        skip = progress.yielded - int(schedule.starts[first])
        reading, reader = self._read_ahead(schedule, first)
        with closing(reader):
            for chunk in range(first, len(schedule.starts) - 1):
                reader.wait(int(reading.needed[chunk - first]) - 1)
                self.waited_s = reader.waited_s
                for position in schedule.positions(chunk)[skip:].tolist():
                    progress.yielded += 1
                    yield position
                skip = 0
                reader.release(int(reading.done[chunk - first]))

    def _begin(self) -> _Progress:
        progress = self._resume or _Progress(self._epoch)
        self._resume = None
        self._progress = progress
        self._epoch = progress.epoch + 1
        if self._tell_epoch is not None:  # before the first index is out, so that every worker augments by it
            self._tell_epoch(progress.epoch)
        return progress

    def _read_ahead(self, schedule: BlockSchedule | RandomSchedule, chunk: int) -> tuple[Reading, ReadAhead]:
        options, room = self.options, memory.available()
        ahead = self.readahead_bytes if room is None else min(self.readahead_bytes, room // 4)
        # two groups fit into what may be read ahead: one in use, one being read
        group = max(1, ahead // (2 * options.window_blocks * options.block_bytes))
        reading = schedule.reading(self._extents, chunk, group)
        self.resident_fraction = resident_fraction(int(self._extents[1].sum()), room, ahead)
        return reading, ReadAhead(self._path, reading, ahead_bytes=ahead, keep_fraction=self.resident_fraction)


def resident_fraction(size: int, room: int | None, ahead: int) -> float:
    """Return the part of `size` bytes to keep in memory, with `room` available and `ahead` read ahead (bytes)."""
    if room is None or memory.fits(size, room):
        return 1.0
    return max(0.0, room * KEEP_SHARE - 2 * ahead) / size


def _replicas(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_replicas is None:
        num_replicas = torch.distributed.get_world_size() if distributed else 1
    if rank is None:
        rank = torch.distributed.get_rank() if distributed else 0
    if not 0 <= rank < num_replicas:
        raise OptionError(f"rank={rank!r}: expected 0 to {num_replicas - 1} with num_replicas={num_replicas!r}")
    return num_replicas, rank
