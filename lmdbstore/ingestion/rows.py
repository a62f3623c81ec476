"""From a csv to rows: ids, lines, records and typed columns, as flat arrays."""

from __future__ import annotations

import csv
import dataclasses
import difflib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from lmdbstore import layout
from lmdbstore.errors import CsvError
from lmdbstore.layout import Array, Reject, TextColumn

_CHUNK = 1 << 16  # rows held as Python objects at a time
_DECIMAL = re.compile(r"-?\d+(\.\d*)?([eE][+-]?\d+)?")


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a csv that can be looked for on the disk.

    Attributes
    ----------
    ids, record : TextColumn, (n,)
        The id, and the row as it stands in the csv.
    line : ndarray of int64, (n,)
        Line of the csv where the row starts, 1-based.
    columns : dict of str to array
        The other columns under their names in the store, int64, float64 or text.
    by_id : ndarray of int64, (n,)
        The permutation that sorts the ids by their bytes.
    names : dict of str to str
        Name in the csv to name in the store, the id column left out.
    header : str
        The header as it stands in the csv.
    rejects : list of Reject
        Rows that no file could help.
    notes : list of str
        What the user should know about the columns.
    total : int
        Rows in the csv.
    digest : str
        XXH3-128 of the csv, hex.
    """

    ids: TextColumn
    record: TextColumn
    line: np.ndarray
    columns: dict[str, Array]
    by_id: np.ndarray
    names: dict[str, str]
    header: str
    rejects: list[Reject]
    notes: list[str]
    total: int
    digest: str


def read_rows(path: Path, *, id_column: str) -> Rows:
    """Read and check a csv: UTF-8, comma-separated, with a header.

    Raises
    ------
    CsvError
        With the line, where the csv as a whole can't be read.
    """
    digest = _digest(path)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return _rows(path, _Records(path, file), id_column, digest)
    except UnicodeDecodeError as error:
        line, byte = _undecodable(path)
        raise CsvError(f"{path}:{line}: byte {byte:#04x} isn't UTF-8 ({error.reason}); save the csv as UTF-8") from None
    except OSError as error:
        raise CsvError(f"{path}: {error.strerror}") from None


class _Records:
    """The records of a csv file with the line where each starts and the text it stands in."""

    def __init__(self, path: Path, lines: Iterator[str]) -> None:
        self.path, self._lines = path, lines
        self._taken: list[str] = []
        self._count = 0

    def __iter__(self) -> Iterator[tuple[int, str, list[str]]]:
        reader = csv.reader(self._take(), strict=True)
        while True:
            first = self._count + 1
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                reason = "a quoted field isn't closed" if "unexpected end" in str(error) else str(error)
                raise CsvError(f"{self.path}:{first}: {reason}; mend this row") from None
            text = "".join(self._taken)
            self._taken.clear()
            if fields and not (len(fields) == 1 and not fields[0].strip()):
                yield first, text, fields

    def _take(self) -> Iterator[str]:
        for line in self._lines:
            self._taken.append(line)
            self._count += 1
            if "\0" in line:  # Python 3.10's csv module refuses it, later ones don't
                raise CsvError(f"{self.path}:{self._count}: a NUL byte; is the file damaged, or UTF-16?")
            yield line


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    try:
        with open(path, "rb") as file:
            start = file.read(4)
            if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start:
                raise CsvError(f"{path}: the csv is UTF-16; save it as UTF-8")
            digest.update(start)
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise CsvError(f"{path}: {error.strerror}") from None
    return digest.hexdigest()


def _undecodable(path: Path) -> tuple[int, int]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return number, line[error.start]
    return 0, 0


def _rows(path: Path, records: _Records, id_column: str, digest: str) -> Rows:
    rows = iter(records)
    try:
        _, header, fields = next(rows)
    except StopIteration:
        raise CsvError(f"{path}: the csv is empty; it needs a header with a column {id_column!r}") from None
    names = [name.strip() for name in fields]
    _check_header(path, names, id_column)
    table = _Table(len(names), names.index(id_column))
    for line, text, fields in rows:
        table.add(line, text, fields)
    return _finish(path, table, names, header, digest)


def _check_header(path: Path, names: list[str], id_column: str) -> None:
    where = f"{path}:1"
    if id_column not in names:
        found = ", ".join(map(repr, names))
        near = difflib.get_close_matches(id_column.lower(), [name.lower() for name in names], n=1)
        close = next((name for name in names if near and name.lower() == near[0]), None)
        if len(names) == 1 and re.search(r"[;\t|]", names[0]):
            advice = "separate the columns by commas"
        elif close:
            advice = f"did you mean --id-column {close}?"
        else:
            advice = "is the header missing? name the column of the ids with --id-column"
        raise CsvError(f"{where}: no column {id_column!r} among {found}; {advice}")
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise CsvError(f"{where}: column {twice[0]!r} stands there twice; rename one")
    for name in names:
        if len(name.encode()) > layout.MAX_KEY_BYTES - 4:
            raise CsvError(f"{where}: column {name[:40]!r}... has a name of over 507 bytes; rename it")


class _Table:
    """Grows columns of text row by row; holds only a chunk of them as Python objects."""

    def __init__(self, width: int, id_at: int) -> None:
        self.width, self.id_at = width, id_at
        self.total = self.stripped = 0
        self.first_stripped = 0
        self.rejects: list[Reject] = []
        self._lines: list[int] = []
        self._chunk: list[list[str]] = [[] for _ in range(width + 1)]  # the columns, then the records
        self._full: list[list[TextColumn]] = [[] for _ in range(width + 1)]
        self._full_lines: list[np.ndarray] = []

    def add(self, line: int, text: str, fields: list[str]) -> None:
        self.total += 1
        if len(fields) != self.width:
            fields = self._fit(fields)
        id = fields[self.id_at] if self.id_at < len(fields) else ""
        if id != id.strip():
            id = fields[self.id_at] = id.strip()
            self.first_stripped = self.first_stripped or line
            self.stripped += 1
        reason = _unusable(id) if len(fields) == self.width else f"{len(fields)} fields, the header has {self.width}"
        if reason:
            self.rejects.append(Reject(line, id, reason))
            return
        self._lines.append(line)
        for column, value in zip(self._chunk, [*fields, text], strict=True):
            column.append(value)
        if len(self._lines) == _CHUNK:
            self._flush()

    def finish(self) -> tuple[np.ndarray, list[TextColumn]]:
        """Return the lines and the columns, the records last."""
        self._flush()
        return np.concatenate(self._full_lines), [_joined(chunks) for chunks in self._full]

    def _fit(self, fields: list[str]) -> list[str]:
        # commas at the end of a row are what spreadsheets leave behind
        return fields[: self.width] if not any(fields[self.width :]) else fields

    def _flush(self) -> None:
        self._full_lines.append(np.array(self._lines, np.int64))
        for full, chunk in zip(self._full, self._chunk, strict=True):
            full.append(TextColumn.of(chunk))
            chunk.clear()
        self._lines.clear()


def _unusable(id: str) -> str | None:
    if not id:
        return "the id is empty"
    size = len(id.encode())
    return f"the id has {size} bytes, LMDB allows {layout.MAX_KEY_BYTES}" if size > layout.MAX_KEY_BYTES else None


def _joined(chunks: list[TextColumn]) -> TextColumn:
    lengths = np.concatenate([np.diff(chunk.starts) for chunk in chunks])
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return TextColumn(starts, np.concatenate([chunk.text for chunk in chunks]))


def _finish(path: Path, table: _Table, names: list[str], header: str, digest: str) -> Rows:
    line, columns = table.finish()
    ids = columns[table.id_at]
    by_id = ids.argsort()
    first = _first_of_each(ids, by_id)
    rejects = table.rejects + [
        Reject(int(line[i]), ids[i], f"the id stands at line {line[first[i]]} already")
        for i in np.flatnonzero(first != np.arange(len(ids)))
    ]
    keep = np.flatnonzero(first == np.arange(len(ids)))
    if len(keep) < len(ids):
        line, columns = line[keep], [column.take(keep) for column in columns]
        by_id = columns[table.id_at].argsort()
    notes = []
    if table.stripped:
        notes.append(
            f"{table.stripped} ids had blanks around them, stripped (first: {path.name}:{table.first_stripped})"
        )
    stored_names, typed = _typed(path, names, columns, table.id_at, line, notes)
    return Rows(
        ids=columns[table.id_at],
        record=columns[-1],
        line=line,
        columns=typed,
        by_id=by_id,
        names=stored_names,
        header=header,
        rejects=sorted(rejects),
        notes=notes,
        total=table.total,
        digest=digest,
    )


def _first_of_each(ids: TextColumn, by_id: np.ndarray) -> np.ndarray:
    """Return for every row the first row with the same id."""
    lengths = np.diff(ids.starts)[by_id]
    digests = np.fromiter((layout.checksum(ids.encoded(i)) for i in by_id), np.uint64, len(ids))
    first = np.arange(len(ids))
    # equal ids are neighbours in sorted order; equal lengths and digests make a candidate
    for k in np.flatnonzero((lengths[1:] == lengths[:-1]) & (digests[1:] == digests[:-1])):
        before, here = by_id[k], by_id[k + 1]
        if ids.encoded(before) == ids.encoded(here):
            first[here] = first[before]
    return first


def _typed(
    path: Path, names: list[str], columns: list[TextColumn], id_at: int, line: np.ndarray, notes: list[str]
) -> tuple[dict[str, str], dict[str, Array]]:
    stored_names, typed = {}, {}
    for at, (name, column) in enumerate(zip(names, columns, strict=False)):
        if at == id_at or (not name and not len(column.text)):  # a nameless empty column: trailing commas
            continue
        stored_names[name] = f"csv.{name}" if name in layout.RESERVED else name
        values, note = type_column(column)
        typed[stored_names[name]] = values
        if note:
            bad, text = note
            notes.append(f"column {name!r} is text, not int64: {path.name}:{line[bad]} has {text!r}")
        if stored_names[name] != name:
            notes.append(f"column {name!r} is stored as {stored_names[name]!r}: every store has a {name!r} of its own")
    return stored_names, typed


def type_column(column: TextColumn) -> tuple[Array, tuple[int, str] | None]:
    """Return a column as int64 or float64 where that loses nothing that matters, else as text.

    int64: every value is written as Python writes an integer (``007`` and ``+1`` aren't).
    float64: every value is a decimal number, and at least one isn't a whole number: ``5.0``
    among integers makes no float label.

    Returns
    -------
    values : ndarray or TextColumn
    note : (position, value) or None
        The first value that isn't an integer, where nearly all of the others are.
    """
    texts = column[:]
    if not texts:
        return column, None
    plain = np.fromiter((_is_integer(text) for text in texts), bool, len(texts))
    if plain.all():
        try:
            return np.array([int(text) for text in texts], np.int64), None
        except OverflowError:
            return column, None
    if all(_DECIMAL.fullmatch(text) for text in texts):
        floats = np.array([float(text) for text in texts])
        if not (floats == np.floor(floats)).all():
            return floats, None
    odd = int(np.argmin(plain))
    return column, (odd, texts[odd]) if plain.mean() >= 0.5 else None


def _is_integer(text: str) -> bool:
    digits = text[1:] if text[:1] == "-" else text
    return digits.isascii() and digits.isdigit() and (digits[0] != "0" or text == "0")
