"""Pictures made small, or made showable, with numpy alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from lmdbstore.errors import OptionError


def reduced(pixels: np.ndarray, side: int) -> np.ndarray:
    """Return a picture, (H, W, C) uint8, averaged over square blocks; its shorter side stays `side` or more.

    At most `side` - 1 rows and columns at the edges are left out.  A smaller picture comes back as it is.
    """
    step = min(pixels.shape[:2]) // side
    if step < 2:
        return pixels
    height, width = (length // step * step for length in pixels.shape[:2])
    blocks = pixels[:height, :width].reshape(height // step, step, width // step, step, -1)
    return np.asarray(blocks.mean((1, 3), dtype=np.float32).astype(np.uint8))


def displayable(item: Any) -> np.ndarray:
    """Return what a transform made of an image as (H, W, 3) uint8.

    Floats within 0..1 are scaled to 255; others, as after a normalisation, from their smallest value to their largest.

    Raises
    ------
    OptionError
        Not an image: quotes the shape.
    """
    values = np.asarray(item)
    if values.ndim == 3 and values.shape[0] in (1, 3) and values.shape[2] not in (1, 3):  # torch's order
        values = values.transpose(1, 2, 0)
    if values.ndim == 2:
        values = values[:, :, None]
    if values.ndim != 3 or values.shape[2] not in (1, 3) or 0 in values.shape:
        raise OptionError(f"the transform returned {type(item).__name__} of shape {values.shape}; one image expected")
    if values.dtype != np.uint8:
        low, high = float(values.min()), float(values.max())
        low, high = (0.0, 1.0) if low >= 0 and high <= 1 else (low, max(high, low + 1e-6))
        values = ((values - low) * (255 / (high - low))).astype(np.uint8)
    return np.broadcast_to(values, (*values.shape[:2], 3))
