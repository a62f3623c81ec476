"""What an image is, from its header alone: format, size, orientation.

Pure bytes, no outside library, and no trust: every read is bounds-checked, the
time is linear in the length of the header, and the number of steps is bounded.
The JPEG walk follows libjpeg's jdmarker.c marker by marker, so that the size
found here is the size that the decoder will allocate.  Orientation follows
`cv2.imread` (OpenCV 5.0), compared case by case in tests/test_headers.py.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from lmdbstore.errors import DecodeError, ImageTooLarge
from lmdbstore.sniff import sniff

BytesLike = bytes | bytearray | memoryview

#: Pixels that a header may declare: Pillow's limit (1 GiB / 4 / 3 bytes, doubled).  A 108-Mpixel
#: photo passes; a 65,500 x 65,500 header, 12.9 GB once decoded, doesn't.
MAX_PIXELS = 178_956_970

SOI, EOI, SOS, APP1 = 0xD8, 0xD9, 0xDA, 0xE1
_JPEG_LS = 0xF7
_NO_PAYLOAD = frozenset({0x01, *range(0xD0, 0xD8)})  # TEM, RST0-7
_FRAMES = frozenset({0xC0, 0xC1, 0xC2, 0xC9, 0xCA})  # what libjpeg has: baseline .. progressive arithmetic
_FOREIGN_FRAMES = {0xC3: "lossless", 0xC5: "hierarchical", 0xC6: "hierarchical", 0xC7: "hierarchical lossless",
                   0xCB: "lossless", 0xCD: "hierarchical", 0xCE: "hierarchical", 0xCF: "hierarchical lossless"}
# A marker is FF and a byte that is neither 00 (stuffing) nor FF (fill); so a long run of FF costs one pass.
_MARKER = re.compile(rb"\xff[^\x00\xff]")
#: Segments or chunks looked at.  64 KiB segments of an ICC profile or extended XMP stay far below.
_MAX_SEGMENTS = 10_000
_PPM = re.compile(rb"P6\n([1-9]\d{0,8}) ([1-9]\d{0,8})\n255\n")
_ORIENTATION = 0x0112
_TEXT_TAGS = frozenset({0x010E, 0x010F, 0x0110})  # ImageDescription, Make, Model: all that sorts before it


class ImageInfo(NamedTuple):
    """What the header of an image says.

    Attributes
    ----------
    format : str
        "jpeg", "png", "webp" or "ppm".
    width, height : int
        Pixels, as the file has them: before the orientation is applied.
    orientation : int
        EXIF orientation, 1 to 8; 1 when there is none or it can't be read.
    """

    format: str
    width: int
    height: int
    orientation: int


class Frame(NamedTuple):
    """The frame header (SOF) of a JPEG file; `blocks` are the 8 x 8 blocks of its largest component."""

    marker: int
    width: int
    height: int
    components: int
    blocks: int


def probe(data: BytesLike, *, max_pixels: int = MAX_PIXELS) -> ImageInfo:
    """Return what the header of an image says, without decoding it.

    Parameters
    ----------
    data : bytes-like
        The file's bytes; nothing is copied.
    max_pixels : int
        Width times height above which the image is refused.

    Raises
    ------
    DecodeError
        Not a JPEG, PNG or WebP, or one that can't be decoded whatever follows.
    ImageTooLarge
        More than `max_pixels`.
    """
    view = as_view(data)
    try:
        info = _PARSERS[sniff(view)](view)
    except struct.error:
        raise DecodeError(f"truncated: the header goes on after the end of the file ({len(view)} bytes)") from None
    check_size(info.width, info.height, max_pixels)
    return info


def as_view(data: BytesLike) -> memoryview:
    """Return `data` as a flat view of unsigned bytes, without copying.

    Raises
    ------
    TypeError
        `data` isn't bytes-like, or not contiguous.
    """
    view = memoryview(data)
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Raise ImageTooLarge when `width` x `height` is over the limit."""
    if width * height > max_pixels:
        raise ImageTooLarge(f"the header says {width} x {height} pixels, {width * height / 1e6:.0f} million; "
                            f"the limit is {max_pixels / 1e6:.0f} million (max_pixels)")


# JPEG


