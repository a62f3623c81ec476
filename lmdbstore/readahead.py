"""The read-ahead thread: makes the steps of a plan resident, in order, a bounded way ahead of who uses them."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from lmdbstore import pagecache
from lmdbstore.errors import ReadError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# 1.7 s of a 160 MB/s disk: rides out what workers take in bursts (16 workers x 2 batches of 64 photos: 205 MB).
AHEAD_BYTES = 256 << 20
# How long to let another process read a step of the same file: 40 blocks of 8 MiB at 160 MB/s.
TURN_S = 2.0
_KEEP_UNIT = 8 << 20  # bytes: file regions of this size are kept in memory, or not, as a whole
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: multiples spread evenly (Knuth 6.4, Fibonacci hashing)


class Step(NamedTuple):
    """What is read before one part of the order can be used: byte ranges in file order, int64."""

    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class Steps(Protocol):
    """A plan: steps in the order in which they will be wanted; may be computed when asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Step: ...


@dataclass
class _Shared:
    """What thread and consumer both see; `changed` guards all that isn't constant."""

    path: str
    fd: int
    steps: Steps
    ahead_bytes: int
    keep_fraction: float
    ready: int  # steps below are resident
    wanted: int  # the consumer waits for this one, however far ahead it is
    released: int = 0  # steps below have been used
    stop: bool = False
    ended: bool = False
    error: str | None = None
    read_bytes: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)


class ReadAhead:
    """A thread that reads a file's ranges into the page cache in the order in which they will be wanted.

    Parameters
    ----------
    path : path
        The file.
    steps : sequence of Step
        Asked for one by one, from the thread.
    first : int
        The step to begin with.
    ahead_bytes : int
        Read at most this far ahead of what was released, except what `wait` asks for.
    keep_fraction : float
        Below 1: the set is larger than memory.  This fraction of the file stays resident, always the same; the rest
        is dropped once it was released and `ahead_bytes` of other steps after it.  An LRU cache would hold nothing
        of use, since everything is wanted once in a cycle.

    Raises
    ------
    OSError
        When the file can't be opened.

    Notes
    -----
    Threads: one consumer.  Processes: the thread lives in the process that made it; in a forked child, `wait`
    raises RuntimeError and `close` only closes the descriptor.  It is a daemon and doesn't hold this object: closing,
    garbage collection and the interpreter's exit all stop it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        steps: Steps,
        *,
        first: int = 0,
        ahead_bytes: int = AHEAD_BYTES,
        keep_fraction: float = 1.0,
    ) -> None:
        fd = os.open(path, os.O_RDONLY)
        pagecache.read_exactly(fd)
        self._shared = _Shared(os.fspath(path), fd, steps, ahead_bytes, keep_fraction, ready=first, wanted=first)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=_run, args=(self._shared,), name="lmdbstore-readahead", daemon=True)
        self.waited_s = 0.0
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            os.close(fd)
            raise
        self._finalizer = weakref.finalize(self, _stop, self._shared, self._thread, self._pid, timeout=2.0)

    @property
    def read_bytes(self) -> int:
        """The bytes read so far: those that weren't resident, nor read by the kernel's own read-ahead."""
        return self._shared.read_bytes

    def wait(self, number: int) -> None:
        """Return once a step, and every one before it, is resident; add the time it took to `waited_s`.

        Raises
        ------
        ReadError
            When the disk failed on it, or on one before it; names the file and the offset.
        """
        shared = self._shared
        if number < shared.ready:
            return
        if os.getpid() != self._pid:
            raise RuntimeError("the read-ahead thread stayed in the parent process; iterate the sampler anew")
        began = time.perf_counter()
        with shared.changed:
            shared.wanted = max(shared.wanted, number)
            shared.changed.notify_all()
            shared.changed.wait_for(lambda: number < shared.ready or shared.ended)
        self.waited_s += time.perf_counter() - began
        if number >= shared.ready:
            raise _reason(shared)

    def release(self, number: int) -> None:
        """Say that the steps below `number` have been used."""
        with self._shared.changed:
            self._shared.released = number
            self._shared.changed.notify_all()

    def close(self) -> None:
        """Stop the thread and wait for its end, at most one read of 1 MiB away."""
        self._finalizer.detach()
        _stop(self._shared, self._thread, self._pid, timeout=None)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def kept(offsets: npt.NDArray[np.int64], fraction: float) -> npt.NDArray[np.bool_]:
    """Tell which ranges belong to the part of the file that stays resident.

    A function of the offset alone, so every epoch, rank and process agrees; spread evenly over the file; and
    what a smaller fraction keeps, a larger one keeps too.
    """
    with np.errstate(over="ignore"):
        spread = (np.asarray(offsets) // _KEEP_UNIT).astype(np.uint64) * np.uint64(_GOLDEN)
    return spread.astype(np.float64) / 2.0**64 < fraction


def _reason(shared: _Shared) -> Exception:
    if shared.error is not None:
        return ReadError(shared.error)
    return RuntimeError("the read-ahead was closed" if shared.stop else "the read-ahead thread ended early")


def _stop(shared: _Shared, thread: threading.Thread, pid: int, timeout: float | None) -> None:
    if os.getpid() != pid:  # a forked child: no thread here, and the lock may have been held when it forked
        _close_fd(shared)
        return
    with shared.changed:
        shared.stop = True
        shared.changed.notify_all()
    if thread is not threading.current_thread():  # garbage is collected in any thread
        thread.join(timeout)


def _close_fd(shared: _Shared) -> None:
    fd, shared.fd = shared.fd, -1
    if fd >= 0:
        os.close(fd)


# The thread


def _run(shared: _Shared) -> None:
    window = _Window(shared)
    try:
        for number in range(shared.ready, len(shared.steps)):
            step = shared.steps[number]
            if not (window.has_room(number, step) and _read(shared, step)):
                break
            with shared.changed:
                shared.ready = number + 1
                shared.changed.notify_all()
        else:
            window.drain()
    except ReadError as error:
        shared.error = str(error)
    finally:
        _close_fd(shared)
        with shared.changed:
            shared.ended = True
            shared.changed.notify_all()


def _read(shared: _Shared, step: Step) -> bool:
    """Read what isn't resident of a step; return False when told to stop."""
    turn = False
    try:
        for piece in _missing(shared.fd, step):
            turn = turn or _take_turn(shared)
            if shared.stop:
                return False
            _read_piece(shared, *piece)
    finally:
        if turn:
            fcntl.flock(shared.fd, fcntl.LOCK_UN)
    return not shared.stop


