"""BlockShuffleSampler: orders, residency, resuming, and what a DataLoader makes of it.

Over a plain file and a stand-in dataset: the sampler needs no more of one than `extents`, `store.path` and a length.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed
from torch.utils.data import DataLoader, Dataset

from lmdbstore import memory, pagecache
from lmdbstore.errors import ReadError
from lmdbstore.samplers import BlockShuffleSampler, resident_fraction
from lmdbstore.shuffle import epoch_order

MIB = 1 << 20
N = 203
SMALL = {"block_bytes": 20_000, "window_blocks": 2}
ORDERS = ["block", "random"]
GIB = 1 << 30


class Standin(Dataset[int]):
    """Items are the positions themselves; the bytes are read and compared."""

    def __init__(self, path: Path, offsets: np.ndarray, lengths: np.ndarray) -> None:
        self.store = SimpleNamespace(path=path)
        self.extents = offsets, lengths

    def __len__(self) -> int:
        return len(self.extents[0])

    def __getitem__(self, i: int) -> int:
        if i == getattr(self, "fails_at", -1):
            raise ZeroDivisionError("as asked")
        return i


@pytest.fixture
def dataset(tmp_path: Path) -> Standin:
    lengths = np.random.default_rng(0).integers(1, 10_000, N)
    offsets = np.cumsum(lengths) - lengths
    path = tmp_path / "images.bin"
    path.write_bytes(bytes(int(lengths.sum())))
    pagecache.evict(path)
    order = np.random.default_rng(1).permutation(N)
    return Standin(path, offsets[order], lengths[order])


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while any(t.name == "lmdbstore-readahead" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not any(t.name == "lmdbstore-readahead" for t in threading.enumerate())


def make(dataset: Standin, **options: Any) -> BlockShuffleSampler:
    return BlockShuffleSampler(dataset, **{**SMALL, **options})


# Order


@pytest.mark.parametrize("order", ORDERS)
def test_each_epoch_is_another_permutation_of_python_ints(dataset: Standin, order: str) -> None:
    sampler = make(dataset, order=order)
    epochs = [list(sampler) for _ in range(3)]
    assert all(sorted(epoch) == list(range(N)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(type(i) is int for i in epochs[0])
    assert len(sampler) == N


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_does_not_depend_on_the_cache(dataset: Standin, order: str) -> None:
    cold = list(make(dataset, order=order))
    assert list(make(dataset, order=order, readahead_bytes=0)) == cold
    assert list(make(dataset, order=order)) == cold == epoch_order(make(dataset, order=order).schedule(0)).tolist()


def test_set_epoch_chooses_and_without_it_epochs_count_on(dataset: Standin) -> None:
    sampler = make(dataset)
    epochs = [list(sampler) for _ in range(4)]
    sampler.set_epoch(2)
    assert [list(sampler), list(sampler)] == epochs[2:]


def test_an_iterator_that_is_never_asked_takes_no_epoch(dataset: Standin) -> None:
    """DataLoaders call iter() more often than they use what they get."""
    sampler = make(dataset)
    iter(sampler)
    iter(sampler)
    assert list(sampler) == list(make(dataset))


def test_an_epoch_broken_off_is_over(dataset: Standin) -> None:
    sampler = make(dataset)
    next(iter(sampler))
    first, second = list(make(dataset)), list(sampler)
    assert second != first


@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_tiny_sets(dataset: Standin, n: int, order: str) -> None:
    tiny = Standin(dataset.store.path, dataset.extents[0][:n], dataset.extents[1][:n])
    for world in (1, 3):
        shares = [list(make(tiny, order=order, num_replicas=world, rank=rank)) for rank in range(world)]
        assert {i for share in shares for i in share} == set(range(n))
        assert {len(share) for share in shares} == {-(-n // world)}


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_share_an_epoch(dataset: Standin, order: str) -> None:
    shares = [list(make(dataset, order=order, num_replicas=4, rank=rank)) for rank in range(4)]
    assert {len(share) for share in shares} == {51}
    assert {i for share in shares for i in share} == set(range(N))
    shares = [list(make(dataset, order=order, num_replicas=4, rank=rank, drop_last=True)) for rank in range(4)]
    assert len({i for share in shares for i in share}) == sum(map(len, shares)) == 200


def test_ranks_come_from_torch_distributed(dataset: Standin, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        sampler = make(dataset)
        assert (sampler.rank, sampler.options.num_replicas) == (0, 1)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "sorted"}, "order='sorted': expected 'block' or 'random'"),
        ({"seed": -1}, "seed=-1: expected 0 or more"),
        ({"block_bytes": 0}, "block_bytes=0: expected 1 or more"),
        ({"window_blocks": 0}, "window_blocks=0: expected 1 or more"),
        ({"num_replicas": 2, "rank": 2}, "rank=2: expected 0 to 1 with num_replicas=2"),
    ],
)
def test_options_that_make_no_sense_are_quoted(dataset: Standin, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(dataset, **options)


def test_it_pickles_and_goes_on_where_it_was(dataset: Standin) -> None:
    sampler = make(dataset)
    first = list(sampler)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler) != first


# Residency


@pytest.mark.skipif(sys.platform != "linux", reason="residency is unknown here")
@pytest.mark.parametrize("order", ORDERS)
def test_an_index_is_handed_out_only_when_its_bytes_are_there(dataset: Standin, order: str) -> None:
    path = dataset.store.path
    assert pagecache.evict(path) == 0
    sampler = make(dataset, order=order, readahead_bytes=50_000)
    with path.open("rb") as file:
        for i in sampler:
            offset, length = int(dataset.extents[0][i]), int(dataset.extents[1][i])
            assert pagecache.resident(file.fileno(), offset, length) == length
    assert sampler.waited_s > 0


def test_a_disk_error_reaches_the_loop(dataset: Standin) -> None:
    os.truncate(dataset.store.path, 1000)
    with pytest.raises(ReadError, match="images.bin: reading at byte"):
        list(make(dataset))


def test_what_stays_resident() -> None:
    assert resident_fraction(100, None, 1) == 1
    assert resident_fraction(10 * GIB, 16 * GIB, GIB) == 1
    assert resident_fraction(100 * GIB, 16 * GIB, GIB // 4) == pytest.approx((16 * 0.7 - 0.5) / 100)
    assert resident_fraction(100 * GIB, GIB // 4, GIB) == 0


def test_larger_than_memory_is_seen_at_the_start_of_an_epoch(dataset: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    size = int(dataset.extents[1].sum())
    monkeypatch.setattr(memory, "available", lambda: size // 2)
    sampler = make(dataset)
    assert sampler.resident_fraction == 1
    assert sorted(sampler) == list(range(N))
    assert 0 <= sampler.resident_fraction < 0.5


# Resuming


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at", [0, 1, 57, N - 1, N])
@pytest.mark.parametrize("rank", [0, 2])
def test_resuming_anywhere_goes_on_exactly(dataset: Standin, order: str, at: int, rank: int) -> None:
    options: dict[str, Any] = {"order": order, "num_replicas": 3 if rank else 1, "rank": rank, "seed": 9}
    sampler = make(dataset, **options)
    at = min(at, len(sampler))
    epochs = [list(sampler) for _ in range(3)]
    sampler = make(dataset, **options)
    list(sampler)
    iterator = iter(sampler)
    for _ in range(at):
        next(iterator)
    state = pickle.loads(pickle.dumps(sampler.state_dict()))
    resumed = make(dataset, **options)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    if at == 0:  # nothing was asked of epoch 1 yet: the state is the end of epoch 0
        assert list(resumed) == []
    assert list(resumed) == epochs[1][at:]
    assert list(resumed) == epochs[2]


def test_a_state_of_other_options_is_refused(dataset: Standin) -> None:
    state = make(dataset).state_dict()
    with pytest.raises(ValueError, match="saved with seed=0, this sampler has 1"):
        make(dataset, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="yielded=999"):
        make(dataset).load_state_dict({**state, "yielded": 999})


def stateful_loader(dataset: Standin, workers: int, **options: Any) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(dataset, sampler=make(dataset), num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{"batch_size": 16}, {"batch_size": 16, "drop_last": True}, {"batch_size": 29}])
@pytest.mark.parametrize("at", [0, 1, 5, -1, None])
def test_stateful_dataloader_resumes_exactly(
    dataset: Standin, workers: int, options: dict[str, Any], at: int | None
) -> None:
    """With workers, the sampler is batches ahead of the loop; None: the state is taken after the loop."""
    whole = stateful_loader(dataset, workers, **options)
    epochs = [[batch.tolist() for batch in whole] for _ in range(3)]
    loader = stateful_loader(dataset, workers, **options)
    assert [batch.tolist() for batch in loader] == epochs[0]
    stop = len(epochs[1]) if at is None else at % len(epochs[1]) + 1
    iterator = iter(loader)
    for _ in range(stop):
        next(iterator)
    if at is None:
        with pytest.raises(StopIteration):
            next(iterator)
    state = loader.state_dict()
    del iterator, loader
    resumed = stateful_loader(dataset, workers, **options)
    resumed.load_state_dict(state)
    if at is not None:
        assert [batch.tolist() for batch in resumed] == epochs[1][stop:]
    assert [batch.tolist() for batch in resumed] == epochs[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader_without_batches(dataset: Standin, workers: int) -> None:
    loader = stateful_loader(dataset, workers, batch_size=None)
    iterator = iter(loader)
    head = [int(next(iterator)) for _ in range(20)]
    resumed = stateful_loader(dataset, workers, batch_size=None)
    resumed.load_state_dict(loader.state_dict())
    assert head + [int(i) for i in resumed] == list(make(dataset))


# In a DataLoader


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_image_once_whatever_the_start_method(dataset: Standin, method: str) -> None:
    loader = DataLoader(dataset, batch_size=8, sampler=make(dataset), num_workers=2, multiprocessing_context=method)
    assert [i for batch in loader for i in batch.tolist()] == list(make(dataset))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_break_leaves_nothing_behind(dataset: Standin, workers: int, persistent: bool) -> None:
    loader = DataLoader(
        dataset,
        batch_size=8,
        sampler=make(dataset, readahead_bytes=1),
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
    )
    for _ in range(3):
        for _batch in loader:
            break
    del loader
    gc.collect()


def test_an_exception_in_the_dataset_leaves_nothing_behind(dataset: Standin) -> None:
    dataset.fails_at = 17  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError, match="as asked"):
        list(DataLoader(dataset, batch_size=8, sampler=make(dataset, readahead_bytes=1)))
    gc.collect()


def test_an_exception_in_the_loop_leaves_nothing_behind(dataset: Standin) -> None:
    def loop() -> None:
        for i in make(dataset, readahead_bytes=1):
            raise ZeroDivisionError(i)

    with pytest.raises(ZeroDivisionError):
        loop()


def test_two_iterators_at_once(dataset: Standin) -> None:
    sampler = make(dataset)
    first, second = iter(sampler), iter(sampler)
    pairs = list(zip(first, second, strict=True))
    other = make(dataset)
    assert [a for a, _ in pairs] == list(other)
    assert [b for _, b in pairs] == list(other)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_forked_child_iterates_for_itself(dataset: Standin) -> None:
    sampler = make(dataset, readahead_bytes=1)
    iterator = iter(sampler)
    next(iterator)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if sorted(sampler) == list(range(N)) else 2
            iterator.close()  # type: ignore[attr-defined]
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(list(iterator)) == N - 1


def test_the_defaults_are_those_of_the_benchmark(dataset: Standin) -> None:
    options = BlockShuffleSampler(dataset).options
    assert (options.block_bytes, options.window_blocks) == (8 * MIB, 4)
