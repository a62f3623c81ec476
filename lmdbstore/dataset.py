"""ImageDataset: a store, or a split of it, as a map-style PyTorch dataset."""

from __future__ import annotations

import multiprocessing.context
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch.utils.data

from lmdbstore.augment import Augmentation, Draws
from lmdbstore.codec import Color
from lmdbstore.errors import LabelError, LmdbstoreError
from lmdbstore.layout import TextColumn
from lmdbstore.plans import DecodePlan
from lmdbstore.selection import lazily
from lmdbstore.store import ImageStore


class ImageDataset(torch.utils.data.Dataset[Any]):
    """Images of a store, decoded and transformed, with their labels.

    Parameters
    ----------
    store : str, path-like or ImageStore
    transform : callable, optional
        An albumentations transform, or any callable that takes the array
        (H, W, 3), uint8, RGB.  What it returns is the item, unchanged.  A callable with an
        argument `rng` is given a numpy Generator.
    label : str, optional
        A column.  With it an item is ``(image, label)``, without it the image alone.
    ids : iterable of str, optional
        A split: these images, in this order.  Default: all, in the order of the file.
    class_index : bool
        The label is the class number, ``0 <= label < len(dataset.classes)``, instead of
        the column's value.  The numbers are the store's, the same for every split.
    color : {"rgb", "bgr"}
    decode : Resized, RandomResizedCrop or CenterCrop, optional
        Decode less than the whole image (see `plans`); the transform gets what that gives.
    seed : int
        Of the random crops and of the transform.

    Attributes
    ----------
    indices : ndarray of int64
        The position in the store of each item.
    classes : ndarray
        The distinct labels of the whole store, sorted; with `class_index` only.

    Raises
    ------
    MissingKey, MissingColumn, LabelError
        At construction, not in the middle of an epoch.

    Notes
    -----
    Randomness: crops, albumentations transforms and callables that take `rng` depend on the seed,
    the epoch and the image, and on nothing else: not on workers, threads or the order of reading.
    `set_epoch` gives the epoch; BlockShuffleSampler calls it, and BatchLoader has its own count.  Until it was
    first called, an image's epoch is the number of times that it was asked for before.
    Threads: items may be read from several at once if the transform allows it; an albumentations one does.
    Processes: works under fork, spawn and forkserver, before or after the first read;
    a pickled dataset is the path, the transform and the indices of the split.
    Memory: arrays over the map, no Python object per image.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | ImageStore,
        transform: Callable[..., Any] | None = None,
        label: str | None = None,
        ids: Iterable[str] | None = None,
        *,
        class_index: bool = False,
        color: Color = "rgb",
        decode: DecodePlan | None = None,
        seed: int = 0,
    ) -> None:
        self.store = store if isinstance(store, ImageStore) else ImageStore(store)
        self.transform, self.label, self.class_index, self.color = transform, label, class_index, color
        self.decode, self.seed = decode, seed
        self.indices = np.arange(len(self.store)) if ids is None else self.store.indices(ids)
        self._epoch = _SharedEpoch(len(self))
        self.classes = _classes(self.store, label, class_index)

    @property
    def transform(self) -> Callable[..., Any] | None:
        """What is done with each decoded image; may be replaced."""
        return None if self._augmentation is None else self._augmentation.transform

    @transform.setter
    def transform(self, transform: Callable[..., Any] | None) -> None:
        self._augmentation = None if transform is None else Augmentation(transform)

    @property
    def epoch(self) -> int | None:
        """The epoch that was set last, in whatever process; None before."""
        return self._epoch.get()

    def set_epoch(self, epoch: int) -> None:
        """Choose the random numbers of the items from now on, in all worker processes of this dataset, too."""
        self._epoch.set(epoch)

    @property
    def extents(self) -> tuple[np.ndarray, np.ndarray]:
        """Offset and length in bytes of each item's file in the store, int64, both of shape (len(self),)."""
        return self.store.column("offset")[self.indices], self.store.column("length")[self.indices]

    @property
    def labels(self) -> np.ndarray:
        """The label of every item, without reading an image: int64 or float64, (len(self),)."""
        if self.label is None:
            raise LabelError(f"{self.store.path}: the dataset was made without label=")
        values = self.store.column(self.label)
        if not self.class_index:
            return values[self.indices]
        if isinstance(values, TextColumn):
            return np.searchsorted(np.char.encode(self.classes), values.fixed()[self.indices])
        return np.searchsorted(self.classes, values[self.indices])

    def show(self, i: int = 0, *, times: int = 8) -> Any:
        """Draw item i as it is stored, then as epochs 0 to `times` - 1 get it; returns a `Picture`.

        Raises
        ------
        IndexError, DecodeError, MissingDependency
        """
        return lazily("sheets").varied_sheet(self, i, times=times)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> Any:
        """Return item i: the image, or (image, label).

        Raises
        ------
        IndexError, DecodeError, ReadError
        """
        return self.load(i)

    def load(
        self, i: int, *, epoch: int | None = None, key: tuple[int, ...] = (), out: np.ndarray | None = None
    ) -> Any:
        """Return item i, of an epoch: `dataset[i]` for whoever reads ahead of the loop.

        Parameters
        ----------
        i : int
        epoch : int, optional
            Default: the one that was set.
        key : tuple of int
            Further numbers that the randomness depends on.
        out : ndarray, optional
            Where the image is wanted.  If that spares a copy, it is written there and `out` is the image of the item.

        Raises
        ------
        IndexError, DecodeError, ReadError
        """
        if not -len(self) <= i < len(self):
            raise IndexError(f"item {i} of a dataset of {len(self)}")
        _keep_to_one_core()
        at = int(self.indices[i])
        draws = Draws(self.seed, self._epoch.of(i) if epoch is None else epoch, at, *key)
        image = self._decoded(at, draws)
        if self._augmentation is not None:
            try:
                image = self._augmentation(image, draws, out)
            except Exception as error:
                _note(error, f"while transforming {self.store.where(at)}")
                raise
        return image if self.label is None else (image, self._label(at))

    def __getitems__(self, positions: list[int]) -> list[Any]:
        """Return the items of a batch, in their order."""
        return [self[i] for i in positions]

    def __repr__(self) -> str:
        split = "" if len(self) == len(self.store) else f"{len(self):,} of "
        return f"<ImageDataset {split}{self.store!r}, label={self.label!r}>"

    def _decoded(self, at: int, draws: Draws) -> Any:
        if self.decode is None:
            return self.store.decode_at(at, color=self.color)
        plan = self.decode.plan(*self.store.size_at(at), draws.numpy if self.decode.random else None)
        return self.store.decode_at(at, color=self.color, plan=plan)

    def __getstate__(self) -> dict[str, Any]:
        # a full set is told by its absence: nothing of the store's size travels
        full = len(self) == len(self.store) and bool((np.diff(self.indices) == 1).all())
        return {**self.__dict__, "indices": None if full else self.indices, "classes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.indices is None:
            self.indices = np.arange(len(self.store))
        self.classes = _classes(self.store, self.label, self.class_index)

    def _label(self, at: int) -> int | float:
        value = self.store.column(self.label)[at]  # type: ignore[arg-type]
        return int(np.searchsorted(self.classes, value)) if self.class_index else value.item()


class _SharedEpoch:
    """The epoch, in memory that worker processes share, so that persistent ones see it change.

    And how often each item was asked for while there was none: it stands in for the epoch, so that a loop that
    never heard of `set_epoch` doesn't see the same augmentations in every epoch.
    """

    def __init__(self, length: int) -> None:
        self._shared: torch.Tensor = torch.zeros(length + 1, dtype=torch.int32)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._shared[0] = -1
        self._values = self._shared.numpy()

    def get(self) -> int | None:
        epoch = int(self._values[0])
        return None if epoch < 0 else epoch

    def set(self, epoch: int) -> None:
        self._values[0] = epoch

    def of(self, item: int) -> int:
        """Return the epoch of an item that is asked for now."""
        epoch = int(self._values[0])
        if epoch < 0:
            at = item if item < 0 else item + 1  # the first value is the epoch
            epoch = int(self._values[at])
            self._values[at] = (epoch + 1) & 0x7FFFFFFF
        return epoch

    def __getstate__(self) -> Any:
        # a process that is being spawned shares the memory; a copy or a pickle in a file has its own
        spawning = multiprocessing.context.get_spawning_popen() is not None
        return self._shared if spawning else (len(self._shared) - 1, int(self._values[0]))

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, torch.Tensor):
            self._shared, self._values = state, state.numpy()
        else:
            self.__init__(state[0])  # type: ignore[misc]
            self.set(state[1])


_kept = 0  # the process whose OpenCV is kept to one thread


def _keep_to_one_core() -> None:
    """Keep OpenCV from starting a thread for every core in every DataLoader worker; torch does so for its own."""
    global _kept
    if _kept == os.getpid():
        return
    _kept = os.getpid()
    if torch.utils.data.get_worker_info() is not None and "cv2" in sys.modules:
        from lmdbstore import opencv

        opencv.one_thread()


def _note(error: Exception, where: str) -> None:
    """Add a place to an error of somebody else's."""
    if hasattr(error, "add_note"):
        error.add_note(where)
    elif error.__cause__ is None:  # Python 3.10
        error.__cause__ = LmdbstoreError(where)


def _classes(store: ImageStore, label: str | None, class_index: bool) -> Any:
    """Check the label column, and return its classes where they are asked for."""
    if label is None:
        return None
    values = store.column(label)
    if class_index:
        return store.classes(label)
    if isinstance(values, TextColumn):
        note = next((note for note in store.manifest.notes if repr(label) in note), f"such as {values[0]!r}")
        raise LabelError(f"{store.path}: column {label!r} is text ({note}); pass class_index=True for class numbers")
    return None
