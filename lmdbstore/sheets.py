"""Contact sheets: many small pictures with a line or two under each.

First the tiles (what to draw), then the grid (where), then the drawing.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lmdbstore import codec
from lmdbstore.errors import DecodeError, LmdbstoreError, OptionError, PathError
from lmdbstore.layout import Reject
from lmdbstore.pictures import BLACK, DPI, GREY, VERMILLION, Picture
from lmdbstore.selection import Selection, default_label
from lmdbstore.template import PathTemplate
from lmdbstore.thumbnails import displayable, reduced

if TYPE_CHECKING:
    from lmdbstore.dataset import ImageDataset

MOST_TILES = 400
WIDTH = 950  # pixels of a sheet: what JupyterLab shows without shrinking
LARGEST_SIDE, SMALLEST_SIDE = 190, 110  # pixels of a tile's square
GAP, TITLE_HEIGHT, LINE_HEIGHT = 8, 32, 15  # pixels
CAPTION_LINES = 2
PROBLEM_SIZE = (400, 240)  # width and height of what stands in for a picture
LARGEST_REJECT = 64 << 20  # bytes; what is larger isn't read for a look at it
LETTER = 6.1  # pixels that a letter of a caption is wide


class Tile(NamedTuple):
    """One picture of a sheet and what stands under it.

    Attributes
    ----------
    pixels : ndarray or None
        (H, W, 3) uint8; None: `problem` stands in its place.
    caption : tuple of str
        Two lines at most.
    problem : str
    """

    pixels: np.ndarray | None
    caption: tuple[str, ...]
    problem: str = ""


class Box(NamedTuple):
    """Where a tile's picture is on the sheet, in pixels from the top left corner; its caption hangs below."""

    left: float
    top: float
    width: float
    height: float


class Grid(NamedTuple):
    """Where the tiles of a sheet are.

    Attributes
    ----------
    boxes : list of Box
    side : int
        Of the square that each picture was fitted into, in pixels.
    height : int
        Of the sheet in pixels; it is WIDTH wide.
    """

    boxes: list[Box]
    side: int
    height: int


def contact_sheet(
    chosen: Selection, *, of: Selection, label: str | None = None, transform: Callable[..., Any] | None = None
) -> Picture:
    """Draw the chosen images; the title says of how many (see `Inspected.show`)."""
    count = f"{len(chosen):,} of {len(of):,} images" if len(chosen) < len(of) else f"{len(chosen):,} images"
    label = label or default_label(chosen.store)
    title = [f"{chosen.store.path.name}: {count}", *([f"label {label}"] if label else [])]
    _check_count(len(chosen))
    return draw(list(tiles(chosen, label=label, transform=transform)), ", ".join(title))


def varied_sheet(dataset: ImageDataset, i: int, *, times: int) -> Picture:
    """Draw item i of a dataset as it is stored, then as it comes in its first `times` epochs."""
    _check_count(times + 1)
    original = dataset.store[int(dataset.indices[i])]
    drawn = list(tiles(original, label=dataset.label))
    for number in range(times):
        item = dataset.load(i, epoch=number)
        pixels = displayable(item if dataset.label is None else item[0])
        drawn.append(Tile(pixels, (f"epoch {number}", size_text(pixels.shape[1], pixels.shape[0]))))
    return draw(drawn, f"{dataset.store.path.name}: item {i} as it is stored, and as {times} epochs get it")


def reject_sheet(store: Any, *, images: str | os.PathLike[str] | None, n: int) -> Picture:
    """Draw rejected rows (see `InspectedStore.show_rejects`)."""
    rejects = store.rejects()
    _check_count(min(n, len(rejects)))
    template = PathTemplate(store.manifest.source["path"], columns=store.columns)
    folder = None if images is None else Path(images)
    title = f"{store.path.name}: {min(n, len(rejects)):,} of {len(rejects):,} rejected rows"
    return draw([_reject_tile(reject, folder, template) for reject in rejects[:n]], title)


def tiles(chosen: Selection, *, label: str | None, transform: Callable[..., Any] | None = None) -> Iterable[Tile]:
    """Yield a tile for each image; one that doesn't decode has its reason in place of a picture."""
    labels = [""] * len(chosen) if label is None else [f"{value} · " for value in chosen.column(label)]
    read = _reader(chosen, transform)
    for at, id, text, width, height in zip(chosen.indices.tolist(), chosen.ids, labels, *chosen.sizes):
        try:
            pixels = read(at)
        except LmdbstoreError as error:
            yield Tile(None, (id, text.rstrip(" ·")), getattr(error, "reason", str(error)))
            continue
        made = "" if transform is None else f" → {size_text(pixels.shape[1], pixels.shape[0])}"
        yield Tile(pixels, (id, f"{text}{size_text(width, height)}{made}"))


