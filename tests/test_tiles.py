"""Tiles: a window of a JPEG, cut from its bytes, has the pixels of the whole; and no bytes make it crash."""

from __future__ import annotations

import io
import struct

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from conftest import with_orientation
from lmdbstore import codec, tiles
from lmdbstore.headers import jpeg_segments
from lmdbstore.plans import Window, scaled

FACTORS = {"444": 0x111111, "422": 0x211111, "420": 0x221111, "440": 0x121111, "411": 0x411111}
SAMPLINGS = [*FACTORS, "gray"]
MCU = {"444": (8, 8), "422": (16, 8), "420": (16, 16), "440": (8, 16), "411": (32, 8), "gray": (8, 8)}
SIZES = [(1, 1), (7, 9), (16, 16), (33, 130), (130, 33), (97, 257), (50, 259), (240, 320)]  # height, width


def picture(height: int, width: int) -> np.ndarray:
    """Return soft colours in which every neighbourhood is its own."""
    rng = np.random.default_rng((height, width))
    small = rng.integers(0, 256, (height // 6 + 2, width // 6 + 2, 3), np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)


def encoded(sampling: str, height: int, width: int, interval: int = 0, **more: int) -> bytes:
    """Encode a picture, with a restart marker after every `interval` MCUs."""
    pixels = picture(height, width)
    options = [cv2.IMWRITE_JPEG_QUALITY, 87, cv2.IMWRITE_JPEG_RST_INTERVAL, interval]
    if sampling == "gray":
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)
    else:
        options += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, FACTORS[sampling]]
    if more.get("progressive"):
        options += [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]
    return cv2.imencode(".jpg", pixels, options)[1].tobytes()


def tiled(sampling: str, height: int, width: int) -> bytes:
    """Encode a picture as an ingest with --tile stores it."""
    interval = tiles.restart_interval(encoded(sampling, height, width))
    assert interval
    indexed = tiles.with_index(encoded(sampling, height, width, interval))
    assert indexed
    return indexed


