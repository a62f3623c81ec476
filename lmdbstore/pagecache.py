"""The page cache: what of a file is in memory, and getting it there and out again.

Works on (file, byte ranges); knows nothing of images, keys or orders.

Linux first.  Where the kernel doesn't say what is resident (another system, or a file that this
process neither owns nor may write) the answer is None, "unknown", and bytes are read regardless.
Where there is no `preadv` (Windows), nothing is read ahead; where there is no `posix_fadvise`, nothing is evicted.

Threads: every function can be called from any thread at any time.  Processes: no state but a scratch
buffer per thread; the page cache itself is shared by all processes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmdbstore import memory
from lmdbstore.errors import ReadError

MIB = 1 << 20
PAGE = mmap.PAGESIZE
# One read of 1 MiB: large against the 128 KiB of the kernel's own read-ahead, and 7 ms of a 160 MB/s disk, so that a
# thread stops soon.  Not posix_fadvise(WILLNEED): of a long range it silently drops what exceeds max_sectors_kb.
PIECE_BYTES = MIB
# What a seek costs in bytes: 8 ms at 160 MB/s is 1.3 MB.  A smaller gap is cheaper to read than to skip.
JOIN_GAP_BYTES = MIB
WARM_SHARE = 0.875  # of the available memory: what `warm` may fill; the rest is for the training process itself

Int64s = npt.NDArray[np.int64]
Path = str | os.PathLike[str]
_scratch = threading.local()


class Warmed(NamedTuple):
    """What `warm` did, in bytes: wanted = fits + left_out; of what fits, `read` weren't known to be in memory."""

    wanted: int
    fits: int
    read: int
    left_out: int


def resident(file: int | Path, offset: int = 0, length: int | None = None) -> int | None:
    """Return how many bytes of a range are in memory.

    Parameters
    ----------
    file : int or path
        An open descriptor (one call costs about 2 us) or a path.
    offset, length : int, optional
        The range in bytes; to the end of the file by default.

    Returns
    -------
    int or None
        Equal to `length` if and only if every page of the range is resident, 0 if none is; otherwise
        `length` less the missing pages.  None where the kernel won't tell.
    """
    if not isinstance(file, int):
        with _opened(file) as fd:
            return resident(fd, offset, length)
    if length is None:
        length = os.fstat(file).st_size - offset
    if length <= 0:
        return 0
    pages = (offset + length - 1) // PAGE - offset // PAGE + 1
    cached = _cached_pages(file, offset, length)
    return None if cached is None else max(0, length - (pages - cached) * PAGE)


def residency_map(file: int | Path, bins: int = 100) -> npt.NDArray[np.float32] | None:
    """Return the resident fraction of each of `bins` equal parts of a file, in file order, or None if unknown."""
    if not isinstance(file, int):
        with _opened(file) as fd:
            return residency_map(fd, bins)
    edges = np.linspace(0, os.fstat(file).st_size, bins + 1).astype(np.int64)
    fractions = np.zeros(bins, np.float32)
    for number, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        found = resident(file, start, stop - start)
        if found is None:
            return None
        fractions[number] = found / max(1, stop - start)
    return fractions


def join_ranges(offsets: Int64s, lengths: Int64s, gap: int = JOIN_GAP_BYTES) -> tuple[Int64s, Int64s]:
    """Return the ranges in file order, with those less than `gap` bytes apart made one."""
    if len(offsets) == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = np.argsort(offsets, kind="stable")
    starts = np.asarray(offsets, np.int64)[order]
    stops = np.maximum.accumulate(starts + np.asarray(lengths, np.int64)[order])
    first = np.flatnonzero(np.append(True, starts[1:] - stops[:-1] >= gap))
    return starts[first], stops[np.append(first[1:], len(starts)) - 1] - starts[first]


