"""MosaicML Streaming: MDS shards on the local disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import streaming
from streaming.base.util import clean_stale_shared_memory

from peers.job import Augmented, Job, loading


class Photos(streaming.StreamingDataset):  # type: ignore[misc]
    """The bytes of the files in a column "bytes", which spares PIL."""

    def __init__(self, job: Job) -> None:
        super().__init__(local=str(job.data), shuffle=True, batch_size=job.batch)
        self.augmented = Augmented(job.pipeline)

    def __getitem__(self, i: int) -> Any:
        sample = super().__getitem__(i)
        return self.augmented(sample["image"]), sample["label"]


def convert(job: Job, out: Path) -> None:
    """Write the shards."""
    with streaming.MDSWriter(out=str(out), columns={"image": "bytes", "label": "int"}) as writer:
        for path, label in zip(*job.photos()):
            writer.write({"image": Path(path).read_bytes(), "label": int(label)})


def dataloader(job: Job) -> Iterable[Any]:
    """StreamingDataLoader."""
    clean_stale_shared_memory()
    return loading(job, Photos(job), streaming.StreamingDataLoader)
