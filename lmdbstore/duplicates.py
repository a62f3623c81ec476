"""Images that are the same file, and images that look the same.

Exact duplicates come from the columns `checksum` and `length`, at once.  Near duplicates come from a perceptual hash
of 64 bits (dHash), for which every image is decoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from lmdbstore import codec, machine
from lmdbstore.errors import DecodeError, OptionError
from lmdbstore.plans import Window
from lmdbstore.selection import Selection, default_label, lazily

if TYPE_CHECKING:
    from lmdbstore.pictures import Picture

LARGEST_DISTANCE = 6  # bits of 64: of 719,400 pairs of different photographs, 3 differ in 8; and 8 take long to find
CHUNK = 64  # images that a thread hashes before it reports
SMALLEST = 36  # pixels of the shorter side that the hash is taken from; four for each field
GRID = (8, 9)  # rows and columns of brightness; each row's 8 differences are 8 bits
_BITS = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)

Progress = Callable[[int, int], None]


class Duplicates(Sequence[Selection]):
    """Groups of images that belong together, in the order of their first members; each is a `Selection`.

    Parameters
    ----------
    store : ImageStore
    members : ndarray of int64
        Positions in the store, group after group.
    starts : ndarray of int64
        Group g is ``members[starts[g]:starts[g + 1]]``; one more than there are groups.
    label : str, optional
        The column that decides what a conflict is.
    failed : ndarray of int64, optional
        Positions of images that couldn't be compared, because they don't decode.

    Notes
    -----
    Threads: safe, it never changes.  Processes: pickles as the store does.
    """

    def __init__(
        self, store: Any, members: np.ndarray, starts: np.ndarray, label: str | None, failed: np.ndarray | None = None
    ) -> None:
        self.store, self.members, self.starts, self.label = store, members, starts, label
        self.failed = Selection(store, np.empty(0, np.int64) if failed is None else failed)

    @property
    def in_conflict(self) -> np.ndarray:
        """For each group, whether its images have more than one label."""
        if self.label is None or not len(self):
            return np.zeros(len(self), bool)
        _, codes = np.unique(np.asarray(Selection(self.store, self.members).column(self.label)), return_inverse=True)
        first = np.repeat(codes[self.starts[:-1]], np.diff(self.starts))
        return np.logical_or.reduceat(codes != first, self.starts[:-1])

    @property
    def conflicts(self) -> Duplicates:
        """The groups whose images have more than one label."""
        return self._only(np.flatnonzero(self.in_conflict))

    @property
    def surplus(self) -> int:
        """How many images would go if one of each group stayed."""
        return len(self.members) - len(self)

    def table(self) -> Any:
        """Return a pandas DataFrame, a row an image: group, id, label, conflict."""
        return lazily("tables").duplicates_table(self)

    def show(self, *, n: int = 16) -> Picture:
        """Draw the first groups, group after group, `n` images at most (or the whole first group)."""
        groups = max(1, int(np.searchsorted(self.starts, n, "right")) - 1) if len(self) else 0
        shown = Selection(self.store, self.members[: self.starts[groups]])
        of = Selection(self.store, self.members)
        picture: Picture = lazily("sheets").contact_sheet(shown, of=of, label=self.label)
        return picture

    def __getitem__(self, g: Any) -> Any:
        """Return group g as a selection; of a slice, these groups."""
        if isinstance(g, slice):
            return self._only(np.arange(len(self))[g])
        if not -len(self) <= g < len(self):
            raise IndexError(f"group {g} of {len(self)}")
        g %= len(self)
        return Selection(self.store, self.members[self.starts[g] : self.starts[g + 1]])

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __repr__(self) -> str:
        failed = f", {len(self.failed):,} images couldn't be compared" if len(self.failed) else ""
        conflicts = "" if self.label is None else f", {int(self.in_conflict.sum()):,} with conflicting {self.label}"
        return f"<Duplicates: {len(self):,} groups, {len(self.members):,} images{conflicts}{failed}>"

    def _repr_html_(self) -> str:
        html: str = lazily("notebook").duplicates_cell(self)
        return html

    def _only(self, groups: np.ndarray) -> Duplicates:
        parts = [self.members[self.starts[g] : self.starts[g + 1]] for g in groups]
        starts = np.cumsum([0, *map(len, parts)])
        members = np.concatenate([np.empty(0, np.int64), *parts])
        return Duplicates(self.store, members, starts, self.label, self.failed.indices)


def exact(selection: Selection, *, label: str | None = None) -> Duplicates:
    """Group the images that are the same file: equal XXH3-64 checksum, equal length (see `Inspected.duplicates`).

    Notes
    -----
    The bytes aren't compared.  That two different files of 1.58 million agree by chance has a probability of 7e-8.
    """
    checksum, length = selection.column("checksum"), selection.column("length")
    order = np.lexsort((length, checksum))
    same = (checksum[order][1:] == checksum[order][:-1]) & (length[order][1:] == length[order][:-1])
    return _groups(selection, order, same, label)


def near(
    selection: Selection, *, distance: int, label: str | None = None, progress: Progress | None = None
) -> Duplicates:
    """Group the images whose hashes differ in at most `distance` bits, directly or through others of the group.

    Raises
    ------
    OptionError
        A distance that isn't within 0..6.
    """
    if not 0 <= distance <= LARGEST_DISTANCE:
        raise OptionError(f"distance={distance!r}; 0 to {LARGEST_DISTANCE} bits expected")
    found, known = hashes(selection, progress=progress)
    compared = selection[known]
    distinct, which = np.unique(found[known], return_inverse=True)
    component = components(len(distinct), *near_pairs(distinct, distance))[which]
    order = np.argsort(component, kind="stable")
    same = component[order][1:] == component[order][:-1]
    return _groups(compared, order, same, label, failed=selection[~known].indices)


def hashes(selection: Selection, *, progress: Progress | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the difference hash of every image, and whether it has one: what doesn't decode hasn't.

    Returns
    -------
    hashes : ndarray of uint64
    known : ndarray of bool

    Notes
    -----
    dHash: the picture, upright and grey, averaged to 9 x 8 fields; bit 8 r + c says whether field (r, c) is darker than
    its right neighbour.  It survives other sizes, qualities and slight changes of colour; not crops, rotations and
    mirroring.  Pictures without any structure have arbitrary hashes.  Of 1,200 photographs of different things no two
    are within 7 bits.  Within 4 bits of their original are 99 % of copies at half the size or JPEG quality 30, 96 % of
    those made brighter by 15 %, 87 % of those cut by 1 % at each edge, 34 % of those cut by 2.5 %.
    Source: N. Krawetz, "Kind of Like That", hackerfactor.com, 2013.
    """
    found, known = np.zeros(len(selection), np.uint64), np.zeros(len(selection), bool)
    chunks = [slice(start, start + CHUNK) for start in range(0, len(selection), CHUNK)]
    pool = ThreadPoolExecutor(machine.cores(), thread_name_prefix="lmdbstore-hash")
    try:
        results = pool.map(lambda chunk: list(_hashes_of(selection, chunk)), chunks)
        for chunk, values in zip(chunks, results):
            known[chunk] = [value is not None for value in values]
            found[chunk] = [value or 0 for value in values]
            if progress is not None:
                progress(min(chunk.stop, len(selection)), len(selection))
    finally:
        pool.shutdown(cancel_futures=True)
    return found, known


