"""What an ingest changes of images: smaller, pixels, tiles; what it leaves alone; and what it says of it."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from conftest import Photos, encode_photo, picture, with_orientation
from lmdbstore import ImageStore, IngestOptions, codec, ingest, tiles, verify
from lmdbstore.errors import DecodeError, IngestError, OptionError, OptionsChanged
from lmdbstore.export import changes, export
from lmdbstore.ingestion import pipeline, preprocess
from lmdbstore.ingestion.preprocess import How, Treated, Treatment, summary, treatment
from lmdbstore.layout import FORMATS
from lmdbstore.plans import Plan, Window
from lmdbstore.turbo import TURBO

needs_divider = pytest.mark.skipif(
    shutil.which("jpegtran") is None and not (TURBO and TURBO.divides), reason="no jpegtran, no libjpeg-turbo 3"
)


def photo(height: int = 90, width: int = 120, kind: str = "colour") -> bytes:
    return encode_photo(picture(np.random.default_rng((height, width)), height, width), kind)


def treated(data: bytes, **options: object) -> Treated:
    """Return an image as an ingest with these options stores it."""
    treat = treatment(Treatment(**options))  # type: ignore[arg-type]
    assert treat
    return treat(data, codec.check(data))


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"short_side": 0}, "short_side 0"),
        ({"max_side": -5}, "max_side -5"),
        ({"short_side": 5, "max_side": 9}, "short_side 5 and max_side 9: choose one"),
        ({"quality": 80}, "quality 80: only with short_side or max_side"),
        ({"short_side": 5, "quality": 0}, "quality 0: 1 to 100"),
        ({"short_side": 5, "quality": 101}, "quality 101: 1 to 100"),
        ({"short_side": 5, "pixels": True, "quality": 80}, "quality 80: only"),
        ({"pixels": True, "tile": True}, "tile and pixels"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        IngestOptions(**options)  # type: ignore[arg-type]


def test_nothing_to_do() -> None:
    assert treatment(IngestOptions()) is None
    assert summary(IngestOptions(), np.zeros(3, np.uint8)) == []


@given(width=st.integers(1, 70_000), height=st.integers(1, 70_000), side=st.integers(1, 5000))
def test_sizes(width: int, height: int, side: int) -> None:
    for options, taken in ((Treatment(short_side=side), min), (Treatment(max_side=side), max)):
        new = options.size(width, height)
        if taken(width, height) <= side:
            assert new == (width, height)
        else:
            assert taken(new) == side
            assert max(new[0] * height, 1) == pytest.approx(new[1] * width, abs=max(width, height))


# Smaller, and pixels


@pytest.mark.parametrize("kind", ["colour", "progressive", "png", "webp", "exif6"])
@pytest.mark.parametrize("options", [{"short_side": 90}, {"max_side": 120}, {"short_side": 500}])
def test_images_that_are_small_enough_stay_as_they_are(kind: str, options: dict[str, int]) -> None:
    data = photo(kind=kind)
    assert treated(data, **options) == (data, codec.probe(data), How.AS_IT_WAS)


@pytest.mark.parametrize("kind", ["colour", "progressive", "png", "webp", *(f"exif{n}" for n in range(1, 9))])
def test_a_smaller_image_is_upright_and_a_jpeg(kind: str) -> None:
    data = photo(90, 120, kind)
    found = treated(data, short_side=45, quality=95)
    turned = kind in ("exif5", "exif6", "exif7", "exif8")
    assert found.info == codec.probe(found.data) == ("jpeg", *((45, 60) if turned else (60, 45)), 1)
    assert found.how == How.SHRUNK
    upright = codec.decode(data)
    expected = cv2.resize(upright, found.info[1:3], interpolation=cv2.INTER_AREA)
    assert np.abs(codec.decode(found.data).astype(int) - expected).mean() < 3


def test_quality_and_grey() -> None:
    low, high = (treated(photo(), max_side=60, quality=quality) for quality in (20, 95))
    assert len(low.data) < len(high.data)
    assert treated(photo(), max_side=60) == treated(photo(), max_side=60, quality=90)
    with Image.open(io.BytesIO(treated(photo(kind="grey"), max_side=60).data)) as image:
        assert image.mode == "L"


@pytest.mark.parametrize("kind", ["colour", "grey", "png", "exif3", "exif8"])
def test_pixels(kind: str) -> None:
    data = photo(9, 12, kind)
    found = treated(data, pixels=True)
    pixels = codec.decode(data)
    assert found.how == How.PIXELS
    assert found.info == codec.check(found.data) == ("ppm", pixels.shape[1], pixels.shape[0], 1)
    assert found.data[-pixels.size :] == pixels.tobytes()
    decoded = codec.decode(found.data)
    assert np.array_equal(decoded, pixels)
    assert decoded.flags.writeable
    assert np.array_equal(codec.decode(found.data, color="bgr"), pixels[..., ::-1])
    assert np.array_equal(cv2.imdecode(np.frombuffer(found.data, np.uint8), cv2.IMREAD_COLOR), pixels[..., ::-1])


def test_pixels_of_a_smaller_image() -> None:
    found = treated(photo(), short_side=9, pixels=True)
    assert found.how == How.SHRUNK | How.PIXELS
    assert found.info[:3] == ("ppm", 12, 9)


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"x", lambda d: d.replace(b"255", b"65535"),
                                    lambda d: d.replace(b"12 9", b"0 9")])  # fmt: skip
def test_damaged_pixels(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(DecodeError):
        codec.check(change(treated(photo(9, 12), pixels=True).data))


def test_what_must_be_decoded_and_can_t_be() -> None:
    treat = treatment(Treatment(pixels=True))
    assert treat
    with pytest.raises(DecodeError):
        treat(b"no image at all", codec.ImageInfo("unknown", 0, 0, 1))


# Tiles


@needs_divider
@pytest.mark.parametrize("kind", ["colour", "grey", "progressive", *(f"exif{n}" for n in range(1, 9))])
def test_tiled_has_the_same_pixels(kind: str) -> None:
    data = photo(90, 120, kind)
    found = treated(data, tile=True)
    assert found.how == How.TILED
    assert found.info == codec.check(found.data) == codec.probe(data)
    assert np.array_equal(codec.decode(found.data), codec.decode(data))
    assert tiles.cut(found.data, 50, 40, 20, 20)


@needs_divider
def test_icc_and_exif_survive_tiling() -> None:
    profile = bytes(range(256)) * 300  # more than one segment holds
    image = Image.fromarray(picture(np.random.default_rng(0), 90, 120))
    image.save(file := io.BytesIO(), "JPEG", icc_profile=profile, comment=b"hello")
    found = treated(with_orientation(file.getvalue(), 6), tile=True)
    assert found.how == How.TILED
    with Image.open(io.BytesIO(found.data)) as image:
        assert image.info["icc_profile"] == profile
        assert image.info["comment"] == b"hello"
        assert image.getexif()[0x0112] == 6


@needs_divider
def test_smaller_and_tiled() -> None:
    found = treated(photo(), short_side=45, tile=True)
    assert found.how == How.SHRUNK | How.TILED
    assert np.array_equal(codec.decode(found.data), codec.decode(treated(photo(), short_side=45).data))


@needs_divider
@pytest.mark.parametrize("kind", ["png", "webp"])
def test_other_formats_aren_t_tiled(kind: str) -> None:
    data = photo(kind=kind)
    assert treated(data, tile=True) == (data, codec.probe(data), How.UNSUITED)


@needs_divider
def test_a_truncated_image_isn_t_tiled() -> None:
    data = photo(200, 200)[:-400]
    treat = treatment(Treatment(tile=True))
    assert treat
    assert treat(data, codec.check(data, keep_truncated=True)) == (data, codec.probe(data), How.UNSUITED)


def test_an_image_that_would_change_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    other = cv2.imencode(".jpg", picture(np.random.default_rng(1), 90, 120), [cv2.IMWRITE_JPEG_RST_INTERVAL, 4])[1]
    monkeypatch.setattr(preprocess, "_divider", lambda: lambda data, interval: other.tobytes())
    assert treated(photo(), tile=True) == (photo(), codec.probe(photo()), How.DIFFERENT)
    monkeypatch.setattr(preprocess, "_divider", lambda: lambda data, interval: data)
    assert treated(photo(), tile=True).how == How.UNSUITED


def test_nothing_that_tiles(monkeypatch: pytest.MonkeyPatch, photos: Photos, tmp_path: Path) -> None:
    without_library(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(IngestError, match="apt-get install libjpeg-turbo-progs") as caught:
        ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb", options=IngestOptions(tile=True))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the library is libjpeg-turbo 2."""
    if TURBO is not None:
        monkeypatch.setattr(type(TURBO), "divides", False)


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("kill -9 $$", IngestError, "signal 9 from outside.*goes on where it stopped"),
        ("kill -2 $$", IngestError, "signal 2"),
        ("kill -11 $$", DecodeError, "exit code -11"),
        ("cat >/dev/null; echo bad Huffman code >&2; exit 2", DecodeError, "jpegtran: bad Huffman code"),
        ("cat; echo a warning >&2", DecodeError, "a warning"),
        ("sleep 5", DecodeError, "more than 0.2 s"),
    ],
)
def test_a_program_that_fails(
    script: str, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess, "_SECONDS", 0.2)
    program = tmp_path / "jpegtran"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with pytest.raises(error, match=message):
        preprocess._jpegtran(str(program), photo(), 4)


