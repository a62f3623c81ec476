"""Files and stores that were made, or broken, to do harm: a clear error or the right pixels, nothing else."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from conftest import Photos
from lmdbstore import ImageDataset, ImageStore, IngestOptions, ingest, layout, verify
from lmdbstore.errors import CsvError, FormatVersionError, LmdbstoreError, StoreError
from lmdbstore.ingestion.rows import read_rows


@pytest.fixture
def odd(shared: Path) -> Path:
    """The folder of odd image files, from public test suites."""
    folder = shared / "data" / "odd"
    if not (folder / "MANIFEST.tsv").is_file():
        pytest.skip("no odd files")
    return folder


def odd_csv(odd: Path, path: Path) -> list[str]:
    """Write a csv of all odd files; return their paths, whose position is the id."""
    with (odd / "MANIFEST.tsv").open(newline="") as file:
        paths = [row["path"] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
    with path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(("id", "path"))
        writer.writerows((f"{k:03d}", name) for k, name in enumerate(paths))
    return paths


def test_every_odd_file_is_stored_or_rejected_and_what_is_stored_decodes(odd: Path, tmp_path: Path) -> None:
    paths = odd_csv(odd, tmp_path / "odd.csv")
    out = tmp_path / "odd.lmdb"
    report = ingest(tmp_path / "odd.csv", images=odd, out=out, options=IngestOptions(path="{path}"))
    assert report.images + len(report.rejects) == len(paths) == 340
    assert report.images > 180
    for reject in report.rejects:
        assert reject.reason.startswith(paths[int(reject.id)]) and len(reject.reason) < 500
    assert verify(out, decode=True).problems == []
    dataset = ImageDataset(out)
    items = iter(DataLoader(dataset, batch_size=None, num_workers=2))
    for id, image in zip(dataset.store.ids, items, strict=True):
        assert (odd / paths[int(id)]).read_bytes() == dataset.store.read(id)
        assert image.ndim == 3 and image.shape[2] == 3 and image.shape[0] * image.shape[1] > 0


@pytest.mark.parametrize("check", ["header", "none"])
def test_odd_files_taken_unchecked_fail_by_name_in_a_worker(odd: Path, tmp_path: Path, check: str) -> None:
    odd_csv(odd, tmp_path / "odd.csv")
    out = tmp_path / "odd.lmdb"
    ingest(tmp_path / "odd.csv", images=odd, out=out, options=IngestOptions(path="{path}", check=check))
    problems = verify(out, decode=True).problems
    with ImageStore(out) as store:
        bad = {re.search(r"id '(\d+)'", problem).group(1) for problem in problems}  # type: ignore[union-attr]
        for id in store.ids:
            began = time.perf_counter()
            try:
                store.decode(id)
            except LmdbstoreError as error:
                assert repr(id) in str(error) and str(out) in str(error)
                assert id in bad
            assert time.perf_counter() - began < 30, "a bound, not a measurement"


# Stores


def with_manifest(path: Path, change: Any) -> None:
    """Put another manifest into a store, with the right checksum."""
    with (
        lmdb.open(str(path), subdir=False, max_dbs=3, lock=False, map_size=1 << 28) as env,
        env.begin(write=True) as txn,
    ):
        db = env.open_db(b"manifest", txn=txn)
        data = msgpack.packb(change(msgpack.unpackb(txn.get(b"manifest", db=db))))
        txn.put(b"manifest", data, db=db)
        txn.put(b"manifest.checksum", layout.checksum(data).to_bytes(8, "little"), db=db)


def every_use(path: Path) -> None:
    """Open a store and use all of it."""
    with ImageStore(path) as store:
        for column in store.manifest.columns:
            store.column(column.name)
        for i in range(min(len(store), 50)):
            store.decode_at(i)
            store.index(store.ids[i])
        store.rejects()
        store.info()
        dataset = ImageDataset(store, label=store.columns[0])
        dataset.extents, dataset[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {**m, "images": 1 << 60},
        lambda m: {**m, "images": 41},
        lambda m: {**m, "images": -1},
        lambda m: {**m, "images": "many"},
        lambda m: {**m, "columns": []},
        lambda m: {**m, "columns": 5},
        lambda m: {**m, "columns": [["ids"]]},
        lambda m: {**m, "columns": [[n, t, 1 << 62, s, c] for n, t, _, s, c in m["columns"]]},
        lambda m: {**m, "columns": [[n, t, o, 1 << 62, c] for n, t, o, _, c in m["columns"]]},
        lambda m: {**m, "columns": [[n, t, -8, s, c] for n, t, _, s, c in m["columns"]]},
        lambda m: {**m, "columns": [[n, "O", o, s, c] for n, _, o, s, c in m["columns"]]},
        lambda m: {**m, "columns": [[n, "V99999999", o, s, c] for n, _, o, s, c in m["columns"]]},
        lambda m: {**m, "columns": [[n, [["a", "<i8"]], o, s, c] for n, _, o, s, c in m["columns"]]},
        lambda m: {**m, "columns": [[1, 2, 3, 4, 5] for _ in m["columns"]]},
        lambda m: {**m, "columns": [[n, t, "x", s, c] for n, t, _, s, c in m["columns"]]},
        lambda m: {**m, "source": {}},
        lambda m: {**m, "source": None},
        lambda m: {**m, "options": None},
        lambda m: {**m, "format": "other"},
        lambda m: [1, 2],
        lambda m: {},
    ],
)
def test_a_manifest_that_lies_is_an_error(store_path: Path, change: Any) -> None:
    with_manifest(store_path, change)
    with pytest.raises(StoreError) as caught:
        every_use(store_path)
    assert str(store_path) in str(caught.value)
    assert verify(store_path).problems


def test_a_newer_format_is_refused_with_advice(store_path: Path) -> None:
    with_manifest(store_path, lambda m: {**m, "format_version": 99})
    with pytest.raises(FormatVersionError, match="99.*pip install -U lmdbstore"):
        ImageStore(store_path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_manifests_never_crash(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    values = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=6,
    )
    names = [field.name for field in dataclasses.fields(layout.Manifest)]
    raw = {"format": "lmdbstore", **{name: data.draw(values) for name in names}, "format_version": 1}
    try:
        found = layout.unpack_manifest(msgpack.packb(raw))
    except StoreError:
        return
    assert isinstance(found.images, int) and all(isinstance(column.name, str) for column in found.columns)


def test_a_truncated_file_under_a_reader_is_an_error_of_the_next_open(store_path: Path) -> None:
    """While it is open a file must be replaced, never cut: that is a SIGBUS for any map.  The next open says so."""
    data = store_path.read_bytes()
    for size in range(0, len(data), len(data) // 40):
        store_path.write_bytes(data[:size])
        with pytest.raises(StoreError):
            ImageStore(store_path)


# The csv


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from('id,\n\r"; \t\0é0123abc/\\.') | st.characters(exclude_categories=["Cs"]), max_size=60)
)
def test_any_csv_gives_rows_or_one_line(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.csv"
    path.write_bytes(b"id,landmark_id\n" + text.encode())
    try:
        rows = read_rows(path, id_column="id")
    except CsvError as error:
        assert "\n" not in str(error) and str(path) in str(error)
        return
    assert len(rows.ids) + len(rows.rejects) == rows.total
    assert len(set(rows.ids)) == len(rows.ids)
    assert all(0 < len(id.encode()) <= layout.MAX_KEY_BYTES for id in rows.ids)
    assert list(rows.ids.take(rows.by_id)) == sorted(rows.ids, key=str.encode)


@given(data=st.binary(max_size=80))
@settings(max_examples=200, deadline=None)
def test_any_bytes_as_a_csv(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.csv"
    path.write_bytes(data)
    try:
        read_rows(path, id_column="id")
    except CsvError as error:
        assert "\n" not in str(error)


# Security


def test_nothing_unpickles_evaluates_or_asks_a_network() -> None:
    package = Path(__file__).parent.parent / "lmdbstore"
    for path in package.rglob("*.py"):
        source = path.read_text()
        assert not re.search(r"\b(pickle\.loads?|marshal|shelve|eval\(|exec\(|allow_pickle=True)", source), path
        assert not re.search(r"^\s*(import|from) (pickle|socket|urllib|requests|http)\b", source, re.M), path


NO_NETWORK = """
import socket, sys
def refused(*args, **kwargs):
    raise AssertionError("a network connection")
