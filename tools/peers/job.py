"""What every side is given, and what most of them share: photos, albumentations, PyTorch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import albumentations as A
import cv2
import numpy as np
from torch.utils.data import DataLoader

from lmdbstore import folder
from lmdbstore.template import probe_layout

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Job:
    """The work of a side."""

    csv: Path
    images: Path
    limit: int  # photos, from the start of the csv; 0 for all
    data: Path  # where a peer keeps its own format
    pipeline: str  # of lmdbstore.folder
    batch: int
    workers: int

    def photos(self) -> tuple[list[str], np.ndarray]:
        """Return files and labels."""
        ids = folder.read_ids(self.csv, id_column="id")[: self.limit or None]
        template = probe_layout(self.images, ids[:50]).text
        paths, labels = folder.read_csv(
            self.csv, self.images, id_column="id", label="landmark_id", template=template, only=ids
        )
        return paths, np.asarray(labels)


class Loader(Protocol):
    """Iterates over (images, labels), an epoch each time."""

    def __iter__(self) -> Iterator[Any]: ...


Side = Callable[[Job], Iterable[Any]]


def augmentation(pipeline: str, *, normalize: bool = True, crop: bool = True) -> A.Compose:
    """Return the albumentations transform of a pipeline; with `normalize`, float32 comes out."""
    steps = [step for step in folder.pipeline(pipeline).transforms if not isinstance(step, A.Normalize)]
    if not crop:
        steps = [step for step in steps if not isinstance(step, A.RandomResizedCrop)]
    return A.Compose([*steps, A.Normalize(mean=MEAN, std=STD)] if normalize else steps)


class Augmented:
    """A file's bytes to a transformed image: OpenCV, then albumentations, for peers without transforms of their own."""

    def __init__(self, pipeline: str) -> None:
        self.transform = augmentation(pipeline)

    def __call__(self, data: bytes) -> np.ndarray:
        # RGB at once: the cvtColor that most tutorials have is spared
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
        image: np.ndarray = self.transform(image=pixels)["image"]
        return image


def loading(job: Job, dataset: Any, kind: Any = DataLoader, **options: Any) -> Any:
    """Return a DataLoader of some kind: worker processes that stay, each on one core."""
    options = {"batch_size": job.batch, "persistent_workers": True, "worker_init_fn": one_core} | options
    return kind(dataset, num_workers=job.workers, **options)


def one_core(worker: int = 0) -> None:
    """Keep OpenCV to one thread in each worker."""
    cv2.setNumThreads(0)
