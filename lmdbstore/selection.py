"""A part of a store, and what a notebook's cell can ask of a store or a part of it.

The methods here are the short names; the work is done by modules that load matplotlib or
pandas, and those are loaded by the first call that needs them.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lmdbstore.errors import LabelError, OptionError
from lmdbstore.layout import FORMATS

if TYPE_CHECKING:
    from lmdbstore.duplicates import Duplicates
    from lmdbstore.pictures import Picture
    from lmdbstore.store import ImageStore

Ids = str | Iterable[str]


def lazily(module: str) -> Any:
    """Load one of the package's modules that stand below this one and bring matplotlib or pandas."""
    return importlib.import_module(f"lmdbstore.{module}")


class Inspected:
    """What both a store and a selection can show.  Only images that are drawn are read."""

    def _selection(self) -> Selection:
        raise NotImplementedError

    def select(self, **values: Any) -> Selection:
        """Return the images whose columns have these values, in file order: ``store.select(landmark_id=27)``.

        Parameters
        ----------
        **values
            Column name and a value, or a list of values.

        Raises
        ------
        MissingColumn
        """
        selection = self._selection()
        kept = np.ones(len(selection), bool)
        for name, wanted in values.items():
            kept &= _is_one_of(selection.column(name), wanted if isinstance(wanted, list | np.ndarray) else [wanted])
        return selection[kept]

    def show(
        self,
        ids: Ids | None = None,
        *,
        n: int = 16,
        label: str | None = None,
        transform: Callable[..., Any] | None = None,
        seed: int = 0,
    ) -> Picture:
        """Draw a grid of images with id, label and size (EXIF orientation applied).

        Parameters
        ----------
        ids : str or iterable of str, optional
            These images, in this order.  Default: a random `n`, the same ones for the same seed.
        label : str, optional
            The column to write under each image.  Default: the first column of integers, else the first one.
        transform : callable, optional
            Draw what it makes of each image, as `ImageDataset` would hand it out.

        Raises
        ------
        MissingKey, MissingColumn, MissingDependency
        OptionError
            More images than a sheet holds.
        """
        selection = self._selection()
        chosen = selection.sample(n, seed=seed) if ids is None else selection.store[ids]
        picture: Picture = lazily("sheets").contact_sheet(chosen, of=selection, label=label, transform=transform)
        return picture

    def table(self) -> Any:
        """Return the columns as a pandas DataFrame, a row an image; its index is the position in the store.

        ``store[table.query("width < 300").index].show()`` draws what the table found.  Sizes are those of the
        file, before the EXIF orientation, as `ImageStore.column` gives them.
        """
        return lazily("tables").table(self._selection())

    def summary(self, *, label: str | None = None) -> Picture:
        """Draw images per class, width by height, bytes, and formats; from the columns alone."""
        picture: Picture = lazily("plots").plot_summary(self._selection(), label=label)
        return picture

    def duplicates(self, *, label: str | None = None) -> Duplicates:
        """Return the groups of images that are the same file, by checksum and length.

        ``.conflicts`` are the groups with more than one label.  No image is read.
        """
        found: Duplicates = lazily("duplicates").exact(self._selection(), label=label)
        return found

    def near_duplicates(
        self,
        *,
        distance: int = 4,
        label: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Duplicates:
        """Return the groups of images that look the same; decodes every image once, small.

        Parameters
        ----------
        distance : int
            Bits, of 64, in which two hashes may differ, 0 to 6 (see `duplicates.hashes`).
        progress : callable, optional
            Called with (images done, images).
        """
        found: Duplicates = lazily("duplicates").near(
            self._selection(), distance=distance, label=label, progress=progress
        )
        return found

    def _repr_html_(self) -> str | None:
        html: str | None = lazily("notebook").cell(self._selection())
        return html


class InspectedStore(Inspected):
    """What only a whole store has: selections, and the rows that were rejected."""

    def __getitem__(self, wanted: Any) -> Selection:
        """Return a selection: an id, ids, a slice, positions, or a mask over all images.

        ``store[["b1", "a7"]]``, ``store[:100]``, ``store[store.column("width") < 300]``; the order is kept.

        Raises
        ------
        MissingKey
        IndexError
            A position outside of the store, or a mask of another length.
        """
        store = cast("ImageStore", self)
        return Selection(store, _positions(store, wanted))

    def show_rejects(self, images: str | os.PathLike[str] | None = None, *, n: int = 16) -> Picture:
        """Draw the first `n` rejected rows with their reasons.

        Parameters
        ----------
        images : path, optional
            The folder of the ingest: what still decodes of the files is drawn, too.
        """
        picture: Picture = lazily("sheets").reject_sheet(self, images=images, n=n)
        return picture

    def rejects_table(self) -> Any:
        """Return the rejected rows as a pandas DataFrame: line, id, reason."""
        return lazily("tables").rejects_table(self)

    def _selection(self) -> Selection:
        store = cast("ImageStore", self)
        return Selection(store, np.arange(len(store)))


class Selection(Inspected):
    """Some images of a store, in an order of their own.

    Parameters
    ----------
    store : ImageStore
    indices : ndarray of int64
        Positions in the store.

    Notes
    -----
    Threads: safe, it never changes.  Processes: pickles as the store does.  Memory: 8 bytes an image.
    """

    def __init__(self, store: ImageStore, indices: np.ndarray) -> None:
        self.store, self.indices = store, indices

    @property
    def ids(self) -> list[str]:
        """The ids: what `ImageDataset` takes as a split."""
        found: list[str] = self.store.ids[self.indices]
        return found

    @property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Width and height in pixels, int32, EXIF orientation applied."""
        width, height = self.column("width"), self.column("height")
        turned = self.column("orientation") >= 5
        return np.where(turned, height, width), np.where(turned, width, height)

    @property
    def formats(self) -> dict[str, int]:
        """How many images there are of each format."""
        counts = np.bincount(self.column("format"), minlength=len(FORMATS))
        return {name: int(count) for name, count in zip(FORMATS, counts) if count}

    def column(self, name: str) -> Any:
        """Return a column's values of these images: an array, or a list of str.

        Raises
        ------
        MissingColumn
        """
        return self.store.column(name)[self.indices]

    def sample(self, n: int, *, seed: int = 0) -> Selection:
        """Return `n` of these images, or all if there are fewer, at random, in the order they have here."""
        if n < 0:
            raise OptionError(f"n={n!r} images; 0 or more expected")
        if n >= len(self):
            return self
        chosen = np.random.default_rng((seed, len(self))).choice(len(self), size=n, replace=False, shuffle=False)
        return self[np.sort(chosen)]

    def __getitem__(self, at: Any) -> Selection:
        """Return a part of this selection by slice, mask or positions within it."""
        return Selection(self.store, np.atleast_1d(self.indices[at]))

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[str]:
        return (self.store.ids[i] for i in self.indices)

    def __repr__(self) -> str:
        return f"<Selection of {len(self):,} of {self.store!r}>"

    def _selection(self) -> Selection:
        return self


def default_label(store: ImageStore) -> str | None:
    """Return the column to take as label when nobody names one: the first of integers, else the first."""
    integers = [name for name in store.columns if getattr(store.column(name), "dtype", np.dtype("V")).kind in "iu"]
    return next(iter([*integers, *store.columns]), None)


def labelled(store: ImageStore, text: str, *, column: str | None = None) -> Selection:
    """Return the images whose label is written like this, in file order.

    Parameters
    ----------
    text : str
        A number if the column is one of numbers.
    column : str, optional
        Default: `default_label`.

    Raises
    ------
    LabelError
        No such column, or no image has this label.
    """
    name = column or default_label(store)
    if name is None:
        raise LabelError(f"{store.path}: the store has no column but the id, so no labels")
    values = store.column(name)
    value: Any = text
    if isinstance(values, np.ndarray):
        try:
            value = int(text) if values.dtype.kind in "iu" else float(text)
        except ValueError:
            raise LabelError(f"{store.path}: column {name!r} is of numbers, {text!r} isn't one") from None
    found = store.select(**{name: value})
    if not len(found):
        raise LabelError(f"{store.path}: no image has {text!r} in column {name!r}")
    return found


def count_values(values: Any) -> tuple[list[Any], np.ndarray]:
    """Return the distinct values of a column and how often each occurs (int64), the most frequent first."""
    if isinstance(values, np.ndarray):
        distinct, counts = np.unique(values, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return distinct[order].tolist(), counts[order]
    common = Counter(values).most_common()
    return [value for value, _ in common], np.array([count for _, count in common], np.int64)


def _is_one_of(values: Any, wanted: Any) -> np.ndarray:
    if isinstance(values, np.ndarray):
        return np.isin(values, wanted)
    among = {str(value) for value in wanted}
    return np.fromiter((value in among for value in values), bool, len(values))


def _positions(store: ImageStore, wanted: Any) -> np.ndarray:
    """Return the positions, int64, that a key of `store[...]` stands for."""
    if isinstance(wanted, slice):
        return np.arange(len(store))[wanted]
    if isinstance(wanted, str):
        return np.array([store.index(wanted)])
    wanted = wanted if hasattr(wanted, "dtype") or isinstance(wanted, int) else list(wanted)
    values = np.atleast_1d(np.asarray(wanted))
    if len(values) == 0 and values.dtype != bool:
        return np.empty(0, np.int64)
    if values.dtype != bool and values.dtype.kind not in "iu":
        # not from `values`: an array of str drops trailing NULs, so that an id that isn't there could be found
        return store.indices(wanted)
    if values.dtype == bool and len(values) != len(store):
        raise IndexError(f"a mask of {len(values):,} for a store of {len(store):,} images")
    return np.arange(len(store))[values]
