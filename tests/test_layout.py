from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdbstore import layout
from lmdbstore.errors import CorruptStore, FormatVersionError
from lmdbstore.layout import Column, Manifest, TextColumn

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8), max_size=30)

MANIFEST = Manifest(
    build_id="b",
    images=3,
    image_bytes=30,
    rejected=1,
    columns=(Column("ids", "text", 4096, 44, 7),),
    options={"order": "id"},
    source={"csv": "train.csv", "header": "id\n", "id_column": "id", "columns": {}, "folder": "train", "path": "{id}"},
    notes=("a note",),
    rejects_checksum=5,
    created="2020-01-01T00:00:00+00:00",
    writer="lmdbstore 0",
)


@given(texts)
def test_text_column_reads_like_a_list(values: list[str]) -> None:
    column = TextColumn.of(values)
    assert list(column) == column[:] == values and len(column) == len(values)
    assert [column[i - len(values)] for i in range(len(values))] == values
    with pytest.raises(IndexError):
        column[len(values)]


@given(texts)
def test_text_column_survives_packing(values: list[str]) -> None:
    packed = layout.pack_column(TextColumn.of(values))
    assert list(layout.unpack_column(memoryview(packed), type=layout.TEXT, count=len(values))) == values


@given(texts, st.randoms(use_true_random=False))
def test_take_sort_and_find(values: list[str], random: object) -> None:
    column = TextColumn.of(values)
    by = column.argsort()
    in_order = sorted(range(len(values)), key=lambda i: values[i].encode())
    assert by.tolist() == in_order
    assert list(column.take(by)) == [values[i] for i in in_order]
    assert [value.decode() for value in column.fixed()] == values
    for value in values:
        found = column.find(value.encode(), by=by)
        assert found is not None and values[found] == value
    assert column.find(b"\xff no UTF-8 sorts behind", by=by) is None


@pytest.mark.parametrize("dtype", ["<i8", "<u8", "<i4", "|u1", "<f8"])
def test_numbers_survive_packing_wherever_they_lie(dtype: str) -> None:
    values = np.arange(5).astype(dtype)
    packed = b"x" + layout.pack_column(values)  # an odd address, as on a leaf page
    found = layout.unpack_column(memoryview(packed)[1:], type=dtype, count=5)
    assert isinstance(found, np.ndarray) and found.flags.aligned
    np.testing.assert_array_equal(found, values)


def test_big_endian_values_are_stored_little_endian() -> None:
    values = np.arange(3, dtype=">i8")
    assert layout.column_type(values) == "<i8"
    assert layout.pack_column(values) == values.astype("<i8").tobytes()


@pytest.mark.parametrize(
    ("data", "type", "count"),
    [
        (b"1234567", "<i8", 1),
        (b"", layout.TEXT, 0),
        (np.array([0, 4], "<i8").tobytes() + b"abc", layout.TEXT, 1),
        (np.array([1, 3], "<i8").tobytes() + b"abc", layout.TEXT, 1),
        (np.array([0, 9, 3], "<i8").tobytes() + b"abc", layout.TEXT, 2),
        (b"123", layout.TEXT, 1 << 60),
    ],
)
def test_a_column_that_lies_about_itself_is_refused(data: bytes, type: str, count: int) -> None:
    with pytest.raises(CorruptStore):
        layout.unpack_column(memoryview(data), type=type, count=count)


def test_manifest_survives_packing() -> None:
    assert layout.unpack_manifest(MANIFEST.pack()) == MANIFEST


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\1\2\3", b"\x80", MANIFEST.pack()[:-3], MANIFEST.pack() + b"x"])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptStore):
        layout.unpack_manifest(data)


@given(st.binary(max_size=200))
def test_random_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises((CorruptStore, FormatVersionError)):
        layout.unpack_manifest(data)


def test_a_newer_format_says_to_upgrade() -> None:
    newer = MANIFEST.pack().replace(b"format_version\x01", b"format_version\x02")
    with pytest.raises(FormatVersionError, match="version 2.*pip install -U"):
        layout.unpack_manifest(newer)


def test_build_id_depends_on_every_column() -> None:
    column = MANIFEST.columns[0]
    same = layout.build_id([column._replace(offset=8192)])
    assert layout.build_id([column]) == same, "where a column lies is no content"
    assert layout.build_id([column._replace(checksum=8)]) != same
    assert layout.build_id([column._replace(name="other")]) != same


def test_checksum_is_xxh3_64() -> None:
    # from the xxHash specification's test vectors: XXH3-64, seed 0, empty input
    assert layout.checksum(b"") == 0x2D06800538D394C2
