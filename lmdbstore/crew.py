"""Threads for the CPU: each keeps torch and OpenCV to itself, so that n of them use n cores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from lmdbstore import opencv


@contextmanager
def crew(count: int) -> Iterator[ThreadPoolExecutor]:
    """Start threads in each of which torch and OpenCV keep to that thread; OpenCV does so in the whole process.

    At the end, what hasn't begun is dropped, and what has is waited for; not in one of the threads themselves, where
    the garbage collector may bring the end about.
    """
    members: set[int] = set()
    before = torch.get_num_threads()
    ready = threading.Barrier(count + 1)

    def settle() -> None:
        torch.set_num_threads(1)  # of this thread, and the default for threads that ask for the first time
        torch.get_num_threads()  # which this one does here
        members.add(threading.get_ident())
        ready.wait()

    with _opencv_in_one_thread():
        executor = ThreadPoolExecutor(count, thread_name_prefix="lmdbstore-loader", initializer=settle)
        try:
            _start(executor, count, ready)
            torch.set_num_threads(before)  # the default again
            yield executor
        finally:
            executor.shutdown(wait=threading.get_ident() not in members, cancel_futures=True)


def _start(executor: ThreadPoolExecutor, count: int, ready: threading.Barrier) -> None:
    try:
        for _ in range(count):
            executor.submit(int)  # starts a thread, since those before it wait at the barrier
        ready.wait()
    except BaseException:  # no more threads, or Ctrl-C: those that there are must not wait for the rest
        ready.abort()
        raise


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