# Whole ingests


@needs_divider
def test_a_tiled_store(photos: Photos, tmp_path: Path) -> None:
    report = ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb", options=IngestOptions(tile=True))
    assert report.notes[-1].startswith("38 of 40 images were tiled: other bytes, the same pixels; kept as they were: 2")
    assert verify(report.path, decode=True).problems == []
    with ImageStore(report.path) as store:
        assert store.manifest.options["tile"] is True
        assert store.manifest.notes == tuple(report.notes)
        for id in store.ids:
            assert np.array_equal(store.decode(id), codec.decode(photos.data(id)))
            untouched = photos.kinds[id] in ("png", "webp")
            assert (store.read(id) == photos.data(id)) == untouched
            assert (tiles.index(store.read(id)) is None) == untouched
        (said,) = changes(store.manifest)
        assert "bytes differ from the files', their pixels don't" in said
        export(store, out=tmp_path / "out")
    exported = next(path for path in (tmp_path / "out").iterdir() if path.is_dir())
    again = ingest(tmp_path / "out" / "train.csv", images=exported, out=tmp_path / "again.lmdb")
    assert again.images == 40


@pytest.mark.parametrize("options", [{"short_side": 40}, {"max_side": 50, "quality": 70}, {"pixels": True}])
def test_a_preprocessed_store(photos: Photos, tmp_path: Path, options: dict[str, int]) -> None:
    chosen = IngestOptions(**options)  # type: ignore[arg-type]
    report = ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb", options=chosen)
    assert verify(report.path, decode=True).problems == []
    with ImageStore(report.path) as store:
        assert options.items() <= store.manifest.options.items()
        for i, id in enumerate(store.ids):
            info = codec.probe(photos.data(id))
            pixels = store.decode(id)
            turned = info.orientation > 4
            size = chosen.size(info.width, info.height)
            assert pixels.shape[:2] == (size if turned else size[::-1])
            if size == info[1:3] and not chosen.pixels:
                assert store.read(id) == photos.data(id)
            else:
                assert FORMATS[store.column("format")[i]] == ("ppm" if chosen.pixels else "jpeg")
                assert store.column("orientation")[i] == 1
            if chosen.pixels:
                assert np.array_equal(pixels, codec.decode(photos.data(id)))
        assert len(changes(store.manifest)) == 1


