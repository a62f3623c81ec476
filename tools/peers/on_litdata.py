"""LitData: chunks of bytes, optimized once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import litdata

from peers.job import Augmented, Job, loading


class Photos(litdata.StreamingDataset):  # type: ignore[misc]
    """The bytes of the files, decoded and transformed."""

    def __init__(self, job: Job) -> None:
        super().__init__(str(job.data), shuffle=True, drop_last=False)
        self.augmented = Augmented(job.pipeline)

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return self.augmented(sample["image"]), sample["label"]


def sample(photo: tuple[str, int]) -> dict[str, Any]:
    """Return what is stored of a photo."""
    return {"image": Path(photo[0]).read_bytes(), "label": photo[1]}


def convert(job: Job, out: Path) -> None:
    """Write the chunks."""
    paths, labels = job.photos()
    litdata.optimize(sample, list(zip(paths, labels.tolist())), str(out), chunk_bytes="16MB", num_workers=1,
                     verbose=False)  # fmt: skip


def dataloader(job: Job) -> Iterable[Any]:
    """StreamingDataLoader."""
    return loading(job, Photos(job), litdata.StreamingDataLoader)
