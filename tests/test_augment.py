"""Augmentation: random numbers by key alone, in any thread; Normalize by table gives the same bits."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import partial
from typing import Any

import albumentations as A
import cv2
import numpy as np
import pytest
import torch

from lmdbstore import augment
from lmdbstore.augment import Augmentation, Draws


def image(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (40, 50, 3), dtype=np.uint8)


def pipelines() -> list[Any]:
    dropped = A.OneOf([A.ChannelDropout(), A.ToGray(), A.GaussNoise()], p=0.8)
    return [
        A.Compose([A.Resize(30, 30), A.Rotate(limit=15), A.ChannelDropout(p=0.1), A.Normalize()]),
        A.Compose([A.RandomResizedCrop((30, 30)), dropped, A.Normalize((0.5, 0.4, 0.3), (0.25,) * 3), A.ToTensorV2()]),
        A.Compose([A.Normalize(max_pixel_value=128.0)]),
        A.Compose([A.HorizontalFlip(), A.Normalize(normalization="image_per_channel")]),
        A.Compose([A.Normalize(p=0.5)]),
        A.Compose([A.HorizontalFlip(), A.Normalize()], p=0.5),
        A.Compose([A.ToFloat(), A.Normalize(max_pixel_value=1.0)]),
        A.Compose([A.Compose([A.Rotate(), A.RandomBrightnessContrast()]), A.SomeOf([A.Blur(), A.HorizontalFlip()], 1)]),
        A.ReplayCompose([A.HorizontalFlip(), A.Normalize()]),
        A.HorizontalFlip(),
    ]


@pytest.mark.parametrize("number", range(len(pipelines())))
def test_the_result_is_the_transforms_own_to_the_bit(number: int) -> None:
    """With the same random state, albumentations itself makes the same of every image."""
    transform, alone = pipelines()[number], pipelines()[number]
    call = Augmentation(transform)
    for k in range(20):
        draws = Draws(0, 1, k)
        alone.set_random_state(draws.numpy, draws.python())
        expected, found = alone(image=image(k))["image"], call(image(k), Draws(0, 1, k))
        assert type(found) is type(expected) and found.dtype == expected.dtype and found.shape == expected.shape
        assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_normalize_is_written_where_it_is_wanted() -> None:
    call = Augmentation(pipelines()[0])
    out = np.full((3, 30, 30, 3), 7, np.float32)
    found = call(image(), Draws(5), out[1])
    assert np.shares_memory(found, out)
    np.testing.assert_array_equal(out[1], call(image(), Draws(5)))
    assert (out[[0, 2]] == 7).all()
    for other in (np.zeros((30, 31, 3), np.float32), np.zeros((30, 30, 3), np.float64)):
        assert not np.shares_memory(call(image(), Draws(5), other), other) and not other.any()


def test_the_users_transform_is_left_whole() -> None:
    transform = pipelines()[0]
    steps = list(transform.transforms)
    Augmentation(transform)(image(), Draws(1))
    assert transform.transforms == steps and len(transform) == 4


def test_threads_do_not_disturb_each_other() -> None:
    call = Augmentation(pipelines()[1])
    expected = [call(image(), Draws(k)).numpy().copy() for k in range(40)]
    found: dict[int, np.ndarray] = {}

    def work(first: int) -> None:
        for k in range(first, 40, 4):
            found[k] = call(image(), Draws(k)).numpy().copy()

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(found[k], expected[k]) for k in range(40))


def test_keys_are_numbers_in_a_row_not_their_sum() -> None:
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0), (0, 10), (1, 0), (2**70, 0), (0, 2**70), (-1, 0)]
    assert len({(Draws(*key).numpy.random(), Draws(*key).python().random()) for key in keys}) == len(keys)
    draws = Draws(3)
    first = draws.numpy.random()
    assert draws.numpy.random() != first == Draws(3).numpy.random()


def noisy(image: np.ndarray, scale: float = 1.0, *, rng: np.random.Generator) -> np.ndarray:
    return image + scale * rng.random(image.shape)


def plain(image: np.ndarray) -> np.ndarray:
    return cv2.flip(image, 1)


def test_callables_get_a_generator_if_they_take_one() -> None:
    for transform in (noisy, partial(noisy, scale=2.0)):
        call = Augmentation(transform)
        np.testing.assert_array_equal(call(image(), Draws(1)), call(image(), Draws(1)))
        assert not np.array_equal(call(image(), Draws(1)), call(image(), Draws(2)))
    np.testing.assert_array_equal(Augmentation(plain)(image(), Draws(1)), plain(image()))
    assert torch.is_tensor(Augmentation(torch.from_numpy)(image(), Draws(1)))  # its signature can't be read


def test_it_pickles_and_copies() -> None:
    call = Augmentation(pipelines()[0])
    call(image(), Draws(1))
    for again in (pickle.loads(pickle.dumps(call)), copy.deepcopy(call)):
        np.testing.assert_array_equal(again(image(), Draws(1)), call(image(), Draws(1)))


def test_without_instance_generators_the_process_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """albumentations before 1.4.21."""
    import random

    class Old(A.HorizontalFlip):
        set_random_state = property()  # hasattr is False

        def __call__(self, *_: Any, **data: Any) -> Any:
            return {"image": data["image"] + random.random()}

    call = Augmentation(Old())
    np.testing.assert_array_equal(call(image(), Draws(1)), call(image(), Draws(1)))
    assert not np.array_equal(call(image(), Draws(1)), call(image(), Draws(2)))
    assert augment._takes_rng(plain) is False
