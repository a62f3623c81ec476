from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmdbstore.errors import CsvError
from lmdbstore.ingestion.rows import Rows, read_rows, type_column
from lmdbstore.layout import Reject, TextColumn


def rows(tmp_path: Path, text: str | bytes, *, id_column: str = "id") -> Rows:
    path = tmp_path / "train.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_rows(path, id_column=id_column)


def test_the_plain_case(tmp_path: Path) -> None:
    found = rows(tmp_path, "id,landmark_id\nb,2\na,1\n")
    assert list(found.ids) == ["b", "a"]
    assert found.line.tolist() == [2, 3]
    assert found.columns["landmark_id"].tolist() == [2, 1]  # type: ignore[union-attr]
    assert found.columns["landmark_id"].dtype == np.int64  # type: ignore[union-attr]
    assert list(found.record) == ["b,2\n", "a,1\n"]
    assert found.header == "id,landmark_id\n"
    assert found.by_id.tolist() == [1, 0]
    assert not found.rejects and not found.notes and found.total == 2


@pytest.mark.parametrize("id", ["0012", "NA", "1e5", "nan", "true", "0x1f", "ü/ß", "a b", "00:1", "-1", "None", "#x"])
def test_ids_are_text_byte_for_byte(tmp_path: Path, id: str) -> None:
    assert list(rows(tmp_path, f"id,landmark_id\n{id},1\n").ids) == [id]


@pytest.mark.parametrize(
    "text",
    [
        b"\xef\xbb\xbfid,landmark_id\na,1\nb,2\n",
        b"id,landmark_id\r\na,1\r\nb,2\r\n",
        b"id,landmark_id\ra,1\rb,2\r",
        b"id,landmark_id\na,1\nb,2",
        b"id,landmark_id\na,1\n\n  \nb,2\n\n\n",
        b'"id","landmark_id"\n"a","1"\n"b","2"\n',
        b" id , landmark_id \na ,1\n b,2\n",
        b"id,landmark_id,\na,1,\nb,2,\n",
        b"id,landmark_id\na,1,,\nb,2,\n",
        b"landmark_id,id\n1,a\n2,b\n",
    ],
)
def test_what_spreadsheets_make_of_it(tmp_path: Path, text: bytes) -> None:
    found = rows(tmp_path, text)
    assert list(found.ids) == ["a", "b"]
    assert found.columns["landmark_id"].tolist() == [1, 2]  # type: ignore[union-attr]
    assert list(found.columns) == ["landmark_id"]
    assert not found.rejects


def test_records_are_the_rows_as_they_stand(tmp_path: Path) -> None:
    text = 'id,name\r\na,"x\r\ny"\r\n\r\nb,"say ""hi"""\r\n'
    found = rows(tmp_path, text)
    assert found.header == "id,name\r\n"
    assert list(found.record) == ['a,"x\r\ny"\r\n', 'b,"say ""hi"""\r\n']
    assert list(found.columns["name"]) == ["x\r\ny", 'say "hi"']
    assert found.line.tolist() == [2, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"ffd603482dd5e162,4027\n", "no column 'id' among 'ffd603482dd5e162', '4027'; is the header missing"),
        (b"ID,landmark_id\na,1\n", "did you mean --id-column ID"),
        (b"image_id,landmark_id\na,1\n", "no column 'id' among 'image_id', 'landmark_id'"),
        (b"id;landmark_id\na;1\n", "separate the columns by commas"),
        (b"id\tlandmark_id\na\t1\n", "separate the columns by commas"),
        (b"id,x,x\na,1,2\n", "'x' stands there twice"),
        (b"id,landmark_id\na,1\n" + "é,2\n".encode("latin-1"), "train.csv:3: byte 0xe9 isn't UTF-8"),
        ("id,landmark_id\na,1\n".encode("utf-16"), "UTF-16"),
        ("id,landmark_id\na,1\n".encode("utf-16-le"), "UTF-16"),
        (b'id,landmark_id\na,1\n"b,2\nc,3\n', "train.csv:3: a quoted field isn't closed"),
        (b"id,landmark_id\na,1\nb\0,1\n", "train.csv:3: a NUL byte"),
        (b'id,landmark_id\n"a"x,1\n', "train.csv:2: "),
        (b"id," + b"x" * 508 + b"\na,1\n", "name of over 507 bytes"),
    ],
)
def test_a_csv_that_cannot_be_read_gives_one_line(tmp_path: Path, text: bytes, message: str) -> None:
    with pytest.raises(CsvError, match=None) as caught:
        rows(tmp_path, text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_csv_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CsvError, match="No such file"):
        read_rows(tmp_path / "none.csv", id_column="id")
    with pytest.raises(CsvError, match="directory"):
        read_rows(tmp_path, id_column="id")


