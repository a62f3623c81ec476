"""Hugging Face datasets: an Arrow file that is memory-mapped; a batch is fetched by one call of `__getitems__`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets

from peers.job import Augmented, Job, loading


class Transform:
    """What `with_transform` calls on a batch."""

    def __init__(self, pipeline: str) -> None:
        self.augmented = Augmented(pipeline)

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"image": [self.augmented(data) for data in batch["image"]], "label": batch["label"]}


def convert(job: Job, out: Path) -> None:
    """Write the Arrow files."""
    paths, labels = job.photos()
    columns = {"image": [Path(path).read_bytes() for path in paths], "label": labels.tolist()}
    features = datasets.Features({"image": datasets.Value("binary"), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(out))


def pairs(items: list[dict[str, Any]]) -> Any:
    """Collate to images and labels."""
    from torch.utils.data import default_collate

    return default_collate([(item["image"], item["label"]) for item in items])


def dataloader(job: Job) -> Iterable[Any]:
    """`with_transform`, DataLoader."""
    dataset = datasets.load_from_disk(str(job.data)).with_transform(Transform(job.pipeline))
    return loading(job, dataset, shuffle=True, collate_fn=pairs)
