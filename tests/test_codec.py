"""Pixels: the same as cv2.imread and Pillow give; damage found, harmless oddities passed; nothing but DecodeError."""

from __future__ import annotations

import csv
import io
import os
import pickle
import subprocess
import sys
import threading
import warnings
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from lmdbstore import codec
from lmdbstore.codec import ImageInfo, check, decode, encode, probe
from lmdbstore.errors import DecodeError, ImageTooLarge

HEIGHT, WIDTH = 96, 136


def picture(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """A photo-like picture, (height, width, 3) uint8 RGB, with four different corners."""
    rng = np.random.default_rng(7)
    coarse = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    fine = rng.integers(0, 24, (height, width, 3), dtype=np.uint8)
    return cv2.addWeighted(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC), 0.9, fine, 1, 0)


RGB = picture()


def pillow(kind: str, mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(RGB).convert(mode).save(file, kind, **options)
    return file.getvalue()


def opencv(extension: str, pixels: np.ndarray, *options: int) -> bytes:
    return cv2.imencode(extension, pixels, options)[1].tobytes()


def imread(data: bytes) -> np.ndarray:
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Mean difference in grey levels."""
    assert a.shape == b.shape
    return float(np.abs(a.astype(int) - b).mean())


JPEG = pillow("JPEG", quality=90)
RESTART = opencv(".jpg", RGB, cv2.IMWRITE_JPEG_RST_INTERVAL, 4)
PROGRESSIVE = pillow("JPEG", quality=90, progressive=True)
CMYK = pillow("JPEG", "CMYK", quality=95)
PNG, WEBP, WEBP_LOSSLESS = pillow("PNG"), pillow("WEBP", quality=90), pillow("WEBP", lossless=True)
KINDS = {
    "baseline": JPEG,
    "restart": RESTART,
    "progressive": PROGRESSIVE,
    "444": pillow("JPEG", quality=90, subsampling=0),
    "422": pillow("JPEG", quality=90, subsampling=1),
    "odd sampling": opencv(".jpg", RGB, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x121111),
    "grey": pillow("JPEG", "L"),
    "cmyk": CMYK,
    "png": PNG,
    "png 16 bit": opencv(".png", RGB.astype(np.uint16) * 257),
    "png palette": pillow("PNG", "P"),
    "png grey": pillow("PNG", "L"),
    "png alpha": pillow("PNG", "RGBA"),
    "webp": WEBP,
    "webp lossless": WEBP_LOSSLESS,
}


@pytest.fixture(params=["turbojpeg", "opencv"])
def each_backend(request, monkeypatch):
    """Run the test with libjpeg-turbo, and as it were without."""
    if request.param == "opencv":
        monkeypatch.setattr(codec, "_turbo", lambda: None)
    elif codec._turbo() is None:
        pytest.skip("no libturbojpeg")
    return request.param


# Pixels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_pixels_are_those_of_opencv_and_pillow(kind, wrap, each_backend):
    data = KINDS[kind]
    pixels = decode(wrap(data))
    assert (pixels.shape, pixels.dtype) == ((HEIGHT, WIDTH, 3), np.uint8)
    assert pixels.flags.c_contiguous and pixels.flags.writeable and pixels.flags.owndata
    assert distance(pixels[..., ::-1], imread(data)) < 1.1  # CMYK differs by the rounding; the others not at all
    assert distance(pixels, by_pillow(data)) < 2
    assert np.array_equal(decode(data, color="bgr")[..., ::-1], pixels)
    assert check(data) == probe(data)


def test_red_is_red(each_backend):
    red = np.zeros((16, 16, 3), np.uint8)
    red[..., 0] = 254
    for data in (encode(red), opencv(".png", red[..., ::-1])):
        assert decode(data)[8, 8].tolist() == pytest.approx([254, 0, 0], abs=2)
        assert decode(data, color="bgr")[8, 8].tolist() == pytest.approx([0, 0, 254], abs=2)


def test_ycck_and_the_colours_of_ink(each_backend):
    assert distance(decode(CMYK), RGB) < 6  # back to where it came from: not negative
    unmarked = CMYK.replace(b"\xff\xee\x00\x0eAdobe", b"\xff\xe9\x00\x0eAdobe")
    assert unmarked != CMYK
    assert distance(decode(unmarked), by_pillow(unmarked)) < 2


def test_ycck(shared, each_backend):
    for path in sorted((shared / "data/odd").rglob("*ycck-2112.jpg")):
        assert distance(decode(path.read_bytes()), by_pillow(path.read_bytes())) < 2


def with_orientation(data: bytes, orientation: int, order: str) -> bytes:
    exif = Image.Exif()
    exif.endian = order
    exif[0x112] = orientation
    block = exif.tobytes()
    return data[:2] + b"\xff\xe1" + (len(block) + 2).to_bytes(2, "big") + block + data[2:]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", "<>")
def test_orientation_is_applied_once(orientation, order, each_backend):
    data = with_orientation(JPEG, orientation, order)
    assert probe(data).orientation == orientation
    pixels = decode(data)
    assert np.array_equal(pixels[..., ::-1], imread(data))
    assert distance(pixels, by_pillow(data)) < 2
    assert pixels.flags.c_contiguous and pixels.flags.writeable
    assert np.array_equal(decode(JPEG, orientation=orientation), pixels), "the caller's word counts"
    assert np.array_equal(decode(data, orientation=np.uint8(1)), decode(JPEG)), "1 leaves it as it is"


def test_orientation_of_png_and_webp():
    exif = Image.Exif()
    exif[0x112] = 6
    for kind in ("PNG", "WEBP"):
        data = pillow(kind, exif=exif)
        assert decode(data).shape == (WIDTH, HEIGHT, 3)
        assert decode(data, orientation=1).shape == (HEIGHT, WIDTH, 3)


@pytest.mark.skipif(int(cv2.__version__.split(".")[0]) < 5, reason="OpenCV 4.10 decodes no animated WebP")
def test_animation_gives_its_first_frame():
    file = io.BytesIO()
    frames = [Image.fromarray(RGB), Image.fromarray(255 - RGB)]
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert distance(decode(file.getvalue()), RGB) < 1


@pytest.mark.parametrize("shape", [(1, 1), (1, 500), (500, 1), (17, 31)])
def test_small_and_narrow(shape, each_backend):
    data = encode(picture(*shape), subsampling="420")
    assert decode(data).shape == (*shape, 3)
    assert check(data) == ImageInfo("jpeg", shape[1], shape[0], 1)
    assert decode(data, orientation=6).shape == (shape[1], shape[0], 3)


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411", "gray"])
def test_encode(subsampling, each_backend):
    data = encode(RGB, quality=95, subsampling=subsampling)
    reference = RGB if subsampling != "gray" else np.asarray(Image.fromarray(RGB).convert("L").convert("RGB"))
    assert distance(decode(data), reference) < 8
    assert encode(RGB[..., ::-1], color="bgr") == encode(RGB), "a view with a negative stride"


@pytest.mark.parametrize("wrong", [{"quality": 0}, {"quality": 101}, {"color": "cmyk"}, {"subsampling": "4:2:0"}])
def test_encode_says_what_is_wrong(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        encode(RGB, **wrong)
    with pytest.raises(ValueError, match="float64"):
        encode(RGB.astype(float))
    with pytest.raises(ValueError, match="color="):
        decode(JPEG, color="hsv")


# Damage


@pytest.mark.parametrize("data", [JPEG, RESTART, PROGRESSIVE, CMYK, pillow("JPEG", "L")],
                         ids=["baseline", "restart", "progressive", "cmyk", "grey"])
@pytest.mark.parametrize("share", [0.45, 0.8, 0.95])
def test_truncated_jpeg(data, share, each_backend):
    start = data.rindex(b"\xff\xda") if data is not PROGRESSIVE else data.index(b"\xff\xda")
    cut = data[:start + 20 + int(share * (len(data) - start - 20))]
    with pytest.raises(DecodeError, match="^truncated: "):
        check(cut)
    assert check(cut, keep_truncated=True) == probe(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partial = decode(cut)
    whole = decode(data)
    assert np.array_equal(partial[:8], whole[:8]) or data is PROGRESSIVE
    assert not np.array_equal(partial, whole)


@pytest.mark.parametrize("cut", [3, 6, 12])
def test_the_last_bytes_of_the_data_count(cut):
    with pytest.raises(DecodeError, match="^truncated: "):
        check(JPEG[:-2 - cut])


def test_progressive_without_its_last_scans(each_backend):
    last = PROGRESSIVE.rindex(b"\xff\xda")
    tables = PROGRESSIVE.rindex(b"\xff\xc4", 0, last)
    with pytest.raises(DecodeError, match="whole scans are missing"):
        check(PROGRESSIVE[:tables])


SOS = JPEG.index(b"\xff\xda")
HARMLESS = {
    "no EOI": JPEG[:-2],
    "half an EOI": JPEG[:-1],
    "progressive, no EOI": PROGRESSIVE[:-2],
    "zeros behind": JPEG + bytes(1000),
    "garbage behind": JPEG + bytes(range(256)) * 8,
    "no EOI, zeros behind": JPEG[:-2] + bytes(1000),
    "no EOI, garbage behind": JPEG[:-2] + bytes(99) + b"\xff\x50" + bytes(99),
    "junk before the tables": JPEG[:2] + b"\1\2\3" + JPEG[2:],
    "junk before the scan": JPEG[:SOS] + b"\1\2\3" + JPEG[SOS:],
    "junk before the EOI": JPEG[:-2] + b"\1\2\3" + JPEG[-2:],
    "junk, and no EOI": JPEG[:SOS] + b"\1\2\3" + JPEG[SOS:-2],
    "JFIF 9.9": JPEG.replace(b"JFIF\0\1\1", b"JFIF\0\x09\x09"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_oddities_pass(name, each_backend):
    data = HARMLESS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check(data) == probe(JPEG)
    assert np.array_equal(decode(data), decode(JPEG))


def test_a_harmless_warning_hides_no_damage():
    for junk in (HARMLESS["junk before the scan"], HARMLESS["JFIF 9.9"]):
        with pytest.raises(DecodeError, match="^truncated: "):
            check(junk[:-300])
    damaged = RESTART[:2] + b"\1\2\3" + RESTART[2:].replace(b"\xff\xd3", b"\xff\xd6", 1)
    with pytest.raises(DecodeError, match="^corrupt: .*RST"):
        check(damaged)


def test_a_fatal_error_after_a_warning_is_no_warning():
    # libjpeg-turbo's error code calls "Unsupported color conversion" a warning here, and leaves the pixels unset
    data = CMYK[:2] + b"\1\2\3" + CMYK[2:]
    assert np.array_equal(decode(data), decode(CMYK))


def test_stray_bytes_cost_no_colours(each_backend):
    # RGB inside, which only the Adobe segment says once the components are called 1, 2, 3
    data = pillow("JPEG", quality=90, keep_rgb=True)
    data = data.replace(b"R\x11\0G\x11\0B\x11\0", b"\1\x11\0\2\x11\0\3\x11\0")
    data = data.replace(b"\3R\0G\0B\0", b"\3\1\0\2\0\3\0")
    assert distance(decode(data), RGB) < 3
    assert np.array_equal(decode(data[:2] + b"\1" + data[2:]), decode(data))


def test_corrupt_jpeg():
    data = bytearray(RESTART)
    at = RESTART.index(b"\xff\xd3")
    data[at + 1] = 0xD6
    with pytest.raises(DecodeError, match="^corrupt: .*RST"):
        check(bytes(data))
    assert decode(bytes(data)).shape == RGB.shape


@pytest.mark.parametrize("data", [JPEG, RESTART, PROGRESSIVE, KINDS["odd sampling"]],
                         ids=["baseline", "restart", "progressive", "odd sampling"])
def test_overwritten_jpeg(data, each_backend):
    # OpenCV gives half a picture for this without a word; hundreds of bytes of noise hold a marker or two.
    at = len(data) * 2 // 3
    for noise in (np.random.default_rng(1).bytes(510), b"\x5a" * 510):
        with pytest.raises(DecodeError):
            check(data[:at] + noise + b"\xff\x50" + data[at + 512:])


@pytest.mark.parametrize("data", [PNG, WEBP, WEBP_LOSSLESS], ids=["png", "webp", "webp lossless"])
@pytest.mark.parametrize("cut", [20, 400, 2000])
def test_truncated_png_and_webp(data, cut):
    with pytest.raises(DecodeError, match="^truncated: "):
        check(data[:-cut])


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def test_corrupt_png():
    middle = len(PNG) // 2
    with pytest.raises(DecodeError, match="checksum in PNG chunk IDAT"):
        check(PNG[:middle] + bytes((PNG[middle] ^ 255,)) + PNG[middle + 1:])
    rows = zlib.compress(bytes(500))
    with pytest.raises(DecodeError, match="corrupt: whole chunks give 500 of"):
        check(PNG[:33] + chunk(b"IDAT", rows) + chunk(b"IEND", b""))
    with pytest.raises(DecodeError, match="corrupt: compressed rows"):
        check(PNG[:33] + chunk(b"IDAT", b"not zlib") + chunk(b"IEND", b""))


def test_interlaced_png(shared):
    paths = sorted((shared / "data/odd").rglob("*interlace*.png"))
    assert all("truncat" in str(path) for path in paths), "a whole one would be worth a test"


def test_nothing_to_decode(each_backend):
    start = JPEG.index(b"\xff\xc4")
    bad_table = JPEG[:start + 5] + b"\xff" * 16 + JPEG[start + 21:]
    for data in (b"", b"\xff\xd8\xff\xd9", bad_table):
        for orientation in (None, 1):
            with pytest.raises(DecodeError):
                decode(data, orientation=orientation)
        with pytest.raises(DecodeError):
            check(data)


# Bombs


def resized(data: bytes, width: int, height: int, frame: bytes = b"\xff\xc0") -> bytes:
    at = data.index(frame) + 5
    return data[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + data[at + 4:]


@pytest.mark.parametrize("orientation", [None, 1])
def test_a_giant_header_is_refused_before_any_allocation(orientation, each_backend):
    for data in (resized(JPEG, 60_000, 60_000), PNG[:16] + b"\0\1\0\0" * 2 + PNG[24:]):
        with pytest.raises(ImageTooLarge):
            decode(data, orientation=orientation)
        with pytest.raises(ImageTooLarge):
            check(data)
    with pytest.raises(ImageTooLarge):
        decode(JPEG, orientation=orientation, max_pixels=WIDTH * HEIGHT - 1)
    assert decode(JPEG, orientation=orientation, max_pixels=WIDTH * HEIGHT).shape == RGB.shape


def test_more_pixels_than_the_bytes_can_hold():
    for data, frame in ((JPEG, b"\xff\xc0"), (PROGRESSIVE, b"\xff\xc2")):
        with pytest.raises(DecodeError, match="^truncated: .* pixels take"):
            check(resized(data, 13_000, 13_000, frame))


def test_scan_bomb(each_backend):
    last = PROGRESSIVE.rindex(b"\xff\xda")
    bomb = PROGRESSIVE[:-2] + PROGRESSIVE[last:-2] * 600 + b"\xff\xd9"
    with pytest.raises(DecodeError, match="500 scans"):
        check(bomb)
    if each_backend == "turbojpeg":
        with pytest.raises(DecodeError, match="scans"):
            decode(bomb)


# Processes, threads, and what is installed


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(codec.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (environment.pop("PYTHONPATH", ""), root)))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120,
                          env={**os.environ, **environment, "PYTHONPATH": path})


def test_import_loads_no_decoder():
    shown = run("import sys, lmdbstore.codec; print([m for m in ('cv2', 'turbojpeg') if m in sys.modules])")
    assert shown.stdout.strip() == "[]"


DECODE_TWICE = """
import sys, numpy as np
from lmdbstore import codec
data = codec.encode(np.full((8, 8, 3), 99, np.uint8))
codec.decode(data), codec.decode(data)
print(codec.backend())
"""


def test_without_the_library():
    shown = run(DECODE_TWICE, LMDBSTORE_TURBOJPEG="/nowhere/libturbojpeg.so")
    assert shown.stdout.startswith("opencv ")
    assert shown.stderr.count("RuntimeWarning") == 1
    for words in ("/nowhere/libturbojpeg.so", "apt-get install libturbojpeg0", "LMDBSTORE_TURBOJPEG"):
        assert words in shown.stderr


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("def decode(): ...", "isn't PyTurboJPEG but another package"),
        ("__version__ = '2.1'\nclass TurboJPEG: ...", "PyTurboJPEG 2.1 is installed"),
        ("raise ImportError", "PyTurboJPEG isn't installed"),
    ],
)
def test_another_module_of_that_name(tmp_path, module, words):
    (tmp_path / "turbojpeg.py").write_text(module)
    shown = run(DECODE_TWICE, PYTHONPATH=str(tmp_path))
    assert shown.stdout.startswith("opencv ")
    assert words in shown.stderr


def test_backend_is_named():
    assert codec.backend().split()[0] in ("turbojpeg", "opencv")


def test_the_two_private_methods_are_still_there():
    turbojpeg = pytest.importorskip("turbojpeg")
    for name in ("__report_error", "__get_header_and_dimensions", "__get_error_string"):
        assert hasattr(turbojpeg.TurboJPEG, f"_TurboJPEG{name}")


def test_threads_keep_their_warnings_apart():
    whole, cut = JPEG, JPEG[:-500]
    wrong: list[str] = []

    def work(data: bytes, damaged: bool) -> None:
        for _ in range(30):
            try:
                check(data)
                found = False
            except DecodeError:
                found = True
            if found != damaged:
                wrong.append(f"damaged={damaged}, found={found}")

    threads = [threading.Thread(target=work, args=(cut if i % 2 else whole, bool(i % 2))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_after_a_fork():
    expected = decode(JPEG)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if np.array_equal(decode(JPEG), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_errors_cross_processes():
    with pytest.raises(DecodeError) as caught:
        check(JPEG[:-500])
    assert str(pickle.loads(pickle.dumps(caught.value.at("abc in x.lmdb")))).startswith("abc in x.lmdb: truncated: ")


# Real files


def odd_files(shared: Path) -> list[tuple[Path, set[str]]]:
    with (shared / "data/odd/MANIFEST.tsv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [(shared / "data/odd" / row["path"], set(row["tags"].split(","))) for row in rows]


def verdict(function, data: bytes):
    try:
        return function(data)
    except DecodeError as err:
        return err


NOT_STORED = {"gif", "tiff", "bmp", "jp2", "text", "other", "lossless", "12-bit", "no-sof", "zero-dimension",
              "bomb/huge-dims", "zero-bytes"}
# Cut by its test suite in the middle of the end marker: every pixel is there.
WHOLE_ALL_THE_SAME = {"truncated_jpeg.jpg"}


@pytest.mark.leaks_ok("OpenCV's thread pool starts with the first large image")
def test_odd_files(shared):
    for path, tags in odd_files(shared):
        data = path.read_bytes()
        info, whole, pixels = (verdict(function, data) for function in (probe, check, decode))
        stored = isinstance(whole, ImageInfo)
        if tags & NOT_STORED or any(tag.startswith("ftyp:") for tag in tags):
            assert not stored, path
        if "truncated/no-eoi" in tags or ("named-truncat" in tags and "png" in tags):
            assert not stored or path.name in WHOLE_ALL_THE_SAME, path
        if stored:
            assert info == whole
            turned = info.orientation >= 5
            assert pixels.shape == ((info.width, info.height, 3) if turned else (info.height, info.width, 3)), path
            if info.format == "jpeg":  # the tags don't have the others'
                assert f"exif-orientation-{info.orientation}" in tags or info.orientation == 1, path
        assert str(whole), path


@pytest.mark.leaks_ok("OpenCV's thread pool starts with the first large image")
def test_odd_files_against_pillow(shared):
    compared = 0
    for path, tags in odd_files(shared):
        data = path.read_bytes()
        if "png" in tags or not isinstance(verdict(check, data), ImageInfo):
            continue  # PNG: 16 bits, transparency and raw EXIF profiles are Pillow's own affair
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reference = by_pillow(data)
        except (OSError, SyntaxError):
            continue
        assert distance(decode(data), reference) < 2 or tags & {"webp"}, path
        compared += 1
    assert compared > 100


def test_photos_are_as_cv2_imread_has_them(shared):
    for path in sorted((shared / "data/glr/train").rglob("*.jpg"))[::40]:
        off = np.abs(decode(path.read_bytes(), color="bgr").astype(int) - cv2.imread(str(path))).max(axis=-1)
        assert (off > 2).mean() <= 0.001, path
