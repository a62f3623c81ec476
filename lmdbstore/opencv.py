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


def compress(bgr: np.ndarray, quality: int, subsampling: str) -> bytes:
    """Encode (H, W, 3) uint8 pixels, blue first, as a baseline JPEG."""
    pixels: Any = np.ascontiguousarray(bgr)
    if subsampling == "gray":
        pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)
    options = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, _SAMPLING[subsampling]]
    return bytes(cv2.imencode(".jpg", pixels, options)[1])