def jpeg_segments(view: memoryview, start: int = 2) -> Iterator[tuple[int, int, int]]:
    """Walk the segments of a JPEG header, from `start` to its first scan.

    Yields
    ------
    marker, start, stop : int
        The marker's code (0xC4 for DHT) and where its payload lies; the last one is SOS.

    Raises
    ------
    DecodeError
        The header ends before SOS, or has more than `_MAX_SEGMENTS` segments.
    struct.error
        The file ends inside of a segment's length.
    """
    position = start
    for _ in range(_MAX_SEGMENTS):
        found = _MARKER.search(view, position)
        if found is None:
            raise DecodeError("truncated: the JPEG header ends before the image data")
        position = found.end()
        marker = view[position - 1]
        if marker in _NO_PAYLOAD:
            continue
        if marker in (SOI, EOI):
            raise DecodeError(f"no image in this JPEG: {'end' if marker == EOI else 'second start'} of image "
                              f"at byte {position - 2}, before any image data")
        stop = position + max(2, struct.unpack_from(">H", view, position)[0])
        if stop > len(view):
            raise DecodeError(f"truncated: JPEG segment ff {marker:02x} at byte {position - 2} "
                              f"reaches past the end of the file ({stop} > {len(view)} bytes)")
        yield marker, position + 2, stop
        if marker == SOS:
            return
        position = stop
    raise DecodeError(f"more than {_MAX_SEGMENTS:,} JPEG segments before the image data")


def _probe_jpeg(view: memoryview) -> ImageInfo:
    frame, orientation = None, None
    for marker, start, stop in jpeg_segments(view):
        if marker in _FRAMES or marker in _FOREIGN_FRAMES or marker == _JPEG_LS:
            if frame is not None:
                raise DecodeError("two frame headers (SOF) in one JPEG")
            frame = parse_frame(marker, view[start:stop])
        elif marker == APP1 and orientation is None and bytes(view[start:start + 6]) == b"Exif\0\0":
            orientation = exif_orientation(view[start + 6:stop])  # the first EXIF counts, even a broken one
    if frame is None:
        raise DecodeError("no frame header (SOF) in this JPEG")
    return ImageInfo("jpeg", frame.width, frame.height, orientation or 1)


def parse_frame(marker: int, payload: memoryview) -> Frame:
    """Read a frame header; refuse what libjpeg's 8-bit decoder can't decode.

    Raises
    ------
    DecodeError
        Lossless, hierarchical, JPEG-LS, not 8 bits a sample, no height (DNL), no width, bad length.
    struct.error
        The payload is shorter than a frame header.
    """
    if marker == _JPEG_LS:
        raise DecodeError("JPEG-LS; JPEG, PNG and WebP are stored")
    if marker in _FOREIGN_FRAMES:
        raise DecodeError(f"{_FOREIGN_FRAMES[marker]} JPEG (SOF{marker - 0xC0}), which libjpeg doesn't decode")
    precision, height, width, components = struct.unpack_from(">BHHB", payload)
    if precision != 8:
        raise DecodeError(f"{precision}-bit JPEG; only 8 bits a sample are decoded")
    if height == 0:
        raise DecodeError("JPEG height 0 in the header (left to a DNL marker), which libjpeg doesn't decode")
    if width == 0 or components == 0 or len(payload) != 6 + 3 * components:
        raise DecodeError(f"bad JPEG frame header: width {width}, {components} components, {len(payload) + 2} bytes")
    return Frame(marker, width, height, components, _blocks(width, height, bytes(payload[7::3])))


