"""Selections: what `store[...]` takes, and what a selection knows."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conftest import Photos
from lmdbstore import ImageDataset, ImageStore, ingest
from lmdbstore.errors import LabelError, MissingColumn, MissingKey
from lmdbstore.selection import count_values, default_label, labelled


@pytest.fixture
def store(store_path: Path) -> Iterator[ImageStore]:
    with ImageStore(store_path) as opened:
        yield opened


@pytest.fixture
def text_store(photos: Photos, tmp_path: Path) -> Iterator[ImageStore]:
    photos.csv.write_text(
        "id,place,score\n" + "".join(f"{id},town {k % 3},{k / 8}\n" for k, id in enumerate(photos.ids))
    )
    ingest(photos.csv, images=photos.images, out=tmp_path / "text.lmdb")
    with ImageStore(tmp_path / "text.lmdb") as opened:
        yield opened


def test_a_selection_by_ids_keeps_their_order(store: ImageStore, photos: Photos) -> None:
    wanted = photos.ids[5:2:-1]
    assert store[wanted].ids == list(store[wanted]) == wanted
    assert store[(id for id in wanted)].ids == wanted
    assert store[np.array(wanted)].ids == wanted
    assert store[wanted[0]].ids == wanted[:1]
    assert ImageDataset(store, ids=store[wanted].ids).indices.tolist() == store[wanted].indices.tolist()


def test_a_selection_by_position_and_mask(store: ImageStore) -> None:
    assert store[3:9:2].indices.tolist() == [3, 5, 7]
    assert store[[7, 2, -1]].indices.tolist() == [7, 2, 39]
    assert store[np.uint8(4)].indices.tolist() == store[4].indices.tolist() == [4]
    narrow = store.column("width") < 60
    assert store[narrow].indices.tolist() == np.flatnonzero(narrow).tolist()
    assert len(store[[]]) == len(store[np.zeros(40, bool)]) == 0
    assert store[3:9][[True, False] * 3].indices.tolist() == [3, 5, 7]
    assert store[3:9][-1].indices.tolist() == [8]


def test_a_selection_of_what_is_not_there_is_an_error(store: ImageStore) -> None:
    with pytest.raises(MissingKey, match="'no'"):
        store[[store.ids[0], "no"]]
    with pytest.raises(MissingKey):  # numpy would drop the NUL and find the id
        store[[store.ids[0] + "\0"]]
    with pytest.raises(IndexError):
        store[[40]]
    with pytest.raises(IndexError, match="mask of 39 for a store of 40"):
        store[np.ones(39, bool)]


def test_pandas_masks_and_indexes_select(store: ImageStore) -> None:
    pytest.importorskip("pandas")
    table = store.table()
    narrow = table[table.width < 60]
    expected = np.flatnonzero(store.column("width") < 60).tolist()
    assert store[narrow.index].indices.tolist() == expected
    assert store[table.width < 60].indices.tolist() == expected
    assert store[narrow.id].indices.tolist() == expected


def test_select_takes_values_of_columns(store: ImageStore, photos: Photos) -> None:
    label = photos.labels[photos.ids[0]]
    assert set(store.select(landmark_id=label)) == {id for id in photos.ids if photos.labels[id] == label}
    both = store.select(landmark_id=[27, 1027])
    assert set(both) == {id for id in photos.ids if photos.labels[id] in (27, 1027)}
    assert set(both.select(format=2)) <= set(both)
    with pytest.raises(MissingColumn, match="landmark"):
        store.select(landmark=1)


def test_select_of_text(text_store: ImageStore, photos: Photos) -> None:
    assert set(text_store.select(place="town 1")) == set(photos.ids[1::3])
    assert set(text_store.select(place=["town 1", "town 2"])) == set(photos.ids[1::3]) | set(photos.ids[2::3])


def test_labelled_reads_the_label_as_the_column_has_it(
    store: ImageStore, text_store: ImageStore, photos: Photos
) -> None:
    label = photos.labels[photos.ids[0]]
    assert labelled(store, f"{label}").ids == store.select(landmark_id=label).ids
    assert set(labelled(text_store, "town 1")) == set(photos.ids[1::3])
    assert labelled(text_store, "0.25", column="score").ids == [photos.ids[2]]
    with pytest.raises(LabelError, match=r"column 'landmark_id' is of numbers, 'x' isn't one"):
        labelled(store, "x")
    with pytest.raises(LabelError, match="no image has '5'"):
        labelled(store, "5")


def test_the_default_label_is_the_first_column_of_integers(store: ImageStore, text_store: ImageStore) -> None:
    assert default_label(store) == "landmark_id"
    assert default_label(text_store) == "place"


def test_sizes_are_upright(store: ImageStore, photos: Photos) -> None:
    width, height = store[photos.ids].sizes
    for id, *size in zip(photos.ids, height.tolist(), width.tolist()):
        assert tuple(size) == store.decode(id).shape[:2], photos.kinds[id]


def test_formats_are_counted(store: ImageStore) -> None:
    assert store[:].formats == {"jpeg": 38, "png": 1, "webp": 1}


def test_a_sample_is_the_same_for_the_same_seed(store: ImageStore) -> None:
    first = store[:].sample(7, seed=3)
    assert len(set(first.indices.tolist())) == 7 and (np.diff(first.indices) > 0).all()
    assert first.indices.tolist() == store[:].sample(7, seed=3).indices.tolist()
    assert first.indices.tolist() != store[:].sample(7, seed=4).indices.tolist()
    assert store[[9, 2]].sample(7).indices.tolist() == [9, 2]


def test_a_selection_pickles_as_the_store_does(store: ImageStore, photos: Photos) -> None:
    again = pickle.loads(pickle.dumps(store[photos.ids[:3]]))
    assert again.ids == photos.ids[:3] and again.store is not store
    again.store.close()


@pytest.mark.parametrize("values", [np.array([5, 3, 5, 9]), ["5", "3", "5", "9"]])
def test_values_are_counted_the_most_frequent_first(values: object) -> None:
    labels, counts = count_values(values)
    assert [int(label) for label in labels] == [5, 3, 9]
    assert counts.tolist() == [2, 1, 1]
