"""lmdbstore.pagecache on real files; only what it says of failures is provoked."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lmdbstore import memory, pagecache
from lmdbstore.errors import ReadError
from lmdbstore.pagecache import MIB, PAGE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the page cache is asked on Linux only")
SIZE = 3 * MIB + 12345


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A file of which nothing is in memory."""
    path = tmp_path / "cold.bin"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    with path.open("rb") as file:  # not with evict: a broken one shall fail, not skip
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        left = pagecache.resident(file.fileno())
    if left != 0:
        pytest.skip("this file system keeps its files in memory (tmpfs?)")
    return path


@pytest.fixture
def cold_fd(cold: Path):
    fd = os.open(cold, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # the kernel's own read-ahead out of the way
    yield fd
    os.close(fd)


def int64s(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def as_nobody(work: Callable[[], object]) -> bool:
    """Run `work` in a child as another user; tell whether it was true."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# resident


def both_ways(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "mincore":
        monkeypatch.setattr(pagecache, "_CACHESTAT", None)


@pytest.mark.parametrize("way", ["cachestat", "mincore"])
def test_resident_counts_what_was_read(cold_fd: int, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    both_ways(monkeypatch, way)
    assert pagecache.resident(cold_fd) == 0
    os.pread(cold_fd, 2 * PAGE, 10 * PAGE)
    assert pagecache.resident(cold_fd, 10 * PAGE, 2 * PAGE) == 2 * PAGE
    assert pagecache.resident(cold_fd, 10 * PAGE + 7, PAGE) == PAGE  # two pages, both there
    assert pagecache.resident(cold_fd, 12 * PAGE, PAGE) == 0
    assert pagecache.resident(cold_fd) == 2 * PAGE - (PAGE - SIZE % PAGE)  # a lower bound: the last page isn't full


@pytest.mark.parametrize("way", ["cachestat", "mincore"])
def test_a_range_is_full_only_if_every_page_is_there(cold_fd: int, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    both_ways(monkeypatch, way)
    os.pread(cold_fd, PAGE, 10 * PAGE)
    found = pagecache.resident(cold_fd, 11 * PAGE - 50, 100)  # its first 50 bytes are there
    assert found is not None
    assert found < 100


@pytest.mark.parametrize("way", ["cachestat", "mincore"])
def test_resident_of_paths_and_of_nothing(cold: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    both_ways(monkeypatch, way)
    cold.read_bytes()
    assert pagecache.resident(cold) == SIZE
    assert pagecache.resident(cold, SIZE) == 0
    assert pagecache.resident(cold, 5, 0) == 0
    assert pagecache.resident(cold, SIZE + 10 * PAGE, PAGE) == 0


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="needs another user")
@pytest.mark.parametrize("way", ["cachestat", "mincore"])
def test_residency_of_a_foreign_file_is_unknown_not_full(
    cold: Path, cold_fd: int, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Mincore calls every page of a foreign file resident; kernels before 6.16 answer cachestat truthfully."""
    both_ways(monkeypatch, way)
    cold.chmod(0o644)
    assert as_nobody(lambda: pagecache.resident(cold_fd, 0, MIB) in ((None,) if way == "mincore" else (None, 0)))
    assert as_nobody(lambda: pagecache.make_resident(cold_fd, 5 * PAGE, 10 * PAGE) == 10 * PAGE)
    assert pagecache.resident(cold_fd, 5 * PAGE, 10 * PAGE) == 10 * PAGE
    cold.chmod(0o666)  # who may write it is told
    assert as_nobody(lambda: pagecache.resident(cold_fd, 0, PAGE) == 0)


def test_elsewhere_residency_is_unknown(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagecache, "_libc", None)
    assert pagecache.resident(cold) is None
    assert pagecache.residency_map(cold) is None
    assert pagecache.warm(cold).read == SIZE


def test_residency_map_shows_where(cold: Path, cold_fd: int) -> None:
    os.pread(cold_fd, MIB, MIB)
    shown = pagecache.residency_map(cold, bins=SIZE // PAGE)
    assert shown is not None
    assert shown.shape == (SIZE // PAGE,)
    assert shown[260:508].min() == 1
    assert shown[:250].max() == shown[520:].max() == 0


def test_residency_map_of_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert pagecache.residency_map(tmp_path / "empty", bins=4).tolist() == [0, 0, 0, 0]  # type: ignore[union-attr]


# make_resident


def test_make_resident_reads_the_extent_and_no_more(cold_fd: int) -> None:
    assert pagecache.make_resident(cold_fd, 10 * PAGE + 5, 3 * PAGE) == 3 * PAGE
    assert pagecache.resident(cold_fd, 10 * PAGE + 5, 3 * PAGE) == 3 * PAGE
    assert pagecache.resident(cold_fd, 0, 10 * PAGE) == 0
    assert pagecache.resident(cold_fd, 14 * PAGE, MIB) == 0


def test_make_resident_skips_what_is_there(cold_fd: int) -> None:
    os.pread(cold_fd, MIB, MIB)
    assert pagecache.make_resident(cold_fd, 0, 3 * MIB) == 2 * MIB
    assert pagecache.make_resident(cold_fd, 0, 3 * MIB) == 0
    assert pagecache.resident(cold_fd, 0, 3 * MIB) == 3 * MIB


def test_a_disk_error_is_an_exception() -> None:
    fd = os.open("/proc/self/mem", os.O_RDONLY)  # reading at address 0 gives EIO
    try:
        with pytest.raises(OSError, match="Input/output error"):
            pagecache.make_resident(fd, 0, PAGE)
    finally:
        os.close(fd)


def test_a_file_that_ends_early_is_an_exception(cold_fd: int) -> None:
    with pytest.raises(OSError, match=f"ends at {SIZE}, 1000 bytes too early"):
        pagecache.make_resident(cold_fd, SIZE - 10, 1010)


def test_without_preadv_nothing_is_read(cold_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    assert pagecache.make_resident(cold_fd, 0, SIZE) == 0


# ranges


@pytest.mark.parametrize("seed", range(20))
def test_joined_ranges_cover_the_bytes_and_no_wide_gap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    offsets, lengths = rng.integers(0, 400, 12), rng.integers(1, 30, 12)
    gap = int(rng.integers(1, 20))
    covered = np.zeros(500, bool)
    for offset, length in zip(offsets, lengths, strict=True):
        covered[offset : offset + length] = True
    edges = np.flatnonzero(np.diff(np.concatenate(([0], covered.astype(int), [0]))))
    for stop, start in zip(edges[1:-1:2], edges[2::2], strict=True):
        covered[stop:start] |= start - stop < gap
    joined = np.zeros(500, bool)
    starts, sizes = pagecache.join_ranges(offsets, lengths, gap)
    for start, size in zip(starts, sizes, strict=True):
        assert not joined[start : start + size].any()
        joined[start : start + size] = True
    assert (joined == covered).all()
    assert (np.diff(starts) > 0).all()


def test_joining_nothing() -> None:
    assert [len(part) for part in pagecache.join_ranges(int64s(), int64s())] == [0, 0]


def test_fitting_cuts_the_last_range() -> None:
    offsets, lengths = pagecache.fitting(int64s(0, 100, 200), int64s(10, 20, 30), 25)
    assert (offsets.tolist(), lengths.tolist()) == ([0, 100], [10, 15])
    assert pagecache.fitting(int64s(0), int64s(10), 0)[1].sum() == 0
    assert pagecache.fitting(int64s(0), int64s(10), None)[1].sum() == 10


# warm and evict


def test_warm_reads_everything_once(cold: Path) -> None:
    calls: list[tuple[int, int]] = []
    assert pagecache.warm(cold, progress=lambda *call: calls.append(call)) == (SIZE, SIZE, SIZE, 0)
    assert pagecache.resident(cold) == SIZE
    assert calls[-1] == (SIZE, SIZE)
    assert calls == sorted(calls)
    assert len(calls) >= 2
    assert pagecache.warm(cold) == (SIZE, SIZE, 0, 0)


def test_warm_ranges_only(cold: Path) -> None:
    done = pagecache.warm(cold, (int64s(2 * MIB, 0), int64s(5000, 5000)))
    assert done == (10000, 10000, 10000, 0)


def test_warm_says_what_does_not_fit(cold: Path) -> None:
    assert pagecache.warm(cold, limit_bytes=MIB) == (SIZE, MIB, MIB, SIZE - MIB)


def test_warm_stays_within_the_memory(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 2 * MIB)
    done = pagecache.warm(cold)
    assert done.fits == int(2 * MIB * pagecache.WARM_SHARE)
    assert done.fits + done.left_out == done.wanted == SIZE


def test_warm_names_the_place_of_a_disk_error(cold: Path) -> None:
    with pytest.raises(ReadError, match=rf"cold\.bin: reading at byte {SIZE - 10} failed: .*too early"):
        pagecache.warm(cold, (int64s(SIZE - 10), int64s(20)))


def test_evict_drops_dirty_pages_too(tmp_path: Path, cold: Path) -> None:
    path = tmp_path / "fresh.bin"
    path.write_bytes(bytes(64 * MIB))  # more than the kernel writes by itself meanwhile
    assert pagecache.evict(path) == 0


def test_evict_says_what_a_map_holds(cold: Path) -> None:
    with cold.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        cold.read_bytes()
        assert view[5 * PAGE] == view[5 * PAGE]
        left = pagecache.evict(cold)
        assert left is not None
        assert 0 < left < SIZE
    assert pagecache.evict(cold) == 0


def test_without_fadvise_evict_only_reports(cold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cold.read_bytes()
    monkeypatch.delattr(os, "posix_fadvise")
    assert pagecache.evict(cold) == SIZE


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    for work in (pagecache.resident, pagecache.residency_map, pagecache.warm, pagecache.evict):
        with pytest.raises(FileNotFoundError):
            work(tmp_path / "nothing")  # type: ignore[operator]
