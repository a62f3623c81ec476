from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from conftest import Photos
from lmdbstore import ImageStore, IngestOptions, ingest, layout, verify
from lmdbstore.ingestion.writer import Batch, Staging


def test_a_whole_store_has_no_problems(store_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = verify(store_path, decode=True, progress=lambda done, total: calls.append((done, total)))
    assert report.problems == [] and report.images == 40
    assert calls[-1] == (40, 40)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


def test_any_flipped_byte_in_a_value_is_found_and_named(store_path: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    with ImageStore(store_path) as store:
        places = [(i, int(store.column("offset")[i]), int(store.column("length")[i])) for i in range(len(store))]
        ids = list(store.ids)
    for i, offset, length in places:
        broken = tmp_path / "broken.lmdb"
        shutil.copy(store_path, broken)
        flip(broken, rng.choice([offset, offset + length - 1, offset + rng.randrange(length)]))
        problems = verify(broken).problems
        assert len(problems) == 1 and repr(ids[i]) in problems[0] and "checksum" in problems[0]


def test_any_flipped_byte_in_a_column_is_found_and_named(store_path: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    with ImageStore(store_path) as store:
        columns = store.manifest.columns
    for column in columns:
        for at in {0, column.length - 1, *rng.sample(range(column.length), 5)}:
            broken = tmp_path / "broken.lmdb"
            shutil.copy(store_path, broken)
            flip(broken, column.offset + at)
            problems = verify(broken).problems
            assert problems and any(repr(column.name) in problem for problem in problems)


def test_flipped_bytes_anywhere_never_crash(store_path: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    size = store_path.stat().st_size
    for _ in range(60):
        broken = tmp_path / "broken.lmdb"
        shutil.copy(store_path, broken)
        for at in rng.sample(range(size), 30):
            flip(broken, at)
        assert verify(broken).problems


def test_all_problems_are_reported(store_path: Path) -> None:
    with ImageStore(store_path) as store:
        offset = store.column("offset")[[3, 5, 7]].tolist()
    for at in offset:
        flip(store_path, at + 40)
    assert len(verify(store_path).problems) == 3


def test_a_file_cut_short_and_no_file(store_path: Path) -> None:
    store_path.write_bytes(store_path.read_bytes()[:-4096])
    assert "cut short" in verify(store_path).problems[0]
    assert "no such file" in verify(store_path.with_name("none")).problems[0]


def test_images_that_do_not_decode_are_named(photos: Photos, tmp_path: Path) -> None:
    photos.path(photos.ids[7]).write_bytes(b"no image")
    out = tmp_path / "x.lmdb"
    ingest(photos.csv, images=photos.images, out=out, options=IngestOptions(check="none"))
    assert verify(out).problems == []
    problems = verify(out, decode=True).problems
    assert len(problems) == 1 and photos.ids[7] in problems[0]


def lying_store(photos: Photos, path: Path, lie: dict[str, object]) -> None:
    """Make a store whose columns are consistent with their checksums, and say something wrong."""
    real = Staging.put_columns

    def put(self: Staging, columns: dict[str, layout.Array]) -> object:
        return real(self, {**columns, **{name: change(columns[name]) for name, change in lie.items()}})  # type: ignore[operator]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "put_columns", put)
        patch.setattr("lmdbstore.ingestion.pipeline._check", lambda staging: None)
        ingest(photos.csv, images=photos.images, out=path)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"offset": lambda a: a + (1 << 40)}, "of a file of"),
        ({"offset": lambda a: np.where(np.arange(40) == 1, a[0] + 1, a)}, "before the end of id"),
        ({"length": lambda a: a - 1}, "LMDB has"),
        ({"length": lambda a: a * 0 - 1}, "of a file of"),
        ({"length": lambda a: a * 0 + (1 << 62)}, "of a file of"),
        ({"ids": lambda a: a.take(np.arange(40)[::-1])}, "LMDB has key"),
        ({"offset": lambda a: a[:-1]}, "39|312 bytes"),
    ],
)
def test_columns_that_lie_consistently(photos: Photos, tmp_path: Path, lie: dict[str, object], message: str) -> None:
    path = tmp_path / "x.lmdb"
    lying_store(photos, path, lie)
    problems = verify(path).problems
    assert problems and any(__import__("re").search(message, problem) for problem in problems)


def test_ingest_verifies_before_it_publishes(photos: Photos, tmp_path: Path) -> None:
    real = Staging.append

    def flipping(self: Staging, batch: Batch) -> None:
        key, value = batch.images[0]
        real(self, batch._replace(images=[(key, value[:-1] + b"?"), *batch.images[1:]]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "append", flipping)
        with pytest.raises(Exception, match="isn't what was written"):
            ingest(photos.csv, images=photos.images, out=tmp_path / "x.lmdb")
    assert not (tmp_path / "x.lmdb").exists()
