"""What one image costs, part by part: read, decode, augment, hand over to the training process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.utils.data

from lmdbstore.folder import one_opencv_thread

TRANSFER_BATCHES = 12  # of them 10 are timed: the first two are ready before the clock starts

Read = Callable[[Any], Any]
Decode = Callable[[Any, Any], np.ndarray]
Augment = Callable[..., Any]


@dataclass(frozen=True)
class Costs:
    """Median milliseconds an image, each part alone on one core, the bytes in memory.

    Attributes
    ----------
    images : int
        How many were measured.
    read : float
        Getting at the bytes: open and read of a file, or a view of the store's map.
    decode : float
        Bytes to an RGB array.
    augment : float
        The transform, without the decoding.
    transfer : float
        From the worker to the training process: batches of ready arrays are collated, copied to shared memory
        and received, with one worker.  The mean time between batches, so what the two processes do side by side
        counts once.
    """

    images: int
    read: float
    decode: float
    augment: float
    transfer: float

    @property
    def total(self) -> float:
        """The sum, in milliseconds."""
        return self.read + self.decode + self.augment + self.transfer


def measure(items: Sequence[Any], *, read: Read, decode: Decode, augment: Augment, batch_size: int) -> Costs:
    """Time the parts one by one, single-threaded, over the same items.

    Parameters
    ----------
    items : sequence
        What `read` takes; at least one.
    read : callable
        item -> bytes-like.
    decode : callable
        (item, bytes-like) -> (H, W, 3) uint8.
    augment : callable
        An albumentations transform.
    batch_size : int
        Of the transfer.
    """
    clock = time.perf_counter
    seconds = np.empty((len(items), 3))
    image = None
    with one_opencv_thread():
        for row, item in zip(seconds, items):
            read(item)  # untimed: from here on the bytes are in memory
            start = clock()
            data = read(item)
            have_data = clock()
            pixels = decode(item, data)
            have_pixels = clock()
            image = augment(image=pixels)["image"]
            row[:] = have_data - start, have_pixels - have_data, clock() - have_pixels
    read_ms, decode_ms, augment_ms = (1e3 * np.median(seconds, axis=0)).tolist()
    return Costs(len(items), read_ms, decode_ms, augment_ms, _transfer(image, batch_size))


class _Ready(torch.utils.data.Dataset[Any]):
    """The same finished item again and again."""

    def __init__(self, item: Any, length: int) -> None:
        self.item, self.length = item, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        return self.item


def _transfer(item: Any, batch_size: int) -> float:
    """Return the milliseconds between two batches from one worker, divided by the batch size."""
    ready = _Ready((item, 0), batch_size * TRANSFER_BATCHES)
    batches = iter(torch.utils.data.DataLoader(ready, batch_size=batch_size, num_workers=1))
    for _ in range(2):
        next(batches)
    start = time.perf_counter()
    count = sum(1 for _ in batches)
    return 1e3 * (time.perf_counter() - start) / (count * batch_size)
