"""Memory for batches, used again only when nobody can see it any more."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import torch


class BufferPool:
    """Arrays of one shape and dtype after the other, lent out as torch tensors.

    Fresh memory costs a page fault for every 4 KiB (0.9 ms an image of 400 x 400 x 3 float32), so an array comes back
    here when the last tensor or array over it is gone: `torch.from_numpy` holds the array that it was made from until
    its storage is freed, by then no tensor, view, slice, `.numpy()` or autograd graph has it, and the array's death is
    what brings the memory back.  While anybody holds any of them, other memory is used.

    Parameters
    ----------
    keep : int
        Free arrays to keep, at most.
    pinned : bool
        Page-locked memory, from torch's own allocator each time: only that one knows when a copy to the device that was
        started with `non_blocking` has ended, and it reuses its blocks, too.

    Notes
    -----
    Threads: any.  Processes: none of it travels.
    """

    def __init__(self, *, keep: int, pinned: bool = False) -> None:
        self.keep, self.pinned = keep, pinned
        self._free: deque[np.ndarray] = deque(maxlen=keep)

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[np.ndarray, torch.Tensor]:
        """Return the same uninitialised memory as an array and as a tensor; it is lent until both are gone."""
        if self.pinned:
            tensor = torch.empty(shape, dtype=_torch_dtype(dtype), pin_memory=True)
            return tensor.numpy(), tensor
        memory = self._matching(shape, dtype)
        lent = memory[:]  # an array object of its own: its end is the end of the loan
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return lent, torch.from_numpy(lent)

    def _matching(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        while self._free:
            memory = self._free.popleft()
            if memory.shape == shape and memory.dtype == dtype:
                return memory
        # Not numpy.empty, which asks for huge pages: 6 ms for 123 MB where there are some, 420 ms where the kernel has
        # to move the page cache about to make them.  So it takes 55 ms, always, and a few times only.
        return torch.empty(shape, dtype=_torch_dtype(dtype)).numpy()


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
