"""Is the file of an image all there?  What its structure tells, without decoding pixels.

Pure bytes: no image library.  codec.py's `check` asks here what the decoders don't say.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections import defaultdict
from typing import NamedTuple

from lmdbstore.errors import DecodeError
from lmdbstore.headers import EOI, SOS, jpeg_frame, jpeg_segments, png_chunks

#: Scans of a JPEG that are decoded; libjpeg-turbo's own limit.  Real progressive files have about 10;
#: each costs a pass over the whole picture, however few its bytes.
MAX_SCANS = 500
_MAX_MARKERS = 10_000
_IN_SCAN = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")  # a marker that ends the entropy-coded data
_SEGMENTS = frozenset({0xC4, 0xCC, 0xDA, 0xDB, 0xDC, 0xDD, *range(0xE0, 0xF0), 0xFE})  # tables, DNL, APPn, COM
_SEQUENTIAL = frozenset({0xC0, 0xC1, 0xC9})
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))  # Adam7
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by PNG colour type
_INFLATE_STEP = 1 << 20  # bytes


class Scans(NamedTuple):
    """The image data of a JPEG.

    Attributes
    ----------
    ended : bool
        An end-of-image marker (EOI) follows the scans.
    complete : bool
        The scans hold every coefficient of every component to its last bit.
    stray : int or None
        The byte where the first marker stands that has no business there.
    """

    ended: bool
    complete: bool
    stray: int | None


def jpeg_scans(view: memoryview) -> Scans:
    """Walk the scans of a JPEG that `probe` has accepted; linear, and no pixels.

    Raises
    ------
    DecodeError
        More than `MAX_SCANS` scans, or `_MAX_MARKERS` markers.
    """
    *_, (_, start, stop) = jpeg_segments(view)
    frame = jpeg_frame(view)
    final: dict[int, set[int]] = defaultdict(set)  # component id -> coefficients that have their last bit
    scans, ended, stray, marker = 0, False, None, SOS
    for _ in range(_MAX_MARKERS):
        if marker == SOS:
            scans += 1
            if scans > MAX_SCANS:
                raise DecodeError(f"more than {MAX_SCANS} scans in a JPEG")
            _note_scan(bytes(view[start:stop]), final, sequential=frame.marker in _SEQUENTIAL)
        found = _IN_SCAN.search(view, stop)
        if found is None:
            break
        marker = view[found.end() - 1]
        if marker == EOI:
            ended = True
            break
        start = stop = found.end()
        if marker in _SEGMENTS:  # anything else is damage, and its length isn't one
            start = start + 2
            stop = max(start, stop + int.from_bytes(view[stop:start], "big"))
        if stray is None and (marker not in _SEGMENTS or stop > len(view)):
            stray = found.start()
    else:
        raise DecodeError(f"more than {_MAX_MARKERS:,} markers in the image data of a JPEG")
    whole = sum(len(coefficients) == 64 for coefficients in final.values())
    return Scans(ended, whole >= frame.components, stray)


def _note_scan(payload: bytes, final: dict[int, set[int]], *, sequential: bool) -> None:
    count = payload[0] if payload else 0
    tail = payload[1 + 2 * count:4 + 2 * count]
    if len(tail) < 3:
        return
    first, last, approximation = (0, 63, 0) if sequential else tail
    if approximation & 15 == 0:
        for component in payload[1:1 + 2 * count:2]:
            final[component].update(range(first, min(last, 63) + 1))


def jpeg_repaired(view: memoryview, *, bare: bool) -> bytes:
    """Return a JPEG without stray bytes between the segments of its header, and with an end (EOI).

    Where `bare`, APPn segments and comments go, too, with all that libjpeg may say about them.  The
    pixels' values may change with them (the colour space); whether the image data is whole doesn't.
    """
    parts: list[bytes | memoryview] = [b"\xff\xd8"]
    for marker, start, stop in jpeg_segments(view):
        if marker == SOS:
            parts.append(view[start - 4:])
        elif not bare or not (0xE0 <= marker <= 0xEF or marker == 0xFE):
            parts.append(view[start - 4:stop])
    return b"".join([*parts, b"\xff\xd9"])


def fewest_bytes(view: memoryview) -> int:
    """Return the bytes that the image data of a JPEG takes at the very least; a bomb has fewer, whatever it claims.

    A Huffman code has a bit at least, and a block has two of them, or one where the rest may be in
    another scan.  Arithmetic coding has no such bound: 0.
    """
    frame = jpeg_frame(view)
    bits = {0xC0: 2, 0xC1: 2, 0xC2: 1}.get(frame.marker, 0)
    return frame.blocks * bits // 8


def webp_problem(view: memoryview) -> str | None:
    """Return what a WebP lacks of the length in its RIFF header, or None."""
    (size,) = struct.unpack_from("<I", view, 4)
    return f"truncated: {len(view)} of {size + 8} bytes" if size + 8 > len(view) else None


def png_problem(view: memoryview) -> str | None:
    """Return what is wrong with the chunks or the compressed rows of a PNG, or None.

    Checksums of chunks that the pixels don't depend on aren't looked at, and a missing IEND passes
    when every row is there.
    """
    pieces, ended = [], False
    for kind, start, stop in png_chunks(view):
        (crc,) = struct.unpack_from(">I", view, stop)
        if kind[:1].isupper() and zlib.crc32(view[start - 4:stop]) != crc:
            return f"corrupt: wrong checksum in PNG chunk {kind.decode('latin-1')} at byte {start - 8}"
        if kind == b"IDAT":
            pieces.append(view[start:stop])
        ended = kind == b"IEND"
        if ended:
            break
    expected = _png_rows(view)
    try:
        found = _inflated(pieces, expected)
    except zlib.error as err:
        return f"corrupt: compressed rows of the PNG: {err}"
    if found < expected:
        return f"{'corrupt' if ended else 'truncated'}: whole chunks give {found:,} of {expected:,} bytes of PNG rows"
    return None


def _inflated(pieces: list[memoryview], enough: int) -> int:
    """Count the bytes that zlib gives, up to `enough`, holding a step of them at a time."""
    inflate, count = zlib.decompressobj(), 0
    for piece in pieces:
        feed: bytes | memoryview = piece
        while len(feed) and count < enough and not inflate.eof:
            count += len(inflate.decompress(feed, _INFLATE_STEP))
            feed = inflate.unconsumed_tail
    return count


def _png_rows(view: memoryview) -> int:
    """Return the bytes of a PNG's rows, filter bytes included."""
    width, height, depth, color, _, _, interlace = struct.unpack_from(">IIBBBBB", view, 16)
    bits = depth * _CHANNELS.get(color, 1)
    passes = _PASSES if interlace else ((0, 0, 1, 1),)
    sides = [(-(-(width - x) // dx), -(-(height - y) // dy)) for x, y, dx, dy in passes]
    return sum(h * (1 + (w * bits + 7) // 8) for w, h in sides if w > 0 and h > 0)