def difference_hash(pixels: np.ndarray, size: tuple[float, float] | None = None) -> int:
    """Return the dHash of a picture, (H, W, 3) uint8 RGB of any size (see `hashes`).

    Parameters
    ----------
    pixels : ndarray
    size : (float, float), optional
        Height and width of the picture within the array, whose last row and column may be partly padding.
    """
    grey = pixels @ np.array([0.299, 0.587, 0.114], np.float32)
    height, width = size or grey.shape
    fields = _averaged(_averaged(grey, GRID[0], height).T, GRID[1], width).T
    return int.from_bytes(np.packbits(fields[:, :-1] < fields[:, 1:]).tobytes(), "big")


def _averaged(lines: np.ndarray, count: int, length: float) -> np.ndarray:
    """Average the first `length` lines, fractions of a line included, over `count` equal parts: (count, ...)."""
    sums = np.zeros((len(lines) + 1, *lines.shape[1:]))
    np.cumsum(lines, axis=0, out=sums[1:])
    edges = np.minimum(np.linspace(0, length, count + 1), len(lines))
    whole = np.minimum(edges.astype(int), len(lines) - 1)
    return np.diff(sums[whole] + (edges - whole)[:, None] * lines[whole], axis=0)


def near_pairs(distinct: np.ndarray, distance: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs (positions i, j) of distinct hashes that differ in at most `distance` bits.

    Of `distance` + 2 bands of bits, two such hashes agree in two or more: for each two bands, only hashes that agree
    there are compared.  A million hashes take seconds.
    """
    edges = np.linspace(0, 64, distance + 3).astype(int).tolist()
    bands = [((1 << high) - 1) ^ ((1 << low) - 1) for low, high in zip(edges[:-1], edges[1:])]
    pairs = [np.empty((2, 0), np.int64)]
    for one, other in combinations(bands, 2):
        pairs += _pairs_within(distinct, np.uint64(one | other), distance)
    first, second = np.unique(np.sort(np.concatenate(pairs, axis=1), axis=0), axis=1)
    return first, second


def components(count: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return for each of `count` nodes the smallest node that it is connected to by the edges (first, second)."""
    root = np.arange(count)
    while len(first):
        lowest = np.minimum(root[first], root[second])
        before = root.copy()
        np.minimum.at(root, first, lowest)
        np.minimum.at(root, second, lowest)
        root = root[root]
        if np.array_equal(root, before):
            break
    return root


def _pairs_within(distinct: np.ndarray, mask: np.uint64, distance: int) -> Iterator[np.ndarray]:
    """Yield the near pairs, (2, n) int64, among hashes that agree in the bits of a mask."""
    keys = distinct & mask
    order = np.argsort(keys, kind="stable")
    keys, step = keys[order], 1
    alive = np.flatnonzero(keys[1:] == keys[:-1])
    while len(alive):
        difference = distinct[order[alive]] ^ distinct[order[alive + step]]
        close = alive[_BITS[difference.view(np.uint8).reshape(-1, 8)].sum(1) <= distance]
        yield np.stack((order[close], order[close + step]))
        step += 1
        alive = alive[alive + step < len(keys)]
        alive = alive[keys[alive] == keys[alive + step]]


def _hashes_of(selection: Selection, chunk: slice) -> Iterator[int | None]:
    for at in selection.indices[chunk].tolist():
        try:
            yield difference_hash(*_small(selection.store, at))
        except DecodeError:
            yield None


def _small(store: Any, at: int) -> tuple[np.ndarray, tuple[float, float] | None]:
    """Decode an image as small as the hash can use it (at 1/8 in a third of the time), and say how large it is then."""
    width, height = int(store.column("width")[at]), int(store.column("height")[at])
    scale = next((scale for scale in (8, 4, 2) if min(width, height) // scale >= SMALLEST), 1)
    if scale == 1 or store.column("orientation")[at] != 1:  # turned, the padding would be at other edges
        return store.decode_at(at), None
    whole = Window(0, 0, width, height)
    pixels = codec.decode_window(store.view(at), whole, scale=scale, max_pixels=store.max_pixels)
    return pixels, (height / scale, width / scale)


def _groups(
    selection: Selection, order: np.ndarray, same: np.ndarray, label: str | None, failed: np.ndarray | None = None
) -> Duplicates:
    """Return the groups of two or more among images in an `order` that tells of each whether the next is the `same`."""
    if label is None:
        label = default_label(selection.store)
    elif len(selection):
        selection.store.column(label)
    edges = np.flatnonzero(~np.concatenate(([False], same, [False])))
    large = np.flatnonzero(np.diff(edges) > 1)
    large = large[np.argsort(order[edges[large]])]
    parts = [order[low:high] for low, high in zip(edges[large], edges[large + 1])]
    members = selection.indices[np.concatenate([np.empty(0, np.int64), *parts])]
    return Duplicates(selection.store, members, np.cumsum([0, *map(len, parts)]), label, failed)
