"""Bytes to pixels and back: probe, check, decode, encode.

JPEG goes to libjpeg-turbo (turbo.py); what that can't do, PNG and WebP go to OpenCV
(opencv.py).  Both are loaded at first use: importing this module loads neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from lmdbstore import integrity, tiles
from lmdbstore.errors import DecodeError
from lmdbstore.headers import MAX_PIXELS, BytesLike, ImageInfo, as_view, check_size, jpeg_frame, ppm_start, probe
from lmdbstore.plans import Plan, Window, as_stored, inside, scaled
from lmdbstore.sniff import sniff

if TYPE_CHECKING:
    from lmdbstore.turbo import Turbo

__all__ = ["MAX_PIXELS", "ImageInfo", "backend", "check", "decode", "decode_plan", "decode_window", "encode",
           "encode_ppm", "probe"]

Color = Literal["rgb", "bgr"]
Touch = Callable[[int, int], object]
Pixels = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]

# TJPF_* and TJSAMP_* of libjpeg-turbo's ABI
_PIXEL_FORMAT = {"rgb": 0, "bgr": 1}
_PIXEL_FORMAT_CMYK = 11
_STRIP = 64  # rows of CMYK at a time: 16-bit products of a whole 100-Mpixel picture would take a gigabyte
_SUBSAMPLING = {"444": 0, "422": 1, "420": 2, "gray": 3, "440": 4, "411": 5}


def backend() -> str:
    """Name the decoder of JPEG files: "turbojpeg ..." or "opencv ..."."""
    turbo = _turbo()
    if turbo is not None:
        return f"turbojpeg {turbo.version}"
    from lmdbstore import opencv

    return f"opencv {opencv.VERSION}"


def decode(data: BytesLike, *, color: Color = "rgb", orientation: int | None = None,
           max_pixels: int = MAX_PIXELS) -> Pixels:
    """Decode a JPEG, PNG or WebP to the pixels that `cv2.imread` gives.

    Parameters
    ----------
    data : bytes-like
        The file's bytes; libjpeg-turbo and OpenCV read them in place.
    color : {"rgb", "bgr"}
        The order of the channels.
    orientation : int, optional
        The EXIF orientation where the caller knows it; 1 leaves the image as it is in the file.
        None: read from the file.
    max_pixels : int
        Width times height above which the image is refused, before anything is allocated.

    Returns
    -------
    ndarray
        (H, W, 3) uint8, writable, C-contiguous; orientation applied.  Grey and CMYK come out as
        three channels, 16 bits as 8, alpha is dropped, an animation gives its first frame.  A
        truncated JPEG gives what there is of it.

    Raises
    ------
    DecodeError
        In the libraries' own words.
    ImageTooLarge
        More than `max_pixels`.
    """
    _check_color(color)
    view = as_view(data)
    if orientation is None:
        orientation = probe(view, max_pixels=max_pixels).orientation
    format = sniff(view)
    if format == "jpeg":
        pixels, _ = _jpeg_pixels(view, color, max_pixels)
    elif format == "ppm":
        pixels = _ppm_pixels(view, color, max_pixels)
    else:
        pixels = _opencv_pixels(view, color, max_pixels)
    if orientation == 1:
        return pixels
    from lmdbstore import opencv

    return opencv.upright(pixels, orientation)


def decode_plan(data: BytesLike, plan: Plan, *, width: int, height: int, orientation: int, color: Color = "rgb",
                max_pixels: int = MAX_PIXELS, touch: Touch | None = None) -> Pixels:
    """Decode what a plan takes of an image.

    Parameters
    ----------
    data, color, max_pixels
        As in `decode`.
    plan : Plan
    width, height, orientation : int
        Of the upright image, as the plan was made for; and its EXIF orientation.
    touch : callable, optional
        Called with the range of bytes, start and stop, that is about to be read, the header left out.

    Returns
    -------
    ndarray
        (plan.size[0], plan.size[1], 3) uint8.

    Raises
    ------
    DecodeError, ImageTooLarge
    """
    from lmdbstore import opencv

    part = inside(plan.window, width, height)
    stored = as_stored(part, width, height, orientation)
    pixels = decode_window(data, stored, scale=plan.scale, color=color, orientation=orientation,
                           max_pixels=max_pixels, touch=touch)
    if part != plan.window:
        above, left = part.y - plan.window.y, part.x - plan.window.x
        pixels = opencv.on_black(pixels, above, left, plan.window.height, plan.window.width)
    return opencv.resized(pixels, *plan.size)


def decode_window(data: BytesLike, window: Window, *, scale: int = 1, color: Color = "rgb", orientation: int = 1,
                  max_pixels: int = MAX_PIXELS, touch: Touch | None = None) -> Pixels:
    """Decode a part of an image at 1/scale; of a tiled JPEG, only the segments that the part lies in.

    Parameters
    ----------
    data, color, max_pixels
        As in `decode`.
    window : Window
        Within the image as it lies in the file, in pixels at full size.
    scale : int
        1, 2, 4 or 8: libjpeg's scaled decoding, on averages of scale x scale pixels in other formats.
    orientation : int
        Applied to the part.
    touch : callable, optional
        As in `decode_plan`.

    Returns
    -------
    ndarray
        (H, W, 3) uint8, contiguous or a part of a larger array: at scale 1 the window of what `decode` gives, else
        `plans.scaled(window, scale)` of the image at 1/scale.

    Raises
    ------
    DecodeError, ImageTooLarge
    """
    _check_color(color)
    view, window = _cut(as_view(data), window, scale, touch)
    x, y, width, height = scaled(window, scale)
    pixels = _at_scale(view, scale, color, max_pixels)
    if pixels.shape[0] < y + height or pixels.shape[1] < x + width:
        raise DecodeError(f"corrupt: {pixels.shape[1]} x {pixels.shape[0]} pixels at 1/{scale}, no window {window}")
    pixels = pixels[y : y + height, x : x + width]
    if orientation == 1:
        return pixels
    from lmdbstore import opencv

    return opencv.upright(np.ascontiguousarray(pixels), orientation)


def _cut(view: memoryview, window: Window, scale: int, touch: Touch | None) -> tuple[memoryview, Window]:
    """Return the part of a tiled JPEG that holds a window, and the window in it; anything else as it is."""
    try:
        part = tiles.cut(view, *window, margin=scale, touch=touch)
    except ValueError:  # not in the picture: found out once more, when that is decoded
        part = None
    if part is None:
        if touch:
            touch(0, len(view))
        return view, window
    return as_view(part.data), window._replace(x=window.x - part.x, y=window.y - part.y)


def _at_scale(view: memoryview, scale: int, color: Color, max_pixels: int) -> Pixels:
    """Decode the whole image, as it lies in the file, at 1/scale."""
    turbo = _turbo() if scale > 1 and sniff(view) == "jpeg" else None
    if turbo is not None:
        try:
            return turbo.decompress(view, _PIXEL_FORMAT[color], max_pixels=max_pixels, scale=scale)[0]
        except DecodeError:  # what `decode` does about it, the scaled decoder can't
            pass
    whole = decode(view, color=color, orientation=1, max_pixels=max_pixels)
    if scale == 1:
        return whole
    from lmdbstore import opencv

    return opencv.shrunk(whole, scale)


def check(data: BytesLike, *, max_pixels: int = MAX_PIXELS, keep_truncated: bool = False) -> ImageInfo:
    """Decode an image whole, and find out whether it is all there.

    Warnings that cost no pixels pass: bytes after the end, a few stray bytes before a marker, a
    missing end-of-image marker.

    Parameters
    ----------
    data, max_pixels
        As in `decode`.
    keep_truncated : bool
        Pass a damaged image, too, as long as it still gives a picture.

    Returns
    -------
    ImageInfo

    Raises
    ------
    DecodeError
        "truncated: ..." or "corrupt: ..." for a damaged image; the libraries' words for one that gives nothing.
    ImageTooLarge
        More than `max_pixels`.
    """
    view = as_view(data)
    info = probe(view, max_pixels=max_pixels)
    if info.format == "jpeg":
        problem = _jpeg_problem(view, info, max_pixels, keep_truncated)
    else:
        problem = _other_problem(view, info, max_pixels)
    if problem is not None and not keep_truncated:
        raise DecodeError(problem)
    return info


def _turbo() -> Turbo | None:
    from lmdbstore.turbo import TURBO  # the first import loads the library, or warns

    return TURBO


def encode(pixels: np.ndarray, *, quality: int = 90, color: Color = "rgb", subsampling: str = "420") -> bytes:
    """Encode pixels as a baseline JPEG.

    Parameters
    ----------
    pixels : ndarray
        (H, W, 3) uint8.
    quality : int
        1 to 100.
    color : {"rgb", "bgr"}
        The order of the channels.
    subsampling : {"444", "422", "420", "440", "411", "gray"}
        Of the chroma; "gray" drops it.

    Raises
    ------
    ValueError
        An argument outside of these.
    """
    _check_encode(pixels, quality, color, subsampling)
    turbo = _turbo()
    if turbo is not None:
        return bytes(turbo.encode(pixels, quality, _PIXEL_FORMAT[color], _SUBSAMPLING[subsampling]))
    from lmdbstore import opencv

    return opencv.compress(pixels if color == "bgr" else pixels[..., ::-1], quality, subsampling)


def encode_ppm(pixels: np.ndarray) -> bytes:
    """Write (H, W, 3) uint8 RGB pixels down as they are: a binary PPM, a line of text and then the bytes."""
    height, width, _ = pixels.shape
    return b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes()


def _check_encode(pixels: np.ndarray, quality: int, color: str, subsampling: str) -> None:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ValueError(f"pixels of shape {pixels.shape}, {pixels.dtype}; (H, W, 3) uint8 expected")
    if not 1 <= quality <= 100:
        raise ValueError(f"quality={quality!r}; 1 to 100 expected")
    _check_color(color)
    if subsampling not in _SUBSAMPLING:
        raise ValueError(f"subsampling={subsampling!r}; one of {', '.join(_SUBSAMPLING)} expected")


def _check_color(color: str) -> None:
    if color not in _PIXEL_FORMAT:
        raise ValueError(f'color={color!r}; "rgb" or "bgr" expected')


# JPEG

#: What libjpeg-turbo says of a sound file that it doesn't decode, or not to RGB, or not in this build.
_NOT_OURS = ("Could not determine", "color conversion", "arithmetic", "omitted at compile time", "Not implemented")


def _jpeg_pixels(view: memoryview, color: Color, max_pixels: int) -> tuple[Pixels, str | None]:
    """Decode a JPEG as it lies in the file; with libjpeg's first warning, None from OpenCV."""
    turbo = _turbo()
    if turbo is None:
        return _opencv_pixels(view, color, max_pixels), None
    try:
        return turbo.decompress(view, _PIXEL_FORMAT[color], max_pixels=max_pixels)
    except DecodeError as err:
        probe(view, max_pixels=max_pixels)  # a broken header ends here, with its reason
        if "Unsupported marker type" in err.reason:
            return _up_to_stray(turbo, view, color, max_pixels, err)
        # Nothing else goes on to OpenCV: of damaged data it makes half a picture, and says nothing.
        if not any(words in err.reason for words in _NOT_OURS):
            raise
        return _hard_jpeg(turbo, view, color, max_pixels, err)