# How a picture is divided


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_the_interval_divides_a_row(sampling: str, height: int, width: int) -> None:
    row = -(-width // MCU[sampling][0])
    interval = tiles.restart_interval(encoded(sampling, height, width))
    assert interval == max(n for n in range(1, 9) if row % n == 0)


@pytest.mark.parametrize("data", [b"", b"\xff", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"\x89PNG\r\n\x1a\n", b"x" * 100])
def test_what_is_no_jpeg_has_no_interval(data: bytes) -> None:
    assert tiles.restart_interval(data) is None
    assert tiles.index(data) is None
    assert tiles.with_index(data) is None
    assert tiles.cut(data, 0, 0, 1, 1) is None


@pytest.mark.parametrize(
    "data",
    [
        encoded("420", 64, 160),
        encoded("420", 64, 160, 3),  # 10 MCUs in a row
        encoded("420", 64, 160, 20),  # two rows
        encoded("420", 64, 160, 5, progressive=1),
        encoded("420", 64, 160, 5)[:-2],
        encoded("420", 64, 160, 5)[:300],
    ],
    ids=["no markers", "no whole rows", "two rows", "progressive", "no end", "half"],
)
def test_not_tiled(data: bytes) -> None:
    assert tiles.index(data) is None
    assert tiles.with_index(data) is None
    assert tiles.cut(data, 0, 0, 10, 10) is None


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_index_and_markers_say_the_same(sampling: str, height: int, width: int) -> None:
    indexed = tiles.index(tiled(sampling, height, width))
    looked_for = tiles.index(encoded(sampling, height, width, tiles.restart_interval(encoded(sampling, height, width))))
    assert indexed and looked_for
    assert np.array_equal(np.diff(indexed.edges), np.diff(looked_for.edges))
    assert indexed[:6] == looked_for[:6] == (width, height, *indexed[2:6])
    assert (indexed.tile_height, indexed.tile_width % MCU[sampling][0]) == (MCU[sampling][1], 0)


def test_an_index_is_replaced_not_added() -> None:
    once = tiled("420", 64, 160)
    assert tiles.with_index(once) == once
    assert tiles.with_index(once + b"behind the end") == once


def test_everything_else_in_the_header_stays() -> None:
    icc = b"\xff\xe2" + struct.pack(">H", 2 + 14 + 500) + b"ICC_PROFILE\0\1\1" + bytes(500)
    comment = b"\xff\xfe" + struct.pack(">H", 2 + 5) + b"hello"
    plain = with_orientation(encoded("422", 64, 160, 5), 6)
    data = plain[:2] + comment + icc + plain[2:]
    indexed = tiles.with_index(data)
    assert indexed
    assert icc in indexed
    assert comment in indexed
    assert codec.probe(indexed) == codec.probe(data)
    assert codec.probe(indexed).orientation == 6
    assert np.array_equal(codec.decode(indexed), codec.decode(data))
    assert len(indexed) - len(data) < 100 + 2 * (2 * 8)


def test_too_many_segments_for_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_MOST", 15)
    data = encoded("420", 64, 160, 2)
    assert tiles.with_index(data) == data
    assert tiles.cut(data, 40, 20, 10, 10) is not None


# Cutting


@pytest.mark.parametrize("sampling", SAMPLINGS)
@settings(max_examples=60, deadline=None)
@given(draw=st.data(), size=st.sampled_from(SIZES[2:]), scale=st.sampled_from([1, 1, 1, 2, 4, 8]))
def test_a_window_has_the_pixels_of_the_whole(
    sampling: str, draw: st.DataObject, size: tuple[int, int], scale: int
) -> None:
    height, width = size
    x, y = draw.draw(st.integers(0, width - 1)), draw.draw(st.integers(0, height - 1))
    window = Window(x, y, draw.draw(st.integers(1, width - x)), draw.draw(st.integers(1, height - y)))
    data = tiled(sampling, height, width)
    at = scaled(window, scale)
    whole = codec.decode_window(encoded(sampling, height, width), Window(0, 0, width, height), scale=scale)
    found = codec.decode_window(data, window, scale=scale)
    assert np.array_equal(found, whole[at.y : at.y + at.height, at.x : at.x + at.width])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_part_is_an_ordinary_jpeg(sampling: str) -> None:
    data = tiled(sampling, 240, 320)
    part = tiles.cut(data, 100, 90, 60, 50)
    whole = tiles.index(data)
    assert part and whole
    assert part.x % whole.tile_width == part.y % whole.tile_height == 0
    assert part.x < 100 < 160 < part.x + codec.check(part.data).width
    assert part.y < 90 < 140 < part.y + codec.check(part.data).height
    with Image.open(io.BytesIO(part.data)) as image:
        image.load()  # Pillow raises where a marker or a byte is missing
    again = tiles.index(part.data)  # by looking for its markers, which must be in turn
    assert again and again.edges[-1] == len(part.data)
    assert len(part.data) < len(data) / 2


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("width", range(257, 273))
def test_slivers_at_the_right_edge(sampling: str, width: int) -> None:
    data, whole = tiled(sampling, 20, width), codec.decode(encoded(sampling, 20, width))
    for x in range(250, width):
        assert np.array_equal(codec.decode_window(data, Window(x, 3, width - x, 9)), whole[3:12, x:])


def test_four_inks() -> None:
    inks = np.random.default_rng(0).integers(0, 256, (9, 12, 4), np.uint8)
    image = Image.fromarray(cv2.resize(inks, (200, 150)), "CMYK")
    image.save(file := io.BytesIO(), "JPEG", quality=90, restart_marker_blocks=5)  # 25 in a row
    data = tiles.with_index(file.getvalue())
    assert data
    part = codec.decode_window(data, Window(71, 33, 50, 60))
    assert np.array_equal(part, codec.decode(file.getvalue())[33:93, 71:121])
    cut = tiles.cut(data, 71, 33, 50, 60)
    assert cut and b"Adobe" in cut.data  # says that the inks are inverted


def test_the_whole_is_the_file_itself() -> None:
    data = tiled("420", 240, 320)
    part = tiles.cut(data, 0, 0, 320, 240)
    assert part == (data, 0, 0)
    assert part.data is data


@pytest.mark.parametrize(
    "window", [(-1, 0, 5, 5), (0, -1, 5, 5), (316, 0, 5, 5), (0, 236, 5, 5), (0, 0, 0, 5), (5, 5, 5, 0)]
)
def test_windows_outside(window: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="in a picture of 320 x 240"):
        tiles.cut(tiled("420", 240, 320), *window)


@settings(max_examples=40, deadline=None)
@given(x=st.integers(0, 300), y=st.integers(0, 220))
def test_only_the_bytes_that_were_touched_are_read(x: int, y: int) -> None:
    data = tiled("420", 240, 320)
    ranges: list[tuple[int, int]] = []
    part = tiles.cut(data, x, y, 20, 20, touch=lambda *bounds: ranges.append(bounds))
    ((start, stop),) = ranges
    whole = tiles.index(data)
    assert part and whole
    masked = bytearray(data)
    masked[whole.edges[0] : max(start, whole.edges[0])] = b"?" * max(0, start - int(whole.edges[0]))
    masked[stop:] = b"?" * (len(data) - stop)
    assert tiles.cut(masked, x, y, 20, 20) == part
    assert stop - start < len(data) * 0.5


# Hostile bytes


def survives(data: bytes) -> None:
    """Do everything with data that may be anything; a window outside is the one error."""
    tiles.restart_interval(data)
    tiles.with_index(data)
    for window in ((0, 0, 1, 1), (100, 60, 50, 40)):
        try:
            part = tiles.cut(data, *window)
        except ValueError:
            continue
        assert part is None or len(part.data) <= len(data) + 2


@pytest.mark.parametrize("data", [tiled("420", 96, 160), encoded("420", 96, 160, 5)], ids=["index", "no index"])
@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=4)), min_size=1, max_size=4))
def test_changed_bytes(data: bytes, changes: list[tuple[int, bytes]]) -> None:
    changed = bytearray(data)
    for at, some in changes:
        at %= min(len(data), 1000) if at % 2 else len(data)  # half of them in the header
        changed[at : at + len(some)] = some
    survives(bytes(changed))


