"""Threads for the CPU: each keeps torch and OpenCV to itself, so that n of them use n cores.

And forks beside them.  A lock that a thread holds in OpenCV when the process forks is held for ever in the child, whose
first call then hangs, as DataLoader's workers did.  So a fork waits until every thread is between two images, and the
end of a crew until its threads are gone: `join` alone returns, before Python 3.13, while they may still be in OpenCV's
destructors.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from lmdbstore import opencv

_PATIENCE = 5.0  # seconds that a fork waits for an image, and the end of a crew for its threads
_at_work: dict[int, threading.Lock] = {}  # by thread: held while it is at an image
_paused: list[threading.Lock] = []


@contextmanager
def crew(count: int) -> Iterator[ThreadPoolExecutor]:
    """Start threads in each of which torch and OpenCV keep to that thread; OpenCV does so in the whole process.

    At the end, what hasn't begun is dropped, and what has is waited for; not in one of the threads themselves, where
    the garbage collector may bring the end about.  What the threads do with images they do within ``with at_work():``.
    """
    members: dict[int, int] = {}  # Python's number of each thread, and the system's
    before = torch.get_num_threads()
    ready = threading.Barrier(count + 1)

    def settle() -> None:
        torch.set_num_threads(1)  # of this thread, and the default for threads that ask for the first time
        torch.get_num_threads()  # which this one does here
        _at_work[threading.get_ident()] = threading.Lock()
        members[threading.get_ident()] = threading.get_native_id()
        ready.wait()

    with _opencv_in_one_thread():
        executor = ThreadPoolExecutor(count, thread_name_prefix="lmdbstore-loader", initializer=settle)
        try:
            _start(executor, count, ready)
            torch.set_num_threads(before)  # the default again
            yield executor
        finally:
            outside = threading.get_ident() not in members
            executor.shutdown(wait=outside, cancel_futures=True)
            if outside:
                _see_off(members)


def at_work() -> threading.Lock:
    """Return the lock to hold while this thread of a crew is at an image."""
    return _at_work[threading.get_ident()]


def _start(executor: ThreadPoolExecutor, count: int, ready: threading.Barrier) -> None:
    try:
        for _ in range(count):
            executor.submit(int)  # starts a thread, since those before it wait at the barrier
        ready.wait()
    except BaseException:  # no more threads, or Ctrl-C: those that there are must not wait for the rest
        ready.abort()
        raise


def _see_off(members: dict[int, int]) -> None:
    """Wait until threads that have been joined are gone for the system, too."""
    deadline = time.monotonic() + _PATIENCE
    for thread, task in members.items():
        _at_work.pop(thread, None)
        while os.path.exists(f"/proc/self/task/{task}") and time.monotonic() < deadline:
            time.sleep(0.0002)


def _pause() -> None:
    for thread, lock in list(_at_work.items()):
        if thread != threading.get_ident() and lock.acquire(timeout=_PATIENCE):
            _paused.append(lock)


def _go_on() -> None:
    while _paused:
        _paused.pop().release()


def _forget() -> None:
    _paused.clear()
    _at_work.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pause, after_in_parent=_go_on, after_in_child=_forget)

_opencv_lock = threading.RLock()  # a collected iterator may end within
_opencv_users = 0
_opencv_before = 1


@contextmanager
def _opencv_in_one_thread() -> Iterator[None]:
    global _opencv_users, _opencv_before
    with _opencv_lock:
        if _opencv_users == 0:
            _opencv_before = opencv.one_thread()
        _opencv_users += 1
    try:
        yield
    finally:
        with _opencv_lock:
            _opencv_users -= 1
            if _opencv_users == 0 and _opencv_before > 1:
                opencv.set_threads(_opencv_before)
