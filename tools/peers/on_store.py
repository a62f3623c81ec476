"""lmdbstore: stores with the files as they are, and tiled."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lmdbstore import BatchLoader, BlockShuffleSampler, ImageDataset, IngestOptions, ingest
from lmdbstore.plans import RandomResizedCrop
from peers.job import Job, augmentation, loading


def convert(job: Job, out: Path) -> None:
    """Ingest twice."""
    rows = job.csv.read_text(encoding="utf-8-sig").splitlines(keepends=True)
    part = out / "photos.csv"
    part.write_text("".join(rows[: job.limit + 1] if job.limit else rows))
    for name, tile in (("raw", False), ("tiled", True)):
        ingest(part, images=job.images, out=out / f"{name}.lmdb", options=IngestOptions(tile=tile))


def dataset(job: Job, *, normalize: bool = True, tiled: bool = False, crop: bool = False) -> ImageDataset:
    """Return a dataset; with `crop`, it decodes only what the crop needs."""
    decode = RandomResizedCrop(224) if crop else None
    transform = augmentation(job.pipeline, normalize=normalize, crop=not crop)
    return ImageDataset(job.data / ("tiled.lmdb" if tiled else "raw.lmdb"), transform, "landmark_id", decode=decode)


def batches(job: Job, **options: bool) -> Iterable[Any]:
    """BatchLoader."""
    return BatchLoader(dataset(job, **options), job.batch, shuffle=True, num_threads=job.workers)


def dataloader(job: Job) -> Iterable[Any]:
    """The stock DataLoader."""
    made = dataset(job)
    return loading(job, made, sampler=BlockShuffleSampler(made))


def threads(job: Job) -> Iterable[Any]:
    """BatchLoader, float32."""
    return batches(job)


def threads_uint8(job: Job) -> Iterable[Any]:
    """BatchLoader, uint8: normalised on the device."""
    return batches(job, normalize=False)


def threads_tiled(job: Job) -> Iterable[Any]:
    """BatchLoader that cuts the crop out of the file, float32."""
    return batches(job, tiled=True, crop=True)


def threads_tiled_uint8(job: Job) -> Iterable[Any]:
    """BatchLoader that cuts the crop out of the file, uint8."""
    return batches(job, normalize=False, tiled=True, crop=True)
