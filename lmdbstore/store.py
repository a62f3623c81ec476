"""ImageStore: a store's images and columns, read from one map of its file.

The B-tree is consulted once, at open, for the manifest; the manifest says where
the columns lie, and the columns say where each image lies.  From then on a read
is two array look-ups and a slice of the map: no transaction, no reader slot, no
lock, nothing that a fork could break.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lmdbstore import codec, layout, memory, pagecache
from lmdbstore.errors import (
    CorruptStore,
    DecodeError,
    MissingColumn,
    MissingKey,
    NotAStore,
    StoreChanged,
    StoreClosed,
    StoreError,
)
from lmdbstore.layout import Array, Manifest, Reject, TextColumn
from lmdbstore.mapping import near, open_mapped
from lmdbstore.pages import Pages
from lmdbstore.plans import Plan
from lmdbstore.selection import InspectedStore

# Of a tiled image this large, in bytes, only what a crop needs is read: the head, with the index of the tiles, and
# then the tiles, two requests to the disk.  Of a smaller one everything, in one.
_LARGE, _HEAD = 1 << 18, 1 << 14


class ImageStore(InspectedStore):
    """The images of a store, by id or by position.

    Neighbours in position are neighbours on the disk (but for images under 2 KB,
    which LMDB keeps among its keys).

    Parameters
    ----------
    path : str or path-like
        The store, `NAME.lmdb`.
    max_pixels : int
        Images whose header declares more are refused before anything is allocated.

    Raises
    ------
    NotAStore, CorruptStore, FormatVersionError
        The message says what was found instead.

    Notes
    -----
    Threads: safe.  Processes: a forked child goes on reading; a pickled store is
    its path and build id, and opens the file again (StoreChanged if another store
    has taken the name).  The file is never written, no lock file is made, and a
    store that is replaced under its name stays whole for those who have it open.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_pixels: int = codec.MAX_PIXELS) -> None:
        self.path = Path(path).absolute()
        self.max_pixels = max_pixels
        self._fd, self._map = open_mapped(self.path)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._columns: dict[str, Array] = {}
        self._in_memory: bool | None = None
        try:
            self.manifest = self._read_manifest()
        except StoreError as error:
            self.close()
            raise type(error)(f"{self.path}: {error}") from None
        self._table = {column.name: column for column in self.manifest.columns}

    @property
    def build_id(self) -> str:
        """The digest of the store's content: equal stores have equal ids."""
        return self.manifest.build_id

    @property
    def ids(self) -> TextColumn:
        """The ids in the order of the store."""
        return self.column("ids")

    @property
    def by_id(self) -> np.ndarray | None:
        """The permutation that sorts the ids by their bytes; None where they are in that order."""
        return self.column(layout.BY_ID) if layout.BY_ID in self._table else None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that came from the csv, without the id's."""
        return tuple(self.manifest.source["columns"].values())

    def column(self, name: str) -> Any:
        """Return a column, without reading more than it.

        Returns
        -------
        ndarray of shape (len(self),), read-only, over the map; TextColumn for text.

        Raises
        ------
        MissingColumn
            The message lists those that there are.
        """
        if name not in self._columns:
            self._columns[name] = self._load(name)
        return self._columns[name]

    def classes(self, name: str) -> np.ndarray:
        """Return the distinct values of a column, sorted; a value's position is its class number.

        Returns
        -------
        ndarray of shape (classes,), of the column's dtype; of str for text.
        """
        values = self.column(name)
        if isinstance(values, TextColumn):
            return np.array([value.decode() for value in np.unique(values.fixed())], dtype=str)
        return np.unique(values)

    def rejects(self) -> list[Reject]:
        """Return the rows of the csv that aren't in the store, with line, id and reason."""
        data = self._lookup(layout.REJECTS_KEY)
        if layout.checksum(data) != self.manifest.rejects_checksum:
            raise CorruptStore(f"{self.path}: the list of rejected rows is damaged")
        return layout.unpack_rejects(data)

    def index(self, id: str) -> int:
        """Return the position of an id.

        Raises
        ------
        MissingKey
        """
        found = self.ids.find(id.encode(), by=self.by_id)
        if found is None:
            raise MissingKey(f"{self.path}: no image with id {id!r} among {len(self)}")
        return found

    def indices(self, ids: Iterable[str]) -> np.ndarray:
        """Return the positions of many ids, int64, in their order.

        Raises
        ------
        MissingKey
            With the count and the first of those that aren't there.
        """
        wanted = list(ids)
        found = _positions(self.ids, wanted, self.by_id)
        missing = np.flatnonzero(found < 0)
        if len(missing):
            first = ", ".join(repr(wanted[k]) for k in missing[:5])
            raise MissingKey(
                f"{self.path}: {len(missing)} of {len(wanted)} ids aren't in the store: {first}"
                f"{', ...' if len(missing) > 5 else ''}; is the csv of another version, or were rows rejected?"
            )
        return found

    def view(self, i: int) -> memoryview:
        """Return the bytes of image i as a read-only view of the map; it keeps the map alive.

        The extent is read into the page cache first where it isn't there: one request
        to the disk instead of a page fault for every 4 KiB.

        Raises
        ------
        CorruptStore, ReadError
        """
        view, offset = self._extent(i)
        self._make_resident(offset, len(view))
        return view

    def read(self, id: str) -> bytes:
        """Return the file's bytes, as they were ingested."""
        return bytes(self.view(self.index(id)))

    def decode(self, id: str, *, color: codec.Color = "rgb") -> np.ndarray:
        """Return the picture of an id.

        Returns
        -------
        ndarray of shape (H, W, 3), uint8, RGB (or "bgr"), EXIF orientation applied, writable.

        Raises
        ------
        MissingKey, DecodeError
        """
        return self.decode_at(self.index(id), color=color)

    def decode_at(self, i: int, *, color: codec.Color = "rgb", plan: Plan | None = None) -> np.ndarray:
        """Return the picture of image i, as `decode`; or what a plan for its `size_at` takes of it."""
        orientation = int(self.column("orientation")[i])
        options: dict[str, Any] = {"color": color, "orientation": orientation, "max_pixels": self.max_pixels}
        try:
            if plan is None:
                return codec.decode(self._encoded(i), **options)
            width, height = self.size_at(i)
            data, touch = self._planned(i)
            return codec.decode_plan(data, plan, width=width, height=height, touch=touch, **options)
        except DecodeError as error:
            raise error.at(self.where(i)) from None

    def _encoded(self, i: int) -> memoryview | bytes:
        # A mapped page can't be dropped, so of a file that is larger than memory the sampler couldn't choose what
        # stays (docs/decisions.md): such a file is read into a buffer, 13 us for 100 KB.
        if self._in_memory is None:
            self._in_memory = memory.fits(len(self._buffer()), memory.available())
        if self._in_memory:
            return self.view(i)
        return self.pread(int(self.column("offset")[i]), int(self.column("length")[i]))

    def _planned(self, i: int) -> tuple[memoryview | bytes, codec.Touch | None]:
        """Return the bytes of image i for a part of it, and what makes those of the part resident, if they aren't."""
        if int(self.column("length")[i]) < _LARGE or not self.manifest.options.get("tile"):
            return self._encoded(i), None
        view, offset = self._extent(i)
        self._make_resident(offset, _HEAD)
        return view, lambda start, stop: self._make_resident(offset + start, stop - start)

    def size_at(self, i: int) -> tuple[int, int]:
        """Return width and height of image i in pixels, EXIF orientation applied."""
        width, height = int(self.column("width")[i]), int(self.column("height")[i])
        return (height, width) if self.column("orientation")[i] > 4 else (width, height)

    def pages(self) -> Pages:
        """Return the LMDB pages of the file, for a look behind the columns."""
        return Pages(memoryview(self._buffer()))

    def pread(self, offset: int, length: int) -> bytes:
        """Read bytes of the file by a system call: a bad sector is an OSError here, on the map a SIGBUS.

        Raises
        ------
        ReadError
        """
        buffer = self._buffer()
        if not hasattr(os, "pread"):  # Windows
            return bytes(buffer[offset : offset + length])
        pieces = []
        while length > 0:
            try:
                piece = os.pread(self._fd, min(length, 1 << 24), offset)
            except OSError as error:
                raise pagecache.read_error(self.path, offset, error) from error
            if not piece:
                raise CorruptStore(f"{self.path}: the file ends at byte {offset}, {length} bytes too early")
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return b"".join(pieces)

    def where(self, i: int) -> str:
        """Return store and id of image i, as messages name it."""
        return f"{self.path}: id {self.ids[i]!r}"

    def info(self) -> dict[str, Any]:
        """Return what there is to say about the store as a whole, ready for JSON."""
        manifest = self.manifest
        formats = np.bincount(self.column("format"), minlength=len(layout.FORMATS))
        return {
            "path": str(self.path),
            "images": len(self),
            "bytes": manifest.image_bytes,
            "file_bytes": os.fstat(self._fd).st_size,
            "columns": {name: self._table[name].type for name in self.columns},
            "formats": {name: int(count) for name, count in zip(layout.FORMATS, formats, strict=False) if count},
            "rejected": manifest.rejected,
            "order": manifest.options["order"],
            "options": manifest.options,
            "csv": manifest.source["csv"],
            "format_version": manifest.format_version,
            "build_id": manifest.build_id,
            "created": manifest.created,
            "writer": manifest.writer,
            "notes": list(manifest.notes),
        }

    def close(self) -> None:
        """Close the file; views and columns that were handed out stay valid."""
        self._close()
        self._map = None
        self._columns = {}

    def __len__(self) -> int:
        return self.manifest.images

    def __contains__(self, id: object) -> bool:
        try:
            return isinstance(id, str) and self.index(id) >= 0
        except MissingKey:
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __enter__(self) -> ImageStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        size, columns = self.manifest.image_bytes / 1e6, ", ".join(self.columns)
        return f"<ImageStore {self.path.name}: {len(self):,} images, {size:,.1f} MB, columns {columns}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.path), self.build_id, self.max_pixels)

    def _buffer(self) -> mmap.mmap:
        if self._map is None:
            raise StoreClosed(f"{self.path}: the store was closed")
        return self._map

    def _extent(self, i: int) -> tuple[memoryview, int]:
        """Return the bytes of image i, wherever they are now, and their offset in the file."""
        offset, length = int(self.column("offset")[i]), int(self.column("length")[i])
        buffer = self._buffer()
        if offset < 0 or length < 0 or offset + length > len(buffer):
            raise CorruptStore(f"{self.where(i)}: bytes {offset} to {offset + length} of a file of {len(buffer)}")
        return memoryview(buffer)[offset : offset + length], offset

    def _make_resident(self, offset: int, length: int) -> None:
        try:
            pagecache.make_resident(self._fd, offset, length)
        except OSError as error:
            raise pagecache.read_error(self.path, offset, error) from error

    def _lookup(self, key: bytes) -> bytes:
        buffer = memoryview(self._buffer())
        found = Pages(buffer).find(layout.MANIFEST, key)
        if found is None:
            databases = Pages(buffer).databases()
            raise NotAStore(f"an LMDB file without a manifest (named databases: {', '.join(databases) or 'none'})")
        return bytes(buffer[found.offset : found.offset + found.length])

    def _read_manifest(self) -> Manifest:
        data = self._lookup(layout.MANIFEST_KEY)
        if self._lookup(layout.MANIFEST_CHECKSUM_KEY) != layout.checksum(data).to_bytes(8, "little"):
            raise CorruptStore("the manifest is damaged (its checksum differs)")
        manifest = layout.unpack_manifest(data)
        missing = [name for name in layout.BUILT_IN if name not in {column.name for column in manifest.columns}]
        if missing:
            raise CorruptStore(f"the manifest has no column {', '.join(missing)}")
        return manifest

    def _load(self, name: str) -> Array:
        buffer = self._buffer()
        if name == self.manifest.source["id_column"] and name not in self._table:
            return self.ids
        if name not in self._table:
            found = f"no column {name!r}{near(name, self._table)}; there are {', '.join(self._table)}"
            raise MissingColumn(f"{self.path}: {found}")
        column = self._table[name]
        if not 0 <= column.offset <= column.offset + column.length <= len(buffer):
            raise CorruptStore(f"{self.path}: column {name!r} lies beyond the end of the file")
        self._make_resident(column.offset, column.length)
        data = memoryview(buffer)[column.offset : column.offset + column.length]
        try:
            return layout.unpack_column(data, type=column.type, count=len(self))
        except (CorruptStore, TypeError, ValueError) as error:
            raise CorruptStore(f"{self.path}: column {name!r}: {error}") from None


def _positions(ids: TextColumn, wanted: list[str], by: np.ndarray | None) -> np.ndarray:
    """Return the position of each wanted id, -1 where it isn't there."""
    result = np.full(len(wanted), -1, np.int64)
    if not len(ids) or not wanted:
        return result
    known = ids.fixed()
    encoded = np.array([id.encode() for id in wanted])
    at = np.minimum(np.searchsorted(known, encoded, sorter=by), len(ids) - 1)
    at = at if by is None else by[at]
    # numpy's S dtype drops trailing NULs; no stored id has any, so one that is asked for isn't there
    same = (known[at] == encoded) & np.array(["\0" not in id for id in wanted])
    result[same] = at[same]
    return result


def _reopen(path: str, build_id: str, max_pixels: int) -> ImageStore:
    store = ImageStore(path, max_pixels=max_pixels)
    if store.build_id != build_id:
        found = store.build_id
        store.close()
        raise StoreChanged(f"{path}: build {found} stands here now, {build_id} was opened first; open the store again")
    return store
