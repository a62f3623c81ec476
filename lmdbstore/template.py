"""Where an id's file lies below its folder: a path with places for the row's values."""

from __future__ import annotations

import os
import string
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lmdbstore.errors import PathError, TemplateError

_Part = tuple[str, str, "int | slice"]  # text before the place, the column's name, what of its value

#: Layouts that are looked for, in this order: where, and under which ending.
_FOLDERS = ("{id[0]}/{id[1]}/{id[2]}/", "", "train/{id[0]}/{id[1]}/{id[2]}/", "train/")
ENDINGS = (".jpg", ".jpeg", ".JPG", ".JPEG", ".png", ".PNG", ".webp", "")
KNOWN_LAYOUTS = tuple(folder + "{id}" + ending for folder in _FOLDERS for ending in ENDINGS)


class PathTemplate:
    """A path below the folder of images, with places for the columns of the row.

    Parameters
    ----------
    text : str
        ``{id}`` is the id, ``{id[0]}`` a character of it, ``{id[0:2]}`` a slice, and
        ``{column}`` another column of the csv.

    Raises
    ------
    TemplateError
        A place that isn't of this form.
    """

    def __init__(self, text: str, *, columns: Iterable[str] = ()) -> None:
        self.text = text
        try:
            self._parts = [_part(*part, {"id", *columns}) for part in string.Formatter().parse(text)]
        except ValueError as error:
            raise TemplateError(f"path {text!r}: {error}") from None
        self.columns = {name for _, name, _ in self._parts if name} - {"id"}
        if not any(name for _, name, _ in self._parts):
            raise TemplateError(f"path {text!r}: no {{id}} in it, every row would be the same file")

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the path of a row.

        Raises
        ------
        PathError
            The id is too short for the template, or leads out of the folder.
        """
        try:
            path = "".join(text + (values[name][at] if name else "") for text, name, at in self._parts)
        except IndexError:
            raise PathError(f"the id is too short for the path {self.text}") from None
        steps = path.split("/") if os.sep == "/" else path.replace(os.sep, "/").split("/")
        if path.startswith(("/", os.sep)) or os.path.isabs(path) or ".." in steps:
            raise PathError(f"{path}: leads out of the folder of images")
        return path


def _part(text: str, name: str | None, spec: str | None, conversion: str | None, known: set[str]) -> _Part:
    if name is None:
        return text, "", slice(None)
    base, _, index = name.partition("[")
    if spec and index:  # Formatter splits {id[0:2]} at the colon
        index = f"{index}:{spec}"
    elif spec or conversion:
        raise ValueError(f"{{{name}}} can't be formatted; use {{id}}, {{id[0]}} or {{id[0:2]}}")
    if base not in known:
        raise ValueError(f"no column {base!r} for {{{name}}}; there are {', '.join(sorted(known))}")
    return text, base, _position(name, index) if index else slice(None)


def _position(name: str, index: str) -> int | slice:
    bounds = index.rstrip("]").split(":")
    try:
        numbers = [int(bound) if bound else None for bound in bounds]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] is not None:
        return numbers[0]
    if len(numbers) == 2:
        return slice(*numbers)
    raise ValueError(f"{{{name}}} isn't a position; use {{id[0]}} or {{id[0:2]}}")


def probe_layout(folder: Path, ids: list[str]) -> PathTemplate:
    """Return the known layout under which most of these ids have a file.

    Raises
    ------
    TemplateError
        None of them has one.
    """
    best, hits = KNOWN_LAYOUTS[0], 0
    for layout_ in KNOWN_LAYOUTS:
        template = PathTemplate(layout_)
        found = sum(_exists(folder, template, id) for id in ids)
        if found > hits:
            best, hits = layout_, found
        if hits == len(ids):
            break
    if not hits:
        tried = PathTemplate(KNOWN_LAYOUTS[0])
        example = next(_paths(tried, ids), ids[0])
        raise TemplateError(
            f"{folder}: no file for the first {len(ids)} ids, at {example} or in any other known layout; "
            "name the layout with --path, such as --path '{id[0]}/{id}.jpg'"
        )
    return PathTemplate(best)


def _paths(template: PathTemplate, ids: list[str]) -> Iterator[str]:
    for id in ids:
        try:
            yield template.fill({"id": id})
        except PathError:
            continue


def _exists(folder: Path, template: PathTemplate, id: str) -> bool:
    return any(os.path.isfile(folder / path) for path in _paths(template, [id]))
