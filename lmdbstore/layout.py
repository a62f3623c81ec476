"""The file format: names, columns, manifest; pack and unpack, no I/O.

`docs/format.md` is the specification for everybody else; this module is the
same thing for the code, and the only place that knows the names.
"""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np
import xxhash

from lmdbstore.errors import CorruptStore, FormatVersionError

FORMAT = "lmdbstore"
FORMAT_VERSION = 1

#: The named databases of the LMDB file.
IMAGES, COLUMNS, MANIFEST = b"images", b"columns", b"manifest"
#: The keys of the manifest database.
MANIFEST_KEY, MANIFEST_CHECKSUM_KEY, REJECTS_KEY = b"manifest", b"manifest.checksum", b"rejects"

#: Image formats; the code in column "format" is the position in this tuple.
FORMATS = ("unknown", "jpeg", "png", "webp", "ppm")

TEXT = "text"
#: Columns that every store has, with their types. "text" is described at `TextColumn`.
BUILT_IN = {
    "ids": TEXT,
    "offset": "<i8",  # bytes from the start of the file
    "length": "<i8",  # bytes
    "checksum": "<u8",  # XXH3-64 of the value
    "width": "<i4",  # pixels, before the EXIF orientation
    "height": "<i4",
    "orientation": "|u1",  # EXIF 1..8
    "format": "|u1",  # position in FORMATS
    "line": "<i8",  # line of the csv where the row starts, 1-based
    "record": TEXT,  # the row as it stands in the csv, line ending included
}
#: The permutation that sorts the ids by their bytes; only where that isn't their order already.
BY_ID = "by_id"
RESERVED = frozenset(BUILT_IN) | {BY_ID}

MAX_KEY_BYTES = 511  # LMDB's compile-time default, the same everywhere


