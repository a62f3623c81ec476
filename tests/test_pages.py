"""The page reader against liblmdb itself, and against damage."""

from __future__ import annotations

import random
from pathlib import Path

import lmdb
import pytest

from lmdbstore.errors import CorruptStore, NotAStore, StoreError
from lmdbstore.pages import Pages

VALUES = {
    f"{i:05d}".encode(): bytes([i % 251]) * size for i, size in enumerate([0, 1, 100, 1999, 2100, 5000, 90000] * 60)
}


def write(path: Path, databases: dict[bytes, dict[bytes, bytes]], *, shuffle: bool = False) -> bytes:
    """Write with py-lmdb, in several transactions, so that pages are freed and used again."""
    with lmdb.open(str(path), subdir=False, map_size=1 << 28, max_dbs=8, lock=False) as env:
        for name, entries in databases.items():
            items = list(entries.items())
            if shuffle:
                random.Random(0).shuffle(items)
            for at in range(0, max(len(items), 1), 50):
                with env.begin(write=True) as txn:
                    db = env.open_db(name, txn=txn)
                    for key, value in items[at : at + 50]:
                        txn.put(key, value, db=db)
    return path.read_bytes()


@pytest.mark.parametrize("shuffle", [False, True])
def test_walk_and_find_agree_with_liblmdb(tmp_path: Path, shuffle: bool) -> None:
    data = write(tmp_path / "a.lmdb", {b"images": VALUES, b"other": {b"x": b"y"}}, shuffle=shuffle)
    pages = Pages(memoryview(data))
    walked = {key: data[offset : offset + length] for key, (offset, length) in pages.walk(b"images")}
    assert walked == VALUES
    assert list(walked) == sorted(VALUES)
    for key in [*list(VALUES)[::17], b"00000", b"00419"]:
        found = pages.find(b"images", key)
        assert found and data[found.offset : sum(found)] == VALUES[key]
    assert pages.find(b"images", b"none") is None and pages.find(b"images", b"") is None
    assert sorted(pages.databases()) == ["images", "other"]


def test_a_database_that_is_empty_or_absent(tmp_path: Path) -> None:
    pages = Pages(memoryview(write(tmp_path / "a.lmdb", {b"images": {}})))
    for name in (b"images", b"absent"):
        assert list(pages.walk(name)) == [] and pages.find(name, b"x") is None


def test_the_last_committed_state_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.lmdb"
    for round_ in range(4):
        data = write(path, {b"images": {b"key": b"value %d" % round_}})
        found = Pages(memoryview(data)).find(b"images", b"key")
        assert found and data[found.offset : sum(found)] == b"value %d" % round_


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\x89PNG" + bytes(9000), bytes(9000)])
def test_what_is_no_lmdb_is_refused(data: bytes) -> None:
    with pytest.raises(NotAStore):
        Pages(memoryview(data))


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "a.lmdb", {b"images": VALUES})
    with pytest.raises(CorruptStore, match="cut short"):
        Pages(memoryview(data)[: len(data) // 2])


def test_damage_is_an_error_or_a_difference_and_never_a_crash(tmp_path: Path) -> None:
    """Overwrite bytes of the tree's pages: liblmdb would follow such page numbers out of the map."""
    data = write(tmp_path / "a.lmdb", {b"images": VALUES})
    tree = [at for at in range(0, len(data), 4096) if data[at + 10] in (1, 2, 8)]
    rng = random.Random(1)
    refused = 0
    for _ in range(400):
        broken = bytearray(data)
        for _ in range(rng.choice([1, 1, 4])):
            page = rng.choice(tree)
            broken[page + rng.choice([rng.randrange(0, 200), rng.randrange(4096)])] = rng.randrange(256)
        try:
            pages = Pages(memoryview(broken))
            for _, (offset, length) in pages.walk(b"images"):
                assert offset >= 0 and offset + length <= len(broken)
        except StoreError:
            refused += 1
    assert refused > 40


def test_a_loop_in_the_tree_ends(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path / "a.lmdb", {b"images": VALUES}))
    for at in range(0, len(data), 4096):
        if data[at + 10] == 1:  # a branch: make its first child the page itself
            node = at + int.from_bytes(data[at + 16 : at + 18], "little")
            number = int.from_bytes(data[at : at + 8], "little")
            data[node : node + 2] = (number & 0xFFFF).to_bytes(2, "little")
    with pytest.raises(CorruptStore):
        list(Pages(memoryview(data)).walk(b"images"))
