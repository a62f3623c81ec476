from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import cv2
import lmdb
import msgpack
import numpy as np
import pytest

from conftest import Photos
from lmdbstore import ImageStore, IngestOptions, ingest
from lmdbstore.errors import (
    CorruptStore,
    DecodeError,
    ImageTooLarge,
    MissingColumn,
    MissingKey,
    NotAStore,
    StoreChanged,
    StoreClosed,
    StoreError,
)


def test_reads_what_was_ingested(photos: Photos, store_path: Path) -> None:
    with ImageStore(store_path) as store:
        assert len(store) == len(photos.ids)
        assert list(store) == list(store.ids) == sorted(photos.ids)
        for id in photos.ids:
            assert id in store
            assert store.ids[store.index(id)] == id
            assert store.read(id) == photos.data(id)
            assert store.column("landmark_id")[store.index(id)] == photos.labels[id]
        assert "none" not in store and 3 not in store


def test_decodes_as_opencv_reads(photos: Photos, store_path: Path) -> None:
    with ImageStore(store_path) as store:
        for id in photos.ids:
            expected = cv2.imread(str(photos.path(id)))
            found = store.decode(id, color="bgr")
            assert found.shape == expected.shape and found.dtype == np.uint8
            assert found.flags.writeable and found.flags.c_contiguous
            assert np.abs(found.astype(int) - expected).mean() < 1.5, photos.kinds[id]
            np.testing.assert_array_equal(store.decode(id), found[..., ::-1])


@pytest.mark.parametrize("order", ["id", "csv", "shuffle"])
def test_any_lmdb_reader_finds_the_same(photos: Photos, tmp_path: Path, order: str) -> None:
    path = tmp_path / "o.lmdb"
    ingest(photos.csv, images=photos.images, out=path, options=IngestOptions(order=order))
    with ImageStore(path) as store, lmdb.open(str(path), subdir=False, max_dbs=3, readonly=True, lock=False) as env:
        offset, length = store.column("offset"), store.column("length")
        big = length > 2048
        assert (np.diff(offset[big]) > 0).all(), "position is the order in the file"
        with env.begin() as txn, open(path, "rb") as file:
            images = env.open_db(b"images", txn=txn)
            assert txn.stat(images)["entries"] == len(store)
            for id in photos.ids:
                i = store.index(id)
                assert store.ids[i] == id
                value = txn.get(id.encode(), db=images)
                assert value == os.pread(file.fileno(), length[i], offset[i]) == photos.data(id) == bytes(store.view(i))
        expected = {"id": sorted(photos.ids), "csv": photos.ids}.get(order)
        assert list(store.ids) == expected if expected else list(store.ids) not in (photos.ids, sorted(photos.ids))


def test_many_ids_at_once(photos: Photos, store_path: Path) -> None:
    with ImageStore(store_path) as store:
        wanted = photos.ids[::-1] + photos.ids[:3]
        assert [store.ids[i] for i in store.indices(wanted)] == wanted
        assert store.indices([]).tolist() == []
        with pytest.raises(MissingKey, match="2 of 3 ids aren't in the store: 'no', 'gone'"):
            store.indices([wanted[0], "no", "gone"])
        with pytest.raises(MissingKey):
            store.indices([wanted[0] + "\0"])


def test_what_is_missing_is_named(store_path: Path) -> None:
    with ImageStore(store_path) as store:
        with pytest.raises(KeyError, match="photos.lmdb: no image with id 'nope' among 40"):
            store.read("nope")
        with pytest.raises(MissingColumn, match="no column 'landmark', did you mean 'landmark_id'"):
            store.column("landmark")


def test_columns_are_arrays_over_the_map(store_path: Path) -> None:
    with ImageStore(store_path) as store:
        assert store.columns == ("landmark_id",)
        for name, dtype in {"landmark_id": "i8", "offset": "i8", "checksum": "u8", "width": "i4"}.items():
            values = store.column(name)
            assert values.dtype == dtype and len(values) == len(store) and values.flags.aligned
        assert store.column("id") is store.ids
        classes = store.classes("landmark_id")
        assert classes.tolist() == sorted(set(store.column("landmark_id").tolist()))


