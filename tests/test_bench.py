"""bench: what is called cold is cold, the sides see the same images, nothing stays open, and the numbers add up."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
from pathlib import Path

import pytest

from conftest import Photos
from lmdbstore import bench, costs, pagecache
from lmdbstore.epochs import BenchResult, Epoch, Options, with_disk_wait
from lmdbstore.errors import NotCold
from lmdbstore.ingestion import ingest
from lmdbstore.layout import TextColumn
from lmdbstore.store import ImageStore

COSTS = costs.Costs(10, read=0.5, decode=2.0, augment=1.5, transfer=1.0)


@pytest.fixture
def store(photos: Photos, tmp_path: Path) -> Path:
    path = tmp_path / "photos.lmdb"
    ingest(photos.csv, images=photos.images, out=path)
    return path


def epoch(side: str = "store", **changes: object) -> Epoch:
    plain = Epoch(side, 0, 1.0, 4.0, 0.5, None, ((0.5, 64), (2.0, 128), (4.0, 160)))
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def result(*epochs: Epoch) -> BenchResult:
    options = Options(Path("a.lmdb"), None, None, 2, 2, 64, "seed", True)
    return BenchResult(options, 160, 9000, epochs, {e.side: COSTS for e in epochs}, {"cores": "2"})


# The numbers


@pytest.mark.parametrize(
    ("resident", "state"), [(None, "unknown"), (0.0, "cold"), (0.001, "partly"), (0.98, "partly"), (0.995, "warm")]
)
def test_state_is_what_was_measured(resident: float | None, state: str) -> None:
    assert epoch(resident=resident).state == state


def test_split_adds_up_to_the_epoch() -> None:
    shown = result(epoch(disk_wait=1.5)).split(epoch(disk_wait=1.5))
    assert shown == pytest.approx({"disk": 1.5, "read": 0.25, "decode": 1.0, "augment": 0.75, "transfer": 0.5})


def test_split_without_a_known_wait_gives_all_to_the_parts() -> None:
    shown = result(epoch()).split(epoch())
    assert shown["disk"] == 0
    assert sum(shown.values()) == pytest.approx(4.0)


def test_rates_integrate_to_the_images() -> None:
    timeline = tuple((0.1 * k + (0.5 if k > 100 else 0), 64 * k) for k in range(1, 301))
    edges, rates = epoch(seconds=timeline[-1][0], timeline=timeline).rates()
    widths = [after - before for before, after in zip(edges, edges[1:])]
    assert sum(rate * width for rate, width in zip(rates, widths)) == pytest.approx(64 * 300)
    assert len(rates) == 60
    assert max(rates) == pytest.approx(640)


def test_rates_of_a_single_batch() -> None:
    assert epoch(seconds=2.0, timeline=((2.0, 10),)).rates() == ([0.0, 2.0], [5.0])


def test_disk_wait_of_the_folder_is_the_difference_to_its_warm_epochs() -> None:
    cold = epoch("folder", resident=0.0, seconds=99.0)
    warm, slow = epoch("folder", seconds=16.0), epoch("folder", seconds=18.0)
    assert [e.disk_wait for e in with_disk_wait([cold, warm, slow])] == [82.0, 0.0, 0.0]


def test_disk_wait_that_was_counted_stays() -> None:
    cold, warm = epoch(resident=0.0, seconds=9.0, disk_wait=0.25), epoch(disk_wait=0.0)
    assert [e.disk_wait for e in with_disk_wait([cold, warm])] == [0.25, 0.0]


def test_disk_wait_is_unknown_without_a_warm_epoch() -> None:
    assert with_disk_wait([epoch("folder", resident=0.0)])[0].disk_wait is None


def test_first_to_later_is_against_the_median() -> None:
    epochs = [epoch(number=k, seconds=s) for k, s in enumerate((12.0, 4.0, 6.0, 5.0))]
    assert result(*epochs).first_to_later("store") == pytest.approx(12 / 5)
    assert result(epochs[0]).first_to_later("store") is None


def test_result_goes_through_json_and_keeps_every_number() -> None:
    measured = result(epoch("folder", resident=0.0), epoch("store", number=1, disk_wait=0.5))
    read = json.loads(json.dumps(measured.to_dict()))
    assert read["options"]["store"] == "a.lmdb"
    assert read["epochs"][0]["state"] == "cold"
    assert read["epochs"][1]["timeline"][-1] == [4.0, 160]
    assert read["epochs"][1]["images_per_second"] == 40.0
    assert sum(read["epochs"][1]["split"].values()) == pytest.approx(4.0)
    assert read["costs_ms"]["store"]["decode"] == 2.0


def test_table_has_a_line_for_every_epoch_within_a_wide_terminal() -> None:
    lines = result(epoch("folder", resident=0.0), epoch("store", number=1)).table().splitlines()
    assert [line.split()[1:3] for line in lines[1:3]] == [["folder", "cold"], ["store", "warm"]]
    assert {len(line) for line in lines[:3]} == {len(lines[0])}
    assert len(lines[0]) < 100


# The options


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"workers": -1}, "workers=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"pipeline": "sed"}, "'sed'"),
        ({"loader": "threads"}, "'threads'; there are dataloader, batch"),
        ({"csv": "train.csv"}, "images=None"),
    ],
)
def test_options_quote_the_bad_value(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bench.run("a.lmdb", **change)  # type: ignore[arg-type]


# The runs


def test_run_takes_the_sides_in_turn_and_counts_every_image(photos: Photos, store: Path) -> None:
    seen: list[bench.Progress] = []
    measured = bench.run(
        store,
        csv=photos.csv,
        images=photos.images,
        epochs=2,
        workers=0,
        batch_size=16,
        pipeline="rrc",
        progress=seen.append,
    )
    assert [(e.side, e.number) for e in measured.epochs] == [("folder", 0), ("store", 0), ("folder", 1), ("store", 1)]
    assert {e.images for e in measured.epochs} == {len(photos.ids)} == {measured.images}
    assert [p.images for p in seen[:3]] == [16, 32, 40]
    assert seen[-1] == bench.Progress("store 2/2", 40, 40)
    assert set(measured.costs) == {"folder", "store"}
    assert all(0 < e.first_batch <= e.seconds for e in measured.epochs)


@pytest.mark.parametrize("loader", ["dataloader", "batch"])
def test_run_with_workers_leaves_nothing_behind(store: Path, loader: str) -> None:  # no_leaks looks
    measured = bench.run(store, epochs=1, workers=2, batch_size=8, pipeline="seed", loader=loader)
    assert measured.options.loader == loader
    assert [e.side for e in measured.epochs] == ["store"]
    assert len(measured.epochs[0].timeline) == 5


def test_the_folder_has_only_what_the_store_has(photos: Photos, tmp_path: Path) -> None:
    photos.path(photos.ids[3]).write_bytes(b"not an image")
    path = tmp_path / "fewer.lmdb"
    ingest(photos.csv, images=photos.images, out=path)
    measured = bench.run(path, csv=photos.csv, images=photos.images, epochs=1, workers=0)
    assert {e.images for e in measured.epochs} == {len(photos.ids) - 1}


def test_a_store_without_a_number_column_runs_without_labels(photos: Photos, tmp_path: Path) -> None:
    photos.csv.write_text("id,place\n" + "".join(f"{id},town {k % 3}\n" for k, id in enumerate(photos.ids)))
    path = tmp_path / "text.lmdb"
    ingest(photos.csv, images=photos.images, out=path)
    with ImageStore(path) as opened:
        assert isinstance(opened.column("place"), TextColumn)
    measured = bench.run(path, csv=photos.csv, images=photos.images, epochs=1, workers=0, batch_size=40)
    assert {e.images for e in measured.epochs} == {40}


def evictable(path: Path) -> bool:
    """Tell whether this file system drops what it is told to (a tmpfs is memory itself)."""
    return pagecache.evict(path) == 0


def test_cold_is_only_the_first_epoch(photos: Photos, store: Path) -> None:
    if not evictable(store):
        pytest.skip("this file system or kernel can't evict")
    measured = bench.run(store, csv=photos.csv, images=photos.images, epochs=2, workers=0, pipeline="rrc", cold=True)
    assert [e.state for e in measured.epochs[:2]] == ["cold", "cold"]
    assert all(e.resident and e.resident > 0.5 for e in measured.epochs[2:])
    assert all(e.disk_wait is not None for e in measured.epochs if e.side == "store")


def test_a_mapped_store_is_refused_as_cold(store: Path) -> None:
    if not evictable(store):
        pytest.skip("this file system or kernel can't evict")
    fd = os.open(store, os.O_RDONLY)
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped:
        os.close(fd)
        assert sum(mapped[:: mmap.PAGESIZE]) >= 0  # touched, so that the pages are mapped
        with pytest.raises(NotCold, match=r"photos\.lmdb: [\d,]+ bytes are still in memory .* close every store"):
            bench.run(store, epochs=1, workers=0, cold=True)


def test_unknown_residency_is_refused_as_cold(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagecache, "evict", lambda path: None)
    with pytest.raises(NotCold, match="doesn't say"):
        bench.run(store, epochs=1, workers=0, cold=True)


def test_costs_measure_every_part() -> None:
    import numpy as np

    measured = costs.measure(
        [b"a", b"b", b"c"],
        read=lambda item: item,
        decode=lambda item, data: np.zeros((4, 4, 3), np.uint8),
        augment=lambda image: {"image": image},
        batch_size=2,
    )
    assert measured.images == 3
    assert min(measured.read, measured.decode, measured.augment, measured.transfer) > 0
    assert measured.total == pytest.approx(measured.read + measured.decode + measured.augment + measured.transfer)


def test_plot_draws_every_epoch(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from lmdbstore.plots import plot_bench

    picture = tmp_path / "epochs.png"
    figure = plot_bench(result(epoch("folder", resident=0.0), epoch("store", number=1)), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == [
        "folder 1, cold: 4.0 s",
        "store 2, warm: 4.0 s",
    ]
