from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from conftest import Photos
from lmdbstore import BlockShuffleSampler, ImageDataset, ImageStore, IngestOptions, ingest
from lmdbstore.errors import DecodeError, LabelError, MissingColumn, MissingKey
from lmdbstore.shuffle import epoch_order


def small(image: np.ndarray) -> np.ndarray:
    return cv2.resize(image, (8, 8))


def small_albumentations() -> Any:
    return A.Compose([A.Resize(8, 8), A.Normalize(), A.ToTensorV2()])


def test_items_are_images_with_their_labels(photos: Photos, store_path: Path) -> None:
    dataset = ImageDataset(store_path, label="landmark_id")
    assert len(dataset) == len(photos.ids)
    for i, id in enumerate(dataset.store.ids):
        image, label = dataset[i]
        assert label == photos.labels[id] and type(label) is int
        np.testing.assert_array_equal(image, dataset.store.decode(id))
        image[:] = 0  # writable, and no part of the store
        assert dataset.store.read(id) == photos.data(id)
    assert dataset.labels.tolist() == [photos.labels[id] for id in dataset.store.ids]


def test_without_a_label_an_item_is_the_image(store_path: Path) -> None:
    assert isinstance(ImageDataset(store_path)[0], np.ndarray)
    with pytest.raises(LabelError):
        _ = ImageDataset(store_path).labels


def test_indexing_is_a_sequence(store_path: Path) -> None:
    dataset = ImageDataset(store_path, small, "landmark_id")
    assert dataset[-1][1] == dataset[len(dataset) - 1][1] == dataset[np.int64(len(dataset) - 1)][1]
    for i in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError):
            dataset[i]
    assert len(list(dataset)) == len(dataset)  # type: ignore[call-overload]


def test_a_split_has_its_ids_in_their_order(photos: Photos, store_path: Path) -> None:
    ids = photos.ids[5:15]
    dataset = ImageDataset(store_path, label="landmark_id", ids=ids)
    assert [dataset[i][1] for i in range(len(dataset))] == [photos.labels[id] for id in ids]
    offset, length = dataset.extents
    file = store_path.read_bytes()
    assert [file[o : o + n] for o, n in zip(offset, length, strict=True)] == [photos.data(id) for id in ids]


def test_what_is_wrong_shows_at_construction(photos: Photos, store_path: Path) -> None:
    with pytest.raises(MissingKey, match="1 of 41 ids"):
        ImageDataset(store_path, ids=[*photos.ids, "gone"])
    with pytest.raises(MissingColumn):
        ImageDataset(store_path, label="landmark")


def test_two_splits_share_their_class_numbers(photos: Photos, store_path: Path) -> None:
    store = ImageStore(store_path)
    splits = [
        ImageDataset(store, label="landmark_id", ids=ids, class_index=True)
        for ids in (photos.ids[:20], photos.ids[20:])
    ]
    number = {value: k for k, value in enumerate(sorted(set(photos.labels.values())))}
    for split, ids in zip(splits, (photos.ids[:20], photos.ids[20:]), strict=True):
        assert split.classes.tolist() == list(number)
        expected = [number[photos.labels[id]] for id in ids]
        assert [split[i][1] for i in range(20)] == split.labels.tolist() == expected


def test_text_labels_need_class_numbers(photos: Photos, tmp_path: Path) -> None:
    lines = photos.csv.read_text().splitlines()
    photos.csv.write_text(
        "\n".join([lines[0] + ",kind", *(f"{line},{'xyz'[k % 3]}" for k, line in enumerate(lines[1:]))])
    )
    out = tmp_path / "x.lmdb"
    ingest(photos.csv, images=photos.images, out=out)
    with pytest.raises(LabelError, match="column 'kind' is text .*class_index=True"):
        ImageDataset(out, label="kind")
    dataset = ImageDataset(out, label="kind", class_index=True)
    assert dataset.classes.tolist() == ["x", "y", "z"]
    kinds = dict(zip(photos.ids, ["xyz"[k % 3] for k in range(40)], strict=True))
    expected = ["xyz".index(kinds[id]) for id in dataset.store.ids]
    assert [dataset[i][1] for i in range(40)] == dataset.labels.tolist() == expected


def test_a_broken_label_column_names_its_line(photos: Photos, tmp_path: Path) -> None:
    lines = photos.csv.read_text().splitlines()
    lines[16] = lines[16].split(",")[0] + ",5.0"
    photos.csv.write_text("\n".join(lines))
    ingest(photos.csv, images=photos.images, out=tmp_path / "x.lmdb")
    with pytest.raises(LabelError, match=r"train.csv:17 has '5.0'"):
        ImageDataset(tmp_path / "x.lmdb", label="landmark_id")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("workers", [0, 2])
def test_dataloader_under_every_start_method(photos: Photos, store_path: Path, method: str, workers: int) -> None:
    train = ImageDataset(store_path, small_albumentations(), "landmark_id", ids=photos.ids[:32], class_index=True)
    other = ImageDataset(store_path, small, "landmark_id", ids=photos.ids[32:])
    train[0], other[0]  # the parent has read, decoded and transformed before the workers start
    context = method if workers else None
    for dataset, shape in ((train, (8, 3, 8, 8)), (other, (8, 8, 8, 3))):
        loader = DataLoader(dataset, 8, shuffle=True, num_workers=workers, multiprocessing_context=context)
        seen: list[int] = []
        for images, labels in loader:
            assert tuple(images.shape) == shape and labels.dtype == torch.int64
            seen += labels.tolist()
        assert sorted(seen) == sorted(dataset.labels.tolist())
    assert train[1][1] == train.labels[1]


