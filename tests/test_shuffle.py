"""Orders are permutations, shares are equal and disjoint, and reading follows the order.  Pure functions, no files."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdbstore.pagecache import JOIN_GAP_BYTES
from lmdbstore.shuffle import (
    BlockPlan,
    BlockSchedule,
    RandomSchedule,
    deal,
    epoch_order,
    expected_labels_per_batch,
    labels_per_batch,
    permutation,
    plan_blocks,
    share_length,
    shuffle_quality,
)

Extents = tuple[np.ndarray, np.ndarray]


def packed(n: int, *, seed: int = 0, gap: int = 0, shuffled: bool = False) -> Extents:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 200, n)
    offsets = np.cumsum(lengths + gap) - lengths
    order = rng.permutation(n) if shuffled else np.arange(n)
    return offsets[order], lengths[order]


def block_schedule(n: int, *, block: int = 700, window: int = 3, **options: Any) -> BlockSchedule:
    options = {"seed": 0, "epoch": 0, **options}
    return BlockSchedule(plan_blocks(*packed(n, shuffled=True), block), window_blocks=window, **options)


# Blocks


@given(
    st.lists(st.tuples(st.integers(0, 2 * JOIN_GAP_BYTES), st.integers(0, 3000)), max_size=60),
    st.integers(1, 5000),
    st.randoms(use_true_random=False),
)
def test_blocks_hold_everything_once_in_file_order(parts: list[tuple[int, int]], block_bytes: int, random: Any) -> None:
    gaps, lengths = np.array(parts, np.int64).reshape(-1, 2).T
    offsets = np.cumsum(gaps + lengths) - lengths
    order = np.array(random.sample(range(len(parts)), len(parts)), np.int64)
    offsets, lengths = offsets[order], lengths[order]
    plan = plan_blocks(offsets, lengths, block_bytes)
    assert sorted(plan.positions.tolist()) == list(range(len(parts)))
    assert (np.diff(offsets[plan.positions]) >= 0).all()
    assert plan.starts[0] == 0
    assert plan.starts[-1] == len(parts)
    assert (np.diff(plan.starts) > 0).all()


def test_blocks_have_about_the_size_asked_for() -> None:
    offsets, lengths = packed(5000, shuffled=True)
    plan = plan_blocks(offsets, lengths, 10_000)
    sizes = np.add.reduceat(lengths[plan.positions], plan.starts[:-1])
    assert abs(sizes[:-1].mean() - 10_000) < 50  # the last one is what is left
    assert sizes.max() < 10_000 + 200


def test_gaps_that_are_read_count_and_wide_ones_do_not() -> None:
    for gap, blocks in ((9_000, 10), (JOIN_GAP_BYTES, 1)):
        lengths = np.full(100, 1000)
        offsets = np.arange(100) * (1000 + gap)
        assert len(plan_blocks(offsets, lengths, 100_000).starts) - 1 == blocks


def test_images_that_are_repeated_are_in_the_plan_as_often() -> None:
    offsets, lengths = np.array([5, 5, 0, 5]), np.array([10, 10, 5, 10])
    assert sorted(plan_blocks(offsets, lengths, 12).positions.tolist()) == [0, 1, 2, 3]


# Permutations


@pytest.mark.parametrize("n", [0, 1, 2, 3, 50, 1000])
@pytest.mark.parametrize("window", [1, 3, 1000])
def test_an_epoch_is_a_permutation(n: int, window: int) -> None:
    assert sorted(epoch_order(block_schedule(n, window=window)).tolist()) == list(range(n))
    assert sorted(epoch_order(RandomSchedule(n, seed=0, epoch=0)).tolist()) == list(range(n))


@pytest.mark.parametrize("make", [block_schedule, lambda n, **key: RandomSchedule(n, **{"seed": 0, "epoch": 0, **key})])
def test_seed_and_epoch_each_make_another_order(make: Any) -> None:
    keys = [{"seed": seed, "epoch": epoch} for seed in range(4) for epoch in range(4)]
    orders = {tuple(epoch_order(make(200, **key)).tolist()) for key in keys}
    assert len(orders) == 16  # seed + epoch would give 7
    assert np.array_equal(epoch_order(make(200, seed=3, epoch=1)), epoch_order(make(200, seed=3, epoch=1)))


def test_the_order_stays_as_it_is() -> None:
    """Resuming after an upgrade, and ranks with different numpy versions, depend on it."""
    assert permutation(10, 1, 2, 3).tolist() == GOLDEN_PERMUTATION
    assert epoch_order(block_schedule(20, seed=5, epoch=2)).tolist() == GOLDEN_BLOCK
    assert epoch_order(RandomSchedule(10, seed=5, epoch=2)).tolist() == GOLDEN_RANDOM


GOLDEN_PERMUTATION = [8, 1, 9, 3, 7, 5, 2, 0, 4, 6]
GOLDEN_BLOCK = [1, 2, 19, 9, 18, 10, 8, 4, 7, 17, 3, 12, 11, 6, 14, 13, 15, 16, 0, 5]
GOLDEN_RANDOM = [2, 9, 5, 3, 4, 1, 6, 8, 7, 0]


def test_windows_mix_blocks_and_stay_within() -> None:
    n = 2000
    offsets, lengths = packed(n)
    plan = plan_blocks(offsets, lengths, 2000)
    schedule = BlockSchedule(plan, seed=0, epoch=0, window_blocks=4)
    block_of = np.searchsorted(plan.starts, np.arange(n), "right") - 1
    for chunk in range(len(schedule.starts) - 1):
        members = schedule.positions(chunk)
        assert len(members) == schedule.starts[chunk + 1] - schedule.starts[chunk]
        assert len(set(block_of[members])) <= 4
    assert [len(set(block_of[schedule.positions(chunk)])) for chunk in range(5)] == [1, 1, 2, 4, 4]
    first = block_of[schedule.positions(3)]
    assert np.count_nonzero(np.diff(first)) > len(first) / 2  # not block after block


# Shares


@pytest.mark.parametrize("n", [0, 1, 7, 100, 1001])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["block", "random"])
def test_shares_are_equal_and_disjoint(n: int, world: int, drop_last: bool, kind: str) -> None:
    key: dict[str, Any] = {"seed": 1, "epoch": 2, "world": world, "drop_last": drop_last}
    shares = [
        epoch_order(block_schedule(n, rank=r, **key) if kind == "block" else RandomSchedule(n, rank=r, **key)).tolist()
        for r in range(world)
    ]
    assert {len(share) for share in shares} == {share_length(n, world=world, drop_last=drop_last)}
    together = list(itertools.chain(*shares))
    assert len(together) == (n // world * world if drop_last else math.ceil(n / world) * world)
    if drop_last:
        assert len(set(together)) == len(together)
    else:
        assert set(together) == set(range(n))
        assert len(together) - len(set(together)) < world  # the padding, and no more


def test_ranks_read_whole_blocks() -> None:
    plan = plan_blocks(*packed(5000), 2000)
    for rank in range(4):
        segments = deal(plan, seed=0, epoch=0, rank=rank, world=4, drop_last=False)
        whole = np.isin(segments[:, 0], plan.starts) & np.isin(segments[:, 1], plan.starts)
        assert np.count_nonzero(~whole) <= 2


# Reading


@pytest.mark.parametrize("kind", ["block", "random"])
@pytest.mark.parametrize("group", [1, 2, 4, 100])
@pytest.mark.parametrize("begin", [0, 1, 5])
def test_a_chunk_is_read_before_it_is_used_and_until_it_has_been(kind: str, group: int, begin: int) -> None:
    n = 3000
    extents = packed(n, shuffled=True)
    schedule: Any = RandomSchedule(n, seed=0, epoch=0)
    if kind == "block":
        schedule = BlockSchedule(plan_blocks(*extents, 5000), seed=0, epoch=0, window_blocks=3)
    chunks = range(begin, len(schedule.starts) - 1)
    reading = schedule.reading(extents, begin, group)
    assert len(reading.needed) == len(reading.done) == len(chunks)
    assert reading.needed[-1] == reading.done[-1] == len(reading)
    released = 0
    for number, chunk in enumerate(chunks):
        there = np.zeros(n * 200, bool)
        for step in range(released, int(reading.needed[number])):
            for offset, length in zip(*reading[step], strict=True):
                there[offset : offset + length] = True
        for position in schedule.positions(chunk):
            assert there[extents[0][position] : extents[0][position] + extents[1][position]].all()
        assert released <= reading.done[number] <= reading.needed[number]
        released = int(reading.done[number])


def test_groups_are_read_in_file_order_and_the_first_are_small() -> None:
    extents = packed(20_000)
    schedule = BlockSchedule(plan_blocks(*extents, 10_000), seed=0, epoch=0, window_blocks=4)
    reading = schedule.reading(extents, 0, 4)
    assert reading.needed[:9].tolist() == [1, 2, 4, 12, 12, 20, 20, 36, 36]
    for start, stop in ((2, 4), (4, 8), (8, 12), (12, 20), (20, 36)):
        assert (np.diff([reading[step].offsets[0] for step in range(start, stop)]) > 0).all()


def test_a_sparse_split_reads_only_what_it_needs() -> None:
    rng = np.random.default_rng(0)
    offsets = np.sort(rng.choice(10**5, 3000, replace=False)) * 100_000  # 3 % of the file
    lengths = np.full(3000, 90_000)
    schedule = BlockSchedule(plan_blocks(offsets, lengths, 8 << 20), seed=0, epoch=0, window_blocks=4)
    reading = schedule.reading((offsets, lengths), 0, 4)
    steps = [reading[step] for step in range(len(reading))]
    assert lengths.sum() <= sum(int(step.lengths.sum()) for step in steps) < offsets[-1] / 8
    for step in steps:
        assert (np.diff(step.offsets) - step.lengths[:-1] >= JOIN_GAP_BYTES).all()


# Quality


def test_quality_of_a_full_shuffle_is_one_and_of_none_is_little() -> None:
    labels = np.repeat(np.arange(500), 40)
    shuffled = permutation(len(labels), 0)
    assert shuffle_quality(labels, shuffled, 64) == pytest.approx(1, abs=0.01)
    assert shuffle_quality(labels, np.arange(len(labels)), 64) < 0.05
    assert shuffle_quality(np.zeros(500), np.arange(500), 64) == 1


def test_quality_grows_with_blocks_and_windows() -> None:
    n = 20_000
    labels = np.arange(n) // 20
    found = []
    for window in (1, 2, 4, 16):
        schedule = BlockSchedule(plan_blocks(*packed(n), 3000), seed=0, epoch=0, window_blocks=window)
        found.append(shuffle_quality(labels, epoch_order(schedule), 64))
    assert found == sorted(found)
    assert found[-1] > 2 * found[0]


def test_expected_labels_is_hurlberts_formula() -> None:
    counts = [1, 2, 3, 10]
    labels = np.repeat(np.arange(4), counts)
    exact = sum(1 - math.comb(16 - count, 5) / math.comb(16, 5) for count in counts)
    assert expected_labels_per_batch(labels, 5) == pytest.approx(exact)
    assert expected_labels_per_batch(labels, 16) == pytest.approx(4)
    assert expected_labels_per_batch(labels, 99) == pytest.approx(4)


def test_labels_per_batch_counts_full_batches() -> None:
    labels = np.array(["a", "b", "c", "d", "e"])
    assert labels_per_batch(labels, np.array([0, 0, 1, 2, 3]), 2) == (1 + 2) / 2
    assert labels_per_batch(labels, np.array([0, 0, 1]), 64) == 2
    assert labels_per_batch(labels, np.array([], int), 64) == 0


# Size


def test_the_order_of_a_large_set_takes_less_than_64_mb() -> None:
    n = 1_580_470
    lengths = np.full(n, 65_536)
    extents = np.cumsum(lengths) - lengths, lengths
    tracemalloc.start()
    try:
        schedules = [
            BlockSchedule(plan_blocks(*extents, 8 << 20), seed=0, epoch=0, window_blocks=4),
            RandomSchedule(n, seed=0, epoch=0),
        ]
        readings = [schedule.reading(extents, 0, 4) for schedule in schedules]
        for schedule, reading in zip(schedules, readings, strict=True):
            assert len(schedule.positions(1)) == schedule.starts[2] - schedule.starts[1]
            assert len(reading[1].offsets) >= 1
        assert tracemalloc.get_traced_memory()[1] < 64e6
    finally:
        tracemalloc.stop()


def test_plans_are_small_types() -> None:
    assert isinstance(plan_blocks(*packed(10), 100), BlockPlan)
    assert plan_blocks(*packed(10), 100).positions.dtype == np.int32
    assert epoch_order(RandomSchedule(10, seed=0, epoch=0)).dtype == np.int32