def _missing(fd: int, step: Step) -> Iterator[tuple[int, int]]:
    for offset, length in zip(step.offsets.tolist(), step.lengths.tolist(), strict=True):
        yield from pagecache.missing_pieces(fd, offset, length)


def _read_piece(shared: _Shared, offset: int, length: int) -> None:
    try:
        shared.read_bytes += pagecache.read_piece(shared.fd, offset, length)
    except OSError as error:
        raise pagecache.read_error(shared.path, offset, error) from error


def _take_turn(shared: _Shared) -> bool:
    """Wait until no other read-ahead of this file is within a step; tell whether the turn is ours to give back.

    Ranks that read their blocks at once make a disk seek for every request: 5.5 s for 2 or 4 ranks where 1 takes 3.3 s
    (430 MB, 8 ms, 160 MB/s).  The lock is a courtesy: it is done without where the file system has none, and when who
    holds it takes too long (a stopped process).
    """
    deadline = time.monotonic() + TURN_S
    while fcntl is not None and not shared.stop and time.monotonic() < deadline:
        try:
            fcntl.flock(shared.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.003)
        except OSError:
            return False
        else:
            return True
    return False


class _Window:
    """The steps that were read: those ahead of the consumer, and behind them those that aren't dropped yet."""

    def __init__(self, shared: _Shared) -> None:
        self.shared = shared
        self.ahead: deque[tuple[int, int, Step]] = deque()  # (number, bytes, step)
        self.behind: deque[tuple[int, Step]] = deque()  # (bytes, step)
        self.ahead_bytes = self.behind_bytes = 0

    def has_room(self, number: int, step: Step) -> bool:
        """Wait until a step may be read; return False when told to stop."""
        size = int(step.lengths.sum())
        shared = self.shared
        while not shared.stop:
            self._move()
            with shared.changed:
                if number <= shared.wanted or self.ahead_bytes + size <= shared.ahead_bytes:
                    self.ahead.append((number, size, step))
                    self.ahead_bytes += size
                    return True
                if not self._movable() and not shared.stop:
                    shared.changed.wait()
        return False

    def drain(self) -> None:
        """Drop what is used after the last step was read, until the consumer has used it all."""
        while self.ahead and self.shared.keep_fraction < 1 and not self.shared.stop:
            with self.shared.changed:
                self.shared.changed.wait_for(lambda: self._movable() or self.shared.stop)
            self._move()

    def _movable(self) -> bool:
        return bool(self.ahead) and self.ahead[0][0] < self.shared.released

    def _move(self) -> None:
        while self._movable():
            _, size, step = self.ahead.popleft()
            self.ahead_bytes -= size
            self.behind.append((size, step))
            self.behind_bytes += size
        # workers may still be reading what was released last: their prefetched batches lie behind the consumer
        while self.behind and self.behind_bytes > self.shared.ahead_bytes:
            size, step = self.behind.popleft()
            self.behind_bytes -= size
            self._drop(step)

    def _drop(self, step: Step) -> None:
        if self.shared.keep_fraction >= 1:
            return
        chosen = ~kept(step.offsets, self.shared.keep_fraction)
        for offset, length in zip(step.offsets[chosen].tolist(), step.lengths[chosen].tolist(), strict=True):
            pagecache.drop(self.shared.fd, offset, length)
