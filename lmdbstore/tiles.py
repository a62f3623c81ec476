"""JPEG files that can be cut without being decoded: restart segments, their index, and windows of them.

A restart marker resets the entropy coder, so that the bytes between two of them can be decoded
by themselves.  Where every row of MCUs is a whole number of such segments, a window of the picture
is a header with a smaller width and height, the segments that it touches, and new numbers on the
markers: an ordinary JPEG.  `restart_interval` says how a file should be divided, `with_index` puts
the lengths of the segments into an APP9 segment of the header, `cut` takes a window out.

Pure bytes and numpy.  The index is data like everything else in a file: each marker that it points
at is looked at before it is used, and a JPEG in which something doesn't fit isn't tiled.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lmdbstore.headers import EOI, BytesLike, as_view
from lmdbstore.restarts import APP9, BASELINE, COLOR, INDEX_NAME, RST0, Header, edges, take_apart

#: MCUs in a segment, at most.  A marker costs 3 to 4 bytes, and 2 in the index: about 1 % of a photograph at 8 MCUs
#: of 16 x 16 pixels.  With larger segments a window has to take more that isn't its own.
MAX_INTERVAL = 8

# The index, docs/format.md: where tables, frame header and data start in the file, segments in a row, rows, and the
# size of a segment in pixels; then the length of each segment in two bytes
_FIELDS = struct.Struct(">III4H")
# A picture with a chroma of 2 samples in a row or fewer is upsampled by another rule (libjpeg's jdsample.c): a part is
# made wider than that, as it will be after scaling down
_LEAST_WIDTH = 8  # pixels
_MOST_COLOR = 4  # segments of the colour space before the index
_MOST = (65_533 - len(INDEX_NAME) - _FIELDS.size) // 2  # segments in an index


class Tiles(NamedTuple):
    """How a JPEG is divided into restart segments.

    Attributes
    ----------
    width, height : int
        Of the picture as it lies in the file, in pixels.
    tile_width, tile_height : int
        Of a segment, in pixels; those of the last column and row may reach over the edge.
    across, down : int
        Segments in a row, and rows.
    edges : ndarray, int64, (across * down + 1,)
        Segment k is bytes ``edges[k]`` to ``edges[k + 1]`` of the file, the marker at its end included.
    before, frame, after : bytes-like
        What pixels depend on in the header: the frame header (SOF), what precedes and what follows it.
    """

    width: int
    height: int
    tile_width: int
    tile_height: int
    across: int
    down: int
    edges: np.ndarray
    before: BytesLike
    frame: BytesLike
    after: BytesLike


class Cut(NamedTuple):
    """A part of a picture as a JPEG of its own, and where its upper left pixel lies in the whole."""

    data: BytesLike
    x: int
    y: int


def restart_interval(data: BytesLike) -> int | None:
    """Return how many MCUs a segment of this JPEG should have.

    The largest divisor of the MCUs in a row that isn't over `MAX_INTERVAL`.

    Parameters
    ----------
    data : bytes-like
        A JPEG of any kind; a progressive one has to become sequential first.

    Returns
    -------
    int or None
        None where there is nothing to divide: no JPEG, a bad one, or one whose components don't fit
        into one scan.
    """
    header = take_apart(as_view(data))
    if header is None or header.grid is None:
        return None
    return max(n for n in range(1, MAX_INTERVAL + 1) if header.grid.row % n == 0)


def index(data: BytesLike) -> Tiles | None:
    """Find the segments of a JPEG.

    Parameters
    ----------
    data : bytes-like
        Only the header is read where it holds an index, else everything.

    Returns
    -------
    Tiles or None
        None where the JPEG isn't tiled: it has no restart markers, or no whole number of segments in a
        row, or several scans; is progressive, arithmetic, damaged, or no JPEG.
        The views in it keep `data` alive.
    """
    view = as_view(data)
    tiles = _indexed(view)
    if tiles is None:
        header = take_apart(view)
        tiles = None if header is None else _scanned(view, header)
    return tiles


def with_index(data: BytesLike) -> bytes | None:
    """Return a tiled JPEG with an index of its segments in the header; None where it isn't tiled.

    An index that it has already is replaced; bytes behind the end of the image are dropped.  Over
    `_MOST` segments don't fit, and are found by looking for the markers each time.
    """
    view = as_view(data)
    header = take_apart(view)
    tiles = None if header is None else _scanned(view, header)
    if header is None or tiles is None:
        return None
    lengths = np.diff(tiles.edges)
    color, rest, tables = (b"".join(parts) for parts in (header.color, header.rest, header.tables))
    segments = view[tiles.edges[0] : tiles.edges[-1]]
    if len(lengths) > _MOST or lengths.max() > 0xFFFF or len(header.color) > _MOST_COLOR:
        return b"".join([b"\xff\xd8", color, rest, tables, segments])
    size = 2 + len(INDEX_NAME) + _FIELDS.size + 2 * len(lengths)
    start = 2 + len(color) + 2 + size + len(rest)
    fields = _FIELDS.pack(start, start + len(b"".join(header.tables[: header.frame])), start + len(tables),
                          tiles.across, tiles.down, tiles.tile_width, tiles.tile_height)
    found = struct.pack(">BBH", 0xFF, APP9, size) + INDEX_NAME + fields + lengths.astype(">u2").tobytes()
    return b"".join([b"\xff\xd8", color, found, rest, tables, segments])


def cut(data: BytesLike, x: int, y: int, width: int, height: int, *, margin: int = 1,
        touch: Callable[[int, int], object] | None = None) -> Cut | None:
    """Take the part of a tiled JPEG that holds a window.

    The window's pixels, decoded from the part, are those of the whole picture, bit for bit: segments
    are taken whole, with those that `margin` touches, since the decoder's chroma upsampling looks at
    the neighbours of a pixel.

    Parameters
    ----------
    data : bytes-like
        Read in place: the header, and the segments that are taken.
    x, y, width, height : int
        The window, in pixels of the picture as it lies in the file, before the EXIF orientation.
    margin : int
        Pixels around the window that come with it.  1 for a decoder that gives every pixel,
        n for one that scales down to 1/n.
    touch : callable, optional
        Called before the segments are read, with the range of bytes in which they lie.

    Returns
    -------
    Cut or None
        The part's header has no EXIF, ICC profile or comment (but a part that is the whole is `data`).
        Its place is a multiple of 8 pixels in both directions.  None where `data` isn't tiled.

    Raises
    ------
    ValueError
        The window isn't in the picture.

    Notes
    -----
    Threads: safe.
    """
    tiles = index(data)
    if tiles is None:
        return None
    if not (0 <= x < x + width <= tiles.width and 0 <= y < y + height <= tiles.height):
        raise ValueError(f"window of {width} x {height} at ({x}, {y}) in a picture of {tiles.width} x {tiles.height}")
    columns = _touched(x - margin, x + width + margin, tiles.tile_width, tiles.width, least=_LEAST_WIDTH * margin)
    rows = _touched(y - margin, y + height + margin, tiles.tile_height, tiles.height, least=1)
    if touch:
        first, last = rows.start * tiles.across + columns.start, (rows.stop - 1) * tiles.across + columns.stop
        touch(int(tiles.edges[first]) - 2, int(tiles.edges[last]))
    if len(columns) == tiles.across and len(rows) == tiles.down:
        return Cut(data, 0, 0)
    part = _part(as_view(data), tiles, columns, rows)
    return None if part is None else Cut(part, columns.start * tiles.tile_width, rows.start * tiles.tile_height)


def _touched(start: int, stop: int, size: int, side: int, *, least: int) -> range:
    """Return the tiles, of `size` pixels along a side, that pixels `start` to `stop` lie in; `least` pixels or more."""
    first, last = max(0, start) // size, -(-min(side, stop) // size)
    while min(side, last * size) - first * size < min(side, least):
        first, last = max(0, first - 1), last + (last * size < side)
    return range(first, last)


def _part(view: memoryview, tiles: Tiles, columns: range, rows: range) -> bytearray | None:
    """Return columns and rows of tiles as a JPEG; None where a marker isn't where the index has it."""
    # few calls of numpy, which take 1 us each beside a decoder that has emptied the caches: 80 us a crop became 47
    row = np.arange(rows.start * tiles.across, rows.stop * tiles.across, tiles.across)
    edge = row[:, None] + np.arange(columns.start, columns.stop + 1)
    at = tiles.edges[edge]
    found = np.frombuffer(view, np.uint8)[at - 1]
    expected = (edge - 1) & 7 | RST0
    if edge[-1, -1] == len(tiles.edges) - 1:
        expected[-1, -1] = EOI
    if edge[0, 0] == 0:  # before it stands the header
        found[0, 0] = expected[0, 0]
    if (found != expected).any():
        return None
    stretches = [view[start:stop] for start, stop in at[:, :: len(columns)].tolist()]
    frame = _smaller(tiles, columns, rows)
    part = bytearray().join([b"\xff\xd8", tiles.before, frame, tiles.after, *stretches])
    _renumber(part, (at[:, 1:] - at[:, :-1]).cumsum())
    return part


