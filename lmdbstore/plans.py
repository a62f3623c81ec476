"""What to decode of an image: the plan is chosen from the header's size, before a pixel is touched.

`Resized`, `RandomResizedCrop` and `CenterCrop` are what ImageDataset takes as `decode=`.  Each
turns the size of an image into a `Plan`: a window, the scale to decode it at, the size to bring it
to.  All of this is arithmetic; `codec.decode_plan` carries it out.

Scales are 1/2, 1/4 and 1/8, the ones that libjpeg-turbo computes with SIMD code.  The other
eighths are slower than the whole picture (3/4: 1.13 ms, 1/1: 0.85, 1/2: 0.70, 1/4: 0.67 an image
of 490 x 430).  An image is never decoded at less than the size that was asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from lmdbstore.errors import OptionError

SCALES = (8, 4, 2)  # denominators, the smallest picture first
_ATTEMPTS = 10  # as torchvision and albumentations

Size = tuple[int, int]  # (height, width)


class Window(NamedTuple):
    """A rectangle of an image, in pixels; x and y are its upper left pixel."""

    x: int
    y: int
    width: int
    height: int


class Plan(NamedTuple):
    """How to decode one image.

    Attributes
    ----------
    window : Window
        In pixels of the upright image.  Beyond its edges it is black (`CenterCrop` only).
    scale : int
        1, 2, 4 or 8: the window is decoded at 1/scale.
    size : (int, int)
        Height and width to bring it to.
    """

    window: Window
    scale: int
    size: Size


class DecodePlan(Protocol):
    """What `decode=` may be; those of this module, or your own."""

    random: bool  # whether `plan` draws random numbers

    def plan(self, width: int, height: int, rng: np.random.Generator | None) -> Plan:
        """Choose the plan for an upright image of this size, in pixels."""


@dataclass(frozen=True)
class Resized:
    """The whole image, resized.

    The pixels: those of the image decoded at 1/scale, brought to `size` by `cv2.resize`, INTER_AREA where that
    shrinks by 3 or more in a direction, else INTER_LINEAR.  The scale is the smallest of 1, 1/2, 1/4 and 1/8 at which
    the image isn't smaller than `size` in either direction; at scale 1 the pixels are those of decode and resize.

    Parameters
    ----------
    size : int or (int, int)
        (height, width); or the length of the shorter side, the other in proportion.

    Raises
    ------
    OptionError
    """

    size: int | Size
    random = False

    def __post_init__(self) -> None:
        _check_size(self.size)

    def plan(self, width: int, height: int, rng: np.random.Generator | None = None) -> Plan:
        """Choose the plan for an image of this size."""
        size = self.size if isinstance(self.size, tuple) else _short_side(width, height, self.size)
        window = Window(0, 0, width, height)
        return Plan(window, dct_scale(window, size), size)


@dataclass(frozen=True)
class RandomResizedCrop:
    """A random window of random area and aspect ratio, resized: the usual crop for training.

    The window has the distribution of torchvision's and albumentations' RandomResizedCrop: ten attempts at an area
    uniform in `scale` and a ratio log-uniform in `ratio`, else the largest central window within `ratio`.

    The pixels: those of the window decoded at 1/scale (`Resized` says which), resized as there.  At scale 1 they are
    exactly those of decode, crop, resize.  Below it the window is widened to whole pixels of the scaled image:
    by less than `scale` pixels of the photo on each side.

    Parameters
    ----------
    size : int or (int, int)
        (height, width), or of a square.
    scale : (float, float)
        Of the window's area, relative to the image.
    ratio : (float, float)
        Of width to height.

    Raises
    ------
    OptionError
    """

    size: int | Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    random = True

    def __post_init__(self) -> None:
        _check_size(self.size)
        for name, most in (("scale", 1.0), ("ratio", math.inf)):
            low, high = getattr(self, name)
            if not 0 < low <= high <= most:
                raise OptionError(f"{name}={getattr(self, name)!r}: expected 0 < low <= high <= {most}")

    def plan(self, width: int, height: int, rng: np.random.Generator | None) -> Plan:
        """Choose a window by `rng`."""
        if rng is None:
            raise OptionError("a random crop needs a random generator")
        window = self._drawn(width, height, rng) or self._central(width, height)
        size = _pair(self.size)
        return Plan(window, dct_scale(window, size), size)

    def _drawn(self, width: int, height: int, rng: np.random.Generator) -> Window | None:
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_ATTEMPTS):
            area = width * height * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(low, high))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return Window(int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1)), w, h)
        return None

    def _central(self, width: int, height: int) -> Window:
        w, h = width, height
        if width / height < self.ratio[0]:
            h = round(width / self.ratio[0])
        elif width / height > self.ratio[1]:
            w = round(height * self.ratio[1])
        w, h = max(1, w), max(1, h)
        return Window((width - w) // 2, (height - h) // 2, w, h)


@dataclass(frozen=True)
class CenterCrop:
    """The central window, for validation.

    Without `short_side` the window is `size` pixels of the image, exactly those that decode and
    `albumentations.CenterCrop` give; an image that is smaller is centred on black, as torchvision does.
    With it, the image is thought of as resized to that shorter side first, as in ``Resize(256), CenterCrop(224)``:
    the window is the part of the image that ends up in the crop, in whole pixels, decoded and resized as by
    `RandomResizedCrop`.  Nothing outside the window enters the result, which therefore differs from resize-then-crop
    along the edges and by the rounding of the window.

    Parameters
    ----------
    size : int or (int, int)
        (height, width), or of a square.
    short_side : int, optional
        At least as long as either side of `size`.

    Raises
    ------
    OptionError
    """

    size: int | Size
    short_side: int | None = None
    random = False

    def __post_init__(self) -> None:
        _check_size(self.size)
        if self.short_side is not None and self.short_side < max(_pair(self.size)):
            raise OptionError(f"short_side={self.short_side!r}: expected {max(_pair(self.size))} or more, by the size")

    def plan(self, width: int, height: int, rng: np.random.Generator | None = None) -> Plan:
        """Choose the plan for an image of this size."""
        size = _pair(self.size)
        zoom = 1.0 if self.short_side is None else min(width, height) / self.short_side
        h, w = (max(1, round(side * zoom)) for side in size)
        window = Window((width - w) // 2, (height - h) // 2, w, h)
        return Plan(window, 1 if self.short_side is None else dct_scale(window, size), size)


def dct_scale(window: Window, size: Size) -> int:
    """Return the largest of 8, 4, 2 and 1 by which a window can be divided without falling below `size`."""
    for scale in SCALES:
        if window.width // scale >= size[1] and window.height // scale >= size[0]:
            return scale
    return 1


def inside(window: Window, width: int, height: int) -> Window:
    """Return the part of a window that lies within an image of this size."""
    x, y = max(0, window.x), max(0, window.y)
    return Window(x, y, min(window.x + window.width, width) - x, min(window.y + window.height, height) - y)


def as_stored(window: Window, width: int, height: int, orientation: int) -> Window:
    """Turn a window of the upright image into one of the image as it lies in the file.

    Parameters
    ----------
    window : Window
        Within the upright image.
    width, height : int
        Of the upright image.
    orientation : int
        EXIF, 1 to 8.
    """
    x, y, w, h = window
    right, below = width - x - w, height - y - h
    x, y = {1: (x, y), 2: (right, y), 3: (right, below), 4: (x, below),
            5: (y, x), 6: (y, right), 7: (below, right), 8: (below, x)}[orientation]  # fmt: skip
    return Window(x, y, h, w) if orientation > 4 else Window(x, y, w, h)


def scaled(window: Window, scale: int) -> Window:
    """Return the pixels of the picture at 1/scale that a window touches."""
    x, y = window.x // scale, window.y // scale
    right, below = -(-(window.x + window.width) // scale), -(-(window.y + window.height) // scale)
    return Window(x, y, right - x, below - y)


def _pair(size: int | Size) -> Size:
    return size if isinstance(size, tuple) else (size, size)


def _short_side(width: int, height: int, short: int) -> Size:
    factor = short / min(width, height)
    return max(short, round(height * factor)), max(short, round(width * factor))


def _check_size(size: int | Size) -> None:
    sides = size if isinstance(size, tuple) else (size,)
    if len(sides) > 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise OptionError(f"size={size!r}: expected a side or (height, width), in pixels")
