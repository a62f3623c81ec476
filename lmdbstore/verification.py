"""A whole store checked: every problem found, not only the first."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lmdbstore import codec, layout
from lmdbstore.errors import CorruptStore, DecodeError, ReadError, StoreError
from lmdbstore.store import ImageStore


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What was found.

    Attributes
    ----------
    path : Path
    images, bytes : int
        Images checked and the sum of their sizes in bytes.
    problems : list of str
        Empty when the store is whole.
    seconds : float
    """

    path: Path
    images: int
    bytes: int
    problems: list[str]
    seconds: float


def verify(
    path: str | os.PathLike[str],
    *,
    decode: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check a store: structure, checksums of every column and value, offsets, sizes, ids.

    Parameters
    ----------
    path : path
    decode : bool
        Decode every image as well.
    progress : callable, optional
        Called with (images checked, images in the store).

    Returns
    -------
    VerifyReport
        A damaged store is a result here, not an exception.
    """
    started = time.perf_counter()
    problems: list[str] = []
    images = size = 0
    try:
        with ImageStore(path) as store:
            images, size = len(store), store.manifest.image_bytes
            for problem in _problems(store, decode, progress):
                problems.append(problem)
    except StoreError as error:
        problems.append(str(error))  # the walk of the tree met a damaged page, or the file can't be opened
    return VerifyReport(Path(path), images, size, problems, time.perf_counter() - started)


def _problems(store: ImageStore, decode: bool, progress: Callable[[int, int], None] | None) -> Iterator[str]:
    damaged = list(_damaged_columns(store))
    yield from damaged
    try:
        store.rejects()
    except (StoreError, ValueError, TypeError) as error:
        yield str(error)
    if damaged:  # nothing that they say can be relied on below
        return
    yield from _places(store)
    yield from _tree(store)
    yield from _values(store, decode, progress)


def _damaged_columns(store: ImageStore) -> Iterator[str]:
    for column in store.manifest.columns:
        try:
            data = store.pread(column.offset, column.length)
            store.column(column.name)
        except (StoreError, ReadError) as error:
            yield str(error)
            continue
        if layout.checksum(data) != column.checksum:
            yield f"{store.path}: column {column.name!r} is damaged (its checksum differs)"


def _places(store: ImageStore) -> Iterator[str]:
    """Check the columns against each other and against the manifest."""
    offset, length = store.column("offset"), store.column("length")
    end = offset + length
    size = os.path.getsize(store.path)
    for i in np.flatnonzero((offset < 0) | (length <= 0) | (end > size)).tolist():
        yield f"{store.where(i)}: bytes {offset[i]} to {end[i]} of a file of {size}"
    by_offset = np.argsort(offset, kind="stable")
    for k in np.flatnonzero(offset[by_offset[1:]] < end[by_offset[:-1]]).tolist():
        a, b = int(by_offset[k]), int(by_offset[k + 1])
        yield f"{store.where(b)}: starts at {offset[b]}, before the end of id {store.ids[a]!r} at {end[a]}"
    if length.sum() != store.manifest.image_bytes:
        yield f"{store.path}: the images have {length.sum()} bytes, the manifest says {store.manifest.image_bytes}"
    order = np.arange(len(store)) if store.by_id is None else store.by_id
    if not np.array_equal(np.sort(order), np.arange(len(store))):
        yield f"{store.path}: column {layout.BY_ID!r} isn't a permutation"
        return


def _tree(store: ImageStore) -> Iterator[str]:
    """Check that any LMDB reader finds the same values under the same keys."""
    offset, length = store.column("offset"), store.column("length")
    order = range(len(store)) if store.by_id is None else store.by_id
    count = 0
    for key, extent in store.pages().walk(layout.IMAGES):
        if count < len(store):
            i = int(order[count])
            if key != store.ids.encoded(i):
                yield f"{store.path}: LMDB has key {key!r} where the columns have {store.ids[i]!r}"
                return
            if extent != (offset[i], length[i]):
                found = f"LMDB has {extent.length} bytes at {extent.offset}, the columns {length[i]} at {offset[i]}"
                yield f"{store.where(i)}: {found}"
        count += 1
    if count != len(store):
        yield f"{store.path}: LMDB has {count} images, the manifest says {len(store)}"


def _values(store: ImageStore, decode: bool, progress: Callable[[int, int], None] | None) -> Iterator[str]:
    """Check every value, several at once, in the order of the file."""
    span = 64
    with ThreadPoolExecutor(thread_name_prefix="lmdbstore-verify") as pool:
        starts = range(0, len(store), span)
        tasks = pool.map(lambda at: _check_span(store, at, min(at + span, len(store)), decode), starts)
        for at, problems in zip(starts, tasks, strict=True):
            yield from problems
            if progress:
                progress(min(at + span, len(store)), len(store))


def _check_span(store: ImageStore, start: int, end: int, decode: bool) -> list[str]:
    return [problem for i in range(start, end) for problem in _check_image(store, i, decode)]


def _check_image(store: ImageStore, i: int, decode: bool) -> Iterator[str]:
    try:
        data = store.pread(int(store.column("offset")[i]), int(store.column("length")[i]))
    except (CorruptStore, ReadError) as error:
        yield f"{store.where(i)}: {error}"
        return
    if layout.checksum(data) != store.column("checksum")[i]:
        yield f"{store.where(i)}: the bytes were changed (the checksum differs)"
        return
    if decode:
        try:
            codec.check(data, keep_truncated=bool(store.manifest.options.get("keep_truncated")))
        except DecodeError as error:
            yield f"{store.where(i)}: {error.reason}"
