"""Normalising on the device: batches travel as uint8, a quarter of the bytes of float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def normalize(
    batch: torch.Tensor,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Turn a batch of uint8 images into what a network takes.

    Parameters
    ----------
    batch : Tensor, (B, H, W, C) uint8
        As a loader gives it without Normalize and ToTensorV2 in the transform.
    mean, std : sequence of float
        Per channel, of pixels in 0 to 1, as albumentations.Normalize has them.  Default: ImageNet's.
    device : device, optional
        Where to; it is moved there as uint8.  A pinned batch is copied while the loop goes on.

    Returns
    -------
    Tensor, (B, C, H, W) float32, on the device
        Channels last in memory, as convolutions on CPUs and GPUs like it best; equal to Normalize and ToTensorV2 within
        float32's rounding.

    Raises
    ------
    TypeError
        The batch isn't uint8.
    ValueError
        Its last dimension isn't the number of channels of `mean` and `std`.
    """
    if batch.dtype != torch.uint8:
        raise TypeError(f"a batch of {batch.dtype}; uint8 expected: is there a Normalize in the transform?")
    if batch.ndim != 4 or not batch.shape[3] == len(mean) == len(std):
        raise ValueError(f"a batch of shape {tuple(batch.shape)}; (B, H, W, {len(mean)}) expected")
    moved = batch.to(device, non_blocking=batch.is_pinned()) if device is not None else batch
    shift = torch.tensor(mean, dtype=torch.float32, device=moved.device) * 255
    factor = 1 / (torch.tensor(std, dtype=torch.float32, device=moved.device) * 255)
    return moved.to(torch.float32).sub_(shift).mul_(factor).permute(0, 3, 1, 2)
