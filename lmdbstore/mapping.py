"""Opening a file that is to be a store, or saying what is there instead."""

from __future__ import annotations

import difflib
import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from lmdbstore import pagecache
from lmdbstore.errors import NotAStore, StoreError


def open_mapped(path: Path) -> tuple[int, mmap.mmap | None]:
    """Return a descriptor of a file and a read-only map of all of it.

    Raises
    ------
    NotAStore
        It isn't a file, or plainly something else.
    StoreError
        It can't be mapped.
    """
    # NONBLOCK: a FIFO would wait for a writer for ever
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        raise NotAStore(f"{path}: no such file{near(path.name, _siblings(path))}") from None
    except OSError as error:
        raise NotAStore(f"{path}: {error.strerror}") from None
    try:
        return fd, _map(fd, path)
    except BaseException:
        os.close(fd)
        raise


def near(name: str, known: Iterable[str]) -> str:
    """Return ", did you mean ...?" if one of the known names is like this one, else nothing."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {found[0]!r}?" if found else ""


def _map(fd: int, path: Path) -> mmap.mmap:
    status = os.fstat(fd)
    if stat.S_ISDIR(status.st_mode):
        raise NotAStore(f"{path}: a folder; a store is one file, NAME.lmdb")
    if not stat.S_ISREG(status.st_mode):
        raise NotAStore(f"{path}: not a file; a store is one file, NAME.lmdb")
    if not status.st_size:
        raise NotAStore(f"{path}: an empty file")
    try:
        found = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        advice = "is the address space limited (ulimit -v)?"
        raise StoreError(f"{path}: can't map {status.st_size:,} bytes ({error}); {advice}") from None
    # What is read is read by its exact extent: the kernel's read-ahead, up to 8 MiB around each, would only cost.
    if hasattr(found, "madvise") and hasattr(mmap, "MADV_RANDOM"):
        found.madvise(mmap.MADV_RANDOM)
    pagecache.read_exactly(fd)
    if found[:23] == b"version https://git-lfs":
        raise NotAStore(f"{path}: a Git LFS pointer, not the file that it stands for: run git lfs pull")
    return found


def _siblings(path: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(path.parent)]
    except OSError:
        return []
