"""A folder of files: the question's code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lmdbstore.folder import FolderDataset
from peers.job import Job, augmentation, loading


def cv2_dataloader(job: Job) -> Iterable[Any]:
    """`cv2.imread`, albumentations, DataLoader."""
    paths, labels = job.photos()
    return loading(job, FolderDataset(paths, labels, augmentation(job.pipeline)), shuffle=True)
