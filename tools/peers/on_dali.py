"""NVIDIA DALI on the CPU: its own reader, decoder, augmentations and threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from peers.job import MEAN, STD, Job

AHEAD = 2  # DALI's default of prefetch_queue_depth


class Endless:
    """Batches without end: DALI goes on into the next epoch.

    An epoch is then as many batches as hold it.  `ready` takes those that DALI made before the clock starts.
    """

    def __init__(self, job: Job) -> None:
        self.files, self.labels = job.photos()
        graph = dali_graph(job, self.files, self.labels.tolist(), batch_size=job.batch, num_threads=job.workers,
                           device_id=None, prefetch_queue_depth=AHEAD)  # fmt: skip
        self.iterator = DALIGenericIterator(graph, ["image", "label"])
        self.batches = -(-len(self.files) // job.batch)

    def ready(self) -> None:
        """Take what has been made ahead."""
        for _ in islice(self.iterator, AHEAD + 1):
            pass

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(self.iterator, self.batches):
            yield batch[0]["image"], batch[0]["label"]


@pipeline_def
def dali_graph(job: Job, files: list[str], labels: list[int]) -> Any:
    """Read, decode, augment, normalise."""
    data, label = fn.readers.file(files=files, labels=labels, random_shuffle=True)
    flip: Any = 0
    if job.pipeline == "rrc":
        pixels = fn.decoders.image_random_crop(data, device="cpu")
        pixels = fn.resize(pixels, size=[224, 224], antialias=False)
        flip = fn.random.coin_flip()
    else:
        pixels = fn.decoders.image(data, device="cpu")
        pixels = fn.resize(pixels, size=[400, 400], antialias=False)
        pixels = fn.rotate(pixels, angle=fn.random.uniform(range=[-15, 15]), keep_size=True, fill_value=0)
        pixels = pixels * dropped()
    scale = {"mean": [255 * value for value in MEAN], "std": [255 * value for value in STD]}
    image = fn.crop_mirror_normalize(pixels, mirror=flip, dtype=types.FLOAT, output_layout="HWC", **scale)
    return image, label


def dropped() -> Any:
    """Return a factor a channel: 1, or with probability 0.1 a 0 in one of them."""
    channel = fn.one_hot(fn.random.uniform(values=[0, 1, 2], dtype=types.INT32), num_classes=3, dtype=types.UINT8)
    lost = fn.random.coin_flip(probability=0.1, dtype=types.UINT8)
    return types.Constant([1, 1, 1], dtype=types.UINT8) - channel * lost


def iterator(job: Job) -> Iterable[Any]:
    """DALIGenericIterator."""
    return Endless(job)