def test_pickles_small_and_copies(photos: Photos, store_path: Path) -> None:
    full = ImageDataset(store_path, small, "landmark_id", class_index=True)
    full[0]
    assert len(pickle.dumps(full)) < 1000
    split = ImageDataset(store_path, label="landmark_id", ids=photos.ids[::-1])
    for dataset in (full, split):
        for again in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
            assert again.labels.tolist() == dataset.labels.tolist()
            np.testing.assert_array_equal(again[3][0], dataset[3][0])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_fails_names_id_and_store_across_processes(photos: Photos, tmp_path: Path, workers: int) -> None:
    photos.path(photos.ids[7]).write_bytes(b"no image")
    out = tmp_path / "x.lmdb"
    ingest(photos.csv, images=photos.images, out=out, options=IngestOptions(check="none"))
    with pytest.raises(DecodeError) as caught:
        list(DataLoader(ImageDataset(out, small), num_workers=workers))
    assert photos.ids[7] in str(caught.value) and str(out) in str(caught.value)


def test_batches_are_items(store_path: Path) -> None:
    dataset = ImageDataset(store_path, small, "landmark_id")
    batch = dataset.__getitems__([3, 1, 2])
    for (image, label), i in zip(batch, (3, 1, 2), strict=True):
        np.testing.assert_array_equal(image, dataset[i][0])
        assert label == dataset[i][1]


def test_colour_order(store_path: Path) -> None:
    rgb, bgr = ImageDataset(store_path), ImageDataset(store_path, color="bgr")
    np.testing.assert_array_equal(rgb[5], bgr[5][..., ::-1])


# Randomness


def turning() -> Any:
    return A.Compose([A.Rotate(limit=90, p=1), A.Resize(8, 8), A.Normalize()])


def epoch_of(dataset: ImageDataset, **options: Any) -> torch.Tensor:
    return torch.cat([images for images, _ in DataLoader(dataset, 8, **options)])


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_augmentation_is_the_same_in_every_process_and_epoch(store_path: Path, method: str) -> None:
    """Persistent workers hear of the epoch, whether the sampler says it or the user."""
    dataset = ImageDataset(store_path, turning(), "landmark_id", seed=3)
    epochs = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        epochs.append(epoch_of(dataset))
    assert not torch.equal(*epochs)
    for sampler in (range(40), BlockShuffleSampler(dataset, seed=1)):
        workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
        loader = DataLoader(dataset, 8, sampler=sampler, **workers)
        for epoch in range(2):
            if isinstance(sampler, BlockShuffleSampler):
                order = epoch_order(sampler.schedule(epoch))
            else:
                dataset.set_epoch(epoch)
                order = np.arange(40)
            assert torch.equal(torch.cat([images for images, _ in loader]), epochs[epoch][order])
        del loader


def test_without_set_epoch_each_pass_is_augmented_anew(store_path: Path) -> None:
    first, second = (ImageDataset(store_path, turning(), "landmark_id") for _ in range(2))
    passes = [epoch_of(first, num_workers=workers) for workers in (0, 2, 1)]
    assert not torch.equal(passes[0], passes[1]) and not torch.equal(passes[1], passes[2])
    assert all(torch.equal(images, epoch_of(second)) for images in passes)
    second.set_epoch(1)
    assert torch.equal(epoch_of(second), passes[1]) and torch.equal(epoch_of(second), passes[1])


def test_a_split_is_augmented_as_the_whole(photos: Photos, store_path: Path) -> None:
    whole = ImageDataset(store_path, turning())
    split = ImageDataset(store_path, turning(), ids=photos.ids[20:5:-1])
    for dataset in (whole, split):
        dataset.set_epoch(5)
    for i, at in enumerate(split.indices):
        np.testing.assert_array_equal(split[i], whole[int(at)])


def test_copies_have_an_epoch_of_their_own(store_path: Path) -> None:
    dataset = ImageDataset(store_path, turning())
    dataset.set_epoch(2)
    again = pickle.loads(pickle.dumps(dataset))
    assert again.epoch == 2
    np.testing.assert_array_equal(again[1], dataset[1])
    again.set_epoch(3)
    assert dataset.epoch == 2


def test_the_transform_may_be_replaced(store_path: Path) -> None:
    dataset = ImageDataset(store_path, small)
    assert dataset.transform is small and dataset[0].shape == (8, 8, 3)
    dataset.transform = None
    np.testing.assert_array_equal(dataset[0], dataset.store.decode_at(0))


def opencv_threads(image: np.ndarray) -> np.ndarray:
    return np.array([cv2.getNumThreads(), torch.get_num_threads()])


def test_workers_keep_to_one_core(store_path: Path) -> None:
    before = cv2.getNumThreads()
    cv2.setNumThreads(4)
    try:
        large = np.zeros((3000, 3000, 3), np.uint8)
        cv2.warpAffine(large, np.eye(2, 3), (3000, 3000))  # OpenCV's threads are there when the workers fork
        dataset = ImageDataset(store_path, opencv_threads)
        assert (torch.cat(list(DataLoader(dataset, 8, num_workers=2))) == 1).all()
        assert dataset[0][0] == 4
    finally:
        cv2.setNumThreads(before)