def test_views_and_columns_outlive_the_store(photos: Photos, store_path: Path) -> None:
    store = ImageStore(store_path)
    view, column, id = store.view(3), store.column("landmark_id"), store.ids[3]
    store.close()
    store.close()
    store_path.unlink()
    gc.collect()
    assert bytes(view) == photos.data(id) and column[3] == photos.labels[id]
    with pytest.raises(StoreClosed):
        store.view(3)


def test_pickles_to_its_path(store_path: Path) -> None:
    store = ImageStore(store_path)
    store.decode_at(0)
    data = pickle.dumps(store)
    assert len(data) < 400
    for other in (pickle.loads(data), copy.deepcopy(store)):
        assert other.read(other.ids[0]) == store.read(store.ids[0])


def test_a_pickled_store_notices_a_replaced_file(photos: Photos, store_path: Path) -> None:
    store = ImageStore(store_path)
    data, before = pickle.dumps(store), store.read(photos.ids[0])
    photos.csv.write_text("".join(photos.csv.read_text().splitlines(True)[:10]))
    ingest(photos.csv, images=photos.images, out=store_path, overwrite=True)
    assert store.read(photos.ids[0]) == before and len(store) == len(photos.ids), "the old one stays whole"
    with pytest.raises(StoreChanged):
        pickle.loads(data)
    with ImageStore(store_path) as new:
        assert len(new) == 9


def _fork_and(work: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()  # type: ignore[operator]
        except BaseException:  # noqa: BLE001
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_fork_between_reads_harms_neither_side(photos: Photos, store_path: Path) -> None:
    store = ImageStore(store_path)
    a, b = photos.ids[:2]
    assert store.read(a) == photos.data(a)
    assert _fork_and(lambda: None) == 0
    assert store.read(b) == photos.data(b)
    assert _fork_and(lambda: store.decode(b)) == 0
    assert _fork_and(store.close) == 0
    assert store.read(a) == photos.data(a)


def test_the_same_file_may_be_open_many_times(store_path: Path) -> None:
    stores = [ImageStore(store_path) for _ in range(200)]
    assert len({store.read(store.ids[0]) for store in stores}) == 1
    with lmdb.open(str(store_path), subdir=False, readonly=True, lock=False):
        assert ImageStore(store_path).build_id == stores[0].build_id


def test_opening_leaves_nothing_behind(store_path: Path) -> None:
    before = sorted(os.listdir(store_path.parent))
    os.chmod(store_path, 0o444)
    with ImageStore(store_path) as store:
        store.decode_at(0)
    assert sorted(os.listdir(store_path.parent)) == before
    with pytest.raises(NotAStore, match=r"no such file, did you mean 'photos.lmdb'\?"):
        ImageStore(store_path.with_name("photo.lmdb"))
    assert sorted(os.listdir(store_path.parent)) == before


def other_lmdb(path: Path) -> None:
    with lmdb.open(str(path), subdir=False, max_dbs=2, lock=False) as env, env.begin(write=True) as txn:
        txn.put(b"num-samples", b"3", db=env.open_db(b"theirs", txn=txn))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b""), "an empty file"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid x\n"), "Git LFS pointer"),
        (lambda path: path.write_text("hello " * 4000), "not as an LMDB file does"),
        (lambda path: path.write_bytes(b"\0"), "1 bytes are too few"),
        (lambda path: path.mkdir(), "a folder; a store is one file"),
        (os.mkfifo, "not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a file"),
        (other_lmdb, "an LMDB file without a manifest .named databases: theirs."),
    ],
)
def test_what_is_no_store_is_named(tmp_path: Path, make: object, message: str) -> None:
    path = tmp_path / "x.lmdb"
    make(path)  # type: ignore[operator]
    with pytest.raises(NotAStore, match=message):
        ImageStore(path)