def test_cut_short_anywhere() -> None:
    data = tiled("420", 96, 160)
    for length in range(900):
        survives(data[:length])
    for length in range(900, len(data), 97):
        survives(data[:length])
        assert tiles.index(data[:length]) is None


def test_an_index_that_lies_makes_a_jpeg_that_isn_t_tiled() -> None:
    data = bytearray(tiled("420", 96, 160))
    at = data.index(b"lmdbstore tiles\0") + 16 + 20  # the first length
    first, second = struct.unpack_from(">HH", data, at)
    struct.pack_into(">HH", data, at, first + 1, second - 1)  # the sum is right
    assert tiles.cut(data, 0, 0, 20, 20) is None
    assert np.array_equal(codec.decode_window(data, Window(0, 0, 20, 20)), codec.decode(data)[:20, :20])
    struct.pack_into(">HH", data, at, first, 0xFFFF)  # beyond the end: looked for instead
    assert tiles.cut(data, 0, 0, 20, 20) is not None


def test_an_index_of_another_picture() -> None:
    one, other = tiled("420", 96, 160), tiled("420", 96, 320)
    payloads = [
        next(data[start - 4 : stop] for marker, start, stop in jpeg_segments(memoryview(data)) if marker == 0xE9)
        for data in (one, other)
    ]
    survives(one.replace(*payloads))
    mixed = one.replace(*payloads)
    window = Window(100, 40, 50, 30)
    assert np.array_equal(codec.decode_window(mixed, window), codec.decode(one)[40:70, 100:150])


def test_endless_segments_of_the_colour_space_take_no_time() -> None:
    survives(b"\xff\xd8" + b"\xff\xe0\x00\x02" * 200_000)
