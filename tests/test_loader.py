"""BatchLoader: DataLoader's batches, whatever the threads; nobody's batch is written to; nothing is left behind."""

from __future__ import annotations

import _thread
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from conftest import Photos
from lmdbstore import BlockShuffleSampler, ImageDataset, IngestOptions, ingest
from lmdbstore.buffers import BufferPool
from lmdbstore.errors import DecodeError, OptionError
from lmdbstore.loader import BatchLoader

PHOTOS = 40  # of the `photos` fixture


def normalized() -> Any:
    return A.Compose([A.Resize(9, 12), A.Rotate(limit=15), A.HorizontalFlip(), A.Normalize()])


def as_tensors() -> Any:
    return A.Compose([A.RandomResizedCrop((9, 12)), A.Normalize(), A.ToTensorV2()])


def pixels() -> Any:
    return A.Compose([A.Resize(9, 12), A.RandomBrightnessContrast(p=0.7)])


def drawn(image: np.ndarray, *, rng: np.random.Generator) -> np.ndarray:
    return cv2.resize(image, (8, 8)) + rng.random((8, 8, 1))


def indices_as_image(image: np.ndarray) -> np.ndarray:
    return cv2.resize(image, (64, 64))


def tensors(batch: Any) -> list[torch.Tensor]:
    return batch if isinstance(batch, list) else [batch]