def _smaller(tiles: Tiles, columns: range, rows: range) -> bytearray:
    """Return the frame header of a part."""
    frame = bytearray(tiles.frame)
    width = min(tiles.width, columns.stop * tiles.tile_width) - columns.start * tiles.tile_width
    height = min(tiles.height, rows.stop * tiles.tile_height) - rows.start * tiles.tile_height
    struct.pack_into(">HH", frame, 5, height, width)
    return frame


def _renumber(jpeg: bytearray, ends: np.ndarray) -> None:
    """Number the markers of the segments that a JPEG ends with, RST0 to RST7 and again, and make the last one EOI.

    `ends` counts from where the segments begin.
    """
    np.frombuffer(jpeg, np.uint8)[ends + (len(jpeg) - 1 - ends[-1])] = np.arange(len(ends)) & 7 | RST0
    jpeg[-1] = EOI


# The index


def _indexed(view: memoryview) -> Tiles | None:
    """Read the index, which stands behind APP0 and APP14; None where there is none, or a wrong one."""
    try:
        at = 2
        for _ in range(_MOST_COLOR):
            if view[at + 1] in COLOR:
                at += 2 + struct.unpack_from(">H", view, at + 2)[0]
        name = at + 4
        if bytes(view[name : name + len(INDEX_NAME)]) != INDEX_NAME:
            return None
        tables, start, first, across, down, width, height = _FIELDS.unpack_from(view, name + len(INDEX_NAME))
        lengths = np.frombuffer(view, ">u2", across * down, name + len(INDEX_NAME) + _FIELDS.size)
        stop = start + 2 + struct.unpack_from(">H", view, start + 2)[0]
        frame = view[start:stop]
        high, wide = struct.unpack_from(">HH", frame, 5)
    except (struct.error, ValueError, IndexError):
        return None
    found = np.empty(len(lengths) + 1, np.int64)
    found[0], found[1:] = first, lengths
    found = found.cumsum()
    if not (tables <= start < stop <= first < found[-1] <= len(view) and frame[1] in BASELINE):
        return None
    if lengths.min() < 2 or -(-wide // max(1, width)) != across or -(-high // max(1, height)) != down:
        return None
    before = bytes(view[2:at]) + view[tables:start]
    return Tiles(wide, high, width, height, across, down, found, before, frame, view[stop:first])


def _scanned(view: memoryview, header: Header) -> Tiles | None:
    """Look for the markers; None where their numbers aren't in order up to the end of the image, or make no rows."""
    grid = header.grid
    if grid is None or not header.interval or not header.sequential:
        return None
    across, rest = divmod(grid.row, header.interval)
    found = edges(view, header.first)
    if rest or found is None or len(found) != across * grid.rows + 1:
        return None
    frame = header.tables[header.frame]
    before = b"".join(header.color + header.tables[: header.frame])
    after = b"".join(header.tables[header.frame + 1 :])
    high, wide = struct.unpack_from(">HH", frame, 5)
    return Tiles(wide, high, header.interval * grid.width, grid.height, across, grid.rows, found, before, frame, after)