def plan(sizes: Sequence[tuple[int, int]]) -> Grid:
    """Choose where pictures of these sizes (width, height) go: rows as high as their highest, few cells empty."""
    columns = _columns(len(sizes))
    side = min(LARGEST_SIDE, max(SMALLEST_SIDE, (WIDTH - GAP) // columns - GAP))
    boxes, top = [], float(TITLE_HEIGHT)
    for first in range(0, len(sizes), columns):
        row = [fit(width, height, side) for width, height in sizes[first : first + columns]]
        bottom = top + max(height for _, height in row)
        for column, (width, height) in enumerate(row):
            boxes.append(Box(GAP + column * (side + GAP) + (side - width) / 2, bottom - height, width, height))
        top = bottom + CAPTION_LINES * LINE_HEIGHT + 2 * GAP
    return Grid(boxes, side, int(top))


def _columns(count: int) -> int:
    fewest, most = (4, 6) if count <= 48 else (6, 8)
    choices = range(min(count, fewest), min(count, most) + 1)
    return max(1, min(choices, key=lambda columns: (-count % max(1, columns), -columns)))


def draw(drawn: Sequence[Tile], title: str) -> Picture:
    """Put the tiles on one sheet."""
    grid = plan([PROBLEM_SIZE if tile.pixels is None else tile.pixels.shape[1::-1] for tile in drawn])
    picture = Picture((WIDTH / DPI, grid.height / DPI), photos=True)
    axes = picture.add_axes((0, 0, 1, 1))
    axes.text(GAP, TITLE_HEIGHT / 2, shorten(title, 120), fontsize=11, va="center", parse_math=False)
    for tile, box in zip(drawn, grid.boxes):
        _draw_tile(axes, tile, box, grid.side)
    axes.set(xlim=(0, WIDTH), ylim=(grid.height, 0), aspect="auto")
    axes.set_axis_off()
    return picture


def fit(width: int, height: int, side: int) -> tuple[float, float]:
    """Return the size at which a picture fits into a square; never more than three times its own."""
    scale = min(side / width, side / height, 3.0)
    return width * scale, height * scale


def shorten(text: str, letters: int) -> str:
    """Return a text with its middle left out if it is longer, and nothing that a font can't show."""
    text = "".join(letter if letter.isprintable() else "�" for letter in text)
    if len(text) <= letters:
        return text
    head = (letters - 1) // 2
    return f"{text[:head]}…{text[len(text) - (letters - 1 - head) :]}"


def size_text(width: int, height: int) -> str:
    """Return a size as captions have it."""
    return f"{width}×{height}"


def _reader(chosen: Selection, transform: Callable[..., Any] | None) -> Callable[[int], np.ndarray]:
    if transform is None:
        return chosen.store.decode_at
    from lmdbstore.dataset import ImageDataset

    dataset = ImageDataset(chosen.store, transform=transform)
    return lambda at: displayable(dataset.load(at, epoch=0))


def _reject_tile(reject: Reject, folder: Path | None, template: PathTemplate) -> Tile:
    caption = (reject.id or "(no id)", f"line {reject.line}")
    path = None if folder is None else _reject_path(reject.id, folder, template)
    if path is None:
        return Tile(None, caption, _bare(reject))
    try:
        return Tile(codec.decode(path.read_bytes()), (f"{caption[0]}, {caption[1]}", _bare(reject)))
    except (OSError, DecodeError):
        return Tile(None, caption, _bare(reject))


def _reject_path(id: str, folder: Path, template: PathTemplate) -> Path | None:
    if template.columns:  # the row's other values aren't in the list of rejects
        return None
    try:
        path = folder / template.fill({"id": id})
    except PathError:
        return None
    inside = path.is_file() and path.resolve().is_relative_to(folder.resolve())
    return path if inside and path.stat().st_size <= LARGEST_REJECT else None


def _bare(reject: Reject) -> str:
    """Return a reason without the path before it: the id stands below."""
    head, _, tail = reject.reason.partition(": ")
    return tail if tail and reject.id in head and " " not in head else reject.reason


def _draw_tile(axes: Any, tile: Tile, box: Box, side: int) -> None:
    left, top, right, bottom = box.left, box.top, box.left + box.width, box.top + box.height
    if tile.pixels is None:
        axes.fill((left, right, right, left), (top, top, bottom, bottom), facecolor="#F4F4F4", edgecolor=GREY)
        letters = int(side / LETTER) - 2
        lines = textwrap.wrap(shorten(tile.problem, letters * 8), letters)
        axes.text(left + 6, top + 6, "\n".join(lines), fontsize=7.5, va="top", color=VERMILLION, parse_math=False)
    else:
        pixels = reduced(tile.pixels, 2 * side)
        axes.imshow(pixels, extent=(left, right, bottom, top), interpolation="antialiased")
    for number, line in enumerate(tile.caption[:CAPTION_LINES]):
        x, y = (left + right) / 2, bottom + (number + 0.6) * LINE_HEIGHT
        text, color = shorten(line, int(side / LETTER)), BLACK if number == 0 else "#444444"
        axes.text(x, y, text, fontsize=7.5, ha="center", va="center", color=color, parse_math=False)


def _check_count(count: int) -> None:
    if not 0 <= count <= MOST_TILES:
        raise OptionError(f"{count:,} pictures on one sheet; {MOST_TILES} at most")
