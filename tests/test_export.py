from __future__ import annotations

import filecmp
import os
from pathlib import Path

import pytest

from conftest import Photos
from lmdbstore import ImageStore, IngestOptions, ingest
from lmdbstore.errors import ExportError, MissingKey
from lmdbstore.export import export


def same(a: Path, b: Path) -> bool:
    """Tell whether two folders have the same files with the same bytes."""
    files = [sorted(p.relative_to(top) for p in top.rglob("*") if p.is_file()) for top in (a, b)]
    return files[0] == files[1] and all(filecmp.cmp(a / file, b / file, shallow=False) for file in files[0])


@pytest.mark.parametrize("order", ["id", "csv", "shuffle"])
@pytest.mark.parametrize("below", ["", "train"])
def test_files_and_csv_come_back(photos: Photos, tmp_path: Path, order: str, below: str) -> None:
    ingest(photos.csv, images=photos.images / below, out=tmp_path / "o.lmdb", options=IngestOptions(order=order))
    with ImageStore(tmp_path / "o.lmdb") as store:
        assert export(store, out=tmp_path / "again") == 40
    assert same(tmp_path / "again", photos.csv.parent)
    assert not (tmp_path / "again.partial").exists()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_odd_csv_comes_back(photos: Photos, tmp_path: Path, end: str) -> None:
    rows = [f'{id},"name, ""{k}""",{k}.50, x ' for k, id in enumerate(photos.ids)]
    photos.csv.write_bytes(end.join(["id,name,score,width", *rows]).encode())
    ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb")
    with ImageStore(tmp_path / "o.lmdb") as store:
        export(store, out=tmp_path / "again")
        export(store, out=tmp_path / "some", ids=photos.ids[5:2:-1])
    assert same(tmp_path / "again", photos.csv.parent)
    expected = end.join(["id,name,score,width", *rows[3:6], ""]).encode()
    assert (tmp_path / "some" / "train.csv").read_bytes() == expected


def test_a_choice_of_ids(photos: Photos, tmp_path: Path, store_path: Path) -> None:
    with ImageStore(store_path) as store:
        assert export(store, out=tmp_path / "some", ids=[photos.ids[9], photos.ids[3], photos.ids[9]]) == 2
        with pytest.raises(MissingKey):
            export(store, out=tmp_path / "none", ids=["gone"])
    files = sorted(p.name for p in (tmp_path / "some").rglob("*.jpg"))
    assert files == sorted(f"{photos.ids[k]}.jpg" for k in (3, 9))
    assert not (tmp_path / "none").exists()


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, store_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with ImageStore(store_path) as store, pytest.raises(ExportError, match="exists already"):
        export(store, out=tmp_path / "there")
    with ImageStore(store_path) as store, pytest.raises(ExportError, match="nothing was exported"):
        export(store, out=tmp_path / "photos.lmdb" / "x")


def test_an_interrupted_export_leaves_nothing(tmp_path: Path, store_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    before = sorted(os.listdir(tmp_path))
    with ImageStore(store_path) as store, pytest.raises(KeyboardInterrupt):
        export(store, out=tmp_path / "again", progress=stop)
    assert sorted(os.listdir(tmp_path)) == before


def test_the_sample_comes_back(shared: Path, tmp_path: Path) -> None:
    glr = shared / "data" / "glr"
    ingest(glr / "train.csv", images=glr / "train", out=tmp_path / "o.lmdb", options=IngestOptions(check="header"))
    with ImageStore(tmp_path / "o.lmdb") as store:
        export(store, out=tmp_path / "again")
    assert same(tmp_path / "again", glr)
