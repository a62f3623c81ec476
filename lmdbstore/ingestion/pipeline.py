"""The order of the stages: rows, plan, read and check, write, columns, verify, publish."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import lmdbstore
from lmdbstore import layout
from lmdbstore.codec import ImageInfo
from lmdbstore.errors import IngestError, OptionError, PathError, RowsRejected, StoreExists
from lmdbstore.ingestion.images import CHECKS, Found, Reader, Rejected
from lmdbstore.ingestion.preprocess import Treated, Treatment, summary, treatment
from lmdbstore.ingestion.rows import Rows, read_rows
from lmdbstore.ingestion.writer import STORED, Batch, Staging
from lmdbstore.layout import Array, Manifest, Reject, TextColumn, column_type
from lmdbstore.publish import publish, rejects_path, staging_path, write_rejects
from lmdbstore.store import ImageStore
from lmdbstore.template import PathTemplate, probe_layout
from lmdbstore.verification import verify

ORDERS = ("id", "csv", "shuffle")
_BATCH_BYTES = 64 << 20  # a commit; one is written while the next is filled: memory is bounded by both
_BATCH_ROWS = 1 << 14
_TASK_ROWS = 16  # rows per task: at 0.1 ms a row (--check header) a task outweighs its hand-over
_PROBED_ROWS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class IngestOptions(Treatment):
    """How a csv becomes a store.

    Parameters
    ----------
    id_column : str
        The csv's column of ids.
    path : str, optional
        Where an id's file lies below the folder of images, such as
        ``{id[0]}/{id[1]}/{id[2]}/{id}.jpg``.  Default: the known layouts are tried.
    check : {"decode", "header", "none"}
        Decode every image once; read its header; or take any bytes.
    order : {"id", "csv", "shuffle"}
        The order in the file.  "shuffle" keeps blocks mixed where ids are grouped by class.
    strict : bool
        Publish nothing if a row can't be stored.
    keep_truncated : bool
        Take images whose data ends early (with check="decode").
    follow_links : bool
        Take files that symbolic links place outside the folder of images.
    workers : int, optional
        Threads that read and check.  Default: as many as there are cores.
    tile, short_side, max_side, quality, pixels
        What is changed of the images: see `Treatment`.
    """

    id_column: str = "id"
    path: str | None = None
    check: str = "decode"
    order: str = "id"
    strict: bool = False
    keep_truncated: bool = False
    follow_links: bool = False
    workers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.check not in CHECKS:
            raise OptionError(f"check {self.check!r}: choose one of {', '.join(CHECKS)}")
        if self.order not in ORDERS:
            raise OptionError(f"order {self.order!r}: choose one of {', '.join(ORDERS)}")
        if self.workers is not None and self.workers < 1:
            raise OptionError(f"workers {self.workers}: at least 1 is needed")


class Progress(NamedTuple):
    """How far an ingest is."""

    settled: int  # rows stored or rejected
    total: int
    bytes: int  # of images, stored in this run


@dataclasses.dataclass(frozen=True)
class IngestReport:
    """What an ingest did.

    Attributes
    ----------
    path : Path
    rows, images, bytes : int
        Rows in the csv, images in the store, and the sum of their sizes in bytes.
    rejects : list of Reject
        The rows that aren't in the store: line, id, reason.
    notes : list of str
        What was noticed about the csv and the run.
    resumed_from : int
        Rows that an interrupted run had settled.
    template : str
        The layout of the files.
    seconds : float
    """

    path: Path
    rows: int
    images: int
    bytes: int
    rejects: list[Reject]
    notes: list[str]
    resumed_from: int
    template: str
    seconds: float


def ingest(
    train_csv: str | os.PathLike[str],
    *,
    images: str | os.PathLike[str],
    out: str | os.PathLike[str],
    overwrite: bool = False,
    options: IngestOptions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> IngestReport:
    """Write the images of a csv's rows into one store.

    The store gets its name only when it is complete, synced and verified.  Interrupted,
    the same call goes on where it stopped.

    Parameters
    ----------
    train_csv : path
        UTF-8, comma-separated, with a header.
    images : path
        The folder below which the files lie.
    out : path
        The store to make.
    overwrite : bool
        Replace a store of this name, once the new one is complete.
    progress : callable, optional
        Called with a `Progress` as rows are settled.

    Raises
    ------
    IngestError
        Nothing was published; the message says why, and how to go on.

    Notes
    -----
    Memory: the csv's columns, and about 200 MB of images whatever the size of the set.
    """
    options = options or IngestOptions()
    job = _Job(Path(train_csv), Path(images), Path(out), options)
    if job.out.exists() and not overwrite:
        raise StoreExists(f"{job.out}: exists already; pass --overwrite to replace it when the new one is complete")
    started = time.perf_counter()
    plan = make_plan(job)
    if options.strict and plan.rows.rejects:
        raise _strict(job, plan.rows.rejects)
    with _staging(job, plan) as staging:
        if staging.finished is None:
            _fill(job, plan, staging, progress)
            _finish(job, plan, staging)
        _check(staging)
        report = _publish(job, plan, staging)
    return dataclasses.replace(report, seconds=time.perf_counter() - started)


class _Job(NamedTuple):
    csv: Path
    images: Path
    out: Path
    options: IngestOptions


class Plan(NamedTuple):
    """What will be read, in which order, and what must be the same for a resume."""

    rows: Rows
    order: np.ndarray  # int64, positions among the rows, in the order of writing
    template: PathTemplate
    identity: dict[str, Any]
    treat: Callable[[bytes, ImageInfo], Treated] | None


def make_plan(job: _Job) -> Plan:
    """Read the csv, find the layout of the files, and choose the order."""
    if not job.images.is_dir():
        raise IngestError(f"{job.images}: no such folder of images")
    if not job.out.parent.is_dir():
        raise IngestError(f"{job.out.parent}: no such folder to put the store in; make it first")
    rows = read_rows(job.csv, id_column=job.options.id_column)
    if not len(rows.ids):
        first = f" ({job.csv}:{rows.rejects[0].line}: {rows.rejects[0].reason})" if rows.rejects else ""
        raise IngestError(f"{job.csv}: no row with a usable id among {rows.total}{first}")
    if job.options.path is None:
        template = probe_layout(job.images, rows.ids[:_PROBED_ROWS])
    else:
        exact = [name for name, stored in rows.names.items() if column_type(rows.columns[stored]) != "<f8"]
        template = PathTemplate(job.options.path, columns=exact)
    identity = _identity(job, rows, template)
    return Plan(rows, _order(rows, job.options.order), template, identity, treatment(job.options))


def _order(rows: Rows, order: str) -> np.ndarray:
    if order == "id":
        return rows.by_id
    if order == "csv":
        return np.arange(len(rows.ids))
    return np.random.default_rng(0).permutation(len(rows.ids))


def _identity(job: _Job, rows: Rows, template: PathTemplate) -> dict[str, Any]:
    changes = (field.name for field in dataclasses.fields(Treatment))
    kept = ("check", "order", "keep_truncated", "follow_links", *changes)
    return {
        "options": {name: getattr(job.options, name) for name in kept},
        "source": {
            "csv": job.csv.name,
            "csv_digest": rows.digest,
            "rows": rows.total,
            "header": rows.header,
            "id_column": job.options.id_column,
            "columns": rows.names,
            "folder": _beside(job.csv, job.images),
            "path": template.text,
        },
    }


def _beside(csv: Path, images: Path) -> str:
    """Return the folder of images as seen from the csv's, for an export of the same shape."""
    relative = os.path.relpath(images.resolve(), csv.resolve().parent)
    return images.resolve().name if relative.startswith("..") or os.path.isabs(relative) else relative


