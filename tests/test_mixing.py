from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmdbstore import ImageStore
from lmdbstore.errors import LabelError, MissingColumn
from lmdbstore.layout import TextColumn
from lmdbstore.mixing import DEFAULT, mixing


def columns(labels: Any, *, kib: int = 100) -> Any:
    """Return what mixing needs of a store: images of one size and their labels, in the order of the file."""
    length = np.full(len(labels), kib << 10)
    values = {"offset": np.cumsum(length) - length, "length": length, "label": labels}
    return SimpleNamespace(path=Path("x.lmdb"), columns=("label",), column=values.__getitem__)


LABELS = np.repeat(np.arange(400), 50)  # 20,000 images, 2 GB


def test_grouped_labels_are_found_and_the_advice_is_to_shuffle() -> None:
    found = mixing(columns(LABELS))
    assert found.quality[DEFAULT] < 0.5 and found.shuffled > 0.98
    assert "--order shuffle" in found.advice and "grouped by label" in found.advice
    assert found.quality[2, 2] < found.quality[2, 8], "more blocks mix better"


def test_mixed_labels_need_nothing() -> None:
    found = mixing(columns(np.random.default_rng(0).permutation(LABELS)))
    assert found.quality[DEFAULT] > 0.98 and "like a full shuffle" in found.advice


def test_labels_in_between_get_a_larger_window() -> None:
    runs = np.random.default_rng(0).permutation(10_000) % 400  # of 3 images
    found = mixing(columns(np.repeat(runs, 3)[: len(LABELS)]))
    assert found.quality[DEFAULT] < 0.95
    assert "BlockShuffleSampler(block_bytes=" in found.advice and "window_blocks=" in found.advice


def test_text_labels_count_as_numbers_do() -> None:
    text = TextColumn.of(f"label {value}" for value in LABELS)
    assert mixing(columns(text)).quality == mixing(columns(LABELS)).quality


def test_of_a_real_store(store_path: Path) -> None:
    with ImageStore(store_path) as store:
        found = mixing(store, batch_size=8)
        assert found.label == "landmark_id"
        assert all(0.5 < value < 1.6 for value in found.quality.values()), "40 images are one window: a full shuffle"
        assert len(list(found.lines())) == 7
        with pytest.raises(MissingColumn):
            mixing(store, label="nothing")
    with pytest.raises(LabelError):
        mixing(SimpleNamespace(path="x", columns=()))  # type: ignore[arg-type]
