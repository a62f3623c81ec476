"""How well the sampler's blocks mix the labels of a store, as numbers and as advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from lmdbstore.errors import LabelError
from lmdbstore.layout import TextColumn
from lmdbstore.shuffle import BlockSchedule, epoch_order, plan_blocks, shuffle_quality
from lmdbstore.store import ImageStore

MIB = 1 << 20
BLOCK_MIB, WINDOWS = (2, 4, 8, 16), (2, 4, 8)
DEFAULT = (8, 4)  # BlockShuffleSampler's block size in MiB, and its window
GOOD = 0.95  # 61 different labels in a batch of 64 where a full shuffle has 64


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Shuffle quality of a store (see `shuffle.shuffle_quality`: 1 is a full shuffle's).

    Attributes
    ----------
    label : str
    batch_size : int
    quality : dict of (block MiB, window blocks) to float
    shuffled : float
        Of the default blocks, if the store had been ingested with ``--order shuffle``.
    """

    label: str
    batch_size: int
    quality: dict[tuple[int, int], float]
    shuffled: float

    @property
    def advice(self) -> str:
        """One sentence that says what to do."""
        now = self.quality[DEFAULT]
        if now >= GOOD:
            return f"the default blocks mix {self.label} like a full shuffle ({now:.2f} of it)"
        better = min(
            (key for key, value in self.quality.items() if value >= GOOD), key=lambda k: k[0] * k[1], default=None
        )
        if better is not None:
            size, window = better
            return (
                f"the default blocks mix {self.label} to {now:.2f} of a full shuffle; "
                f"BlockShuffleSampler(block_bytes={size} << 20, window_blocks={window}) to {self.quality[better]:.2f}"
            )
        return (
            f"images are grouped by {self.label}: the default blocks mix it to {now:.2f} of a full shuffle; "
            f"ingest again with --order shuffle ({self.shuffled:.2f}), "
            "or use order='random' where the store fits into memory"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        rows = [
            {"block_mib": size, "window_blocks": window, "quality": value}
            for (size, window), value in self.quality.items()
        ]
        return {
            "label": self.label,
            "batch_size": self.batch_size,
            "quality": rows,
            "quality_if_shuffled": self.shuffled,
            "advice": self.advice,
        }

    def lines(self) -> Iterator[str]:
        """Yield a table, a row a block size, and the advice."""
        yield f"different {self.label} in a batch of {self.batch_size}, relative to a full shuffle"
        yield "block      " + "".join(f"{f'window of {window}':>14}" for window in WINDOWS)
        for size in BLOCK_MIB:
            yield f"{size:2} MiB     " + "".join(f"{self.quality[size, window]:14.3f}" for window in WINDOWS)
        yield self.advice


def mixing(store: ImageStore, *, label: str | None = None, batch_size: int = 64) -> Mixing:
    """Measure how well blocks of several sizes mix a column's values; reads no image.

    Parameters
    ----------
    store : ImageStore
    label : str, optional
        A column of the csv.  Default: the first.
    batch_size : int

    Raises
    ------
    LabelError
        The csv had no column besides the ids.
    MissingColumn
    """
    if label is None and not store.columns:
        raise LabelError(f"{store.path}: no column besides the ids; there is no label to mix")
    name = label or store.columns[0]
    values = store.column(name)
    codes = np.unique(values.fixed() if isinstance(values, TextColumn) else values, return_inverse=True)[1]

    def quality(labels: np.ndarray, size: int, window: int) -> float:
        plan = plan_blocks(store.column("offset"), store.column("length"), size * MIB)
        order = epoch_order(BlockSchedule(plan, seed=0, epoch=0, window_blocks=window))
        return shuffle_quality(labels, order, batch_size)

    table = {(size, window): quality(codes, size, window) for size in BLOCK_MIB for window in WINDOWS}
    return Mixing(name, batch_size, table, quality(np.random.default_rng(0).permutation(codes), *DEFAULT))
