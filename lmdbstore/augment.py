"""How a transform is called: with random numbers that depend on seed, epoch and image alone, from any thread."""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class Draws:
    """The random numbers of one item, a function of its key.

    Parameters
    ----------
    *key : int
        Seed, epoch, position of the image in its store, and what else tells this item from another.

    Notes
    -----
    Threads: one.  The generators are made when they are asked for: 8 and 6 us.
    """

    __slots__ = ("_key", "_numpy")

    def __init__(self, *key: int) -> None:
        self._key = key
        self._numpy: np.random.Generator | None = None

    @property
    def numpy(self) -> np.random.Generator:
        """The generator; always the same one, so whoever draws next goes on where the last one stopped."""
        if self._numpy is None:
            self._numpy = np.random.Generator(np.random.PCG64(self._entropy(b"numpy")))
        return self._numpy

    def python(self) -> random.Random:
        """Return a generator of Python's kind, independent of the other; from its start."""
        return random.Random(self._entropy(b"python"))

    def _entropy(self, which: bytes) -> int:
        # A digest, not a sum: neighbouring seeds and epochs share nothing.
        data = ",".join(map(str, self._key)).encode()
        return int.from_bytes(hashlib.blake2b(data, digest_size=16, person=which).digest(), "little")


class Augmentation:
    """A transform, and how to call it.

    Parameters
    ----------
    transform : callable
        An albumentations transform; or any callable on the array, which gets ``rng=``, a numpy Generator, if it takes
        an argument of that name.

    Notes
    -----
    Threads: an albumentations transform holds its random generators, so every thread but the main one calls
    a copy of its own, made when it first needs it.  Other callables are shared.
    Processes: pickles if the transform does.
    """

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform
        self._albumentations = _is_albumentations(transform)
        self._takes_rng = not self._albumentations and _takes_rng(transform)
        self._local = threading.local()

    def __call__(self, image: np.ndarray, draws: Draws, out: np.ndarray | None = None) -> Any:
        """Return what the transform makes of an image.

        Parameters
        ----------
        image : ndarray, (H, W, 3) uint8
        draws : Draws
        out : ndarray, optional
            Where the result is wanted.  It is written there, and `out` returned, if that spares a copy; else it is
            left alone, and the caller copies.
        """
        if self._albumentations:
            return self._augmented(image, draws, out)
        return self.transform(image, rng=draws.numpy) if self._takes_rng else self.transform(image)

    def __getstate__(self) -> Callable[..., Any]:
        return self.transform

    def __setstate__(self, transform: Callable[..., Any]) -> None:
        self.__init__(transform)  # type: ignore[misc]

    def _augmented(self, image: np.ndarray, draws: Draws, out: np.ndarray | None) -> Any:
        transform = self._own()
        _seed(transform, draws)
        before, normalize, after = _split(transform)
        if normalize is None:
            return transform(image=image)["image"]
        pixels = before(image=image)["image"]
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            pixels = normalize(image=pixels)["image"]
        else:
            fits = not after and out is not None and out.shape == pixels.shape and out.dtype == np.float32
            pixels = _look_up(pixels, self._values(normalize), out if fits else None)
        for transform in after:
            pixels = transform(image=pixels)["image"]
        return pixels

    def _own(self) -> Any:
        """Return the transform that this thread may call."""
        if threading.current_thread() is threading.main_thread():
            return self.transform
        if not hasattr(self._local, "transform"):
            with _copying:
                self._local.transform = copy.deepcopy(self.transform)
        return self._local.transform

    def _values(self, normalize: Any) -> np.ndarray:
        """Return what Normalize makes of each value of each channel, (256, 3) float32, by asking it."""
        if getattr(self._local, "normalize", None) is not normalize:
            ramp = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(256, 1, 3)
            self._local.values = np.ascontiguousarray(normalize(image=ramp)["image"].reshape(256, 3))
            self._local.normalize = normalize
        values: np.ndarray = self._local.values
        return values


def _split(transform: Any) -> tuple[Any, Any, list[Any]]:
    """Split a pipeline at a Normalize that a table can stand for: what precedes it, it, and what follows.

    Normalize maps values channel by channel, so 256 x 3 of its results are all of them: looking them up gives
    the same bits in 0.2 ms where albumentations 2.0 takes 1.8 (400 x 400).  Without such an end: None in the middle.
    """
    albumentations = sys.modules["albumentations"]
    if type(transform) is not albumentations.Compose or transform.p < 1:
        return transform, None, []
    steps = list(transform.transforms)
    at = len(steps) - 1
    if at > 0 and type(steps[at]).__name__ == "ToTensorV2":
        at -= 1
    if at < 0 or not _is_table(steps[at], albumentations) or any(step.p < 1 for step in steps[at:]):
        return transform, None, []
    before = copy.copy(transform)  # shares the transforms, and has a shorter list of them: 3 us
    before.transforms = steps[:at]
    return before, steps[at], steps[at + 1 :]


def _is_table(step: Any, albumentations: Any) -> bool:
    return type(step) is albumentations.Normalize and getattr(step, "normalization", "standard") == "standard"


def _look_up(pixels: np.ndarray, values: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    from lmdbstore import opencv

    found: np.ndarray = opencv.table(pixels, values, out)
    return found


def _seed(transform: Any, draws: Draws) -> None:
    """Set the random state of an albumentations transform and of all within it."""
    if hasattr(transform, "set_random_state"):  # 1.4.21 and later; 16 us, where set_random_seed of 2.0 takes 83
        transform.set_random_state(draws.numpy, draws.python())
    else:  # the generators of the process; one thread a process, as in DataLoader's workers, is still reproducible
        random.seed(int(draws.numpy.integers(1 << 63)))


def _is_albumentations(transform: object) -> bool:
    # whoever hands us one has imported it; we needn't
    library = sys.modules.get("albumentations")
    return library is not None and isinstance(transform, (library.BasicTransform, library.BaseCompose))


def _takes_rng(transform: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(transform).parameters.get("rng")
    except (TypeError, ValueError):  # some callables written in C don't tell
        return False
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def _unlock() -> None:
    global _copying
    _copying = threading.Lock()


_copying = threading.Lock()
if hasattr(os, "register_at_fork"):  # another thread may have held it when the process forked
    os.register_at_fork(after_in_child=_unlock)
