"""torchvision: v2 transforms of uint8 tensors, which its documentation names as the fast way, and of PIL images."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from peers.job import MEAN, STD, Job, loading


class Photos(torch.utils.data.Dataset[Any]):
    """Files, read by `read`, and their labels."""

    def __init__(self, job: Job, read: Callable[[str], Any], first: list[Any]) -> None:
        self.paths, self.labels = job.photos()
        self.read = read
        own = {"seed": [v2.Resize((400, 400)), v2.RandomRotation(15), v2.RandomApply([ChannelDropout()], 0.1)],
               "rrc": [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()]}[job.pipeline]  # fmt: skip
        last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        self.transform = v2.Compose([*own[:-1], *first, own[-1], *last])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        return self.transform(self.read(self.paths[i])), int(self.labels[i])


class ChannelDropout(torch.nn.Module):
    """Set one of the channels to 0, as albumentations does; torchvision has none."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor (3, H, W)."""
        image = image.clone()
        image[torch.randint(3, ())] = 0
        return image


def read_tensor(path: str) -> torch.Tensor:
    """Decode by libjpeg-turbo to a uint8 tensor."""
    return decode_image(path, ImageReadMode.RGB)


def read_pil(path: str) -> Image.Image:
    """Decode as `ImageFolder` does."""
    with Image.open(path) as image:
        return image.convert("RGB")


def tensors(job: Job) -> Iterable[Any]:
    """uint8 tensors all the way, DataLoader."""
    return loading(job, Photos(job, read_tensor, []), shuffle=True)


def pil(job: Job) -> Iterable[Any]:
    """PIL images until they are small, DataLoader."""
    return loading(job, Photos(job, read_pil, [v2.PILToTensor()]), shuffle=True)