def _blocks(width: int, height: int, factors: bytes) -> int:
    """Count the blocks of the largest component, given each one's sampling factors as H * 16 + V."""
    horizontal, vertical = [f >> 4 for f in factors], [f & 15 for f in factors]
    if not set(horizontal + vertical) <= {1, 2, 3, 4}:
        raise DecodeError(f"bad JPEG frame header: sampling factors {factors.hex(' ')}, each must be 1 to 4")
    wide, high = 8 * max(horizontal), 8 * max(vertical)
    return max(-(-width * h // wide) * -(-height * v // high) for h, v in zip(horizontal, vertical, strict=True))


def jpeg_frame(view: memoryview) -> Frame:
    """Return the frame header of a JPEG that `probe` has accepted."""
    return next(parse_frame(marker, view[start:stop]) for marker, start, stop in jpeg_segments(view)
                if marker in _FRAMES)


def exif_orientation(tiff: memoryview) -> int:
    """Return the orientation in an EXIF block (a TIFF header and its first directory): 1 to 8, 1 when unreadable.

    As OpenCV does it: the first orientation entry counts, and an unreadable text before it ends the search.
    """
    order = {b"II": "<", b"MM": ">"}.get(bytes(tiff[:2]))
    if order is None:
        return 1
    try:
        magic, directory = struct.unpack_from(order + "HI", tiff, 2)
        (entries,) = struct.unpack_from(order + "H", tiff, directory)
        for at in range(directory + 2, directory + 2 + 12 * entries, 12) if magic == 42 else ():
            tag, _, count, value = struct.unpack_from(order + "HHII", tiff, at)
            if tag == _ORIENTATION:  # two bytes, whatever the type says
                (orientation,) = struct.unpack_from(order + "H", tiff, at + 8)
                return orientation if 1 <= orientation <= 8 else 1
            if tag in _TEXT_TAGS and count > 4 and value + count > len(tiff):
                return 1
    except struct.error:
        pass  # cut short: as good as no orientation
    return 1


# PNG and WebP


def png_chunks(view: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Walk the chunks of a PNG: type, and start and stop of the data; stops at the first that isn't whole."""
    return _chunks(view, start=8, layout=">I4s", tail=4, even=False)


def webp_chunks(view: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Walk the chunks of a WebP: type, and start and stop of the data; stops at the first that isn't whole."""
    return _chunks(view, start=12, layout="<4sI", tail=0, even=True)


def _chunks(view: memoryview, *, start: int, layout: str, tail: int, even: bool) -> Iterator[tuple[bytes, int, int]]:
    position = start
    for _ in range(_MAX_SEGMENTS):
        if position + 8 > len(view):
            return
        one, two = struct.unpack_from(layout, view, position)
        kind, length = (one, two) if isinstance(one, bytes) else (two, one)
        stop = position + 8 + length
        if stop + tail > len(view):
            return
        yield kind, position + 8, stop
        position = stop + tail + (length % 2 if even else 0)


def _probe_png(view: memoryview) -> ImageInfo:
    length, kind, width, height = struct.unpack_from(">I4sII", view, 8)
    if kind != b"IHDR" or length != 13:
        raise DecodeError(f"bad PNG: the first chunk is {kind!r} of {length} bytes, not IHDR of 13")
    _check_sides("PNG", width, height)
    exif = next((view[start:stop] for kind, start, stop in png_chunks(view) if kind == b"eXIf"), None)
    return ImageInfo("png", width, height, exif_orientation(exif) if exif is not None else 1)


def _probe_webp(view: memoryview) -> ImageInfo:
    kind = bytes(view[12:16])
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(side, "little") for side in struct.unpack_from("3s3s", view, 24))
        exif = next((view[start:stop] for kind, start, stop in webp_chunks(view) if kind == b"EXIF"), None)
        return ImageInfo("webp", width, height, exif_orientation(exif) if exif is not None else 1)
    if kind == b"VP8L":
        signature, bits = struct.unpack_from("<BI", view, 20)
        if signature != 0x2F:
            raise DecodeError(f"bad WebP: lossless data starts with {signature:02x}, not 2f")
        return ImageInfo("webp", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), 1)
    if kind != b"VP8 ":
        raise DecodeError(f"bad WebP: the first chunk is {kind!r}, none of VP8, VP8L, VP8X")
    start_code, width, height = struct.unpack_from("<3sHH", view, 23)
    if start_code != b"\x9d\x01\x2a":
        raise DecodeError(f"bad WebP: the key frame starts with {start_code.hex(' ')}, not 9d 01 2a")
    _check_sides("WebP", width & 0x3FFF, height & 0x3FFF)
    return ImageInfo("webp", width & 0x3FFF, height & 0x3FFF, 1)


def _check_sides(name: str, width: int, height: int) -> None:
    if width == 0 or height == 0:
        raise DecodeError(f"the {name} header says {width} x {height} pixels")


# PPM: how pixels are stored as they are


def ppm_start(view: memoryview) -> tuple[int, int, int]:
    """Return width, height, and the byte at which the pixels start.

    Raises
    ------
    DecodeError
        Another header than the one that `codec.encode_ppm` writes.
    """
    found = _PPM.match(view[:40])
    if found is None:
        raise DecodeError("a PPM header other than `P6`, width and height, `255`, on lines of their own")
    return int(found[1]), int(found[2]), found.end()


def _probe_ppm(view: memoryview) -> ImageInfo:
    width, height, _ = ppm_start(view)
    return ImageInfo("ppm", width, height, 1)


_PARSERS = {"jpeg": _probe_jpeg, "png": _probe_png, "webp": _probe_webp, "ppm": _probe_ppm}
