"""The columns of a store as lines of text, for a terminal or as csv; memory for a piece of them at a time."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from lmdbstore.layout import FORMATS
from lmdbstore.selection import Selection

PIECE = 10_000  # rows
ABOUT_THE_FILE = ("width", "height", "orientation", "format", "length")


def lines(selection: Selection, *, as_csv: bool = False) -> Iterator[str]:
    """Yield a line of names, then one for each image: id, the csv's columns, size, orientation, format, bytes.

    Sizes are in pixels before the EXIF orientation.  As text, columns are aligned within 10,000 rows, and what can't
    be printed is escaped; as csv, values are as they are.
    """
    names = header(selection)
    for start in range(0, max(1, len(selection)), PIECE):
        rows = list(zip(*_values(selection[start : start + PIECE])))
        shown = [names, *rows] if start == 0 else rows
        yield from _csv_lines(shown) if as_csv else _text_lines(shown)


def header(selection: Selection) -> tuple[str, ...]:
    """Return the names of the columns that are listed."""
    return (selection.store.manifest.source["id_column"], *selection.store.columns, *ABOUT_THE_FILE)


def _values(piece: Selection) -> Iterator[list[Any]]:
    yield piece.ids
    for name in (*piece.store.columns, *ABOUT_THE_FILE):
        values = piece.column(name)
        if name == "format":
            values = np.array(FORMATS)[values]
        yield values.tolist() if isinstance(values, np.ndarray) else values


def _csv_lines(rows: list[tuple[Any, ...]]) -> Iterator[str]:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    yield buffer.getvalue().removesuffix("\n")


def _text_lines(rows: list[tuple[Any, ...]]) -> Iterator[str]:
    # an id may hold anything, also what moves a terminal's cursor
    texts = [[text if (text := str(value)).isprintable() else repr(text) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts)]
    place = [str.rjust if isinstance(value, int | float) else str.ljust for value in rows[-1]]
    for row in texts:
        yield "  ".join(put(cell, width) for put, cell, width in zip(place, row, widths)).rstrip()
