"""What a store, a selection and a list of duplicates say of themselves in a notebook's cell.

HTML without style sheets and scripts: it looks the same in JupyterLab, VS Code and on GitHub, and follows the theme.
Each cell is aligned by a style of its own: JupyterLab's style sheet overrules the attribute `align`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from lmdbstore import codec, pagecache
from lmdbstore.errors import MissingDependency, StoreClosed
from lmdbstore.selection import Selection, count_values, default_label

if TYPE_CHECKING:
    from lmdbstore.duplicates import Duplicates

SHEET_IMAGES = 12  # two rows of six
TOP_LABELS = 5
SHOWN_GROUPS = 20
BAR_BINS, BAR_SCALE, BAR_HEIGHT = 100, 4, 16  # parts of the file; pixels a part, and of the bar
# as in pictures.py, which needs matplotlib
RESIDENT, ABSENT = np.array([0, 114, 178]), np.array([221, 221, 221])


def cell(selection: Selection) -> str | None:
    """Return a store or a selection as HTML: counts, size, labels, formats, residency, a contact sheet.

    Reads the columns and at most `SHEET_IMAGES` images.  None for a closed store, whose cell shows its repr.
    """
    try:
        facts = _facts(selection)
        residency = _residency(selection) if _is_whole(selection) else ""
        return f"{_heading(selection)}{_rows({**facts, **_html('in memory', residency)})}{_sheet(selection)}"
    except StoreClosed:
        return None


def duplicates_cell(duplicates: Duplicates) -> str:
    """Return the first groups of duplicates as HTML: ids, labels, whether these conflict."""
    label, conflict = duplicates.label, duplicates.in_conflict
    head = ("group", "images", "ids", *(() if label is None else (label, "conflict")))
    rows = []
    for g, group in enumerate(duplicates[:SHOWN_GROUPS]):
        labels = () if label is None else (_labels(group, label), _yes(conflict[g]))
        rows.append((f"{g}", f"{len(group)}", _joined(group.ids), *labels))
    left = len(duplicates) - len(rows)
    more = f"<p>… and {left:,} groups more</p>" if left > 0 else ""
    return f"<p><b>{escape(repr(duplicates)[1:-1])}</b></p>{_table(rows, head)}{more}"


def _is_whole(selection: Selection) -> bool:
    return len(selection) == len(selection.store)


def _heading(selection: Selection) -> str:
    store = selection.store
    count = f"{len(selection):,} images" if _is_whole(selection) else f"{len(selection):,} of {len(store):,} images"
    return f"<p><b>{escape(store.path.name)}</b>: {count}</p>"


def _facts(selection: Selection) -> dict[str, str]:
    store, lengths = selection.store, selection.column("length")
    if not len(selection):
        return {"path": escape(str(store.path))}
    facts = {
        "size": f"{lengths.sum() / 1e6:,.1f} MB; median {np.median(lengths) / 1e3:,.0f} kB, "
        f"largest {lengths.max() / 1e3:,.0f} kB",
        "pixels": _pixels(*selection.sizes),
        "formats": ", ".join(f"{name} {count:,}" for name, count in selection.formats.items()),
    }
    label = default_label(store)
    if label is not None:
        facts[escape(label)] = _label_summary(selection.column(label))
    if _is_whole(selection):
        facts |= {"columns": escape(", ".join(store.columns)), "rejected rows": f"{store.manifest.rejected:,}"}
        facts["path"] = f"{escape(str(store.path))}, build {store.build_id[:12]}"
    return facts


def _pixels(width: np.ndarray, height: np.ndarray) -> str:
    smallest, largest = (f"{w:,}×{h:,}" for w, h in (_at(width, height, np.argmin), _at(width, height, np.argmax)))
    return f"median {np.median(width):,.0f}×{np.median(height):,.0f}, smallest {smallest}, largest {largest}"


def _at(width: np.ndarray, height: np.ndarray, choose: Any) -> tuple[int, int]:
    i = int(choose(width.astype(np.int64) * height))
    return int(width[i]), int(height[i])


def _label_summary(values: Any) -> str:
    labels, counts = count_values(values)
    once = int((counts == 1).sum())
    top = ", ".join(f"{escape(str(label))} ({count:,})" for label, count in zip(labels[:TOP_LABELS], counts))
    return f"{len(labels):,} classes; median {np.median(counts):,.0f} images, {once:,} with one image; most: {top}"


def _residency(selection: Selection) -> str:
    """Return a bar of the file, dark where it is in memory, with the share in words."""
    try:
        found = pagecache.residency_map(selection.store.path, BAR_BINS)
    except OSError:  # renamed or deleted since it was opened: what is open goes on working
        found = None
    if found is None:
        return "unknown"
    row = ABSENT + found[:, None] * (RESIDENT - ABSENT)
    pixels = np.broadcast_to(row.repeat(BAR_SCALE, axis=0), (BAR_HEIGHT, BAR_BINS * BAR_SCALE, 3))
    bar = codec.encode(pixels.astype(np.uint8), quality=95, subsampling="444")
    return f"{_image(bar)} {found.mean():.0%} of the file"


def _sheet(selection: Selection) -> str:
    if not len(selection):
        return ""
    try:
        jpeg = selection.show(n=SHEET_IMAGES).jpeg()
    except MissingDependency as error:
        return f"<p>{escape(str(error))}</p>"
    return _image(jpeg)


def _image(jpeg: bytes) -> str:
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}">'


def _html(name: str, value: str) -> dict[str, str]:
    return {name: value} if value else {}


def _rows(facts: Mapping[str, str]) -> str:
    return _table([(f"<b>{name}</b>", value) for name, value in facts.items()])


def _table(rows: Iterable[tuple[str, ...]], head: tuple[str, ...] = ()) -> str:
    lines = ["".join(f'<td style="text-align: left">{value}</td>' for value in row) for row in rows]
    if head:
        lines.insert(0, "".join(f'<th style="text-align: left">{escape(name)}</th>' for name in head))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _labels(group: Selection, label: str) -> str:
    counted = zip(*count_values(group.column(label)))
    return escape(", ".join(f"{value} ({count})" if count > 1 else f"{value}" for value, count in counted))


def _joined(ids: list[str]) -> str:
    shown = ", ".join(f"<code>{escape(id)}</code>" for id in ids[:6])
    return shown + (f", … {len(ids) - 6:,} more" if len(ids) > 6 else "")


def _yes(conflict: bool) -> str:
    return "<b>yes</b>" if conflict else "no"
