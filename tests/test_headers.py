"""The header parser: what it reads, what it refuses and why, and that nothing makes it do anything else."""

from __future__ import annotations

import io
import struct
import zlib

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lmdbstore.errors import DecodeError, ImageTooLarge
from lmdbstore.headers import MAX_PIXELS, ImageInfo, exif_orientation, probe

WIDTH, HEIGHT = 40, 24


def picture() -> np.ndarray:
    """A picture whose corners differ: (24, 40, 3) uint8, RGB."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([x * 6, y * 10, (x + y) * 2], axis=-1).astype(np.uint8)


def pillow(kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture()).save(file, kind, **options)
    return file.getvalue()


JPEG, PNG, WEBP, WEBP_LOSSLESS = pillow("JPEG"), pillow("PNG"), pillow("WEBP"), pillow("WEBP", lossless=True)


def tiff(orientation: int, *, order: str = "<", kind: int = 3, magic: int = 42, entries: int | None = None,
         before: tuple[tuple[int, int, int, int], ...] = ()) -> bytes:
    """An EXIF block: `before` are the entries (tag, type, count, value) that precede the orientation."""
    value = struct.pack(order + {1: "BBH", 3: "HH", 4: "I"}[kind], orientation, *([0] * {1: 2, 3: 1, 4: 0}[kind]))
    rows = [struct.pack(order + "HHII", *row) for row in before] + [struct.pack(order + "HHI", 0x112, kind, 1) + value]
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "HIH", magic, 8, entries or len(rows))
    return head + b"".join(rows) + bytes(4)


def segment(marker: int, payload: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(payload) + 2) + payload


def with_exif(*blocks: bytes) -> bytes:
    return JPEG[:2] + b"".join(segment(0xE1, b"Exif\0\0" + block) for block in blocks) + JPEG[2:]


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new):]


SOF = JPEG.index(b"\xff\xc0")
SOS = JPEG.index(b"\xff\xda")


@pytest.mark.parametrize(("data", "kind"), [(JPEG, "jpeg"), (PNG, "png"), (WEBP, "webp"), (WEBP_LOSSLESS, "webp"),
                                            (pillow("JPEG", progressive=True), "jpeg"),
                                            (pillow("WEBP", exif=tiff(1)), "webp")])
@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda b: memoryview(np.frombuffer(b, np.uint16))])
def test_format_and_size(data, kind, wrap):
    assert probe(wrap(data + b"\0" * (len(data) % 2))) == ImageInfo(kind, WIDTH, HEIGHT, 1)


# Orientation, and that it is cv2.imread's

XMP = segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>")
EXIF_CASES = {
    **{f"{order}{n}": (with_exif(tiff(n, order=order)), n) for order in "<>" for n in range(1, 9)},
    "0": (with_exif(tiff(0)), 1),
    "9": (with_exif(tiff(9)), 1),
    "long": (with_exif(tiff(6, kind=4)), 6),
    "long, big endian": (with_exif(tiff(6, kind=4, order=">")), 1),
    "first counts": (with_exif(tiff(6), tiff(3)), 6),
    "first counts, even 1": (with_exif(tiff(1), tiff(6)), 1),
    "behind XMP": (JPEG[:2] + XMP + with_exif(tiff(6))[2:], 6),
    "behind SOF": (JPEG[:SOS] + segment(0xE1, b"Exif\0\0" + tiff(6)) + JPEG[SOS:], 6),
    "no prefix": (JPEG[:2] + segment(0xE1, tiff(6)) + JPEG[2:], 1),
    "wrong magic": (with_exif(tiff(6, magic=43)), 1),
    "claims 500 entries": (with_exif(tiff(6, entries=500)), 6),
    "broken Make before it": (with_exif(tiff(6, before=((271, 2, 50, 9999),))), 1),
    "broken unknown tag before it": (with_exif(tiff(6, before=((254, 2, 50, 9999),))), 6),
    "two entries": (with_exif(tiff(3, before=((0x112, 3, 1, 6),))), 6),
    "no next directory": (with_exif(tiff(6)[:-4]), 6),
    "cut in its value": (with_exif(tiff(6)[:-7]), 1),
    "directory far away": (with_exif(b"II*\0\xff\xff\xff\x7f"), 1),
    "empty": (with_exif(b""), 1),
    "PNG": (PNG[:33] + struct.pack(">I", 26) + b"eXIf" + tiff(6) +
            struct.pack(">I", zlib.crc32(b"eXIf" + tiff(6))) + PNG[33:], 6),
    "PNG, at the end": (PNG[:-12] + struct.pack(">I", 26) + b"eXIf" + tiff(6) +
                        struct.pack(">I", zlib.crc32(b"eXIf" + tiff(6))) + PNG[-12:], 6),
    "WebP": (pillow("WEBP", exif=tiff(6)), 6),
    "WebP, lossless": (pillow("WEBP", exif=tiff(8, order=">"), lossless=True), 8),
}


@pytest.mark.parametrize("name", EXIF_CASES)
def test_orientation(name):
    data, expected = EXIF_CASES[name]
    assert probe(data).orientation == expected


@pytest.mark.skipif(int(cv2.__version__.split(".")[0]) < 5, reason="OpenCV 4 leaves PNG and WebP as they are")
@pytest.mark.parametrize("name", EXIF_CASES)
def test_orientation_is_that_of_opencv(name):
    data, expected = EXIF_CASES[name]
    turned = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert (turned.shape[:2] == (WIDTH, HEIGHT)) == (expected >= 5)


# What is refused


def frame(*, precision: int = 8, height: int = HEIGHT, width: int = WIDTH, marker: int = 0xC0) -> bytes:
    data = patched(JPEG, SOF + 1, bytes((marker,)))
    return patched(data, SOF + 4, struct.pack(">BHH", precision, height, width))


REFUSED = {
    "12 bits": (frame(precision=12), "12-bit JPEG"),
    "lossless": (frame(marker=0xC3), "lossless JPEG"),
    "hierarchical": (frame(marker=0xC5), "hierarchical JPEG"),
    "JPEG-LS": (frame(marker=0xF7), "JPEG-LS"),
    "DNL": (frame(height=0), "DNL"),
    "no width": (frame(width=0), "width 0"),
    "no components": (patched(JPEG, SOF + 9, b"\0"), "0 components"),
    "sampling factor 0": (patched(JPEG, SOF + 11, b"\x02"), "sampling factors"),
    "no frame": (JPEG[:SOF] + JPEG[SOS:], "no frame header"),
    "two frames": (JPEG[:SOS] + JPEG[SOF:SOF + 19] + JPEG[SOS:], "two frame headers"),
    "no image": (JPEG[:SOF] + b"\xff\xd9", "no image in this JPEG: end"),
    "second start": (JPEG[:2] + JPEG, "second start of image"),
    "ends in a segment": (JPEG[:SOF + 6], "truncated: JPEG segment ff c0"),
    "ends in a length": (JPEG[:SOF + 3], "truncated: the header goes on"),
    "ends between segments": (JPEG[:SOF], "truncated: the JPEG header ends"),
    "many segments": (JPEG[:2] + b"\xff\xfe\0\2" * 11_000 + JPEG[2:], "more than 10,000 JPEG segments"),
    "PNG without size": (PNG[:20], "truncated"),
    "PNG of Apple": (PNG[:8] + b"\0\0\0\4CgBI" + bytes(8) + PNG[8:], "CgBI"),
    "PNG 0 wide": (patched(PNG, 16, bytes(4)), "0 x 24"),
    "WebP without frame": (WEBP[:24], "truncated"),
    "WebP of another kind": (patched(WEBP, 12, b"VP9 "), "VP9"),
    "WebP key frame": (patched(WEBP, 23, b"\0\0\0"), "9d 01 2a"),
    "WebP lossless": (patched(WEBP_LOSSLESS, 20, b"\0"), "not 2f"),
    "empty": (b"", "empty file"),
    "zeros": (bytes(5000), "all 5,000 bytes are zero"),
    "GIF": (b"GIF89a" + bytes(20), r"starts with 47 49 46 38 \(GIF\); JPEG, PNG and WebP are stored"),
    "BMP": (pillow("BMP"), "BMP"),
    "TIFF": (pillow("TIFF"), "TIFF"),
    "AVIF": (b"\0\0\0\x20ftypavif" + bytes(20), "AVIF"),
    "HEIC": (b"\0\0\0\x18ftypheic" + bytes(20), "HEIC"),
    "JPEG XL": (b"\xff\x0a" + b"\1" * 20, "JPEG XL"),
    "JPEG 2000": (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    "PDF": (b"%PDF-1.7\n", "PDF"),
    "HTML": (b"\xef\xbb\xbf\n <!DOCTYPE HTML><html>404</html>", "HTML"),
    "SVG": (b"<svg xmlns='x'/>", "SVG"),
    "text": ("Datei nicht gefunden: \u00fc".encode(), "text: 'Datei nicht"),
    "Git-LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "four NULs": (bytes(4) + JPEG, "a JPEG begins at byte 4"),
    "one byte": (b"\xff", r"starts with ff \(unknown\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    data, reason = REFUSED[name]
    with pytest.raises(DecodeError, match=reason):
        probe(data)


def test_junk_between_segments_is_passed_over():
    junk = b"\0\1\2\xff\0\xff\xff\xff"
    assert probe(JPEG[:2] + junk + JPEG[2:SOF] + junk + JPEG[SOF:])[1:3] == (WIDTH, HEIGHT)


def test_the_scale_of_a_webp_isn_t_its_size():
    data = patched(patched(WEBP, 27, bytes((WEBP[27] | 0x40,))), 29, bytes((WEBP[29] | 0x80,)))
    assert data != WEBP
    assert probe(data)[1:3] == (WIDTH, HEIGHT)


def test_markers_without_payload_are_passed_over():
    assert probe(JPEG[:2] + b"\xff\x01\xff\xd0" + JPEG[2:])[1:3] == (WIDTH, HEIGHT)


def test_a_long_run_of_fill_bytes_takes_linear_time():
    probe(JPEG[:2] + b"\xff" * 2_000_000 + b"\0" + JPEG[2:])  # hours, were it quadratic


def test_the_limit_is_on_pixels_and_settable():
    photo = frame(width=12_000, height=9_000)  # a 108-Mpixel phone
    assert probe(photo)[1:3] == (12_000, 9_000)
    with pytest.raises(ImageTooLarge, match="12000 x 9000 pixels, 108 million; the limit is 10 million"):
        probe(photo, max_pixels=10_000_000)
    with pytest.raises(ImageTooLarge):
        probe(frame(width=60_000, height=60_000))
    with pytest.raises(ImageTooLarge):
        probe(patched(PNG, 16, struct.pack(">II", 1 << 30, 1 << 30)))
    probe(JPEG, max_pixels=WIDTH * HEIGHT)
    with pytest.raises(ImageTooLarge):
        probe(JPEG, max_pixels=WIDTH * HEIGHT - 1)
    assert Image.MAX_IMAGE_PIXELS is not None
    assert abs(MAX_PIXELS - 2 * Image.MAX_IMAGE_PIXELS) <= 1


@pytest.mark.parametrize("wrong", ["text", 5, None])
def test_only_bytes_are_taken(wrong):
    with pytest.raises(TypeError):
        probe(wrong)


# Whatever comes: an answer or a DecodeError

SEEDS = [JPEG, PNG, WEBP, WEBP_LOSSLESS, *(data for data, _ in EXIF_CASES.values())]


def probe_quietly(data: bytes) -> None:
    try:
        info = probe(data)
    except DecodeError:
        return
    assert info.format in ("jpeg", "png", "webp")
    assert 0 < info.width * info.height <= MAX_PIXELS
    assert 1 <= info.orientation <= 8


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 700), st.binary(min_size=1, max_size=4)), max_size=4),
       st.integers(0, 1000))
def test_mutations(data, changes, stop):
    for at, new in changes:
        data = patched(data, at, new)
    probe_quietly(data[:stop])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([JPEG[:2], with_exif(tiff(6))[:30], PNG[:8], WEBP[:12] + b"VP8X"]), st.binary(max_size=200))
def test_noise(start, rest):
    probe_quietly(start + rest)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([b"II*\0", b"MM\0*"]), st.binary(max_size=60))
def test_exif_is_never_fatal(start, rest):
    assert 1 <= exif_orientation(memoryview(start + rest)) <= 8


@pytest.mark.parametrize("data", [JPEG, PNG, WEBP, pillow("WEBP", exif=tiff(6)), with_exif(tiff(6))],
                         ids=["jpeg", "png", "webp", "webp-exif", "jpeg-exif"])
def test_every_prefix(data):
    for stop in range(len(data)):
        probe_quietly(data[:stop])
