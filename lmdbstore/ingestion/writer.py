"""The LMDB write side: a staging file that survives any interruption.

Images are put in batches, each one transaction, with a journal entry that says
which rows it settles.  The environment is opened anew for every batch: what the
next batch does depends on the file alone, so an ingest that was killed and went on
gives the same file, page by page, as one that wasn't.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import msgpack
import numpy as np

from lmdbstore import layout
from lmdbstore.errors import CorruptStore, IngestBusy, IngestError, OptionsChanged, StoreError
from lmdbstore.layout import Array, Column, Manifest, Reject
from lmdbstore.pages import Extent, Pages
from lmdbstore.publish import fsync

_PROGRESS, _PLAN_KEY = b"progress", b"plan"
_PAGE = 4096

#: What is known of every stored row; `row` is its position among the rows of the csv.
STORED = np.dtype(
    [
        ("row", "<i8"),
        ("checksum", "<u8"),
        ("width", "<i4"),
        ("height", "<i4"),
        ("orientation", "u1"),
        ("format", "u1"),
        ("how", "u1"),  # what was done to it: preprocess.How
    ]
)


class Batch(NamedTuple):
    """Rows that are settled together."""

    settled: int  # rows of the work list that are done after this batch
    images: list[tuple[bytes, bytes]]  # key and value
    stored: np.ndarray  # of STORED, (len(images),)
    rejects: list[Reject]


class Staging:
    """A store in the making.

    Parameters
    ----------
    path : Path
        Of the staging file.  One that is there already goes on, if it has the same plan.
    plan : dict
        All that decides what will be in the file.

    Raises
    ------
    IngestBusy, OptionsChanged, IngestError

    Notes
    -----
    Threads: one at a time.  Processes: one, held by a lock on the file that the
    system drops with the process.
    """

    def __init__(self, path: Path, *, plan: dict[str, Any]) -> None:
        self.path = path
        self._lock = _lock(path)
        try:
            self._resume(plan)
        except BaseException:
            self.close()
            raise

    def append(self, batch: Batch) -> None:
        """Store a batch, whole or not at all, and wait until it is on the disk."""
        journal = {"settled": batch.settled, "stored": batch.stored.tobytes(), "rejects": batch.rejects}
        room = sum(len(value) for _, value in batch.images)
        self._write(lambda env, txn: self._put(env, txn, batch, msgpack.packb(journal)), room, len(batch.images))
        self.settled = batch.settled

    def journal(self) -> tuple[np.ndarray, list[Reject]]:
        """Return what is known of all stored rows (of STORED, in the order they were put), and the rejects."""
        stored, rejects = [np.empty(0, STORED)], []
        for entry in self._journal():
            stored.append(np.frombuffer(entry["stored"], STORED))
            rejects += [Reject(*row) for row in entry["rejects"]]
        return np.concatenate(stored), rejects

    def extents(self) -> Iterator[tuple[bytes, Extent]]:
        """Yield key, offset and length in bytes of every image, in the order of the keys."""
        with _mapped(self.path) as buffer:
            yield from Pages(buffer).walk(layout.IMAGES)

    def put_columns(self, columns: dict[str, Array]) -> tuple[Column, ...]:
        """Write the columns that aren't there yet, and return where they lie."""
        for name, values in columns.items():
            data = layout.pack_column(values)
            if self._column(name, values) is None:
                self._write(_putting(layout.COLUMNS, {name.encode(): data}), len(data), 1)
        found = [self._column(name, values) for name, values in columns.items()]
        return tuple(column for column in found if column)

    def finish(self, manifest: Manifest, rejects: bytes) -> None:
        """Put the manifest in the place of the journal, and cut the file to its pages."""
        data = manifest.pack()
        entries = {
            layout.MANIFEST_KEY: data,
            layout.MANIFEST_CHECKSUM_KEY: layout.checksum(data).to_bytes(8, "little"),
            layout.REJECTS_KEY: rejects,
        }

        def change(env: lmdb.Environment, txn: lmdb.Transaction) -> None:
            _putting(layout.MANIFEST, entries)(env, txn)
            txn.drop(env.open_db(_PROGRESS, txn=txn), delete=True)

        self._write(change, len(data) + len(rejects), len(entries))
        with _mapped(self.path) as buffer:
            size = Pages(buffer).size
        os.truncate(self.path, size)
        fsync(self.path)

    def discard(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file; what was stored stays."""
        os.close(self._lock)

    def _resume(self, plan: dict[str, Any]) -> None:
        self.settled = self.resumed_from = 0
        self.finished: Manifest | None = None
        if self._is_new():
            self._write(_putting(_PROGRESS, {_PLAN_KEY: msgpack.packb(plan)}), 4096, 1)
            return
        try:
            found = self._plan()
        except StoreError as error:
            raise IngestError(f"{self.path}: not an ingest that can go on ({error}); delete it to start over") from None
        if found != plan:
            raise OptionsChanged(f"{self.path}: {_difference(found, plan)}; delete it to start over")
        self.settled = self.resumed_from = max((entry["settled"] for entry in self._journal()), default=0)

    def _is_new(self) -> bool:
        """Tell whether nothing was ever put: a new file, or one whose first transaction didn't come to its end."""
        if not os.path.getsize(self.path):
            return True
        try:
            with _mapped(self.path) as buffer:
                return not Pages(buffer).databases()
        except StoreError:
            return False

    def _plan(self) -> dict[str, Any]:
        """Return the plan of what is there; sets `finished` when only the final name is missing."""
        with _mapped(self.path) as buffer:
            pages = Pages(buffer)
            if manifest := pages.find(layout.MANIFEST, layout.MANIFEST_KEY):
                self.finished = layout.unpack_manifest(bytes(buffer[manifest.offset : sum(manifest)]))
                return {"options": self.finished.options, "source": self.finished.source}
            plan = pages.find(_PROGRESS, _PLAN_KEY)
            if plan is None:
                raise CorruptStore("it has no plan")
            return msgpack.unpackb(buffer[plan.offset : sum(plan)])

    def _journal(self) -> Iterator[dict[str, Any]]:
        with _mapped(self.path) as buffer:
            for key, (offset, length) in Pages(buffer).walk(_PROGRESS):
                if key != _PLAN_KEY:
                    yield msgpack.unpackb(buffer[offset : offset + length])

    def _put(self, env: lmdb.Environment, txn: lmdb.Transaction, batch: Batch, journal: bytes) -> None:
        images = env.open_db(layout.IMAGES, txn=txn)
        last: bytes | None = None
        with txn.cursor(db=images) as cursor:
            if cursor.last():
                last = bytes(cursor.key())
        for key, value in batch.images:
            # append=True with a key that isn't the largest stores nothing and only returns False
            if not txn.put(key, value, db=images, append=last is None or key > last, overwrite=False):
                raise AssertionError(f"key {key!r} was there already")
            last = key if last is None else max(last, key)
        txn.put(b"%016d" % batch.settled, journal, db=env.open_db(_PROGRESS, txn=txn))

    def _column(self, name: str, values: Array) -> Column | None:
        with _mapped(self.path) as buffer:
            extent = Pages(buffer).find(layout.COLUMNS, name.encode())
            if extent is None:
                return None
            checksum = layout.checksum(buffer[extent.offset : sum(extent)])
            return Column(name, layout.column_type(values), *extent, checksum)

    def _write(self, change: _Change, room: int, count: int) -> None:
        # every value may leave most of a page unused, and every key may copy a path of the tree
        size = os.path.getsize(self.path) + room + (count + 64) * 8 * _PAGE
        try:
            with (
                lmdb.open(
                    str(self.path),
                    subdir=False,
                    map_size=-(-size // _PAGE) * _PAGE,
                    max_dbs=4,
                    lock=False,
                ) as env,
                env.begin(write=True) as txn,
            ):
                change(env, txn)
        except (lmdb.Error, OSError) as error:
            raise _explained(self.path, error, room) from error


_Change = Callable[[lmdb.Environment, lmdb.Transaction], None]


def _putting(database: bytes, entries: dict[bytes, bytes]) -> _Change:
    """Return the change that puts these entries."""

    def change(env: lmdb.Environment, txn: lmdb.Transaction) -> None:
        db = env.open_db(database, txn=txn)
        for key, value in entries.items():
            txn.put(key, value, db=db)

    return change


class _mapped:
    """The bytes of a file as a view that is released at the end of the block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> memoryview:
        with open(self._path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map)
        return self._view

    def __exit__(self, *_: object) -> None:
        self._view.release()
        self._map.close()


def _lock(path: Path) -> int:
    """Open the staging file and lock it, or say who has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # Windows: LMDB's own sharing violation stands in for the lock
    except BlockingIOError:
        os.close(fd)
        raise IngestBusy(
            f"{path}: another ingest is writing this store; wait for it, or choose another --out"
        ) from None
    except OSError as error:
        os.close(fd)
        raise IngestError(
            f"{path}: this file system has no locks ({error.strerror}); ingest to a local disk, then copy the store"
        ) from None
    try:
        same = os.stat(path).st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        same = False
    if not same:  # published or discarded by another ingest between our open and our lock
        os.close(fd)
        raise IngestBusy(f"{path}: another ingest finished this store just now; look at it, then run again")
    return fd


def _difference(found: dict[str, Any], plan: dict[str, Any]) -> str:
    for key in plan:
        if found.get(key) != plan[key]:
            return f"an interrupted ingest with {key} {found.get(key)!r}, now {plan[key]!r}"
    return "an interrupted ingest of another version"


def _explained(path: Path, error: Exception, room: int) -> IngestError:
    text = str(error)
    # a write that runs into the end of the disk is cut short, which LMDB calls an I/O error
    if os.strerror(errno.ENOSPC) in text or shutil.disk_usage(path.parent).free < room + (1 << 20):
        return IngestError(
            f"{path}: no space left on the disk (the next batch needs {room:,} bytes); "
            "free some and run the same command again: it goes on where it stopped"
        )
    return IngestError(f"{path}: {text}; what was stored before stays: run the same command again to go on")