def test_rows_that_no_file_could_help(tmp_path: Path) -> None:
    long, wide = "x" * 511, "ü" * 256
    text = f"id,n\na,1\n,2\n{long},3\n{long}x,4\n{wide},5\nb\nc,1,2\na,9\n"
    found = rows(tmp_path, text)
    assert list(found.ids) == ["a", long]
    assert [(line, reason) for line, _, reason in found.rejects] == [
        (3, "the id is empty"),
        (5, "the id has 512 bytes, LMDB allows 511"),
        (6, "the id has 512 bytes, LMDB allows 511"),
        (7, "1 fields, the header has 2"),
        (8, "3 fields, the header has 2"),
        (9, "the id stands at line 2 already"),
    ]
    assert found.total == 8 and isinstance(found.rejects[0], Reject)
    assert found.by_id.tolist() == [0, 1]


def test_stripped_ids_are_noted(tmp_path: Path) -> None:
    found = rows(tmp_path, "id,n\na,1\n b,2\nc ,3\n")
    assert list(found.ids) == ["a", "b", "c"]
    assert found.notes == ["2 ids had blanks around them, stripped (first: train.csv:3)"]


@pytest.mark.parametrize(
    ("values", "type"),
    [
        (["1", "-2", "0"], "<i8"),
        ([str(2**63 - 1), str(-(2**63))], "<i8"),
        ([str(2**63)], "text"),
        (["1", ""], "text"),
        (["1", "5.0"], "text"),
        (["5.0", "6.0"], "text"),
        (["1.5", "2"], "<f8"),
        (["1e-3", "2"], "<f8"),
        (["007"], "text"),
        (["+1"], "text"),
        (["-0"], "text"),
        (["1_000"], "text"),
        (["١"], "text"),
        (["nan", "1.5"], "text"),
        (["yes"], "text"),
    ],
)
def test_types_lose_nothing(values: list[str], type: str) -> None:
    found, _ = type_column(TextColumn.of(values))
    if type == "text":
        assert list(found) == values
    else:
        assert isinstance(found, np.ndarray) and found.dtype == np.dtype(type)
        assert found.tolist() == [float(v) if type == "<f8" else int(v) for v in values]


def test_a_label_column_with_a_blank_is_noted_with_its_line(tmp_path: Path) -> None:
    found = rows(tmp_path, "id,landmark_id\na,1\nb,\nc,3\n")
    assert list(found.columns["landmark_id"]) == ["1", "", "3"]
    assert found.notes == ["column 'landmark_id' is text, not int64: train.csv:3 has ''"]


def test_a_csv_column_with_a_built_in_name_keeps_both(tmp_path: Path) -> None:
    found = rows(tmp_path, "id,width\na,7\n")
    assert list(found.columns) == ["csv.width"] and found.names == {"width": "csv.width"}
    assert "stored as 'csv.width'" in found.notes[0]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_integers_come_back(values: list[int]) -> None:
    found, note = type_column(TextColumn.of(map(str, values)))
    assert isinstance(found, np.ndarray) and found.tolist() == values and note is None


def test_more_rows_than_one_chunk(tmp_path: Path) -> None:
    count = 70_000
    text = "id,n\n" + "".join(f"{i:x},{i}\n" for i in range(count)) + "1,5\n"
    found = rows(tmp_path, text)
    assert len(found.ids) == count and found.ids[count - 1] == f"{count - 1:x}"
    assert found.columns["n"][-1] == count - 1
    assert [reject.line for reject in found.rejects] == [count + 2]