def test_a_resume_has_the_same_options(photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    places = {"images": photos.images, "out": tmp_path / "o.lmdb"}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline, "_finish", interrupted)
        ingest(photos.csv, **places, options=IngestOptions(max_side=50))
    for other in (IngestOptions(), IngestOptions(max_side=51), IngestOptions(max_side=50, quality=80)):
        with pytest.raises(OptionsChanged, match="max_side"):
            ingest(photos.csv, **places, options=other)
    report = ingest(photos.csv, **places, options=IngestOptions(max_side=50))
    assert report.resumed_from == 40
    shrunk = sum(max(codec.probe(photos.data(id))[1:3]) > 50 for id in photos.ids)
    assert report.notes[-1].startswith(f"{shrunk} of 40 images were brought to long side 50")


@needs_divider
def test_a_crop_of_a_large_tiled_image_reads_its_part(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = cv2.resize(rng.integers(0, 256, (400, 600, 3), np.uint8), (1200, 800), interpolation=cv2.INTER_CUBIC)
    (tmp_path / "a.jpg").write_bytes(codec.encode(noise, quality=95))
    (tmp_path / "train.csv").write_text("id,label\na,1\n")
    ingest(tmp_path / "train.csv", images=tmp_path, out=tmp_path / "o.lmdb", options=IngestOptions(tile=True))
    with ImageStore(tmp_path / "o.lmdb") as store:
        offset, length = int(store.column("offset")[0]), int(store.column("length")[0])
        read: list[tuple[int, int]] = []
        store._make_resident = lambda start, size: read.append((start - offset, size))  # type: ignore[method-assign]
        plan = Plan(Window(300, 300, 100, 90), 1, (90, 100))
        store.decode_at(0, plan=plan)
        store.decode("a")  # columns are read once
        read.clear()
        whole = store.decode("a")
        assert read == [(0, length)]
        read.clear()
        pixels = store.decode_at(0, plan=plan)
        assert np.array_equal(pixels, whole[300:390, 300:400])
        head, part = read
        assert head[0] == 0
        assert head[1] + part[1] < length / 4