socket.socket.connect = refused
socket.getaddrinfo = refused
import lmdbstore
from lmdbstore import ImageDataset, ingest
import albumentations as A
csv, images, out = sys.argv[1:]
ingest(csv, images=images, out=out)
print(len([item for item in ImageDataset(out, A.Compose([A.Resize(8, 8)]))]))
"""


def test_a_whole_run_without_a_network(photos: Photos, tmp_path: Path) -> None:
    words = [sys.executable, "-c", NO_NETWORK, photos.csv, photos.images, tmp_path / "o.lmdb"]
    shown = subprocess.run(words, capture_output=True, text=True)
    assert shown.stdout.strip() == "40", shown.stderr


@pytest.mark.parametrize("folder", ["../../evil", "/evil", "a/../../../evil", "."])
def test_export_stays_inside_its_folder(store_path: Path, tmp_path: Path, folder: str) -> None:
    from lmdbstore.export import export

    with_manifest(store_path, lambda m: {**m, "source": {**m["source"], "folder": folder, "csv": folder + "/t.csv"}})
    with ImageStore(store_path) as store:
        try:
            export(store, out=tmp_path / "inside" / "out")
        except LmdbstoreError:
            assert folder != "."
    evil = list(tmp_path.parent.rglob("evil*"))
    assert not evil and not Path("/evil").exists()


def test_ids_that_lead_out_are_not_exported(photos: Photos, tmp_path: Path) -> None:
    from lmdbstore.export import export

    out = tmp_path / "o.lmdb"
    (photos.images / "flat").mkdir()
    (photos.images / "flat" / "x").write_bytes(photos.data(photos.ids[0]))
    photos.csv.write_text("id\nx\n")
    ingest(photos.csv, images=photos.images / "flat", out=out)
    with_manifest(out, lambda m: {**m, "source": {**m["source"], "path": "../../{id}"}})
    with ImageStore(out) as store, pytest.raises(LmdbstoreError, match="leads out of the folder"):
        export(store, out=tmp_path / "a" / "out")
    assert not list(tmp_path.rglob("../x"))


def test_a_bomb_of_every_kind_is_refused_before_it_is_allocated(photos: Photos, tmp_path: Path) -> None:
    """60,000 x 60,000 pixels in some bytes: a process with 1 GB of address space to spare survives the ingest."""
    data = bytearray(photos.data(next(id for id in photos.ids if photos.kinds[id] == "colour")))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = b"\xea\x60\xea\x60"
    photos.path(photos.ids[0]).write_bytes(data)
    png = bytearray(photos.data(next(id for id in photos.ids if photos.kinds[id] == "png")))
    png[16:24] = b"\0\0\xea\x60\0\0\xea\x60"
    photos.path(photos.ids[1]).write_bytes(png)
    report = ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb")
    assert {reject.id for reject in report.rejects} == set(photos.ids[:2])
    assert all("pixels" in reject.reason or "CRC" in reject.reason for reject in report.rejects), report.rejects


def test_corrupt_images_do_not_leak(photos: Photos) -> None:
    """2,000 decodes, half of them of broken images: the process's own memory is flat."""
    from test_readers import private_dirty

    from lmdbstore import codec
    from lmdbstore.errors import DecodeError

    good = photos.data(next(id for id in photos.ids if photos.kinds[id] == "colour"))
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (20, len(good)), dtype=np.uint8)
    hit = rng.random(noise.shape) < 0.02
    broken = [row.tobytes() for row in np.where(hit, noise, np.frombuffer(good, np.uint8))]

    def round_(count: int) -> None:
        for k in range(count):
            codec.decode(good)
            with contextlib.suppress(DecodeError):
                codec.check(broken[k % 20])

    round_(200)
    before = private_dirty()
    round_(800)
    assert private_dirty() - before < 2 << 20