@contextmanager
def _staging(job: _Job, plan: Plan) -> Iterator[Staging]:
    """Hold the staging file for the time of an ingest; an unusable target is an IngestError."""
    path = staging_path(job.out)
    try:
        staging = Staging(path, plan=plan.identity)
    except OSError as error:
        raise IngestError(f"{path}: {error.strerror}; choose another --out") from None
    with closing(staging):
        yield staging


def _fill(job: _Job, plan: Plan, staging: Staging, progress: Callable[[Progress], None] | None) -> None:
    """Read, check and write what isn't settled yet."""
    workers = job.options.workers or os.cpu_count() or 1
    refused: list[Reject] = []
    written = 0
    with (
        closing(_results(job, plan, staging.settled, workers)) as results,
        ThreadPoolExecutor(1, "lmdbstore-write") as writing,
    ):
        commit: Future[None] | None = None
        for batch in _batches(results, plan.rows, settled=staging.settled):
            refused += batch.rejects if job.options.strict else []
            if commit:
                commit.result()
            # a strict run that failed goes on checking, and writes no more: a rerun begins at the first bad batch
            commit = None if refused else writing.submit(staging.append, batch)
            written += sum(len(value) for _, value in batch.images)
            if progress:
                progress(Progress(batch.settled, len(plan.order), written))
        if commit:
            commit.result()
    if refused:
        raise _strict(job, refused)


