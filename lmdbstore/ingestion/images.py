"""From a row to a file's bytes: find, read, check."""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lmdbstore import codec, layout
from lmdbstore.codec import ImageInfo
from lmdbstore.errors import DecodeError
from lmdbstore.ingestion.preprocess import How, Treated
from lmdbstore.template import ENDINGS

CHECKS = ("decode", "header", "none")


class Rejected(Exception):
    """The row's file can't be stored; the message is the reason."""


class Found(NamedTuple):
    """A file that can be stored."""

    data: bytes
    checksum: int
    info: ImageInfo
    how: int  # of preprocess.How


class Reader:
    """Reads and checks files below one folder.

    Parameters
    ----------
    folder : Path
    check : {"decode", "header", "none"}
        Decode every image once; read its header; or take any bytes.
    keep_truncated : bool
        Take images whose data ends early.
    follow_links : bool
        Take files that symbolic links place outside the folder.
    treat : callable, optional
        What `preprocess.treatment` gives: changes an image that has passed.

    Notes
    -----
    Threads: safe; the checks run without the GIL.
    """

    def __init__(
        self,
        folder: Path,
        *,
        check: str,
        keep_truncated: bool,
        follow_links: bool,
        treat: Callable[[bytes, ImageInfo], Treated] | None = None,
    ) -> None:
        self.folder, self._treat = folder, treat
        self._root = os.path.realpath(folder)
        self._check, self._keep_truncated, self._follow_links = check, keep_truncated, follow_links
        # 1.58 M files lie in 4,096 folders: the links of each are resolved once
        self._inside = functools.lru_cache(maxsize=1 << 16)(self._is_inside)

    def find(self, path: str) -> Found:
        """Return the bytes of a file, with their checksum and header.

        Raises
        ------
        Rejected
            With the reason.
        """
        data = self._read(path)
        try:
            info, how = self._examine(data), How.AS_IT_WAS
            if self._treat:
                data, info, how = self._treat(data, info)
        except DecodeError as error:
            raise Rejected(f"{path}: {error.reason}") from None
        return Found(data, layout.checksum(data), info, int(how))

    def _read(self, path: str) -> bytes:
        full = os.path.join(self._root, path)
        if not self._follow_links and not self._inside(os.path.dirname(full)):
            raise Rejected(f"{path}: a symbolic link leads out of the folder of images; allow it with --follow-links")
        try:
            return self._contents(full, path)
        except FileNotFoundError:
            raise Rejected(f"{path}: no such file{_near_match(full)}") from None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Rejected(f"{path}: a symbolic link; allow it with --follow-links") from None
            raise Rejected(f"{path}: {error.strerror}") from None

    def _contents(self, full: str, path: str) -> bytes:
        # NONBLOCK: a FIFO with an image's name would wait for a writer for ever
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        fd = os.open(full, flags if self._follow_links else flags | getattr(os, "O_NOFOLLOW", 0))
        try:
            before = os.fstat(fd)
            if not stat.S_ISREG(before.st_mode):
                raise Rejected(f"{path}: not a file")
            if not before.st_size:
                raise Rejected(f"{path}: an empty file")
            if before.st_size > MAX_FILE_BYTES:
                raise Rejected(f"{path}: {before.st_size:,} bytes, over the limit of {MAX_FILE_BYTES:,}")
            data = _read_all(fd, before.st_size)
            after = os.fstat(fd)
        finally:
            os.close(fd)
        if len(data) != before.st_size or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise Rejected(f"{path}: changed while it was read")
        return data

    def _examine(self, data: bytes) -> ImageInfo:
        if self._check == "decode":
            return codec.check(data, keep_truncated=self._keep_truncated)
        try:
            return codec.probe(data)
        except DecodeError:
            if self._check == "none":
                return ImageInfo("unknown", 0, 0, 1)
            raise

    def _is_inside(self, folder: str) -> bool:
        real = os.path.realpath(folder)
        return real == self._root or real.startswith(self._root.rstrip(os.sep) + os.sep)


#: A larger file is no photograph; it would also be held in memory once per worker.
MAX_FILE_BYTES = 1 << 30


def _read_all(fd: int, size: int) -> bytes:
    data = os.read(fd, size + 1)
    if len(data) < size:  # a read of a regular file may be short over 2 GiB, on a network, after a signal
        pieces = [data]
        while piece := os.read(fd, 1 << 20):
            pieces.append(piece)
        data = b"".join(pieces)
    return data


def _near_match(full: str) -> str:
    stem = os.path.splitext(full)[0]
    near = [os.path.basename(stem + ending) for ending in ENDINGS if os.path.exists(stem + ending)]
    return f" (there is {near[0]})" if near else ""
