"""Which format bytes are, by how they start; and for a message, what else they are if none that is stored."""

from __future__ import annotations

import re

from lmdbstore.errors import DecodeError

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_NOT_ZERO = re.compile(rb"[^\x00]")
_MAGIC = (
    (0, b"GIF8", "GIF"), (0, b"BM", "BMP"), (0, b"II*\0", "TIFF"), (0, b"MM\0*", "TIFF"), (0, b"II+\0", "BigTIFF"),
    (0, b"MM\0+", "BigTIFF"), (0, b"\0\0\0\x0cjP  ", "JPEG 2000"), (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"), (0, b"\xff\x0a", "JPEG XL"), (0, b"%PDF", "PDF"), (0, b"\0\0\1\0", "ICO"),
    (0, b"8BPS", "Photoshop"), (0, b"\x1f\x8b", "gzip"), (0, b"PK\3\4", "zip"), (128, b"DICM", "DICOM"),
    (0, b"version https://git-lfs", "a Git-LFS pointer: fetch the data with `git lfs pull`"),
    (4, b"ftypavi", "AVIF"), (4, b"ftyphei", "HEIC"), (4, b"ftyphe", "HEIC"), (4, b"ftypmif", "HEIF"),
    (4, b"ftypmsf", "HEIF"), (4, b"ftyp", "MP4 or a relative of it"),
)
_HTML = re.compile(rb"\s*(?:<!--.*?-->\s*)?<(?:!doctype html|html|head|body)", re.IGNORECASE | re.DOTALL)


def sniff(view: memoryview) -> str:
    """Return "jpeg", "png", "webp" or "ppm" by the first bytes, or raise a DecodeError that says what it is instead."""
    head = bytes(view[:12])
    if head[:2] == b"\xff\xd8":
        return "jpeg"
    if head[:8] == _PNG_SIGNATURE:
        return "png"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    if head[:3] == b"P6\n":
        return "ppm"
    raise DecodeError(_describe(view))


def _describe(view: memoryview) -> str:
    """Say what bytes are that aren't an image that can be stored."""
    if not len(view):
        return "empty file (0 bytes)"
    if _NOT_ZERO.search(view) is None:
        return f"all {len(view):,} bytes are zero"
    kind = _kind(bytes(view[:512]))
    if kind is None and (at := bytes(view[:65_536]).find(b"\xff\xd8\xff")) > 0:
        kind = f"unknown; a JPEG begins at byte {at}"
    return f"starts with {bytes(view[:4]).hex(' ')} ({kind or 'unknown'}); JPEG, PNG and WebP are stored"


def _kind(head: bytes) -> str | None:
    head = head.removeprefix(b"\xef\xbb\xbf")
    for offset, magic, name in _MAGIC:
        if head.startswith(magic, offset):
            return name
    if _HTML.match(head):
        return "HTML"
    if head.lstrip().startswith((b"<?xml", b"<svg")):
        return "XML or SVG"
    text = head.decode("utf-8", "replace")[:-1]  # the last letter may be cut in two
    readable = len(text) > 3 and all(c.isprintable() or c.isspace() for c in text) and "\ufffd" not in text
    return f"text: {text[:40]!r}" if readable else None