def _strict(job: _Job, rejects: list[Reject]) -> RowsRejected:
    write_rejects(rejects, rejects_path(job.out))
    first = rejects[0]
    return RowsRejected(
        f"{job.csv}:{first.line}: id {first.id!r}: {first.reason}; --strict, and {len(rejects)} rows can't be stored: "
        f"see {rejects_path(job.out)}"
    )


Result = tuple[int, "Found | str"]  # a row, and its file or why it has none


def _results(job: _Job, plan: Plan, start: int, workers: int) -> Generator[Result, None, None]:
    """Yield a result for every row, in the order of writing; reads ahead by a few tasks."""
    reader = Reader(
        job.images,
        check=job.options.check,
        keep_truncated=job.options.keep_truncated,
        follow_links=job.options.follow_links,
        treat=plan.treat,
    )
    tasks = (plan.order[at : at + _TASK_ROWS] for at in range(start, len(plan.order), _TASK_ROWS))
    pool = ThreadPoolExecutor(workers, "lmdbstore-read")
    try:
        ahead: deque[Future[list[Result]]] = deque()
        for task in tasks:
            ahead.append(pool.submit(_read, reader, plan, task))
            if len(ahead) > 4 * workers:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _read(reader: Reader, plan: Plan, task: np.ndarray) -> list[Result]:
    return [(int(row), _read_row(reader, plan, int(row))) for row in task]


def _read_row(reader: Reader, plan: Plan, row: int) -> Found | str:
    values = {name: str(_column_of(plan.rows, name)[row]) for name in plan.template.columns}
    try:
        return reader.find(plan.template.fill({"id": plan.rows.ids[row], **values}))
    except (PathError, Rejected) as rejected:
        return str(rejected)


def _column_of(rows: Rows, name: str) -> Array:
    return rows.columns[rows.names[name]]


def _batches(results: Iterator[Result], rows: Rows, *, settled: int) -> Iterator[Batch]:
    """Gather results into batches; where one ends depends on the rows alone, not on when it was started."""
    images: list[tuple[bytes, bytes]] = []
    stored: list[tuple[int, ...]] = []
    rejects: list[Reject] = []
    size = 0
    for row, found in results:
        settled += 1
        if isinstance(found, str):
            rejects.append(Reject(int(rows.line[row]), rows.ids[row], found))
        else:
            images.append((rows.ids.encoded(row), found.data))
            stored.append(_stored(row, found))
            size += len(found.data)
        if size >= _BATCH_BYTES or len(images) + len(rejects) >= _BATCH_ROWS:
            yield Batch(settled, images, np.array(stored, STORED), rejects)
            images, stored, rejects, size = [], [], [], 0
    if images or rejects:
        yield Batch(settled, images, np.array(stored, STORED), rejects)


