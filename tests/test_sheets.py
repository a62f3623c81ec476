"""Contact sheets: what is drawn, where, and what stands under it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from conftest import Photos
from lmdbstore import ImageDataset, ImageStore, IngestOptions, ingest
from lmdbstore.errors import LmdbstoreError, MissingColumn, MissingKey, OptionError

pytest.importorskip("matplotlib")

from lmdbstore import sheets, thumbnails
from lmdbstore.pictures import Picture


@pytest.fixture
def store(store_path: Path) -> Iterator[ImageStore]:
    with ImageStore(store_path) as opened:
        yield opened


def texts(picture: Picture) -> list[str]:
    return [text.get_text() for text in picture.axes[0].texts]


def drawn(picture: Picture) -> list[np.ndarray]:
    return [np.asarray(image.get_array()) for image in picture.axes[0].images]


# The whole sheet


def test_show_draws_these_images_with_id_label_and_upright_size(store: ImageStore, photos: Photos) -> None:
    wanted = [id for id in photos.ids if photos.kinds[id] in ("exif6", "exif1", "png")]
    picture = store.show(wanted)
    expected = ["photos.lmdb: 3 of 40 images, label landmark_id"]
    for id in wanted:
        height, width = store.decode(id).shape[:2]
        expected += [id, f"{photos.labels[id]} · {width}×{height}"]
    assert texts(picture) == expected
    for found, id in zip(drawn(picture), wanted, strict=True):
        np.testing.assert_array_equal(found, store.decode(id))


def test_show_reads_only_what_it_draws(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    view = store.view
    monkeypatch.setattr(store, "view", lambda i: read.append(i) or view(i))
    picture = store.show(n=5, seed=1)
    assert read == store[:].sample(5, seed=1).indices.tolist()
    assert len(drawn(picture)) == 5
    assert texts(picture)[0].startswith("photos.lmdb: 5 of 40 images")


def test_show_of_a_selection(store: ImageStore) -> None:
    assert texts(store[4:8].show())[0].startswith("photos.lmdb: 4 images")
    assert texts(store[[]].show())[0].startswith("photos.lmdb: 0 images")


def test_show_says_what_is_wrong(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingKey):
        store.show(["gone"])
    with pytest.raises(MissingColumn):
        store.show(label="landmark")
    monkeypatch.setattr(sheets, "MOST_TILES", 10)
    with pytest.raises(OptionError, match="11 pictures on one sheet; 10 at most"):
        store.show(n=11)


def test_an_image_that_does_not_decode_has_its_reason_in_its_place(store: ImageStore, photos: Photos) -> None:
    bad = store.index(photos.ids[5])
    columns = dict(store._columns) | {"offset": store.column("offset").copy()}
    columns["offset"][bad] += 40  # into the middle of the JPEG
    store._columns = columns
    picture = store.show(photos.ids[4:7])
    assert len(drawn(picture)) == 2
    assert photos.ids[5] in texts(picture)
    assert any("not an image" in text or "starts with" in text for text in texts(picture)), texts(picture)


def test_what_is_drawn_is_what_training_gets(store: ImageStore, photos: Photos) -> None:
    picture = store.show(photos.ids[:2], transform=lambda image: image[:10, :20, ::-1])
    for found, id in zip(drawn(picture), photos.ids, strict=False):
        np.testing.assert_array_equal(found, store.decode(id)[:10, :20, ::-1])
    assert texts(picture)[2].endswith(" → 20×10")


def test_ids_are_no_formulas_and_no_control_codes(photos: Photos, tmp_path: Path) -> None:
    odd = r"$\frac{a$"
    flat, names = tmp_path / "flat", (odd, "b\tc", "x" * 90)
    flat.mkdir()
    for number in range(len(names)):
        (flat / f"{number}.jpg").write_bytes(photos.data(photos.ids[0]))
    csv = tmp_path / "odd.csv"
    csv.write_text("id,file\n" + "".join(f"{name},{number}\n" for number, name in enumerate(names)))
    ingest(csv, images=flat, out=tmp_path / "odd.lmdb", options=IngestOptions(path="{file}.jpg"))
    with ImageStore(tmp_path / "odd.lmdb") as store:
        picture = store.show()
        assert picture.jpeg().startswith(b"\xff\xd8")  # a formula that can't be set would raise here
    assert odd in texts(picture) and "b�c" in texts(picture)
    assert any("…" in text and len(text) < 60 for text in texts(picture))


def test_a_dataset_shows_an_item_as_its_epochs_get_it(store: ImageStore, photos: Photos) -> None:
    def shift(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.full_like(image, rng.integers(256))

    dataset = ImageDataset(store, transform=shift, label="landmark_id", ids=photos.ids[10:20])
    picture = dataset.show(3, times=5)
    original, *varied = drawn(picture)
    np.testing.assert_array_equal(original, store.decode(photos.ids[13]))
    assert [int(pixels.flat[0]) for pixels in varied] == [int(dataset.load(3, epoch=k)[0].flat[0]) for k in range(5)]
    assert len({int(pixels.flat[0]) for pixels in varied}) > 1
    assert texts(picture)[1] == photos.ids[13] and "epoch 4" in texts(picture)


# Rejects


def test_rejects_are_drawn_where_there_is_something_to_see(photos: Photos, tmp_path: Path) -> None:
    gone, html, cut = photos.ids[20:23]
    photos.path(gone).unlink()
    photos.path(html).write_bytes(b"<html>404</html>")
    whole = photos.data(cut)
    photos.path(cut).write_bytes(whole[: len(whole) * 2 // 3])
    ingest(photos.csv, images=photos.images, out=tmp_path / "r.lmdb")
    with ImageStore(tmp_path / "r.lmdb") as store:
        reasons = {reject.id: reject.reason for reject in store.rejects()}
        picture, blind = store.show_rejects(photos.images), store.show_rejects()
        first = store.show_rejects(photos.images, n=1)
    assert len(drawn(picture)) == 1 and len(drawn(blind)) == 0 and len(drawn(first)) == 0
    assert texts(picture)[0] == "r.lmdb: 3 of 3 rejected rows" and texts(first)[0] == "r.lmdb: 1 of 3 rejected rows"
    assert {gone, html, f"{cut}, line 24"} <= set(texts(picture))
    assert any("truncated" in text for text in texts(picture))
    shown = " ".join(text.replace("\n", " ") for text in texts(blind))
    assert all(reason.split(": ", 1)[1][:30] in shown for reason in reasons.values())


def test_a_rejected_id_leads_nowhere_outside(photos: Photos, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(photos.data(photos.ids[0]))
    flat = tmp_path / "flat"
    flat.mkdir()
    (flat / "a.jpg").write_bytes(photos.data(photos.ids[0]))
    (flat / "link.jpg").symlink_to(secret)
    (tmp_path / "x.csv").write_text("id\na\n../secret\nlink\n")
    ingest(tmp_path / "x.csv", images=flat, out=tmp_path / "x.lmdb")
    with ImageStore(tmp_path / "x.lmdb") as store:
        assert len(store.rejects()) == 2
        assert drawn(store.show_rejects(flat)) == []


# The grid


@pytest.mark.parametrize("count", [0, 1, 2, 5, 9, 12, 16, 49, 400])
def test_tiles_lie_on_the_sheet_and_apart(count: int) -> None:
    rng = np.random.default_rng(count)
    sizes = [(int(w), int(h)) for w, h in rng.integers(20, 4000, (count, 2))]
    grid = sheets.plan(sizes)
    boxes = [(b.left, b.top, b.left + b.width, b.top + b.height + 2 * sheets.LINE_HEIGHT) for b in grid.boxes]
    assert len(boxes) == count
    for left, top, right, bottom in boxes:
        assert left >= -1e-9 and top >= sheets.TITLE_HEIGHT - 1e-9 and right <= sheets.WIDTH and bottom <= grid.height
    for k, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[k + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
    for box, (width, height) in zip(grid.boxes, sizes):
        assert box.width / box.height == pytest.approx(width / height)


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (3, 3), (9, 5), (12, 6), (16, 4)])
def test_few_cells_stay_empty(count: int, columns: int) -> None:
    assert len({box.left for box in sheets.plan([(50, 50)] * count).boxes}) == columns


@pytest.mark.parametrize(
    ("text", "shown"), [("short", "short"), ("a" * 9, "a" * 9), ("abcdefghijk", "abcd…hijk"), ("a\x1b[2J", "a�[2J")]
)
def test_long_texts_lose_their_middle(text: str, shown: str) -> None:
    assert sheets.shorten(text, 9) == shown


# Pictures and thumbnails


def test_pictures_are_saved_by_their_ending(store: ImageStore, tmp_path: Path) -> None:
    picture = store.show(n=2)
    for ending, start in ((".png", b"\x89PNG"), (".JPG", b"\xff\xd8"), (".pdf", b"%PDF")):
        picture.save(tmp_path / f"a{ending}")
        assert (tmp_path / f"a{ending}").read_bytes().startswith(start)
    with pytest.raises(LmdbstoreError, match=r"a\.txt: the ending chooses the format; one of .*\.png"):
        picture.save(tmp_path / "a.txt")
    assert not (tmp_path / "a.txt").exists()


def test_a_cell_shows_photos_as_jpeg_and_plots_as_png(store: ImageStore) -> None:
    sheet, plot = store.show(n=2), store.summary()
    assert sheet._repr_png_() is None and plot._repr_jpeg_() is None
    shown = cv2.imdecode(np.frombuffer(sheet._repr_jpeg_() or b"", np.uint8), cv2.IMREAD_COLOR)
    assert shown.shape[1] == sheets.WIDTH
    assert (plot._repr_png_() or b"").startswith(b"\x89PNG")


def test_reduced_is_the_mean_of_blocks() -> None:
    pixels = np.arange(40 * 61 * 3, dtype=np.uint32).reshape(40, 61, 3).astype(np.uint8)
    found = thumbnails.reduced(pixels, 10)
    assert found.shape == (10, 15, 3)
    assert found[2, 3].tolist() == pixels[8:12, 12:16].mean((0, 1)).astype(int).tolist()
    assert thumbnails.reduced(pixels, 21) is pixels


def a_tensor(values: Any) -> Any:
    import torch

    return torch.as_tensor(values)


@pytest.mark.parametrize(
    ("made", "shape", "first"),
    [
        (np.full((4, 6, 3), 7, np.uint8), (4, 6, 3), 7),
        (np.full((4, 6), 0.5), (4, 6, 3), 127),
        (np.full((4, 6, 1), 1.0, np.float32), (4, 6, 3), 255),
        (np.linspace(-2, 2, 72).reshape(4, 6, 3), (4, 6, 3), 0),
        (a_tensor(np.linspace(2, -2, 72, dtype=np.float32).reshape(3, 4, 6)), (4, 6, 3), 255),
    ],
)
def test_what_a_transform_made_is_shown(made: Any, shape: tuple[int, ...], first: int) -> None:
    found = thumbnails.displayable(made)
    assert (found.shape, found.dtype, int(found.flat[0])) == (shape, np.uint8, first)


@pytest.mark.parametrize("made", [np.zeros((2, 4, 6, 3)), np.zeros(5), np.zeros((4, 6, 7)), {"image": 1}])
def test_what_is_no_image_is_refused(made: Any) -> None:
    with pytest.raises(OptionError, match="one image expected"):
        thumbnails.displayable(made)


def test_a_sheet_of_large_photos_is_small(store: ImageStore) -> None:
    rng = np.random.default_rng(0)
    tiles = [sheets.Tile(rng.integers(0, 256, (1500, 2000, 3), np.uint8), ("a", "b")) for _ in range(3)]
    picture = sheets.draw(tiles, "large")
    assert all(max(pixels.shape) <= 1000 for pixels in drawn(picture))
    assert cv2.imdecode(np.frombuffer(io.BytesIO(picture.jpeg()).getvalue(), np.uint8), 1) is not None