def checksum(data: bytes | memoryview) -> int:
    """Return XXH3-64 of the bytes, an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(data)


class TextColumn(Sequence[str]):
    """Strings in two flat arrays: n + 1 starts (int64), then the UTF-8 bytes.

    Reads like a list of str; nothing is decoded before it is asked for.

    Parameters
    ----------
    starts : ndarray, shape (n + 1,), int64
        String i is ``text[starts[i]:starts[i + 1]]``.
    text : ndarray, shape (m,), uint8

    Notes
    -----
    Threads: safe.  Processes: arrays over a shared read-only map.
    """

    def __init__(self, starts: np.ndarray, text: np.ndarray) -> None:
        self.starts, self.text = starts, text

    @classmethod
    def of(cls, strings: Iterable[str]) -> TextColumn:
        """Build a column from strings."""
        encoded = [s.encode() for s in strings]
        starts = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(s) for s in encoded], out=starts[1:])
        return cls(starts, np.frombuffer(b"".join(encoded), np.uint8))

    def __len__(self) -> int:
        return len(self.starts) - 1

    def encoded(self, i: int | np.integer[Any]) -> bytes:
        """Return string i as UTF-8 bytes."""
        return self.text[self.starts[i] : self.starts[i + 1]].tobytes()

    def __getitem__(self, i: Any) -> Any:
        """Return string i, or a list of strings for a slice or an array of positions."""
        if isinstance(i, slice):
            i = np.arange(len(self))[i]
        if isinstance(i, np.ndarray):
            return [self.encoded(k).decode() for k in (np.flatnonzero(i) if i.dtype == bool else i)]
        if not -len(self) <= i < len(self):
            raise IndexError(f"position {i} of a column of {len(self)}")
        return self.encoded(i % len(self)).decode()

    def __iter__(self) -> Iterator[str]:
        for i in range(len(self)):
            yield self.encoded(i).decode()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[:], dtype=dtype)

    def __repr__(self) -> str:
        head = ", ".join(map(repr, self[:3]))
        return f"<TextColumn of {len(self)}: {head}{', ...' if len(self) > 3 else ''}>"

    def take(self, order: np.ndarray) -> TextColumn:
        """Return the strings at these positions as a new column."""
        starts = np.zeros(len(order) + 1, np.int64)
        np.cumsum(np.diff(self.starts)[order], out=starts[1:])
        # each byte's source: where its string starts in the old text, plus how far it is into the string
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
        return TextColumn(starts, self.text[np.repeat(self.starts[:-1][order], np.diff(starts)) + within])

    def fixed(self) -> np.ndarray:
        """Return the strings as one array of dtype S<longest>, without a copy when all are as long."""
        lengths = np.diff(self.starts)
        width = max(1, int(lengths.max(initial=0)))
        if len(self) and (lengths == width).all():
            return self.text[self.starts[0] : self.starts[-1]].view(f"S{width}")
        padded = np.zeros((len(self), width), np.uint8)
        padded[np.arange(width) < lengths[:, None]] = self.text[self.starts[0] : self.starts[-1]]
        return padded.view(f"S{width}")[:, 0]

    def argsort(self) -> np.ndarray:
        """Return the stable permutation, int64, that sorts the strings by their UTF-8 bytes."""
        widest = int(np.diff(self.starts).max(initial=0))
        if len(self) * widest > 1 << 28:  # 256 MiB: a few long strings among many short ones
            return np.array(sorted(range(len(self)), key=self.encoded), np.int64)
        return np.argsort(self.fixed(), kind="stable")

    def find(self, wanted: bytes, *, by: np.ndarray | None = None) -> int | None:
        """Return the position of a string, given the permutation that sorts the column (None: sorted)."""
        order: Sequence[int] | np.ndarray = range(len(self)) if by is None else by
        at = bisect_left(order, wanted, key=lambda i: self.encoded(i))
        if at < len(self) and self.encoded(order[at]) == wanted:
            return int(order[at])
        return None

    def pack(self) -> bytes:
        """Return the column as it lies in the file."""
        return (self.starts - self.starts[0]).astype("<i8").tobytes() + self.text.tobytes()


class Column(NamedTuple):
    """Where a column lies in the file, and what it is."""

    name: str
    type: str  # numpy dtype string, or "text"
    offset: int  # bytes from the start of the file
    length: int  # bytes
    checksum: int  # XXH3-64 of its bytes


Array = np.ndarray | TextColumn


def column_type(values: Array) -> str:
    """Return the type string of a column's values."""
    return TEXT if isinstance(values, TextColumn) else values.dtype.newbyteorder("<").str


def pack_column(values: Array) -> bytes:
    """Return the bytes of a column as they lie in the file."""
    if isinstance(values, TextColumn):
        return values.pack()
    return values.astype(values.dtype.newbyteorder("<")).tobytes()


