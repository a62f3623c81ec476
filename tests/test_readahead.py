"""The read-ahead thread: what is resident when, how far ahead, and that it always goes away."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from lmdbstore import memory, pagecache, readahead
from lmdbstore.errors import ReadError
from lmdbstore.pagecache import MIB
from lmdbstore.readahead import ReadAhead, Step, kept

pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="nothing is read ahead here")
STEPS, STEP_BYTES = 16, 256 * 1024
LINUX = sys.platform == "linux"
NAME = "lmdbstore-readahead"


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    path = tmp_path / "cold.bin"
    path.write_bytes(bytes(STEPS * STEP_BYTES))
    if pagecache.evict(path) not in (0, None):
        pytest.skip("this file system keeps its files in memory (tmpfs?)")
    return path


def plan(*numbers: int, size: int = STEP_BYTES) -> list[Step]:
    return [Step(np.array([number * size]), np.array([size])) for number in numbers]


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def settled(value: Callable[[], int]) -> int:
    """Return a value once it hasn't changed for a while."""
    last, since = value(), time.monotonic()
    while time.monotonic() - since < 0.2:
        time.sleep(0.01)
        if value() != last:
            last, since = value(), time.monotonic()
    return last


def running() -> bool:
    return any(thread.name == NAME for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    assert until(lambda: not running())


# Reading


def test_a_step_is_resident_after_wait(cold: Path) -> None:
    order = np.random.default_rng(0).permutation(STEPS).tolist()
    with ReadAhead(cold, plan(*order)) as ahead:
        for number, place in enumerate(order):
            ahead.wait(number)
            assert pagecache.resident(cold, place * STEP_BYTES, STEP_BYTES) in (STEP_BYTES, None)
            ahead.release(number + 1)
    assert ahead.waited_s > 0


def test_waiting_for_the_last_is_waiting_for_all(cold: Path) -> None:
    with ReadAhead(cold, plan(*range(STEPS)), ahead_bytes=0) as ahead:
        ahead.wait(STEPS - 1)  # far beyond what may be read ahead
        assert pagecache.resident(cold) in (STEPS * STEP_BYTES, None)


@pytest.mark.skipif(not LINUX, reason="residency is unknown here")
def test_what_is_resident_is_not_read(cold: Path) -> None:
    cold.read_bytes()
    with ReadAhead(cold, plan(*range(STEPS))) as ahead:
        ahead.wait(STEPS - 1)
        assert ahead.read_bytes == 0


def test_the_depth_is_bounded_by_what_was_released(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagecache, "_libc", None)  # residency unknown: everything is read, and counted
    with ReadAhead(cold, plan(*range(STEPS)), ahead_bytes=4 * STEP_BYTES) as ahead:
        ahead.wait(0)
        assert settled(lambda: ahead.read_bytes) == 4 * STEP_BYTES
        ahead.release(3)
        assert settled(lambda: ahead.read_bytes) == 7 * STEP_BYTES
        ahead.wait(12)
        assert settled(lambda: ahead.read_bytes) == 13 * STEP_BYTES


def test_a_step_of_several_ranges_and_an_empty_one(cold: Path) -> None:
    steps = [Step(np.array([0, 5 * MIB // 4]), np.array([10, 20])), Step(np.array([], int), np.array([], int))]
    with ReadAhead(cold, steps) as ahead:
        ahead.wait(1)
        assert pagecache.resident(cold, 5 * MIB // 4, 20) in (20, None)


def test_no_steps(cold: Path) -> None:
    with ReadAhead(cold, []):
        assert until(lambda: not running())


def test_readers_of_one_file_take_turns(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(pagecache, "_libc", None)
    with cold.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with ReadAhead(cold, plan(*range(STEPS))) as ahead:
            assert settled(lambda: ahead.read_bytes) == 0
            fcntl.flock(other, fcntl.LOCK_UN)
            ahead.wait(STEPS - 1)
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back


def test_a_reader_that_hangs_does_not_stop_the_others(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(readahead, "TURN_S", 0.05)
    with cold.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with ReadAhead(cold, plan(0, 1)) as ahead:
            ahead.wait(1)


# Errors


def test_a_disk_error_reaches_who_waits() -> None:
    """Address 0 of /proc/self/mem gives EIO, as a bad sector does."""
    if not LINUX:
        pytest.skip("procfs")
    with ReadAhead("/proc/self/mem", plan(0)) as ahead:
        for _ in range(2):  # and again
            with pytest.raises(ReadError, match="/proc/self/mem: reading at byte 0 failed: .*Input/output error"):
                ahead.wait(0)


def test_steps_before_the_error_are_good(cold: Path) -> None:
    with ReadAhead(cold, plan(0, 1, STEPS + 1, 2)) as ahead:
        ahead.wait(1)
        with pytest.raises(ReadError, match=f"reading at byte {(STEPS + 1) * STEP_BYTES} failed: .*too early"):
            ahead.wait(3)
        ahead.wait(1)


class Breaks(list[Step]):
    def __getitem__(self, number: object) -> Step:  # type: ignore[override]
        raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_plan_does_not_hang_who_waits(cold: Path) -> None:
    with ReadAhead(cold, Breaks(plan(0))) as ahead, pytest.raises(RuntimeError, match="ended early"):
        ahead.wait(0)


def test_a_missing_file_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ReadAhead(tmp_path / "nothing", plan(0))


def test_no_more_threads(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        ReadAhead(cold, plan(0))  # the fixture sees to it that no descriptor stays


# Going away


def test_close_wakes_a_thread_that_waits_for_room(cold: Path) -> None:
    ahead = ReadAhead(cold, plan(*range(STEPS)), ahead_bytes=STEP_BYTES)
    ahead.wait(0)
    ahead.close()
    assert not running()
    ahead.close()
    with pytest.raises(RuntimeError, match="closed"):
        ahead.wait(STEPS - 1)


def test_garbage_collection_stops_it(cold: Path) -> None:
    ahead = ReadAhead(cold, plan(*range(STEPS)), ahead_bytes=STEP_BYTES)
    ahead.wait(0)
    cycle = [ahead]
    cycle.append(cycle)  # type: ignore[arg-type]
    del ahead, cycle
    gc.collect()
    assert not running()


def test_the_interpreter_ends_while_it_reads(cold: Path) -> None:
    code = (
        "import sys, tests.test_readahead as t\n"
        "ahead = t.ReadAhead(sys.argv[1], t.plan(*range(16)), ahead_bytes=1)\n"
        "ahead.wait(0)\n"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code, cold], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_a_forked_child_neither_waits_nor_hangs(cold: Path) -> None:
    with ReadAhead(cold, plan(*range(STEPS)), ahead_bytes=STEP_BYTES) as ahead:
        ahead.wait(0)
        ahead._shared.changed.acquire()  # the worst moment: the lock is held, and nobody in the child gives it back
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with pytest.raises(RuntimeError, match="stayed in the parent"):
                    ahead.wait(STEPS - 1)
                ahead.close()
                code = 0 if ahead._shared.fd < 0 else 3
            finally:
                os._exit(code)
        ahead._shared.changed.release()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        ahead.wait(STEPS - 1)  # the parent goes on


# Larger than memory


def test_kept_is_a_fraction_spread_evenly_and_nested() -> None:
    offsets = np.arange(0, 100 << 30, 1 << 20)
    for fraction in (0.0, 0.1, 0.5, 0.9, 1.0):
        mask = kept(offsets, fraction)
        assert abs(mask.mean() - fraction) < 0.01
        assert abs(mask[: len(mask) // 16].mean() - fraction) < 0.03
        assert (kept(offsets, fraction * 0.9) <= mask).all()


@pytest.mark.skipif(not LINUX, reason="nothing can be evicted here")
def test_what_was_used_is_dropped_but_for_the_part_to_keep(tmp_path: Path) -> None:
    size, count = 8 * MIB, 12
    path = tmp_path / "large.bin"
    path.write_bytes(bytes(size * count))
    pagecache.evict(path)
    steps = plan(*range(count), size=size)
    with ReadAhead(path, steps, ahead_bytes=2 * size, keep_fraction=0.5) as ahead:
        for number in range(count):
            ahead.wait(number)
            ahead.release(number + 1)
        assert until(lambda: not running())
    found = np.array([pagecache.resident(path, number * size, size) == size for number in range(count)])
    wanted = kept(np.arange(count) * size, 0.5)
    assert wanted.any()
    assert not wanted.all()
    assert (found[:-2] == wanted[:-2]).all()
    assert found[-2:].all()  # workers may still be at these


@pytest.mark.skipif(not LINUX, reason="nothing can be evicted here")
def test_nothing_is_dropped_when_all_is_kept(cold: Path) -> None:
    with ReadAhead(cold, plan(*range(STEPS)), ahead_bytes=STEP_BYTES) as ahead:
        for number in range(STEPS):
            ahead.wait(number)
            ahead.release(number + 1)
    assert pagecache.resident(cold) == STEPS * STEP_BYTES


LIMITED = """
import os, sys
from pathlib import Path
import numpy as np
from lmdbstore import memory, pagecache
from lmdbstore.readahead import ReadAhead
from lmdbstore.shuffle import BlockSchedule, plan_blocks

path, fraction = sys.argv[1], float(sys.argv[2])
lengths = np.full(1536, 131072)
extents = np.cumsum(lengths) - lengths, lengths
plan = plan_blocks(*extents, 2 << 20)
fd = os.open(path, os.O_RDONLY)

def read_from_disk():
    return int(Path("/proc/self/io").read_text().split("read_bytes:")[1].split()[0])

for epoch in range(3):
    before = read_from_disk()
    schedule = BlockSchedule(plan, seed=0, epoch=epoch, window_blocks=2)
    reading = schedule.reading(extents, 0, 1)
    with ReadAhead(path, reading, ahead_bytes=8 << 20, keep_fraction=fraction) as ahead:
        for chunk in range(len(schedule.starts) - 1):
            ahead.wait(int(reading.needed[chunk]) - 1)
            for position in schedule.positions(chunk):
                os.pread(fd, 131072, extents[0][position])
            ahead.release(int(reading.done[chunk]))
    print(read_from_disk() - before, memory.available())
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of our own; needs root, and a hierarchy that lets us make one."""
    for kind, parent in memory.memory_groups():
        path = parent / f"lmdbstore-test-{os.getpid()}"
        limit = path / ("memory.max" if kind == "cgroup2" else "memory.limit_in_bytes")
        try:
            path.mkdir()
        except OSError:
            continue
        if limit.exists():
            limit.write_text(str(160 * MIB))
            yield path
            until(lambda path=path: not (path / "cgroup.procs").read_text())
            path.rmdir()
            return
        path.rmdir()
    pytest.skip("can't make a memory control group here")


@pytest.mark.skipif(not LINUX, reason="control groups")
def test_a_set_larger_than_memory_reads_only_what_is_not_kept(tmp_path: Path, group: Path) -> None:
    size = 192 * MIB
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        for _ in range(192):
            file.write(bytes(MIB))
    if pagecache.evict(path) != 0:
        pytest.skip("this file system keeps its files in memory (tmpfs?)")
    script = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} - {path} 0.4"
    root = Path(__file__).parent.parent
    done = subprocess.run(["sh", "-c", script], input=LIMITED, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    epochs = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert all(room < 160 * MIB for _, room in epochs)  # the limit is seen
    assert epochs[0][0] >= 0.95 * size
    # 60 % isn't kept, less what was used last and not dropped yet; LRU would read nearly all again
    assert all(0.4 * size < read < 0.7 * size for read, _ in epochs[1:])
