from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
import torch

from lmdbstore import normalize


@pytest.mark.parametrize("options", [{}, {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3)}])
def test_it_equals_albumentations(options: dict[str, tuple[float, float, float]]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 48, 3), dtype=np.uint8)
    images[0].reshape(-1)[: 256 * 3] = np.repeat(np.arange(256), 3)  # every value in every channel
    usual = A.Compose([A.Normalize(**options), A.ToTensorV2()])
    expected = torch.stack([usual(image=image)["image"] for image in images])
    found = normalize(torch.from_numpy(images), **options)
    assert found.dtype == torch.float32 and found.shape == (4, 3, 32, 48)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_it_moves_to_the_device_and_leaves_the_batch_alone() -> None:
    batch = torch.full((2, 4, 4, 3), 255, dtype=torch.uint8)
    assert normalize(batch, device="meta").device.type == "meta"
    normalize(batch, device="cpu")
    assert (batch == 255).all()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.float32; uint8 expected"):
        normalize(torch.zeros(2, 4, 4, 3))
    with pytest.raises(ValueError, match=r"shape \(2, 3, 4, 4\); \(B, H, W, 3\)"):
        normalize(torch.zeros(2, 3, 4, 4, dtype=torch.uint8))