def _stored(row: int, found: Found) -> tuple[int, ...]:
    info = found.info
    code = layout.FORMATS.index(info.format)
    return row, found.checksum, info.width, info.height, info.orientation, code, found.how


def _finish(job: _Job, plan: Plan, staging: Staging) -> None:
    """Write columns and manifest."""
    stored, rejects = staging.journal()
    rejects = sorted(plan.rows.rejects + rejects)
    if not len(stored):
        write_rejects(rejects, rejects_path(job.out))
        staging.discard()
        raise IngestError(
            f"{job.csv}: none of {plan.rows.total} rows could be stored; the first: "
            f"line {rejects[0].line}, id {rejects[0].id!r}: {rejects[0].reason}"
        )
    columns = _columns(plan.rows, stored, staging)
    length = np.asarray(columns["length"])
    table = staging.put_columns(columns)
    packed = layout.pack_rejects(rejects)
    manifest = Manifest(
        build_id=layout.build_id(table),
        images=len(stored),
        image_bytes=int(length.sum()),
        rejected=len(rejects),
        columns=table,
        notes=(*plan.rows.notes, *summary(job.options, stored["how"])),
        rejects_checksum=layout.checksum(packed),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        writer=f"lmdbstore {lmdbstore.__version__}",
        **plan.identity,
    )
    staging.finish(manifest, packed)


def _columns(rows: Rows, stored: np.ndarray, staging: Staging) -> dict[str, Array]:
    """Return all columns, in the order of writing."""
    row = stored["row"]
    ids = rows.ids.take(row)
    offset, length = _places(ids, staging)
    columns: dict[str, Array] = {
        "ids": ids,
        "offset": offset,
        "length": length,
        **{name: stored[name] for name in ("checksum", "width", "height", "orientation", "format")},
        "line": rows.line[row],
        "record": rows.record.take(row),
        **{name: _taken(values, row) for name, values in rows.columns.items()},
    }
    by_id = ids.argsort()
    if (np.diff(by_id) != 1).any():
        columns[layout.BY_ID] = by_id
    return columns


def _taken(values: Array, row: np.ndarray) -> Array:
    return values.take(row) if isinstance(values, TextColumn) else values[row]


def _places(ids: TextColumn, staging: Staging) -> tuple[np.ndarray, np.ndarray]:
    """Return offset and length of each id's value; LMDB lists them in the order of the keys."""
    offset, length = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    by_id = ids.argsort()
    for i, (key, extent) in zip(by_id, staging.extents(), strict=True):
        assert key == ids.encoded(i), f"{key!r} stands where {ids[i]!r} was put"
        offset[i], length[i] = extent
    return offset, length


def _check(staging: Staging) -> None:
    report = verify(staging.path)
    if report.problems:
        raise IngestError(
            f"{staging.path}: what the disk gives back isn't what was written: {report.problems[0]}; "
            "check the disk, delete the file, and ingest again"
        )


def _publish(job: _Job, plan: Plan, staging: Staging) -> IngestReport:
    with ImageStore(staging.path) as store:
        manifest, rejects = store.manifest, store.rejects()
    publish(staging.path, job.out)
    notes = list(manifest.notes)
    try:
        if rejects:
            write_rejects(rejects, rejects_path(job.out))
        else:
            rejects_path(job.out).unlink(missing_ok=True)
    except OSError as error:
        notes.append(
            f"{rejects_path(job.out)}: {error.strerror}; the rejects are in the store (lmdbstore info --rejects)"
        )
    return IngestReport(
        path=job.out,
        rows=plan.rows.total,
        images=manifest.images,
        bytes=manifest.image_bytes,
        rejects=rejects,
        notes=notes,
        resumed_from=staging.resumed_from,
        template=plan.template.text,
        seconds=0.0,
    )