def unpack_column(data: memoryview, *, type: str, count: int) -> Array:
    """Return a column's values over its bytes, without copying.

    Raises
    ------
    CorruptStore
        The bytes can't be a column of this type and count.
    """
    if type != TEXT:
        dtype = np.dtype(type)
        if len(data) != count * dtype.itemsize:
            raise CorruptStore(f"{len(data)} bytes where {count} values of {type} need {count * dtype.itemsize}")
        return np.require(np.frombuffer(data, dtype), requirements="A")
    head = 8 * (count + 1)
    if len(data) < head:
        raise CorruptStore(f"{len(data)} bytes where the starts of {count} strings need {head}")
    starts = np.require(np.frombuffer(data[:head], "<i8"), requirements="A")
    if starts[0] != 0 or starts[-1] != len(data) - head or (np.diff(starts) < 0).any():
        raise CorruptStore("the starts of the strings don't fit their text")
    return TextColumn(starts, np.frombuffer(data[head:], np.uint8))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What is known about a store as a whole.

    Attributes
    ----------
    build_id : str
        Digest of the columns (checksums of all images included): equal stores have equal ids.
    images, image_bytes, rejected : int
        Images stored, the sum of their sizes in bytes, and rows of the csv left out.
    columns : tuple of Column
    options : dict
        The options of the ingest that decide what is in the file.
    source : dict
        The csv and the folder: names, sizes, digest, header, path template.
    notes : tuple of str
        What the ingest had to say about the csv.
    rejects_checksum : int
        XXH3-64 of the value of "rejects".
    created : str
        UTC, ISO 8601.
    writer : str
        Program and version.
    """

    build_id: str
    images: int
    image_bytes: int
    rejected: int
    columns: tuple[Column, ...]
    options: dict[str, Any]
    source: dict[str, Any]
    notes: tuple[str, ...]
    rejects_checksum: int
    created: str
    writer: str
    format_version: int = FORMAT_VERSION

    def pack(self) -> bytes:
        """Return the manifest as msgpack."""
        return msgpack.packb({"format": FORMAT, **dataclasses.asdict(self)})


def build_id(columns: Iterable[Column]) -> str:
    """Return the digest that names a store: 128 bits in hex, a function of its columns."""
    digest = xxhash.xxh3_128()
    for column in columns:
        digest.update(msgpack.packb([column.name, column.type, column.length, column.checksum]))
    return digest.hexdigest()


def unpack_manifest(data: bytes) -> Manifest:
    """Read a manifest.

    Raises
    ------
    FormatVersionError
        Written by a newer lmdbstore.
    CorruptStore
        Anything else that isn't a manifest.
    """
    try:
        raw = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptStore(f"the manifest isn't msgpack ({error})") from None
    if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
        raise CorruptStore("the manifest isn't one of lmdbstore")
    version = raw.get("format_version")
    if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        raise FormatVersionError(
            f"format version {version!r}, and this lmdbstore reads 1 to {FORMAT_VERSION}; pip install -U lmdbstore"
        )
    try:
        return _manifest(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptStore(f"the manifest isn't complete ({type(error).__name__}: {error})") from None


# What a manifest must have, and what its maps must; a store that lies about it is refused at open.
_FIELDS: dict[str, type] = {
    "build_id": str,
    "images": int,
    "image_bytes": int,
    "rejected": int,
    "columns": list,
    "options": dict,
    "source": dict,
    "notes": list,
    "rejects_checksum": int,
    "created": str,
    "writer": str,
    "format_version": int,
}
_OPTIONS: dict[str, type] = {"order": str}
_SOURCE: dict[str, type] = {"csv": str, "header": str, "id_column": str, "columns": dict, "folder": str, "path": str}
_COLUMN_TYPE = re.compile(r"text|<[iuf][248]|\|[iu]1")


def _manifest(raw: dict[str, Any]) -> Manifest:
    _check_types(raw, _FIELDS)
    _check_types(raw["options"], _OPTIONS)
    _check_types(raw["source"], _SOURCE)
    if not all(isinstance(name, str) for pair in raw["source"]["columns"].items() for name in pair):
        raise ValueError("the names of the columns aren't text")
    known = {name: raw[name] for name in _FIELDS}
    return Manifest(**{**known, "columns": tuple(map(_column, raw["columns"])), "notes": tuple(map(str, raw["notes"]))})


def _check_types(found: dict[str, Any], kinds: dict[str, type]) -> None:
    for name, kind in kinds.items():
        if not isinstance(found[name], kind) or (kind is int and found[name] < 0):
            raise ValueError(f"{name} is {found[name]!r:.60}")


def _column(row: Any) -> Column:
    column = Column(*row)
    sound = isinstance(column.name, str) and isinstance(column.type, str) and _COLUMN_TYPE.fullmatch(column.type)
    if not sound or not all(isinstance(value, int) and value >= 0 for value in column[2:]):
        raise ValueError(f"a column is {row!r:.60}")
    return column


class Reject(NamedTuple):
    """A row of the csv that isn't in the store."""

    line: int  # of the csv, 1-based
    id: str
    reason: str


def pack_rejects(rejects: Iterable[Reject]) -> bytes:
    """Return the rejects as msgpack."""
    return msgpack.packb([list(reject) for reject in rejects])


def unpack_rejects(data: bytes) -> list[Reject]:
    """Read the rejects."""
    return [Reject(*row) for row in msgpack.unpackb(data)]
