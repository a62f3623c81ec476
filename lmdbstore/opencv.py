"""OpenCV as decoder of PNG and WebP and of the JPEG files that libjpeg-turbo can't do; and turning pictures.

Importing this module loads OpenCV (0.1 s), so codec.py imports it at first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np

from lmdbstore import integrity
from lmdbstore.errors import DecodeError
from lmdbstore.headers import BytesLike

VERSION: str = cv2.__version__
_FLAGS = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION  # the orientation is applied in one place: upright()
_SAMPLING = {"444": 0x111111, "422": 0x211111, "420": 0x221111, "gray": 0x111111, "440": 0x121111, "411": 0x411111}


def decompress(view: memoryview, format: str, color: str) -> Any:
    """Decode an image whose size is known to be sane.

    Returns
    -------
    ndarray
        (H, W, 3) uint8.  From a damaged JPEG whatever OpenCV makes of it, without a word.

    Raises
    ------
    DecodeError
        OpenCV gives nothing.
    """
    try:
        pixels = _decoded(_with_end(view) if format == "jpeg" else view)
        if pixels is None and format == "jpeg":  # a stray third byte: no JPEG to OpenCV
            pixels = _decoded(integrity.jpeg_repaired(view, bare=False))
    except cv2.error as err:
        raise DecodeError(f"OpenCV {VERSION}: {str(err).strip()}") from None
    if pixels is None:
        raise DecodeError(f"OpenCV {VERSION} can't decode this {format.upper()}")
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB) if color == "rgb" else pixels


def _decoded(data: BytesLike) -> Any:
    return cv2.imdecode(np.frombuffer(data, np.uint8), _FLAGS)


def _with_end(view: memoryview) -> BytesLike:
    """Give a JPEG without an end one: OpenCV 5 refuses it otherwise, and 4 leaves its last rows unset."""
    return view if bytes(view[-2:]) == b"\xff\xd9" else bytes(view) + b"\xff\xd9"


def upright(pixels: np.ndarray, orientation: int) -> Any:
    """Apply an EXIF orientation; a new array, contiguous."""
    turns: dict[int, Callable[[np.ndarray], Any]] = {
        2: lambda p: cv2.flip(p, 1), 3: lambda p: cv2.rotate(p, cv2.ROTATE_180), 4: lambda p: cv2.flip(p, 0),
        5: cv2.transpose, 6: lambda p: cv2.rotate(p, cv2.ROTATE_90_CLOCKWISE),
        7: lambda p: cv2.flip(cv2.transpose(p), -1), 8: lambda p: cv2.rotate(p, cv2.ROTATE_90_COUNTERCLOCKWISE)}
    return turns[orientation](pixels) if orientation in turns else pixels


def resized(pixels: np.ndarray, height: int, width: int) -> Any:
    """Resize to an exact size: INTER_AREA where it shrinks by 3 or more in a direction, else INTER_LINEAR.

    INTER_LINEAR begins to leave out pixels at 2, and takes 0.07 ms where INTER_AREA takes 0.5 (500 x 375 to 224 x 224).
    A scaled decode leaves less than 2 for the tighter direction.
    """
    if pixels.shape[:2] == (height, width):
        return np.ascontiguousarray(pixels)
    skips = pixels.shape[0] >= 3 * height or pixels.shape[1] >= 3 * width
    return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA if skips else cv2.INTER_LINEAR)


def reduced(pixels: np.ndarray, height: int, width: int) -> Any:
    """Shrink to an exact size, each pixel the mean of the area that it covers."""
    return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)


def shrunk(pixels: np.ndarray, scale: int) -> Any:
    """Average squares of scale x scale pixels, sides rounded up: stands in for a scaled decode where there is none."""
    below, right = (-side % scale for side in pixels.shape[:2])
    if below or right:  # whole squares everywhere: a part of the picture gives the pixels that the whole gives
        pixels = cv2.copyMakeBorder(pixels, 0, below, 0, right, cv2.BORDER_REPLICATE)
    height, width = (side // scale for side in pixels.shape[:2])
    return pixels if scale == 1 else cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)


def on_black(pixels: np.ndarray, above: int, left: int, height: int, width: int) -> Any:
    """Place pixels on a black picture of this size."""
    canvas = np.zeros((height, width, 3), np.uint8)
    canvas[above : above + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return canvas


def one_thread() -> int:
    """Make OpenCV work in the calling thread, process-wide; return how many threads it used before.

    Not by setNumThreads(1), which joins OpenCV's threads: in a forked child they aren't there, and it crashes.
    """
    before = int(cv2.getNumThreads())
    cv2.setNumThreads(0)
    return before


def set_threads(count: int) -> None:
    """Give OpenCV `count` threads, process-wide."""
    cv2.setNumThreads(count)


def table(pixels: np.ndarray, values: np.ndarray, out: np.ndarray | None = None) -> Any:
    """Look every channel's value up: ``values[pixels[y, x, c], c]``.

    Parameters
    ----------
    pixels : ndarray, (H, W, C) uint8
    values : ndarray, (256, C), float32
    out : ndarray, (H, W, C) float32, contiguous, optional
        Written to, and returned.
    """
    found = cv2.LUT(pixels, values.reshape(1, 256, -1), dst=out)
    if out is not None and found is not out:
        out[...] = found
    return found if out is None else out


def planes(pixels: np.ndarray, out: np.ndarray) -> None:
    """Write (H, W, C) pixels, C up to 4, as (C, H, W): three times as fast as numpy's assignment."""
    cv2.split(pixels, list(out))


def compress(bgr: np.ndarray, quality: int, subsampling: str) -> bytes:
    """Encode (H, W, 3) uint8 pixels, blue first, as a baseline JPEG."""
    pixels: Any = np.ascontiguousarray(bgr)
    if subsampling == "gray":
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)
    options = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, _SAMPLING[subsampling]]
    return bytes(cv2.imencode(".jpg", pixels, options)[1])