def _up_to_stray(turbo: Turbo, view: memoryview, color: Color, max_pixels: int,
                 first: DecodeError) -> tuple[Pixels, str | None]:
    """Decode a JPEG with a senseless marker in its image data: if that lies behind the last pixel, it is garbage."""
    stray = integrity.jpeg_scans(view).stray
    if stray is not None:
        head = memoryview(bytes(view[:stray]) + b"\xff\xd9")
        pixels, warning = turbo.decompress(head, _PIXEL_FORMAT[color], max_pixels=max_pixels)
        if warning is None or _is_harmless(warning):
            return pixels, None
    raise first


def _hard_jpeg(turbo: Turbo, view: memoryview, color: Color, max_pixels: int,
               first: DecodeError) -> tuple[Pixels, str | None]:
    """Decode what libjpeg-turbo doesn't convert to RGB: four inks, odd subsampling."""
    try:
        if jpeg_frame(view).components == 4:
            inks, warning = turbo.decompress(view, _PIXEL_FORMAT_CMYK, max_pixels=max_pixels)
            return _ink_to_light(inks, color), warning
    except DecodeError as err:
        first = err
    try:
        return _opencv_pixels(view, color, max_pixels), None
    except DecodeError as second:
        raise DecodeError(f"{first.reason}; {second.reason}") from None


