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
from lmdbstore.errors import DecodeError, LmdbstoreError, PathError
from lmdbstore.layout import Reject
from lmdbstore.pictures import BLACK, DPI, GREY, VERMILLION, Picture
from lmdbstore.selection import Selection, default_label
from lmdbstore.template import PathTemplate
from lmdbstore.thumbnails import displayable, reduced

if TYPE_CHECKING:
    from lmdbstore.dataset import ImageDataset

MOST_TILES = 400
WIDTH = 950  # pixels of a sheet: what JupyterLab shows without shrinking
LARGEST_SIDE, SMALLEST_SIDE = 220, 110  # pixels of a tile's square
GAP, TITLE_HEIGHT, LINE_HEIGHT = 8, 32, 15  # pixels
CAPTION_LINES = 2
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


class Grid(NamedTuple):
    """Where the tiles of a sheet are, in pixels from the top left corner."""

    columns: int
    rows: int
    side: int  # of a tile's square
    height: int  # of the sheet, which is WIDTH wide

    def corner(self, number: int) -> tuple[int, int]:
        """Return the left and top edge of a tile's square."""
        row, column = divmod(number, self.columns)
        return GAP + column * (self.side + GAP), TITLE_HEIGHT + row * self.pitch

    @property
    def pitch(self) -> int:
        """The height of a row with its captions."""
        return self.side + CAPTION_LINES * LINE_HEIGHT + GAP


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
    """Draw item i of a dataset as it is stored, then as its transform makes it, `times` times."""
    _check_count(times + 1)
    original = dataset.store[int(dataset.indices[i])]
    drawn = list(tiles(original, label=dataset.label))
    for number in range(times):
        item = dataset[i] if dataset.label is None else dataset[i][0]
        pixels = displayable(item)
        drawn.append(Tile(pixels, (f"transformed, {number + 1}", size_text(pixels.shape[1], pixels.shape[0]))))
    return draw(drawn, f"{dataset.store.path.name}: item {i}, and {times} times through the transform")


def reject_sheet(store: Any, *, images: str | os.PathLike[str] | None, n: int) -> Picture:
    """Draw rejected rows (see `InspectedStore.show_rejects`)."""
    rejects = store.rejects()
    _check_count(min(n, len(rejects)))
    template = PathTemplate(store.manifest.source["path"], columns=store.columns)
    folder = None if images is None else Path(images)
    title = f"{store.path.name}: {min(n, len(rejects)):,} of {len(rejects):,} rejected rows"
    return draw([_reject_tile(reject, folder, template) for reject in rejects[:n]], title)


def tiles(
    chosen: Selection, *, label: str | None, transform: Callable[..., Any] | None = None
) -> Iterable[Tile]:
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


def plan(count: int) -> Grid:
    """Choose columns and tile size for a number of tiles: square enough to look at, few cells left empty."""
    fewest, most = (4, 6) if count <= 48 else (6, 8)
    columns = min(range(min(count, fewest), min(count, most) + 1), key=lambda c: (-count % c, -c)) if count else 1
    side = min(LARGEST_SIDE, max(SMALLEST_SIDE, (WIDTH - GAP) // columns - GAP))
    rows = -(-count // columns)
    grid = Grid(columns, rows, side, 0)
    return grid._replace(height=TITLE_HEIGHT + rows * grid.pitch)


def draw(drawn: Sequence[Tile], title: str) -> Picture:
    """Put the tiles on one sheet."""
    grid = plan(len(drawn))
    picture = Picture((WIDTH / DPI, grid.height / DPI), photos=True)
    axes = picture.add_axes((0, 0, 1, 1))
    axes.text(GAP, TITLE_HEIGHT / 2, shorten(title, 120), fontsize=11, va="center", parse_math=False)
    for number, tile in enumerate(drawn):
        _draw_tile(axes, tile, *grid.corner(number), grid.side)
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
    return lambda at: displayable(dataset[at])


def _reject_tile(reject: Reject, folder: Path | None, template: PathTemplate) -> Tile:
    caption = (reject.id or "(no id)", f"line {reject.line}")
    path = None if folder is None else _reject_path(reject.id, folder, template)
    if path is None:
        return Tile(None, caption, reject.reason)
    try:
        return Tile(codec.decode(path.read_bytes()), (caption[0], f"{caption[1]}: {_bare(reject.reason)}"))
    except (OSError, DecodeError):
        return Tile(None, caption, reject.reason)


def _reject_path(id: str, folder: Path, template: PathTemplate) -> Path | None:
    if template.columns:  # the row's other values aren't in the list of rejects
        return None
    try:
        path = folder / template.fill({"id": id})
    except PathError:
        return None
    inside = path.is_file() and path.resolve().is_relative_to(folder.resolve())
    return path if inside and path.stat().st_size <= LARGEST_REJECT else None


def _bare(reason: str) -> str:
    """Return a reason without the path before it."""
    return reason.split(": ", 1)[-1]


def _draw_tile(axes: Any, tile: Tile, left: int, top: int, side: int) -> None:
    if tile.pixels is None:
        right, bottom = left + side, top + side
        axes.fill((left, right, right, left), (top, top, bottom, bottom), facecolor="#F4F4F4", edgecolor=GREY)
        letters = int(side / LETTER) - 2
        lines = textwrap.wrap(shorten(tile.problem, letters * 9), letters)
        axes.text(left + 6, top + 6, "\n".join(lines), fontsize=7.5, va="top", color=VERMILLION, parse_math=False)
    else:
        pixels = reduced(tile.pixels, 2 * side)
        width, height = fit(pixels.shape[1], pixels.shape[0], side)
        x, y = left + (side - width) / 2, top + (side - height) / 2
        axes.imshow(pixels, extent=(x, x + width, y + height, y), interpolation="antialiased")
    for number, line in enumerate(tile.caption[:CAPTION_LINES]):
        y = top + side + (number + 0.6) * LINE_HEIGHT
        text, color = shorten(line, int(side / LETTER)), BLACK if number == 0 else "#444444"
        axes.text(left + side / 2, y, text, fontsize=7.5, ha="center", va="center", color=color, parse_math=False)


def _check_count(count: int) -> None:
    if not 0 <= count <= MOST_TILES:
        raise ValueError(f"{count:,} pictures on one sheet; {MOST_TILES} at most")
