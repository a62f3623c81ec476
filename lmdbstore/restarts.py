"""A JPEG's header taken apart, and its restart segments found by looking; bytes and numpy, no trust.

For tiles.py, which cuts: at the time of an ingest, and where a JPEG has no index of its segments.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import NamedTuple

import numpy as np

from lmdbstore.errors import DecodeError
from lmdbstore.headers import EOI, jpeg_segments, parse_frame
from lmdbstore.sniff import sniff

RST0, APP9 = 0xD0, 0xE9
COLOR = frozenset({0xE0, 0xEE})  # APP0 (JFIF) and APP14 (Adobe): libjpeg takes the colour space from them
BASELINE = frozenset({0xC0, 0xC1})  # Huffman-coded, in one pass
#: The payload of an index starts with it, an APP9 segment.
INDEX_NAME = b"lmdbstore tiles\0"

_DRI, _APP0, _APP15, _COM = 0xDD, 0xE0, 0xEF, 0xFE
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_MAX_BLOCKS = 10  # of 8 x 8 pixels in an MCU: ISO 10918-1, B.2.3


class Grid(NamedTuple):
    """The MCUs of a picture: size in pixels, how many in a row, how many rows."""

    width: int
    height: int
    row: int
    rows: int


@dataclasses.dataclass
class Header:
    """The segments of a JPEG's header, by what they are for, their markers included; no index is among them."""

    color: list[memoryview] = dataclasses.field(default_factory=list)
    rest: list[memoryview] = dataclasses.field(default_factory=list)  # other APPn, comments
    tables: list[memoryview] = dataclasses.field(default_factory=list)  # all that decodes; the last one is SOS
    frame: int = -1  # position in `tables`
    interval: int = 0  # MCUs
    first: int = 0  # byte behind the header
    grid: Grid | None = None  # None where the components don't fit into one scan

    def add(self, marker: int, segment: memoryview) -> None:
        """Take the next segment."""
        if marker in COLOR:
            self.color.append(segment)
        elif _APP0 <= marker <= _APP15 or marker == _COM:
            if bytes(segment[4 : 4 + len(INDEX_NAME)]) != INDEX_NAME:
                self.rest.append(segment)
        else:
            if marker in _FRAMES:
                if self.frame >= 0:
                    raise DecodeError("two frame headers (SOF) in one JPEG")
                self.frame, self.grid = len(self.tables), _grid(segment)
            if marker == _DRI:
                (self.interval,) = struct.unpack_from(">H", segment, 4)
            self.tables.append(segment)

    @property
    def sequential(self) -> bool:
        """Whether the first scan is the only one that the frame needs."""
        frame, scan = self.tables[self.frame], self.tables[-1]
        count = frame[9]
        whole = len(scan) == 8 + 2 * count and scan[4] == count and bytes(scan[-3:]) == b"\0\x3f\0"
        return whole and frame[1] in BASELINE


def take_apart(view: memoryview) -> Header | None:
    """Take a header apart; None where it isn't a JPEG's, or broken."""
    header = Header()
    try:
        if sniff(view) != "jpeg":
            return None
        for marker, start, stop in jpeg_segments(view):
            header.add(marker, view[start - 4 : stop])
            header.first = stop
    except (DecodeError, struct.error):
        return None
    return header


def _grid(segment: memoryview) -> Grid | None:
    frame = parse_frame(segment[1], segment[4:])
    factors = [divmod(f, 16) for f in segment[11::3]]
    wide, high = (8 * max(side) for side in zip(*factors, strict=True))
    if len(factors) == 1:  # in a scan of one component an MCU is one block, whatever the factors say
        wide = high = 8
    elif sum(h * v for h, v in factors) > _MAX_BLOCKS:
        return None
    return Grid(wide, high, -(-frame.width // wide), -(-frame.height // high))


def edges(view: memoryview, first: int) -> np.ndarray | None:
    """Look for the restart markers of the scan that starts at byte `first`.

    Returns
    -------
    ndarray or None
        int64: `first`, and where each segment ends, its marker included, up to the end of the image (EOI).
        None where there is no end, or a marker out of turn.
    """
    raw = np.frombuffer(view, np.uint8)[first:]
    at = np.flatnonzero(raw[:-1] == 0xFF)
    codes = raw[at + 1]
    real = (codes != 0) & (codes != 0xFF)  # neither stuffing nor fill
    at, codes = at[real], codes[real]
    end = np.flatnonzero(codes == EOI)[:1]
    if not len(end) or not np.array_equal(codes[: end[0]], RST0 + np.arange(end[0]) % 8):
        return None
    return np.concatenate([[0], at[: end[0] + 1] + 2]) + first
