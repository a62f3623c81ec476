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

    At the end, what hasn't begun is dropped, and what has is waited for.
    """
    before = torch.get_num_threads()
    ready = threading.Barrier(count + 1)

    def settle() -> None:
        torch.set_num_threads(1)  # of this thread, and the default for threads that ask for the first time
        torch.get_num_threads()  # which this one does here
        ready.wait()

    with _opencv_in_one_thread():
        executor = ThreadPoolExecutor(count, thread_name_prefix="lmdbstore-loader", initializer=settle)
        try:
            for _ in range(count):
                executor.submit(int)  # starts a thread, since those before it wait at the barrier
            ready.wait()
            torch.set_num_threads(before)  # the default again
            yield executor
        finally:
            ready.abort()
            executor.shutdown(cancel_futures=True)


_opencv_lock = threading.Lock()
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
