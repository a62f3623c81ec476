"""Duplicates: the same file, and files that look the same; checked against brute force."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from conftest import Photos, encode_photo, with_orientation
from lmdbstore import ImageStore, duplicates, ingest
from lmdbstore.errors import MissingColumn, OptionError


@pytest.fixture
def copies(photos: Photos, tmp_path: Path) -> Iterator[ImageStore]:
    """A store in which ids[0], [1], [2] are one file with labels 1, 1, 2, and ids[3], [4] another with label 5."""
    for of, other in ((0, 1), (0, 2), (3, 4)):
        photos.path(photos.ids[other]).write_bytes(photos.data(photos.ids[of]))
    labels = dict(zip(photos.ids, [1, 1, 2, 5, 5]))
    photos.csv.write_text("id,landmark_id\n" + "".join(f"{id},{labels.get(id, 9)}\n" for id in photos.ids))
    ingest(photos.csv, images=photos.images, out=tmp_path / "copies.lmdb")
    with ImageStore(tmp_path / "copies.lmdb") as opened:
        yield opened


def sets(found: duplicates.Duplicates) -> set[frozenset[str]]:
    return {frozenset(group) for group in found}


def test_exact_duplicates_are_groups_of_the_same_file(copies: ImageStore, photos: Photos) -> None:
    found = copies.duplicates()
    assert sets(found) == {frozenset(photos.ids[:3]), frozenset(photos.ids[3:5])}
    assert (len(found), len(found.members), found.surplus, found.label) == (2, 5, 3, "landmark_id")
    firsts = [group.indices[0] for group in found]
    assert firsts == sorted(firsts), "in the order of the file"
    assert sets(found.conflicts) == {frozenset(photos.ids[:3])}
    assert repr(found) == "<Duplicates: 2 groups, 5 images, 1 with conflicting landmark_id>"
    assert found[-1].ids == found[1].ids and sets(found[:1]) == {frozenset(found[0])}
    with pytest.raises(IndexError):
        found[2]


def test_exact_duplicates_read_no_image(copies: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "view", lambda i: pytest.fail("an image was read"))
    assert len(copies.duplicates()) == 2


def test_the_same_checksum_with_another_length_is_another_file(copies: ImageStore) -> None:
    at = copies.duplicates()[0].indices
    lengths = copies.column("length").copy()
    lengths[at[0]] += 1
    copies._columns["length"] = lengths
    assert at[0] not in copies.duplicates().members


def test_duplicates_within_a_selection(copies: ImageStore, photos: Photos) -> None:
    assert sets(copies[photos.ids[2:4] + photos.ids[:1]].duplicates()) == {frozenset((photos.ids[2], photos.ids[0]))}
    assert len(copies[[]].duplicates()) == len(copies[photos.ids[4:9]].duplicates()) == 0


def test_duplicates_without_labels_have_no_conflicts(copies: ImageStore, photos: Photos, tmp_path: Path) -> None:
    photos.csv.write_text("id\n" + "".join(f"{id}\n" for id in photos.ids))
    ingest(photos.csv, images=photos.images, out=tmp_path / "bare.lmdb")
    with ImageStore(tmp_path / "bare.lmdb") as bare:
        found = bare.duplicates()
        assert len(found) == 2 and len(found.conflicts) == 0 and "conflict" not in repr(found)
    with pytest.raises(MissingColumn):
        copies.duplicates(label="landmark")


def test_table_and_sheet_of_duplicates(copies: ImageStore, photos: Photos) -> None:
    pytest.importorskip("pandas")
    table = copies.duplicates().table()
    assert list(table.columns) == ["group", "id", "landmark_id", "conflict"]
    assert set(table[table.conflict].id) == set(photos.ids[:3]) and len(table) == 5
    pytest.importorskip("matplotlib")
    assert len(copies.duplicates().show(n=3).axes[0].images) in (2, 3), "whole groups"
    assert len(copies.duplicates().show().axes[0].images) == 5


# Near duplicates


def a_photo(seed: int, height: int = 300, width: int = 400) -> np.ndarray:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (7, 9, 3), dtype=np.uint8)
    fine = rng.normal(0, 8, (height, width, 1))
    return np.clip(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC) + fine, 0, 255).astype(np.uint8)


def jpeg(image: np.ndarray, quality: int = 92) -> bytes:
    return cv2.imencode(".jpg", image, (cv2.IMWRITE_JPEG_QUALITY, quality))[1].tobytes()


@pytest.fixture
def lookalikes(tmp_path: Path) -> Iterator[ImageStore]:
    """Eight photos (p0 .. p7), and of p0 a smaller, a poorer, a turned (by EXIF) and a PNG copy; one broken file."""
    photo = a_photo(0)
    files = {f"p{k}": jpeg(a_photo(k)) for k in range(8)}
    files |= {
        "p0-half": jpeg(cv2.resize(photo, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA)),
        "p0-poor": jpeg(photo, 30),
        "p0-exif": with_orientation(jpeg(cv2.rotate(photo, cv2.ROTATE_90_COUNTERCLOCKWISE)), 6),
        "p0-png": encode_photo(photo, "png"),
        "p0-tiny": jpeg(cv2.resize(photo, (40, 30), interpolation=cv2.INTER_AREA)),
    }
    folder = tmp_path / "looks"
    folder.mkdir()
    for name, data in files.items():
        (folder / f"{name}.jpg").write_bytes(data)
    (tmp_path / "looks.csv").write_text("id,kind\n" + "".join(f"{name},{name[3:] or 'x'}\n" for name in files))
    ingest(tmp_path / "looks.csv", images=folder, out=tmp_path / "looks.lmdb")
    with ImageStore(tmp_path / "looks.lmdb") as opened:
        yield opened


def test_near_duplicates_are_copies_of_other_size_quality_and_orientation(lookalikes: ImageStore) -> None:
    seen: list[tuple[int, int]] = []
    found = lookalikes.near_duplicates(progress=lambda done, total: seen.append((done, total)))
    assert sets(found) == {frozenset(id for id in lookalikes if id.startswith("p0"))}
    assert seen[-1] == (13, 13) and len(found.failed) == 0
    assert len(found.conflicts) == 1


def test_what_does_not_decode_is_named(lookalikes: ImageStore) -> None:
    bad = lookalikes.index("p5")
    offsets = lookalikes.column("offset").copy()
    offsets[bad] += 40
    lookalikes._columns["offset"] = offsets
    found = lookalikes.near_duplicates()
    assert found.failed.ids == ["p5"] and "1 images couldn't be compared" in repr(found)
    assert sets(found) == {frozenset(id for id in lookalikes if id.startswith("p0"))}


@pytest.mark.parametrize("distance", [-1, 7])
def test_a_distance_out_of_range_is_refused(lookalikes: ImageStore, distance: int) -> None:
    with pytest.raises(OptionError, match=f"distance={distance}; 0 to 6 bits"):
        lookalikes.near_duplicates(distance=distance)


def test_the_hash_is_that_of_its_definition() -> None:
    pixels = a_photo(3, 80, 90)
    grey = pixels @ np.array([0.299, 0.587, 0.114])
    fields = grey.reshape(8, 10, 9, 10).mean((1, 3))
    bits = "".join("1" if fields[r, c] < fields[r, c + 1] else "0" for r in range(8) for c in range(8))
    assert duplicates.difference_hash(pixels) == int(bits, 2)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (8, 9), (13, 200), (301, 407)])
def test_any_size_has_a_hash_and_a_larger_copy_has_the_same(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(shape).integers(0, 256, (*shape, 3), np.uint8)
    found = duplicates.difference_hash(pixels)
    assert 0 <= found < 1 << 64
    doubled = duplicates.difference_hash(pixels.repeat(2, 0).repeat(2, 1))
    assert bin(found ^ doubled).count("1") <= (0 if min(shape) > 8 else 64)


def test_padding_is_left_out() -> None:
    pixels = a_photo(4, 64, 72)
    padded = np.pad(pixels, ((0, 3), (0, 5), (0, 0)), constant_values=255)
    assert duplicates.difference_hash(padded, (64, 72)) == duplicates.difference_hash(pixels)
    assert duplicates.difference_hash(padded) != duplicates.difference_hash(pixels)


@pytest.mark.parametrize("distance", [0, 1, 4, 6])
def test_near_pairs_are_those_of_brute_force(distance: int) -> None:
    rng = np.random.default_rng(distance)
    seeds = rng.integers(0, 1 << 64, 60, np.uint64)
    flips = [
        np.bitwise_or.reduce(np.uint64(1) << rng.integers(0, 64, k, np.uint64)) for k in range(1, 9) for _ in seeds
    ]
    hashes = np.unique(np.concatenate([seeds, np.tile(seeds, 8) ^ np.array(flips, np.uint64)]))
    differ = [[bin(int(a) ^ int(b)).count("1") for b in hashes] for a in hashes]
    expected = {(i, j) for i in range(len(hashes)) for j in range(i) if differ[i][j] <= distance}
    first, second = duplicates.near_pairs(hashes, distance)
    assert {(int(max(pair)), int(min(pair))) for pair in zip(first, second)} == expected
    assert len(first) == len(expected) and (distance == 0 or len(expected) > 60)


def test_components_follow_chains() -> None:
    first, second = np.array([5, 3, 8, 1]), np.array([3, 8, 9, 2])
    assert duplicates.components(10, first, second).tolist() == [0, 1, 1, 3, 4, 3, 6, 7, 3, 3]
    chain = np.arange(200)
    assert not duplicates.components(201, chain[::-1], chain[::-1] + 1).any()
    assert duplicates.components(3, np.empty(0, int), np.empty(0, int)).tolist() == [0, 1, 2]
