"""What an ingest changes of an image before it is stored: made smaller, turned into pixels, tiled.

The order is fixed: shrink, then pixels or tiles.  What an option can't change, or needn't, is stored
as the file is; `Treated.how` says what was done, and `summary` puts it into words.
"""

from __future__ import annotations

import enum
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lmdbstore import codec, tiles
from lmdbstore.codec import ImageInfo
from lmdbstore.errors import DecodeError, IngestError, OptionError
from lmdbstore.headers import as_view, jpeg_frame

QUALITY = 90  # of what is encoded anew, where the user says nothing
_SECONDS = 120  # for one image, which takes jpegtran some milliseconds
#: Signals by which a program dies of its input; any other is somebody's wish that everything stop.
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, getattr(signal, "SIGBUS", signal.SIGSEGV)}


class How(enum.IntFlag):
    """What was done to an image; fits in a byte."""

    AS_IT_WAS = 0
    SHRUNK = 1
    PIXELS = 2
    TILED = 4
    UNSUITED = 8  # to be tiled: no JPEG, damaged, or nothing that libjpeg rewrites as one scan
    DIFFERENT = 16  # tiled, it would have had other pixels


class Treated(NamedTuple):
    """An image as it will be stored."""

    data: bytes
    info: ImageInfo
    how: How


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """What to change.

    Parameters
    ----------
    tile : bool
        Divide JPEG files into restart segments, losslessly.
    short_side, max_side : int, optional
        The length in pixels to which the shorter, or the longer, side is brought where it is longer.
    quality : int, optional
        Of the JPEG files that this makes, 1 to 100; default 90.
    pixels : bool
        Store decoded pixels.

    Raises
    ------
    OptionError
        A value out of range, or two that exclude each other.
    """

    tile: bool = False
    short_side: int | None = None
    max_side: int | None = None
    quality: int | None = None
    pixels: bool = False

    def __post_init__(self) -> None:
        for name in ("short_side", "max_side"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} {value}: at least 1 pixel is needed")
        if self.short_side and self.max_side:
            raise OptionError(f"short_side {self.short_side} and max_side {self.max_side}: choose one of the two")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise OptionError(f"quality {self.quality}: 1 to 100 is possible")
        if self.quality is not None and (self.pixels or not self.resizes):
            raise OptionError(f"quality {self.quality}: only with short_side or max_side is anything encoded anew")
        if self.tile and self.pixels:
            raise OptionError("tile and pixels: choose one of the two; pixels need no tiles to be cut")

    @property
    def resizes(self) -> bool:
        """Whether images may become smaller."""
        return bool(self.short_side or self.max_side)

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height that an image of this size is brought to; never larger."""
        if self.short_side:
            factor = self.short_side / min(width, height)
        else:
            factor = (self.max_side or max(width, height)) / max(width, height)
        if factor >= 1:
            return width, height
        return max(1, round(width * factor)), max(1, round(height * factor))


def treatment(options: Treatment) -> Callable[[bytes, ImageInfo], Treated] | None:
    """Return the function that treats an image; None where there is nothing to do.

    It raises DecodeError for an image that has to be decoded and can't be.

    Raises
    ------
    IngestError
        A program that is needed isn't installed.

    Notes
    -----
    Threads: safe.
    """
    if not (options.tile or options.resizes or options.pixels):
        return None
    divide = _divider() if options.tile else None

    def treat(data: bytes, info: ImageInfo) -> Treated:
        image = _sized(data, info, options)
        if divide is None:
            return image
        tiled, how = _tiled(image.data, image.info, divide)
        return Treated(tiled, image.info, image.how | how)

    return treat


def summary(options: Treatment, how: np.ndarray) -> list[str]:
    """Say what was done.

    Parameters
    ----------
    options : Treatment
    how : ndarray, uint8, (images,)
        The `Treated.how` of every image.
    """

    def count(flag: How) -> int:
        return int(np.count_nonzero(how & flag))

    notes = []
    if options.resizes:
        side = f"short side {options.short_side}" if options.short_side else f"long side {options.max_side}"
        notes.append(f"{count(How.SHRUNK):,} of {len(how):,} images were brought to {side}; "
                     "the others are no larger, and stored as their files are")
    if options.pixels:
        notes.append(f"{count(How.PIXELS):,} images are stored as pixels")
    if options.tile:
        notes.append(f"{count(How.TILED):,} of {len(how):,} images were tiled: other bytes, the same pixels; kept as "
                     f"they were: {count(How.UNSUITED):,} that can't be tiled, {count(How.DIFFERENT):,} whose pixels "
                     "would have changed")
    return notes


# Smaller, or pixels


def _sized(data: bytes, info: ImageInfo, options: Treatment) -> Treated:
    """Apply `short_side`, `max_side` and `pixels`; what is decoded for it is turned upright on the way."""
    if not (options.resizes or options.pixels):
        return Treated(data, info, How.AS_IT_WAS)
    if info.format == "unknown":  # check="none" lets anything pass; this can't
        info = codec.probe(data)
    width, height = options.size(info.width, info.height) if options.resizes else (info.width, info.height)
    shrinks = (width, height) != (info.width, info.height)
    if not (shrinks or options.pixels):
        return Treated(data, info, How.AS_IT_WAS)
    from lmdbstore import opencv

    pixels = codec.decode(data, orientation=1)
    if shrinks:
        pixels = opencv.reduced(pixels, height, width)
    pixels = opencv.upright(pixels, info.orientation)
    if options.pixels:
        stored, how = codec.encode_ppm(pixels), How.PIXELS
    else:
        gray = info.format == "jpeg" and jpeg_frame(as_view(data)).components == 1
        stored, how = codec.encode(pixels, quality=options.quality or QUALITY,
                                   subsampling="gray" if gray else "420"), How.AS_IT_WAS
    return Treated(stored, codec.probe(stored), how | (How.SHRUNK if shrinks else How.AS_IT_WAS))


# Tiles


def _tiled(data: bytes, info: ImageInfo, divide: Callable[[bytes, int], bytes]) -> tuple[bytes, How]:
    """Return the tiled JPEG where it is proved to have the same pixels; else `data`, and why."""
    interval = tiles.restart_interval(data) if info.format == "jpeg" else None
    if interval is None:
        return data, How.UNSUITED
    try:
        tiled = tiles.with_index(divide(data, interval))
        if tiled is None or codec.probe(tiled) != info:
            return data, How.UNSUITED
        same = np.array_equal(codec.decode(data, orientation=1), codec.decode(tiled, orientation=1))
    except DecodeError:
        return data, How.UNSUITED
    return (tiled, How.TILED) if same else (data, How.DIFFERENT)


def _divider() -> Callable[[bytes, int], bytes]:
    """Return the function that puts restart markers into a JPEG: libjpeg-turbo 3's, else the program jpegtran."""
    from lmdbstore.turbo import TURBO

    if TURBO is not None and TURBO.divides:
        library = TURBO
        return lambda data, interval: library.divide(as_view(data), interval)
    program = shutil.which("jpegtran")
    if program is None:
        raise IngestError("--tile needs libjpeg-turbo 3 or the program jpegtran, and neither is there: "
                          "apt-get install libjpeg-turbo-progs")
    return lambda data, interval: _jpegtran(program, data, interval)


def _jpegtran(program: str, data: bytes, interval: int) -> bytes:
    """Rewrite a JPEG by jpegtran; a warning, too, is a DecodeError."""
    command = [program, "-copy", "all", "-optimize", "-restart", f"{interval}B"]
    try:
        # a session of its own: Ctrl-C is for this process, which then ends in order
        done = subprocess.run(command, input=data, capture_output=True, timeout=_SECONDS, start_new_session=True)
    except subprocess.TimeoutExpired:
        raise DecodeError(f"jpegtran took more than {_SECONDS} s") from None
    except OSError as error:
        raise IngestError(f"{program}: {error.strerror}") from None
    if done.returncode < 0 and -done.returncode not in _CRASHES:
        raise IngestError(f"{program}: ended by signal {-done.returncode} from outside (is there memory left?); "
                          "run the same command again: it goes on where it stopped")
    if done.returncode or done.stderr:
        raise DecodeError(f"jpegtran: {os.fsdecode(done.stderr).strip() or f'exit code {done.returncode}'}")
    return done.stdout