def assert_same(found: Any, expected: Any) -> None:
    """Compare two epochs batch for batch: values, dtypes, shapes, structure."""
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert type(a) is type(b)
        for x, y in zip(tensors(a), tensors(b), strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape and x.is_contiguous()
            assert torch.equal(x, y)


# The same batches


@pytest.mark.parametrize("transform", [normalized(), as_tensors(), pixels(), drawn], ids=str)
@pytest.mark.parametrize("label", ["landmark_id", None])
@pytest.mark.parametrize("threads", [1, 3])
def test_batches_are_those_of_a_dataloader(store_path: Path, transform: Any, label: str | None, threads: int) -> None:
    dataset = ImageDataset(store_path, transform, label)
    loader = BatchLoader(dataset, 7, num_threads=threads, sampler=BlockShuffleSampler(dataset, seed=3))
    stock = DataLoader(dataset, 7, sampler=BlockShuffleSampler(dataset, seed=3), num_workers=threads - 1)
    assert len(loader) == len(stock) == 6
    for _ in range(2):
        assert_same(loader, stock)


def test_labels_are_int64_and_class_numbers_too(store_path: Path) -> None:
    for numbers in (False, True):
        dataset = ImageDataset(store_path, pixels(), "landmark_id", class_index=numbers)
        (images, labels), *_ = BatchLoader(dataset, 40)
        assert labels.dtype == torch.int64 and labels.tolist() == dataset.labels.tolist()
        assert images.dtype == torch.uint8 and images.shape == (40, 9, 12, 3)


def samplers() -> dict[str, Callable[[Any], Any]]:
    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    return {
        "sequential": SequentialSampler,
        "random": lambda d: RandomSampler(d, generator=seeded()),
        "random, unseeded": RandomSampler,
        "subset": lambda d: SubsetRandomSampler(range(3, 30), generator=seeded()),
        "weighted": lambda _: WeightedRandomSampler(range(1, 41), 33, replacement=False, generator=seeded()),
        "distributed": lambda d: DistributedSampler(d, num_replicas=3, rank=1),
        "blocks": lambda d: BlockShuffleSampler(d, block_bytes=20_000, num_replicas=2, rank=1),
        "blocks, random": lambda d: BlockShuffleSampler(d, order="random"),
        "numpy": lambda d: np.arange(len(d))[::-1],
    }


@pytest.mark.parametrize("name", samplers())
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_sampler(store_path: Path, name: str, drop_last: bool) -> None:
    dataset = ImageDataset(store_path, normalized(), "landmark_id")
    make = samplers()[name]
    for epoch in range(2):
        ours, theirs = make(dataset), make(dataset)
        for sampler in (ours, theirs):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        loader = BatchLoader(dataset, 8, sampler=ours, drop_last=drop_last, num_threads=2)
        loader.set_epoch(epoch)
        torch.manual_seed(epoch)
        found = list(loader)
        dataset.set_epoch(epoch)
        torch.manual_seed(epoch)
        assert_same(found, DataLoader(dataset, 8, sampler=theirs, drop_last=drop_last))


def test_a_batch_sampler(store_path: Path) -> None:
    dataset = ImageDataset(store_path, pixels(), "landmark_id")
    dataset.set_epoch(0)
    batches = BatchSampler(SequentialSampler(dataset), 6, drop_last=False)
    assert_same(BatchLoader(dataset, None, sampler=batches), DataLoader(dataset, batch_sampler=batches))


def test_splits_subsets_and_concatenations(photos: Photos, store_path: Path) -> None:
    split = ImageDataset(store_path, normalized(), "landmark_id", ids=photos.ids[9:31], seed=4)
    split.set_epoch(0)
    other = ImageDataset(store_path, normalized(), "landmark_id", ids=photos.ids[:9])
    other.set_epoch(0)
    both = ConcatDataset([Subset(split, [5, 3, 8, 1]), other, Subset(Subset(split, range(10, 20)), [0, 9])])
    for dataset in (split, both):
        assert_same(BatchLoader(dataset, 4, num_threads=2), DataLoader(dataset, 4))


class Anything(torch.utils.data.Dataset[Any]):
    """A map-style dataset of somebody else's."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: {"x": torch.full((2, 3), i), "name": str(i)},
        lambda i: (np.full((3, 2), i, np.float64), i, "text"),
        lambda i: (torch.full((2,), i, dtype=torch.bfloat16), 0.5 * i),
        lambda i: (np.full((2, 2), i, np.int16), np.float32(i)),
        lambda i: torch.arange(12.0).reshape(2, 2, 3).permute(2, 0, 1) + i,
        lambda i: i,
    ],
)
def test_any_dataset_is_collated_as_by_torch(make: Callable[[int], Any]) -> None:
    dataset = Anything(make)
    for ours, theirs in zip(BatchLoader(dataset, 4, num_threads=2), DataLoader(dataset, 4), strict=True):
        assert repr(ours) == repr(theirs)


def test_collate_gets_the_items_in_order(store_path: Path) -> None:
    dataset = ImageDataset(store_path, None, "landmark_id")
    batches = list(BatchLoader(dataset, 16, collate=lambda items: items, num_threads=3))
    items = [item for batch in batches for item in batch]
    assert [label for _, label in items] == dataset.labels.tolist()
    assert all(np.array_equal(image, dataset[i][0]) for i, (image, _) in enumerate(items))


def test_sizes_may_change_between_batches_but_not_within(photos: Photos, store_path: Path) -> None:
    dataset = ImageDataset(store_path)
    assert_same(BatchLoader(dataset, 1, num_threads=2), DataLoader(dataset, 1))
    with pytest.raises(ValueError, match=r"id '\w{16}': shape .* in a batch of .* collate="):
        list(BatchLoader(dataset, 8))


# The same augmentations


def epoch_of(dataset: ImageDataset, threads: int, **options: Any) -> torch.Tensor:
    return torch.cat(list(BatchLoader(dataset, 8, num_threads=threads, **options)))


def test_augmentation_depends_on_seed_epoch_and_image_alone(photos: Photos, store_path: Path) -> None:
    whole = ImageDataset(store_path, normalized(), seed=1)
    first = epoch_of(whole, 1)
    assert torch.equal(first, epoch_of(whole, 4, prefetch_batches=0))
    split = ImageDataset(store_path, normalized(), ids=photos.ids[::-1], seed=1)
    assert torch.equal(first[split.indices], epoch_of(split, 3))
    loader = BatchLoader(whole, 8)
    epochs = [torch.cat(list(loader)) for _ in range(2)]
    assert torch.equal(first, epochs[0]) and not torch.equal(first, epochs[1])
    assert not torch.equal(first, epoch_of(ImageDataset(store_path, normalized(), seed=2), 2))
    assert not torch.equal(first, epoch_of(whole, 2, seed=2))


def test_a_repeated_image_is_augmented_anew(store_path: Path) -> None:
    dataset = ImageDataset(store_path, normalized())
    images = epoch_of(dataset, 2, sampler=[3] * 20)
    assert len({image.numpy().tobytes() for image in images}) > 5
    assert torch.equal(images, epoch_of(dataset, 1, sampler=[3] * 20))


# Batches stay valid


def test_held_batches_never_change(store_path: Path) -> None:
    """Hold batches in every way there is, for many epochs, and compare at the end."""
    dataset = ImageDataset(store_path, indices_as_image)
    expected = [dataset[i] for i in range(len(dataset))]
    loader = BatchLoader(dataset, 4, num_threads=3, sampler=RandomSampler(dataset), prefetch_batches=3)
    rng = np.random.default_rng(0)
    ways: list[Callable[[torch.Tensor], Any]] = [
        lambda b: b,
        lambda b: b[1],
        lambda b: b.numpy()[2],
        lambda b: b.permute(0, 3, 1, 2)[0].detach(),
        lambda b: memoryview(b.numpy()),
        lambda b: torch.from_dlpack(b)[3],
        lambda b: b.untyped_storage(),
        lambda b: b.view(-1)[100:200].view(torch.int8),
    ]
    held: list[tuple[Any, bytes]] = []
    for _ in range(12):
        for batch in loader:
            kept = ways[rng.integers(len(ways))](batch)
            held.append((kept, bytes_of(kept)))
            if len(held) > 12:
                del held[rng.integers(len(held))]
            if rng.random() < 0.3:
                batch.fill_(7)  # it's the user's: nobody else sees it
                held = [(kept, bytes_of(kept)) for kept, _ in held]
            else:
                assert any(np.array_equal(batch[0], image) for image in expected)
            del batch, kept
        assert all(bytes_of(kept) == before for kept, before in held)


def bytes_of(kept: Any) -> bytes:
    if isinstance(kept, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8).set_(kept).numpy().tobytes()
    return kept.contiguous().numpy().tobytes() if isinstance(kept, torch.Tensor) else np.asarray(kept).tobytes()


def test_an_epoch_may_be_kept_whole(store_path: Path) -> None:
    dataset = ImageDataset(store_path, indices_as_image)
    batches = list(BatchLoader(dataset, 4, prefetch_batches=1))
    assert len({batch.data_ptr() for batch in batches}) == len(batches)
    for i, image in enumerate(torch.cat(batches)):
        np.testing.assert_array_equal(image, dataset[i])


def test_memory_is_used_again(store_path: Path) -> None:
    dataset = ImageDataset(store_path, indices_as_image)
    loader = BatchLoader(dataset, 4, num_threads=2, prefetch_batches=2)
    places: list[int] = []
    for _ in range(5):
        for batch in loader:
            places.append(batch.data_ptr())
            del batch
    assert len(places) == 50 and len(set(places)) <= 5


def test_pool_lends_memory_until_the_last_holder_is_gone() -> None:
    pool = BufferPool(keep=2)
    array, tensor = pool.take((4, 3), np.dtype(np.float32))
    place = tensor.data_ptr()
    assert array.ctypes.data == place
    del array
    row = tensor.numpy()[1:][0]
    del tensor
    def places() -> list[int]:
        return [tensor.data_ptr() for tensor in [pool.take((4, 3), np.dtype(np.float32))[1] for _ in range(4)]]

    assert place not in places()
    del row
    assert place in places()
    array, tensor = pool.take((4, 3), np.dtype(np.float32))
    place = tensor.data_ptr()
    del tensor
    assert place not in places()  # the writer has it still
    del array
    assert place in places()
    assert len(pool._free) == 2


def test_autograd_holds_its_batch(store_path: Path) -> None:
    dataset = ImageDataset(store_path, A.Compose([A.Resize(8, 8), A.Normalize()]))
    weight = torch.ones(3, requires_grad=True)
    graphs = [(batch * weight).sum() for batch in BatchLoader(dataset, 4, prefetch_batches=1)]
    sum(graphs).backward()  # type: ignore[union-attr]
    whole = torch.cat(list(BatchLoader(dataset, 4)))
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, whole.sum((0, 1, 2)))


# Ends: early, by errors, by Ctrl-C


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lmdbstore")]


@pytest.mark.parametrize("block", [False, True])
def test_break_leaves_nothing_behind(store_path: Path, block: bool) -> None:
    dataset = ImageDataset(store_path, normalized(), "landmark_id")
    loader = BatchLoader(dataset, 4, shuffle=block, num_threads=2)
    for _ in loader:
        assert len([name for name in loader_threads() if "loader" in name]) == 2
        break
    gc.collect()
    assert not loader_threads()
    iterator = iter(loader)
    next(iterator)
    del iterator
    gc.collect()
    assert not loader_threads()
    assert len(list(loader)) == 10


def test_an_image_that_fails_names_its_id(photos: Photos, tmp_path: Path) -> None:
    photos.path(photos.ids[7]).write_bytes(b"no image")
    ingest(photos.csv, images=photos.images, out=tmp_path / "x.lmdb", options=IngestOptions(check="none"))
    dataset = ImageDataset(tmp_path / "x.lmdb", indices_as_image, ids=photos.ids)
    received = []
    with pytest.raises(DecodeError, match=photos.ids[7]):
        for batch in BatchLoader(dataset, 3, num_threads=2):
            received.append(batch)
    assert len(received) == 2  # all that comes before it
    assert not loader_threads()


def test_a_transform_that_fails_says_where(store_path: Path) -> None:
    def fail(image: np.ndarray) -> np.ndarray:
        raise ZeroDivisionError("own words")

    dataset = ImageDataset(store_path, fail)
    with pytest.raises(ZeroDivisionError, match="own words") as caught:
        list(BatchLoader(dataset, 4))
    notes = getattr(caught.value, "__notes__", None) or [str(caught.value.__cause__)]
    assert dataset.store.ids[0] in notes[0] and str(store_path) in notes[0]


def test_a_collate_that_fails_is_raised(store_path: Path) -> None:
    dataset = ImageDataset(store_path, indices_as_image)
    with pytest.raises(KeyError, match="mine"):
        list(BatchLoader(dataset, 4, collate=lambda items: {}["mine"]))


def test_ctrl_c_ends_the_epoch(store_path: Path) -> None:
    def slow(image: np.ndarray) -> np.ndarray:
        time.sleep(0.05)
        return image[:8, :8]

    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(20):
            list(BatchLoader(ImageDataset(store_path, slow), 40, num_threads=2))
    timer.join()
    assert not loader_threads()


def test_an_iterator_that_is_alive_at_exit_hinders_nothing(store_path: Path) -> None:
    code = (
        "import sys; from lmdbstore import ImageDataset; from lmdbstore.loader import BatchLoader\n"
        "d = ImageDataset(sys.argv[1], lambda image: image[:8, :8])\n"
        "it = iter(BatchLoader(d, 4, shuffle=True)); print(len(next(it)))"
    )
    command = [sys.executable, "-c", code, str(store_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "4\n", "")


def test_a_fork_in_mid_epoch_hinders_nobody(store_path: Path) -> None:
    dataset = ImageDataset(store_path, normalized())
    iterator = iter(BatchLoader(dataset, 4, shuffle=True, num_threads=2))
    next(iterator)
    pid = os.fork()
    if pid == 0:
        del iterator
        gc.collect()
        os._exit(0 if len(list(BatchLoader(dataset, 4, num_threads=2))) == 10 else 1)
    assert len(list(iterator)) == 9
    assert os.waitpid(pid, 0)[1] == 0


def test_a_fork_finds_no_thread_at_an_image(store_path: Path) -> None:
    """What a thread locks in a library would be locked in the child for ever."""
    inside: list[int] = []

    def slow(image: np.ndarray) -> np.ndarray:
        inside.append(1)
        time.sleep(0.003)
        inside.pop()
        return image[:8, :8]

    iterator = iter(BatchLoader(ImageDataset(store_path, slow), 4, num_threads=3, prefetch_batches=8))
    next(iterator)
    counts = []
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            os._exit(len(inside))
        counts.append(os.waitpid(pid, 0)[1])
        time.sleep(0.002)
    assert counts == [0] * 10
    assert len(list(iterator)) == 9


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc")
def test_the_threads_are_gone_when_the_epoch_is(store_path: Path) -> None:
    dataset = ImageDataset(store_path, normalized())
    tasks = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        list(BatchLoader(dataset, 20, num_threads=4))
        assert len(os.listdir("/proc/self/task")) == tasks


def test_forked_workers_after_epochs_of_threads(store_path: Path) -> None:
    """Train with one, validate with the other."""
    dataset = ImageDataset(store_path, normalized())
    for _ in range(8):
        list(BatchLoader(dataset, 4, num_threads=3))
        assert len(list(DataLoader(dataset, 20, num_workers=2, timeout=60))) == 2


def test_an_iterator_may_be_collected_in_one_of_its_own_threads(store_path: Path) -> None:
    """In a cycle, it ends wherever the garbage collector happens to run."""
    cycle: list[Any] = []

    def drop_the_cycle(image: np.ndarray) -> np.ndarray:
        if len(seen) > 9:
            gc.collect()
        seen.append(1)
        return image[:8, :8]

    seen: list[int] = []
    loader = BatchLoader(ImageDataset(store_path, drop_the_cycle), 4, num_threads=2, prefetch_batches=8)
    gc.disable()
    try:
        iterator = iter(loader)
        cycle += [cycle, iterator]
        next(iterator)
        del iterator, cycle
        deadline = time.monotonic() + 10
        while loader_threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not loader_threads()
    finally:
        gc.enable()


# Threads of others


def test_torch_and_opencv_keep_to_the_loaders_threads(store_path: Path) -> None:
    seen = set()

    def look(image: np.ndarray) -> np.ndarray:
        seen.add((torch.get_num_threads(), cv2.getNumThreads()))
        return image[:8, :8]

    before = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(3)
    cv2.setNumThreads(3)
    try:
        dataset = ImageDataset(store_path, look)
        for _ in zip(BatchLoader(dataset, 4, num_threads=2), BatchLoader(dataset, 4), strict=True):
            assert torch.get_num_threads() == 3
        assert seen == {(1, 1)}
        assert (torch.get_num_threads(), cv2.getNumThreads()) == (3, 3)
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3]
    finally:
        torch.set_num_threads(before[0])
        cv2.setNumThreads(before[1])


# Resuming


@pytest.mark.parametrize("name", ["sequential", "random", "blocks", "distributed"])
@pytest.mark.parametrize("taken", [0, 1, 3, 4])
def test_resume_goes_on_with_what_was_not_received(store_path: Path, name: str, taken: int) -> None:
    dataset = ImageDataset(store_path, normalized(), "landmark_id")

    def loader() -> BatchLoader:
        return BatchLoader(dataset, 5, sampler=samplers()[name](dataset), num_threads=2, prefetch_batches=3)

    whole = loader()
    epochs = [list(whole) for _ in range(2)] if name != "random" else [list(whole)]
    interrupted = loader()
    iterator = iter(interrupted)
    for _ in range(min(taken, len(whole))):
        next(iterator)
    state = interrupted.state_dict()
    del iterator
    resumed = loader()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert_same(resumed, epochs[0][taken:])
    if name != "random":  # torch's has no epochs: its generator goes on
        assert_same(resumed, epochs[1])


def test_a_state_after_an_epoch_is_the_start_of_the_next(store_path: Path) -> None:
    dataset = ImageDataset(store_path, normalized())
    loader = BatchLoader(dataset, 8, shuffle=True)
    list(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (1, 0)
    resumed = BatchLoader(dataset, 8, shuffle=True)
    resumed.load_state_dict(state)
    assert_same(resumed, loader)


def test_a_state_of_another_order_is_refused(store_path: Path) -> None:
    dataset = ImageDataset(store_path, indices_as_image)
    loader = BatchLoader(dataset, 8, sampler=RandomSampler(dataset))
    next(iter(loader))
    state = loader.state_dict()
    other = BatchLoader(dataset, 8, sampler=RandomSampler(dataset))
    other.load_state_dict(state)
    with pytest.raises(OptionError, match="another order"):
        next(iter(other))
    with pytest.raises(OptionError, match=r"seed=0, this loader has 5"):
        BatchLoader(dataset, 8, seed=5).load_state_dict(state)


def test_set_epoch_chooses_order_and_augmentation(store_path: Path) -> None:
    dataset = ImageDataset(store_path, normalized())
    loader = BatchLoader(dataset, 8, shuffle=True)
    epochs = [list(loader) for _ in range(3)]
    loader.set_epoch(1)
    assert_same(loader, epochs[1])
    assert_same(loader, epochs[2])


# Options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"prefetch_batches": -1}, "prefetch_batches=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"shuffle": True, "sampler": [1]}, "shuffle=True"),
        ({"batch_size": None}, "batch_size=None"),
    ],
)
def test_options_that_make_no_sense_are_quoted(store_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        BatchLoader(ImageDataset(store_path), **{"batch_size": 4, **options})


def test_pin_memory_without_an_accelerator_warns(store_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.warns(UserWarning, match="ordinary memory"):
        loader = BatchLoader(ImageDataset(store_path, indices_as_image), 8, pin_memory=True)
    assert len(list(loader)) == 5
