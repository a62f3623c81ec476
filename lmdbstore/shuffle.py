"""Orders of a dataset: which position comes when, and which bytes it needs.  Pure functions; no I/O, no torch.

Every order is a function of (seed, epoch, rank, world size).  The random numbers are PCG64's raw output,
keyed by tuples, and an argsort: numpy promises both to stay as they are, unlike `Generator.permutation`, so ranks
with different numpy versions agree and an epoch can be resumed after an upgrade.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lmdbstore.pagecache import JOIN_GAP_BYTES, join_ranges
from lmdbstore.readahead import Step

Ints = npt.NDArray[Any]  # int32 where the dataset allows it, else int64
Int64s = npt.NDArray[np.int64]

# What a random key is for, its first part.  A key is padded with zeros: (1,) and (1, 0) are one.
_BLOCKS, _WINDOW, _FULL = 1, 2, 3
FIRST_CHUNK, LAST_CHUNK = 64, 1024  # images read together in random order: the first batch soon, later ones cheaply


@dataclass(frozen=True)
class BlockPlan:
    """A dataset cut into blocks.

    Attributes
    ----------
    positions : ndarray of int, (n,)
        Dataset positions in the order of the file.
    starts : ndarray of int64, (blocks + 1,)
        Block b is `positions[starts[b]:starts[b + 1]]`.
    """

    positions: Ints
    starts: Int64s


def plan_blocks(offsets: Int64s, lengths: Int64s, block_bytes: int) -> BlockPlan:
    """Cut a dataset in the order of the file into blocks of about `block_bytes` to be read.

    Gaps under 1 MiB count, since they are read too (see `pagecache.JOIN_GAP_BYTES`).

    Parameters
    ----------
    offsets, lengths : ndarray of int64, (n,)
        Where each image lies, in bytes; in any order.
    """
    n = len(offsets)
    positions = np.argsort(offsets, kind="stable").astype(_index_type(n))
    cost = lengths[positions].astype(np.int64, copy=False)
    gaps = np.diff(offsets[positions])
    gaps -= cost[:-1]
    gaps[(gaps < 0) | (gaps >= JOIN_GAP_BYTES)] = 0  # repeated images overlap; a wide gap isn't read
    cost[1:] += gaps
    block = np.cumsum(cost)
    block -= cost  # in place: at 1.58 million each array is 13 MB
    block //= block_bytes
    first = np.flatnonzero(block[1:] != block[:-1]) + 1
    return BlockPlan(positions, np.concatenate(([0], first, [n])) if n else np.zeros(1, np.int64))


def share_length(n: int, *, world: int, drop_last: bool) -> int:
    """Return how many positions each rank gets: the same for all, as DistributedSampler counts."""
    return n // world if drop_last else -(-n // world)


def deal(plan: BlockPlan, *, seed: int, epoch: int, rank: int, world: int, drop_last: bool) -> Int64s:
    """Return one rank's share of an epoch as segments (start, stop) of `plan.positions`, int64 (k, 2).

    The shuffled blocks, laid end to end, are cut into `world` equal pieces: at most two blocks of a share are in
    parts.  The last share is filled up from the beginning, or (drop_last) the end is left out.
    """
    n = len(plan.positions)
    blocks = permutation(len(plan.starts) - 1, _BLOCKS, seed, epoch)
    starts, stops = plan.starts[blocks], plan.starts[blocks + 1]
    ends = np.cumsum(stops - starts)  # in the laid-out order
    length = share_length(n, world=world, drop_last=drop_last)
    at, left, segments = rank * length, length, []
    while left > 0:
        begin = at % n
        end = min(begin + left, n)
        k = slice(int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(ends, end, "left")) + 1)
        shift = stops[k] - ends[k]  # from the laid-out order to plan.positions
        segments.append(np.stack([np.maximum(starts[k], begin + shift), np.minimum(stops[k], end + shift)], axis=1))
        at, left = at + end - begin, left - (end - begin)
    return np.concatenate(segments) if segments else np.empty((0, 2), np.int64)


def permutation(n: int, *key: int) -> Ints:
    """Return a permutation of range(n) that depends on nothing but the key."""
    raw = np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)
    return np.argsort(raw, kind="stable").astype(_index_type(n))


@dataclass(frozen=True)
class Reading:
    """How the bytes of an epoch are read, from one chunk on: steps, in an order of their own (a readahead.Steps).

    Attributes
    ----------
    needed : ndarray of int64, (chunks,)
        How many steps have to be resident before a chunk is used.
    done : ndarray of int64, (chunks,)
        How many steps nobody needs any more once a chunk has been used.
    """

    extents: tuple[Int64s, Int64s]
    members: list[Ints]
    needed: Int64s
    done: Int64s

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, step: int) -> Step:
        positions = self.members[step]
        return Step(*join_ranges(self.extents[0][positions], self.extents[1][positions]))


class BlockSchedule:
    """One rank's epoch in shuffled blocks, window by window, shuffled within.  A chunk is a window."""

    def __init__(
        self,
        plan: BlockPlan,
        *,
        seed: int,
        epoch: int,
        window_blocks: int,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
    ) -> None:
        self._plan = plan
        self._key = (seed, epoch, rank)
        self._segments = deal(plan, seed=seed, epoch=epoch, rank=rank, world=world, drop_last=drop_last)
        # the first windows are small, so that the first batch comes after one block and not after all of a window
        self._edges = _growing_edges(len(self._segments), 1, window_blocks)
        self._small = int(np.argmax(np.diff(self._edges, append=np.iinfo(np.int64).max) >= window_blocks))
        self.starts = np.append(0, np.cumsum(self._segments[:, 1] - self._segments[:, 0]))[self._edges]

    def positions(self, chunk: int) -> Ints:
        """Return the dataset positions of a chunk, in order."""
        segments = self._segments[self._edges[chunk] : self._edges[chunk + 1]]
        members = np.concatenate([self._plan.positions[start:stop] for start, stop in segments.tolist()])
        return members[permutation(len(members), _WINDOW, *self._key, chunk)]

    def reading(self, extents: tuple[Int64s, Int64s], chunk: int, group: int) -> Reading:
        """Return how to read from `chunk` on: small windows one by one, then 2, 4, ... and `group` at a time.

        Each group is read in file order: the arm travels less, and passes from one block to the next where both are
        in the group.
        """
        edges = self._edges[chunk:] - self._edges[chunk]  # in steps: a step is a segment
        small = max(0, self._small - chunk)
        later = _growing_edges(len(edges) - 1 - small, min(2, group), group)
        groups = np.append(np.arange(small), small + later)  # in windows
        segments = self._segments[self._edges[chunk] :]
        which = np.repeat(np.arange(len(groups) - 1), np.diff(edges[groups]))
        order = np.lexsort((segments[:, 0], which))
        members = [self._plan.positions[start:stop] for start, stop in segments[order].tolist()]
        done = np.repeat(edges[groups[:-1]], np.diff(groups))
        needed = np.repeat(edges[groups[1:]], np.diff(groups))
        done[groups[1:] - 1] = edges[groups[1:]]
        return Reading(extents, members, needed, done)