def _ink_to_light(inks: np.ndarray, color: Color) -> Pixels:
    """Turn CMYK as JPEG files hold it, 255 for no ink (Adobe's way, and everybody's since), into RGB or BGR.

    The product that Pillow and OpenCV form, too: without an ICC profile there is no better one.
    """
    pixels = np.empty((*inks.shape[:2], 3), np.uint8)
    order = slice(None, None, 1 if color == "rgb" else -1)
    for top in range(0, len(inks), _STRIP):
        strip = inks[top:top + _STRIP]
        light = strip[..., :3].astype(np.uint16) * strip[..., 3:]
        pixels[top:top + _STRIP] = ((light + 127) // 255)[..., order]
    return pixels


# What costs no pixels, in the words of libjpeg's jerror.h
_HARMLESS = ("extraneous bytes before marker", "unknown JFIF revision", "Unknown Adobe color transform",
             "Inconsistent progression sequence", "Invalid SOS parameters")
#: Below this a false claim is left to the decoder, which finds it soon enough.
_BOMB_BYTES = 16_384
_MISSING_END = "Premature end of JPEG file"


def _jpeg_problem(view: memoryview, info: ImageInfo, max_pixels: int, keep_truncated: bool) -> str | None:
    scans = integrity.jpeg_scans(view)
    least = integrity.fewest_bytes(view)
    if not keep_truncated and len(view) < least and least > _BOMB_BYTES:
        raise DecodeError(f"truncated: {len(view):,} bytes; {info.width} x {info.height} pixels take {least:,} or more")
    pixels, warning = _jpeg_pixels(view, "bgr", max_pixels)
    _check_shape(pixels, info)
    if not scans.ended and not scans.complete:
        return f"truncated: {len(view):,} bytes, whole scans are missing"
    if scans.ended and scans.stray is not None:  # restart markers get libjpeg over it; OpenCV never says
        return f"corrupt: senseless marker in the image data, at byte {scans.stray}"
    if warning is None:
        missing = not scans.ended and _wants_more(view[:scans.stray], max_pixels)
        return f"truncated: {_MISSING_END}" if missing else None
    if _MISSING_END in warning or _is_harmless(warning):
        # libjpeg tells its first warning only.  Without this one's cause, does it have another?
        mended = memoryview(integrity.jpeg_repaired(view, bare=True))
        _, hidden = _jpeg_pixels(mended, "bgr", max_pixels)
        if hidden is None or _is_harmless(hidden):
            return None
        warning = warning if _MISSING_END in warning else hidden
    return f"{'corrupt' if scans.ended else 'truncated'}: {warning}"


def _is_harmless(warning: str) -> bool:
    return any(words in warning for words in _HARMLESS)


def _wants_more(view: memoryview, max_pixels: int) -> bool:
    """Tell whether a JPEG without end is cut in its data, from a decoder that doesn't say: do more bytes change it?"""
    # Missing bits count as zeros, so the noise starts with a one; unless it has to complete an escaped ff first.
    noise = (b"\0" if view[-1] == 0xFF else b"") + b"\xb5\x6a\xd3" * 300
    short, long = (memoryview(bytes(view) + tail + b"\xff\xd9") for tail in (b"", noise))
    return not np.array_equal(_jpeg_pixels(short, "bgr", max_pixels)[0], _jpeg_pixels(long, "bgr", max_pixels)[0])


# PNG and WebP


def _other_problem(view: memoryview, info: ImageInfo, max_pixels: int) -> str | None:
    if info.format == "ppm":
        _ppm_pixels(view, "rgb", max_pixels)
        return None
    problem = integrity.png_problem(view) if info.format == "png" else integrity.webp_problem(view)
    try:
        _check_shape(_opencv_pixels(view, "bgr", max_pixels), info)
    except DecodeError as err:
        raise DecodeError(problem or err.reason) from None
    return problem


def _ppm_pixels(view: memoryview, color: Color, max_pixels: int) -> Pixels:
    """Copy the pixels out of a PPM of our own."""
    width, height, start = ppm_start(view)
    check_size(width, height, max_pixels)
    if len(view) - start != width * height * 3:
        raise DecodeError(f"truncated: {len(view) - start:,} bytes of {width} x {height} x 3 pixels")
    pixels = np.frombuffer(view, np.uint8, offset=start).reshape(height, width, 3)
    return pixels.copy() if color == "rgb" else np.ascontiguousarray(pixels[..., ::-1])


def _check_shape(pixels: np.ndarray, info: ImageInfo) -> None:
    if pixels.shape[:2] != (info.height, info.width):
        raise DecodeError(f"corrupt: the header says {info.width} x {info.height} pixels, "
                          f"the decoder {pixels.shape[1]} x {pixels.shape[0]}")


def _opencv_pixels(view: memoryview, color: Color, max_pixels: int) -> Pixels:
    from lmdbstore import opencv

    return opencv.decompress(view, probe(view, max_pixels=max_pixels).format, color)
