"""The arithmetic and the words on given figures; the measurements on real files, without asking how long they take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import Photos
from lmdbstore import pagecache
from lmdbstore.costs import Costs
from lmdbstore.doctor import Diagnosis, Side, diagnose
from lmdbstore.errors import OptionError

COSTS = Costs(images=100, read=0.0, decode=2.0, augment=1.5, transfer=0.5)
FOLDER = Side("folder", images=10_000, bytes=1_000_000_000, resident=0.0, random_ms=16.0)
STORE = replace(FOLDER, name="store", random_ms=9.0)
SLOW = Diagnosis((FOLDER, STORE), 160e6, COSTS, 2, {"cores": 2, "processor": "x"})


def test_an_epoch_takes_what_the_slower_of_cores_and_disk_needs() -> None:
    assert SLOW.warm_seconds(STORE) == pytest.approx(20.0)
    assert SLOW.cold_seconds(FOLDER, in_order=False) == pytest.approx(160.0)
    assert SLOW.cold_seconds(STORE, in_order=False) == pytest.approx(90.0)
    assert SLOW.cold_seconds(STORE, in_order=True) == pytest.approx(20.0), "6.25 s of disk hide behind the cores"
    slower = replace(SLOW, sequential=10e6)
    assert slower.cold_seconds(STORE, in_order=True) == pytest.approx(100.0)


def test_a_slow_disk_is_named_with_its_figure() -> None:
    text = "\n".join(SLOW.lines())
    assert "each image costs the disk 16.00 ms, and only 2.00 ms of the 2 workers" in text
    assert "sampler=BlockShuffleSampler(dataset)" in text
    alone = "\n".join(replace(SLOW, sides=(FOLDER,)).lines())
    assert "ingest the folder into a store" in alone


def test_a_fast_disk_is_not_to_blame() -> None:
    fast = replace(SLOW, sides=(replace(STORE, random_ms=0.2),), sequential=2e9)
    text = "\n".join(fast.lines())
    assert "the disk isn't the reason" in text
    assert "order='random') costs no more" in text


def test_what_cannot_be_measured_is_said() -> None:
    blind = replace(SLOW, sides=(replace(STORE, random_ms=None, resident=None),), sequential=None)
    text = "\n".join(blind.lines())
    assert "unknown (not your file)" in text and "can't be measured" in text
    assert blind.to_dict()["predicted"]["store"]["cold_in_order_seconds"] is None


def test_it_measures_a_store_and_a_folder(photos: Photos, store_path: Path) -> None:
    found = diagnose(store_path, csv=photos.csv, images=photos.images)
    assert [side.name for side in found.sides] == ["folder", "store"]
    assert [side.images for side in found.sides] == [40, 40]
    size = sum(len(photos.data(id)) for id in photos.ids)
    assert found.sides[1].bytes == size and found.sides[0].bytes == pytest.approx(size, rel=0.01)
    assert found.costs.decode > 0 and found.costs.augment > 0
    if pagecache.resident(store_path) is not None:
        assert found.sides[1].random_ms and found.sides[1].random_ms > 0
        assert found.sequential and found.sequential > 0
    assert json.loads(json.dumps(found.to_dict()))["predicted"]["store"]
    assert sorted(path.name for path in photos.images.iterdir()) == ["train", "train.csv"], "no trial file is left"


@pytest.mark.parametrize("arguments", [{}, {"csv": "x"}, {"images": "x"}, {"store": "x", "csv": "x"}])
def test_it_needs_something_to_look_at(arguments: dict[str, str]) -> None:
    with pytest.raises(OptionError):
        diagnose(**arguments)  # type: ignore[arg-type]
