"""ImageDataset: a store, or a split of it, as a map-style PyTorch dataset."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch.utils.data

from lmdbstore.codec import Color
from lmdbstore.errors import LabelError
from lmdbstore.layout import TextColumn
from lmdbstore.selection import lazily
from lmdbstore.store import ImageStore


class ImageDataset(torch.utils.data.Dataset[Any]):
    """Images of a store, decoded and transformed, with their labels.

    Parameters
    ----------
    store : str, path-like or ImageStore
    transform : callable, optional
        An albumentations transform, or any callable that takes the array
        (H, W, 3), uint8, RGB.  What it returns is the item, unchanged.
    label : str, optional
        A column.  With it an item is ``(image, label)``, without it the image alone.
    ids : iterable of str, optional
        A split: these images, in this order.  Default: all, in the order of the file.
    class_index : bool
        The label is the class number, ``0 <= label < len(dataset.classes)``, instead of
        the column's value.  The numbers are the store's, the same for every split.
    color : {"rgb", "bgr"}

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
    Threads: items may be read from several at once if the transform allows it.
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
    ) -> None:
        self.store = store if isinstance(store, ImageStore) else ImageStore(store)
        self.transform, self.label, self.class_index, self.color = transform, label, class_index, color
        self.indices = np.arange(len(self.store)) if ids is None else self.store.indices(ids)
        self.classes = _classes(self.store, label, class_index)

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
        """Draw item i as it is stored, then `times` times as the transform makes it; returns a `Picture`.

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
        if not -len(self) <= i < len(self):
            raise IndexError(f"item {i} of a dataset of {len(self)}")
        at = int(self.indices[i])
        image = self._transformed(self.store.decode_at(at, color=self.color))
        return image if self.label is None else (image, self._label(at))

    def __getitems__(self, positions: list[int]) -> list[Any]:
        """Return the items of a batch, in their order."""
        return [self[i] for i in positions]

    def __repr__(self) -> str:
        split = "" if len(self) == len(self.store) else f"{len(self):,} of "
        return f"<ImageDataset {split}{self.store!r}, label={self.label!r}>"

    def __getstate__(self) -> dict[str, Any]:
        # a full set is told by its absence: nothing of the store's size travels
        full = len(self) == len(self.store) and bool((np.diff(self.indices) == 1).all())
        return {**self.__dict__, "indices": None if full else self.indices, "classes": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.indices is None:
            self.indices = np.arange(len(self.store))
        self.classes = _classes(self.store, self.label, self.class_index)

    def _transformed(self, image: np.ndarray) -> Any:
        if self.transform is None:
            return image
        return self.transform(image=image)["image"] if _is_albumentations(self.transform) else self.transform(image)

    def _label(self, at: int) -> int | float:
        value = self.store.column(self.label)[at]  # type: ignore[arg-type]
        return int(np.searchsorted(self.classes, value)) if self.class_index else value.item()


def _is_albumentations(transform: object) -> bool:
    # whoever hands us one has imported it; we needn't
    library = sys.modules.get("albumentations")
    return library is not None and isinstance(transform, (library.BasicTransform, library.BaseCompose))


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
