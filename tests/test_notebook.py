"""What a cell shows of a store: its HTML, its plots and tables; and that nothing reads more than it shows."""

from __future__ import annotations

import base64
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import cv2
import numpy as np
import pytest

from conftest import Photos
from lmdbstore import ImageStore, ingest, notebook, pagecache
from lmdbstore.layout import TextColumn

pytest.importorskip("matplotlib")
pytest.importorskip("pandas")

from lmdbstore import plots
from lmdbstore.errors import MissingColumn, OptionError

MANY = 1_580_000


@pytest.fixture
def store(store_path: Path) -> Iterator[ImageStore]:
    with ImageStore(store_path) as opened:
        yield opened


class Words(HTMLParser):
    """The text of some HTML, and whether its tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(html)
        assert self.tags == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "img":
            self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def __str__(self) -> str:
        return " ".join(self.words)


def images(html: str) -> list[np.ndarray]:
    found = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', html)
    return [cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_COLOR) for data in found]


# The cell


def test_a_store_shows_itself(store: ImageStore, photos: Photos) -> None:
    html = store._repr_html_()
    assert html is not None
    shown = str(Words(html))
    labels = list(photos.labels.values())
    assert "photos.lmdb : 40 images" in shown
    assert "jpeg 38, png 1, webp 1" in shown
    assert f"{len(set(labels))} classes" in shown
    assert f"{max(labels, key=labels.count)} ({max(map(labels.count, labels))})" in shown
    assert f"{store.manifest.image_bytes / 1e6:,.1f} MB" in shown
    assert "rejected rows 0" in shown and str(store.path) in shown
    assert images(html)[-1].shape[1] == 950


def test_a_selection_shows_its_own_figures(store: ImageStore, photos: Photos) -> None:
    html = store[photos.ids[:3]]._repr_html_()
    assert html is not None
    assert "3 of 40 images" in str(Words(html)) and "in memory" not in html
    size = sum(len(photos.data(id)) for id in photos.ids[:3])
    assert f"{size / 1e6:,.1f} MB" in html
    assert "0 of 40 images" in (store[[]]._repr_html_() or "")


def test_a_cell_reads_only_the_images_that_it_draws(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    view = store.view
    monkeypatch.setattr(store, "view", lambda i: read.append(i) or view(i))
    store._repr_html_()
    assert read == store[:].sample(notebook.SHEET_IMAGES).indices.tolist()


def test_the_bar_shows_what_is_in_memory(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    half = np.repeat([1, 0], 50).astype(np.float32)
    monkeypatch.setattr(pagecache, "residency_map", lambda path, bins: half)
    html = store._repr_html_() or ""
    bar = images(html)[0]
    assert bar.shape == (16, 400, 3) and "50% of the file" in html
    assert np.abs(bar[8, 100].astype(int) - [178, 114, 0]).max() < 12  # blue, green, red
    assert np.abs(bar[8, 300].astype(int) - [221, 221, 221]).max() < 12
    monkeypatch.setattr(pagecache, "residency_map", lambda path, bins: None)
    assert "unknown" in (store._repr_html_() or "")


def test_a_store_whose_file_was_renamed_shows_itself(store: ImageStore) -> None:
    store.path.unlink()
    assert "unknown" in (store._repr_html_() or "") and len(images(store._repr_html_() or "")) == 1


def test_a_closed_store_shows_its_repr(store: ImageStore) -> None:
    store.close()
    assert store._repr_html_() is None


def test_ids_and_labels_are_no_html(photos: Photos, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    photos.path(photos.ids[1]).write_bytes(photos.data(photos.ids[0]))
    photos.csv.write_text(f"id,<b>kind\n{photos.ids[0]},{evil}\n{photos.ids[1]},<i>\n")
    ingest(photos.csv, images=photos.images, out=tmp_path / "<u>.lmdb")
    with ImageStore(tmp_path / "<u>.lmdb") as store:
        for html in (store._repr_html_(), store.duplicates()._repr_html_()):
            assert html and "<script" not in html and "<i>" not in html and "<u>" not in html and "<b>kind" not in html
            assert "&lt;script&gt;" in html


def test_without_matplotlib_a_cell_has_all_but_the_pictures(store_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; from lmdbstore import ImageStore; "
        f"html = ImageStore({str(store_path)!r})._repr_html_(); "
        "print('40 images' in html, 'lmdbstore[notebook]' in html, 'pandas' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["True", "True", "False"]


@pytest.mark.parametrize(("library", "call"), [("matplotlib", "summary"), ("matplotlib", "show"), ("pandas", "table")])
def test_what_is_missing_is_named(store_path: Path, library: str, call: str) -> None:
    code = (
        f"import sys; sys.modules[{library!r}] = None; from lmdbstore import ImageStore\n"
        f"from lmdbstore.errors import MissingDependency\n"
        f"try: ImageStore({str(store_path)!r}).{call}()\n"
        "except MissingDependency as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"need {library}: pip install 'lmdbstore[notebook]'" in shown.stdout


def test_duplicates_show_ids_and_labels(photos: Photos, tmp_path: Path) -> None:
    for id in photos.ids[1:10]:
        photos.path(id).write_bytes(photos.data(photos.ids[0]))
    ingest(photos.csv, images=photos.images, out=tmp_path / "d.lmdb")
    with ImageStore(tmp_path / "d.lmdb") as store:
        shown = str(Words(store.duplicates()._repr_html_()))
    labels = [photos.labels[id] for id in photos.ids[:10]]
    assert "1 groups, 10 images, 1 with conflicting landmark_id" in shown and "4 more" in shown and "yes" in shown
    for label in set(labels):
        assert (f"{label} ({labels.count(label)})" if labels.count(label) > 1 else f"{label}") in shown


# Tables


def test_the_table_has_the_columns(store: ImageStore, photos: Photos) -> None:
    table = store.table()
    assert list(table.columns) == [
        "id", "landmark_id", "width", "height", "orientation", "format", "length", "line",
    ]  # fmt: skip
    assert table.id.tolist() == list(store) and table.index.tolist() == list(range(40))
    assert table.landmark_id.tolist() == [photos.labels[id] for id in store]
    assert table.format.value_counts()["jpeg"] == 38 and table.format.dtype == "category"
    assert table.length.tolist() == [len(photos.data(id)) for id in store]
    part = store[photos.ids[:2]].table()
    assert part.id.tolist() == photos.ids[:2] and part.index.tolist() == [store.index(id) for id in photos.ids[:2]]


def test_the_table_of_rejects(photos: Photos, tmp_path: Path) -> None:
    photos.path(photos.ids[7]).unlink()
    ingest(photos.csv, images=photos.images, out=tmp_path / "r.lmdb")
    with ImageStore(tmp_path / "r.lmdb") as store:
        table = store.rejects_table()
        assert table.line.tolist() == [9] and table.id.tolist() == [photos.ids[7]] and "no such file" in table.reason[0]


# Plots


def test_the_summary_draws_the_columns(store: ImageStore, photos: Photos) -> None:
    classes, sizes, lengths, formats, bar = store.summary().axes
    counts = sorted((list(photos.labels.values()).count(label) for label in set(photos.labels.values())), reverse=True)
    assert classes.lines[0].get_ydata().tolist() == counts
    assert f"landmark_id, {len(counts)} classes" in classes.get_title()
    assert sizes.collections[0].get_array().sum() == 40
    assert sum(patch.get_height() for patch in lengths.patches) == 40
    assert [patch.get_width() for patch in formats.patches] == [38, 1, 1]
    for axes in (classes, sizes, lengths, formats):
        assert axes.get_title() and axes.get_xlabel()
    with pytest.raises(MissingColumn):
        store.summary(label="landmark")


def test_few_sizes_are_discs_with_their_counts(store: ImageStore) -> None:
    store._columns["width"] = np.where(np.arange(40) < 30, 640, 480)
    store._columns["height"], store._columns["orientation"] = np.full(40, 300), np.ones(40, int)
    sizes = store.summary().axes[1]
    assert [text.get_text() for text in sizes.texts] == ["10", "30"]
    assert sizes.collections[0].get_offsets().tolist() == [[480, 300], [640, 300]]


def test_the_summary_of_little(store: ImageStore) -> None:
    for selection in (store[:1], store[[]]):
        assert (selection.summary()._repr_png_() or b"").startswith(b"\x89PNG")


def test_residency_is_a_strip_for_each_moment() -> None:
    maps = {"before": np.zeros(10), "after": np.linspace(0, 1, 10), "later": None}
    axes = plots.plot_residency(maps, size=20_000_000).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["before: 0%", "after: 50%", "later: unknown"]
    np.testing.assert_allclose(np.asarray(axes.images[0].get_array())[1], maps["after"])
    assert axes.images[0].get_extent()[1] == 20.0
    for wrong in ({}, {str(k): None for k in range(41)}):
        with pytest.raises(OptionError, match="residency maps"):
            plots.plot_residency(wrong, size=1)


# The full size


@pytest.fixture
def landmarks(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    """The columns of 1.58 million images, 81,313 landmarks, over the 40 images of `store`."""
    rng = np.random.default_rng(0)
    columns = {name: np.resize(store.column(name), MANY) for name in ("offset", "length", "width", "height")}
    columns |= {name: np.resize(store.column(name), MANY) for name in ("orientation", "format", "line")}
    columns["checksum"] = rng.integers(0, 1 << 64, MANY, np.uint64)
    columns["checksum"][MANY // 2 :: 100_000] = columns["checksum"][0]
    columns["length"][MANY // 2 :: 100_000] = columns["length"][0]
    columns["landmark_id"] = np.minimum(rng.zipf(1.3, MANY), 81_313)
    hexes = np.char.mod("%016x", np.arange(MANY)).astype("S16")
    columns["ids"] = TextColumn(np.arange(0, 16 * MANY + 1, 16), hexes.view(np.uint8))
    store.manifest = dataclasses.replace(store.manifest, images=MANY)
    store._columns = columns
    read: list[int] = []
    view = store.view
    monkeypatch.setattr(store, "view", lambda i: read.append(i) or view(i))
    store.views = read  # type: ignore[attr-defined]
    return store


def test_at_full_size_a_look_reads_what_it_draws_and_no_more(landmarks: ImageStore) -> None:
    html = landmarks._repr_html_()
    assert html and "1,580,000 images" in html
    assert len(landmarks.views) == notebook.SHEET_IMAGES  # type: ignore[attr-defined]
    assert landmarks.summary().axes[0].get_title().endswith("classes")
    found = landmarks.duplicates()
    assert (len(found), len(found[0])) == (1, 9)
    table = landmarks.table()
    assert len(table) == MANY
    assert len(landmarks[table.index[table.landmark_id == 7]]) == int((landmarks.column("landmark_id") == 7).sum())
    landmarks.select(landmark_id=7).show(n=4)
    assert len(landmarks.views) == notebook.SHEET_IMAGES + 4  # type: ignore[attr-defined]