def test_a_truncated_store_is_refused_at_open(store_path: Path) -> None:
    data = store_path.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 8192, 4096, 300):
        store_path.write_bytes(data[:size])
        with pytest.raises(StoreError):
            ImageStore(store_path)


def test_columns_that_lie_are_errors_when_used(store_path: Path) -> None:
    with ImageStore(store_path) as store:
        column = store._table["offset"]
    data = bytearray(store_path.read_bytes())
    data[column.offset : column.offset + 8] = (1 << 40).to_bytes(8, "little")
    data[column.offset + 8 : column.offset + 16] = (-5 & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")
    store_path.write_bytes(data)
    with ImageStore(store_path) as store:
        for i in (0, 1):
            with pytest.raises(CorruptStore, match=f"id '{store.ids[i]}': bytes"):
                store.view(i)


def test_a_bomb_is_refused_by_its_header(photos: Photos, store_path: Path) -> None:
    with ImageStore(store_path, max_pixels=100) as store, pytest.raises(ImageTooLarge) as caught:
        store.decode(photos.ids[0])
    assert photos.ids[0] in str(caught.value) and str(store_path) in str(caught.value)


def test_an_undecodable_image_names_itself_and_pickles(photos: Photos, tmp_path: Path) -> None:
    photos.path(photos.ids[0]).write_bytes(b"<html>404</html>")
    out = tmp_path / "x.lmdb"
    ingest(photos.csv, images=photos.images, out=out, options=IngestOptions(check="none"))
    with ImageStore(out) as store, pytest.raises(DecodeError) as caught:
        store.decode(photos.ids[0])
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and photos.ids[0] in str(again) and str(out) in str(again)


def test_opens_in_a_small_address_space(store_path: Path) -> None:
    code = f"from lmdbstore import ImageStore; print(len(ImageStore({str(store_path)!r})))"
    command = f"ulimit -v 1000000; exec {sys.executable} -c '{code.replace(chr(39), chr(34))}'"
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env)
    assert shown.stdout.strip() == "40", shown.stderr


def _open_and_read(path: str, times: int) -> int:
    for _ in range(times):
        with ImageStore(path) as store:
            assert store.read(store.ids[0])
    return os.getpid()


def test_many_processes_open_and_close_at_once(store_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(16) as pool:
        pids = pool.starmap(_open_and_read, [(str(store_path), 100)] * 32)
        pool.close()
        pool.join()
    assert len(pids) == 32


def test_a_store_is_readable_by_following_the_format_page_alone(photos: Photos, store_path: Path) -> None:
    """docs/format.md, with nothing but lmdb, msgpack and numpy."""
    with lmdb.open(str(store_path), subdir=False, max_dbs=3, readonly=True, lock=False) as env, env.begin() as txn:
        manifest = msgpack.unpackb(txn.get(b"manifest", db=env.open_db(b"manifest", txn=txn)))
        assert manifest["format"] == "lmdbstore" and manifest["format_version"] == 1
        columns = env.open_db(b"columns", txn=txn)
        table = {}
        for name, type, offset, length, _checksum in manifest["columns"]:
            data = txn.get(name.encode(), db=columns)
            assert data == store_path.read_bytes()[offset : offset + length]
            if type == "text":
                starts = np.frombuffer(data, "<i8", manifest["images"] + 1)
                text = data[starts.nbytes :]
                table[name] = [text[a:b].decode() for a, b in zip(starts[:-1], starts[1:], strict=True)]
            else:
                table[name] = np.frombuffer(data, type).tolist()
        images = env.open_db(b"images", txn=txn)
        file = store_path.read_bytes()
        for i, id in enumerate(table["ids"]):
            value = txn.get(id.encode(), db=images)
            assert value == photos.data(id)
            assert value == file[table["offset"][i] :][: table["length"][i]]
            assert table["landmark_id"][i] == photos.labels[id]
            assert table["record"][i] == f"{id},{photos.labels[id]}\n"