class RandomSchedule:
    """One rank's epoch as a part of a full permutation.  A chunk is up to 1024 images of it."""

    def __init__(
        self, n: int, *, seed: int, epoch: int, rank: int = 0, world: int = 1, drop_last: bool = False
    ) -> None:
        order = permutation(n, _FULL, seed, epoch)
        length = share_length(n, world=world, drop_last=drop_last)
        # strided, as DistributedSampler deals; what is missing at the end comes from the beginning
        self._order = order if world == 1 else order[np.arange(rank, length * world, world) % max(1, n)]
        self.starts = _growing_edges(length, FIRST_CHUNK, LAST_CHUNK)

    def positions(self, chunk: int) -> Ints:
        """Return the dataset positions of a chunk, in order."""
        return self._order[self.starts[chunk] : self.starts[chunk + 1]]

    def reading(self, extents: tuple[Int64s, Int64s], chunk: int, group: int) -> Reading:
        """Return how to read from `chunk` on: chunk by chunk, each in file order."""
        members = [self.positions(number) for number in range(chunk, len(self.starts) - 1)]
        count = np.arange(1, len(members) + 1)
        return Reading(extents, members, count, count)


def epoch_order(schedule: BlockSchedule | RandomSchedule) -> Ints:
    """Return a whole epoch's dataset positions at once, in order."""
    chunks = [schedule.positions(chunk) for chunk in range(len(schedule.starts) - 1)]
    return np.concatenate(chunks) if chunks else np.empty(0, np.int32)


def labels_per_batch(labels: npt.NDArray[Any], order: Ints, batch_size: int) -> float:
    """Return the mean number of different labels in a full batch, if images come in this order.

    Parameters
    ----------
    labels : ndarray, (n,)
        The label of every dataset position; any dtype that sorts.
    order : ndarray of int, (m,)
        Dataset positions.
    """
    batch_size = min(batch_size, len(order))
    if batch_size == 0:
        return 0.0
    codes = np.unique(labels, return_inverse=True)[1].astype(np.int32)
    full = len(order) // batch_size * batch_size
    batches = np.sort(codes[order[:full]].reshape(-1, batch_size), axis=1)
    return float(np.count_nonzero(np.diff(batches, axis=1)) / len(batches) + 1)


def expected_labels_per_batch(labels: npt.NDArray[Any], batch_size: int) -> float:
    """Return the number of different labels to be expected in a batch of a full shuffle.

    Hurlbert's rarefaction: the sum over labels of 1 - C(n - n_i, b) / C(n, b), with n_i images of label i
    (S. H. Hurlbert, "The nonconcept of species diversity", Ecology 52 (1971), 577-586).
    """
    counts, how_many = np.unique(np.unique(labels, return_counts=True)[1], return_counts=True)
    n = int((counts * how_many).sum())
    absent = np.ones(len(counts))  # the probability that a label with so many images isn't in the batch
    for drawn in range(min(batch_size, n)):
        absent *= np.maximum(0.0, 1 - counts / (n - drawn))
    return float(((1 - absent) * how_many).sum())


def shuffle_quality(labels: npt.NDArray[Any], order: Ints, batch_size: int) -> float:
    """Return how well an order mixes labels: different labels per batch, relative to a full shuffle.

    1 is as good as a full shuffle; `1 / min(batch_size, labels)` or so is not shuffled at all, sorted by label.
    """
    order = np.asarray(order)
    return labels_per_batch(labels, order, batch_size) / max(expected_labels_per_batch(labels[order], batch_size), 1e-9)


def _index_type(n: int) -> type[np.signedinteger[Any]]:
    return np.int32 if n < 2**31 else np.int64  # half the memory, at 1.58 million 6 MB an array


def _growing_edges(n: int, first: int, last: int) -> Int64s:
    """Return edges that divide range(n): 0, `first`, twice, four times as much, ... and from `last` on every `last`."""
    head = [0]
    while first < last:
        head.append(first)
        first *= 2
    edges = np.concatenate((head, np.arange(last, max(n, last) + 1, last)))
    return np.append(edges[edges < n], n)
