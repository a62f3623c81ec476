"""The columns as text and as csv."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from conftest import Photos
from lmdbstore import ImageStore, IngestOptions, ingest, listing


def test_csv_has_every_column_of_every_image(store_path: Path, photos: Photos) -> None:
    with ImageStore(store_path) as store:
        head, *rows = csv.reader("\n".join(listing.lines(store[:], as_csv=True)).splitlines())
        assert head == ["id", "landmark_id", "width", "height", "orientation", "format", "length"]
        assert [row[0] for row in rows] == list(store)
        for row in rows:
            i = store.index(row[0])
            assert row[1] == str(photos.labels[row[0]])
            assert row[2:5] == [str(store.column(name)[i]) for name in ("width", "height", "orientation")]
            assert row[5] == {"png": "png", "webp": "webp"}.get(photos.kinds[row[0]], "jpeg")
            assert row[6] == str(len(photos.data(row[0])))


def test_text_is_aligned_and_has_the_same_values(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PIECE", 7)  # several pieces
    with ImageStore(store_path) as store:
        text = list(listing.lines(store[:]))
        expected = csv.reader("\n".join(listing.lines(store[:], as_csv=True)).splitlines())
        assert [line.split() for line in text] == list(expected)
        assert len({len(line) for line in text[:8]}) == 1
        assert [line.split()[0] for line in listing.lines(store[[]])] == ["id"]


def test_what_a_terminal_would_obey_is_escaped(photos: Photos, tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text(f'id,file,note\na\x1b[2Jb,{photos.ids[0]},"two\nlines"\n')
    folder = photos.path(photos.ids[0]).parent
    ingest(tmp_path / "odd.csv", images=folder, out=tmp_path / "odd.lmdb", options=IngestOptions(path="{file}.jpg"))
    with ImageStore(tmp_path / "odd.lmdb") as store:
        head, line = listing.lines(store[:])
        assert "\x1b" not in line and r"'a\x1b[2Jb'" in line and r"two\nlines" in line
        again = list(csv.reader(("\n".join(listing.lines(store[:], as_csv=True)) + "\n").splitlines(keepends=True)))
        assert again[1][0] == "a\x1b[2Jb" and again[1][2] == "two\nlines"
