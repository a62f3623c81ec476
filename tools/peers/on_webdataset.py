"""WebDataset: tar shards read in sequence; shuffled before they are decoded, batched in the workers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import webdataset
from torch.utils.data import default_collate

from peers.job import Augmented, Job, loading

SHARDS = 8  # whole numbers of them a worker


def convert(job: Job, out: Path) -> None:
    """Write the tar files."""
    paths, labels = job.photos()
    each = -(-len(paths) // SHARDS)
    with webdataset.ShardWriter(str(out / "%02d.tar"), maxcount=each, verbose=0) as sink:
        for i, (path, label) in enumerate(zip(paths, labels)):
            sink.write({"__key__": f"{i:08}", "jpg": Path(path).read_bytes(), "cls": int(label)})


def webloader(job: Job) -> Iterable[Any]:
    """Shuffle shards, then raw samples in a buffer of 1,000; WebLoader."""
    shards = [str(path) for path in sorted(job.data.glob("*.tar"))]
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=len(shards), empty_check=False)
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map_tuple(Augmented(job.pipeline), int)
        .batched(job.batch, partial=True, collation_fn=default_collate)
    )
    return loading(job, dataset, webdataset.WebLoader, batch_size=None)