def missing_pieces(fd: int, offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the pieces (offset, length), of at most 1 MiB, of a range that aren't known to be resident."""
    if resident(fd, offset, length) == length:
        return
    stop = offset + length
    while offset < stop:
        size = min(PIECE_BYTES - offset % PIECE_BYTES, stop - offset)
        if length <= PIECE_BYTES or resident(fd, offset, size) != size:
            yield offset, size
        offset += size


def read_piece(fd: int, offset: int, length: int) -> int:
    """Read a range of at most 1 MiB into a scratch buffer, so that it is in memory; return `length`.

    Raises
    ------
    OSError
        When the disk fails, or the file ends within the range.
    """
    if not hasattr(os, "preadv"):
        return 0
    if not hasattr(_scratch, "buffer"):
        _scratch.buffer = memoryview(bytearray(PIECE_BYTES))
    done = 0
    while done < length:
        count = os.preadv(fd, [_scratch.buffer[: length - done]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends at {offset + done}, {length - done} bytes too early")
        done += count
    return length


def make_resident(fd: int, offset: int, length: int) -> int:
    """Read what of a range isn't in memory yet; return the number of bytes read.

    A mapped image that is cold costs one page fault for each 4 KiB; after this call it costs none, and a disk error
    is an exception here instead of a SIGBUS there.

    Raises
    ------
    OSError
        When the disk fails, or the file ends within the range.
    """
    return sum(read_piece(fd, *piece) for piece in missing_pieces(fd, offset, length))


def read_exactly(fd: int) -> None:
    """Have reads of a descriptor fetch what they ask for, and nothing around it.

    The kernel's own read-ahead goes on behind the end of every block, up to twice read_ahead_kb: on a disk with
    8 MiB of it, an epoch in blocks of 8 MiB would read the file twice (tools/bench_memory).
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def warm(
    path: Path,
    ranges: tuple[Int64s, Int64s] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    limit_bytes: int | None = None,
) -> Warmed:
    """Read a file, or ranges of it, into the page cache in file order, as far as memory allows.

    Parameters
    ----------
    path : path
        The file.
    ranges : (offsets, lengths), optional
        int64 arrays, in any order; ranges less than 1 MiB apart are read as one.
    progress : callable, optional
        Called with (bytes done, bytes to do) after each MiB at most.
    limit_bytes : int, optional
        Fill at most this much.  Without it: 7/8 of what the machine and the control groups have available.

    Raises
    ------
    ReadError
        When the disk fails; names the file and the offset.
    """
    size = os.stat(path).st_size
    whole = np.array([0], np.int64), np.array([size], np.int64)
    offsets, lengths = join_ranges(*(whole if ranges is None else ranges))
    wanted = int(lengths.sum())
    offsets, lengths = fitting(offsets, lengths, _warm_budget(limit_bytes))
    fits, read, done = int(lengths.sum()), 0, 0
    with _opened(path) as fd:
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            read += length - (resident(fd, offset, length) or 0)
            for piece in _read_run(path, fd, offset, length):
                if progress is not None:
                    progress(done + piece[0] - offset + piece[1], fits)
            done += length
    if progress is not None:
        progress(fits, fits)
    return Warmed(wanted, fits, read, wanted - fits)


def fitting(offsets: Int64s, lengths: Int64s, budget: int | None) -> tuple[Int64s, Int64s]:
    """Return the ranges, in the order given, up to `budget` bytes; the last one is cut to fit.  None: all."""
    if budget is None:
        return offsets, lengths
    before = np.cumsum(lengths) - lengths
    kept = before < budget
    return offsets[kept], np.minimum(lengths, budget - before)[kept]


def drop(fd: int, offset: int, length: int) -> None:
    """Let the kernel forget the whole pages of a range; those that are mapped or dirty stay."""
    if length > 0 and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def clean(fd: int) -> None:
    """Write a file's dirty pages to the disk, since such a page can't be dropped; a read-only one has none."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS):
            raise


def evict(path: Path) -> int | None:
    """Drop a file from the page cache and return how many bytes are still resident, None if unknown.

    What some process has mapped and touched can't be dropped: close every store and end the workers first.
    """
    with _opened(path) as fd:
        clean(fd)
        drop(fd, 0, os.fstat(fd).st_size)
        return resident(fd)


def read_error(path: Path, offset: int, error: OSError) -> ReadError:
    """Return the error of a failed read, with its place."""
    return ReadError(f"{os.fspath(path)}: reading at byte {offset} failed: {error}")


def _read_run(path: Path, fd: int, offset: int, length: int) -> Iterator[tuple[int, int]]:
    for piece in missing_pieces(fd, offset, length):
        try:
            read_piece(fd, *piece)
        except OSError as error:
            raise read_error(path, piece[0], error) from error
        yield piece


def _warm_budget(limit_bytes: int | None) -> int | None:
    room = memory.available()
    budgets = [limit_bytes, None if room is None else int(room * WARM_SHARE)]
    return min((budget for budget in budgets if budget is not None), default=None)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


# What the kernel knows: the only place with ctypes.

_LINUX = sys.platform == "linux"
# cachestat(2), Linux 6.5, has this number on every architecture but alpha and mips.
_CACHESTAT = 451 if platform.machine() in ("x86_64", "aarch64", "riscv64", "ppc64le", "s390x", "loongarch64") else None
_libc = ctypes.CDLL(None, use_errno=True) if _LINUX else None


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted")]


def _cached_pages(fd: int, offset: int, length: int) -> int | None:
    """Count the resident pages that overlap a range."""
    if _libc is None:
        return None
    if _CACHESTAT is not None:
        counts = _Counts()
        if _libc.syscall(_CACHESTAT, fd, ctypes.byref(_Range(offset, length)), ctypes.byref(counts), 0) == 0:
            return int(counts.cache)
    # ENOSYS: an older kernel.  EPERM: a foreign file, or a container that forbids unknown calls: mincore, with care.
    return _mincore_pages(fd, offset, length)


def _mincore_pages(fd: int, offset: int, length: int) -> int | None:
    assert _libc is not None
    if not _mincore_is_truthful(fd):
        return None
    start = offset - offset % PAGE
    size = min(offset + length, os.fstat(fd).st_size) - start
    if size <= 0:
        return 0
    found = np.zeros(-(-size // PAGE), np.uint8)
    with mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ, offset=start) as view:
        base = np.frombuffer(view, np.uint8)
        address = ctypes.c_void_p(base.ctypes.data)
        failed = _libc.mincore(address, ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data))
        del base  # a map with an exported buffer can't be closed
    return None if failed else int(np.count_nonzero(found & 1))


def _mincore_is_truthful(fd: int) -> bool:
    """Tell whether mincore answers: to who neither owns nor may write the file it calls every page resident."""
    if os.geteuid() in (0, os.fstat(fd).st_uid):
        return True
    return os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)
