"""SPDL: a pipeline of threads; with OpenCV and albumentations, and with SPDL's own decoder and filters (FFmpeg)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import spdl.io
import torch
from spdl.pipeline import PipelineBuilder

from lmdbstore.plans import RandomResizedCrop
from peers.job import MEAN, STD, Augmented, Job, one_core


class Epochs:
    """A pipeline built for every epoch: one stage for an image, one for a batch."""

    def __init__(self, job: Job, one: Callable[[Any], Any], many: Callable[[list[Any]], Any]) -> None:
        self.job, self.one, self.many = job, one, many
        paths, labels = job.photos()
        self.photos = list(zip(paths, labels.tolist()))

    def __iter__(self) -> Iterator[Any]:
        builder = PipelineBuilder().add_source(random.sample(self.photos, len(self.photos)))
        builder = builder.pipe(self.one, concurrency=self.job.workers).aggregate(self.job.batch).pipe(self.many)
        pipeline = builder.add_sink(2).build(num_threads=self.job.workers)
        with pipeline.auto_stop():
            yield from pipeline


def threads(job: Job) -> Iterable[Any]:
    """OpenCV and albumentations in the threads."""
    one_core()
    own = threading.local()  # an albumentations transform isn't to be shared by threads

    def one(photo: tuple[str, int]) -> tuple[np.ndarray, int]:
        if not hasattr(own, "augmented"):
            own.augmented = Augmented(job.pipeline)
        return own.augmented(Path(photo[0]).read_bytes()), photo[1]

    return Epochs(job, one, stacked)


def decoder(job: Job) -> Iterable[Any]:
    """`spdl.io`: decode, crop, resize and flip in FFmpeg, batches made of its frames; needs FFmpeg's libraries."""
    torch.set_num_threads(1)
    return Epochs(job, cropped, normalized)


def stacked(items: list[tuple[np.ndarray, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch of arrays."""
    return torch.from_numpy(np.stack([image for image, _ in items])), torch.tensor([label for _, label in items])


def cropped(photo: tuple[str, int]) -> tuple[Any, int]:
    """Decode the crop of a photo; it keeps FFmpeg's own format until it is small."""
    packets = spdl.io.demux_image(photo[0])
    plan = RandomResizedCrop(224).plan(packets.width, packets.height, np.random.default_rng())
    x, y, width, height = plan.window
    flip = random.choice(["hflip,", ""])
    filters = f"crop={width}:{height}:{x}:{y},scale=224:224:flags=bilinear,{flip}format=rgb24"
    return spdl.io.decode_packets(packets, filter_desc=filters), photo[1]


def normalized(items: list[tuple[Any, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch of frames."""
    batch = spdl.io.to_torch(spdl.io.convert_frames([frames for frames, _ in items])).to(torch.float32)
    mean, std = 255 * torch.tensor(MEAN), 255 * torch.tensor(STD)
    return batch.sub_(mean).div_(std), torch.tensor([label for _, label in items])
