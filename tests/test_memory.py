"""lmdbstore.memory, on made-up procfs trees and on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lmdbstore import memory

GIB = 1 << 30


def make_proc(root: Path, *, available: int, cgroup: str, mounts: str) -> Path:
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable: {available // 1024} kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mountinfo").write_text(mounts)
    return proc


def make_v2(group: Path, *, limit: str, current: int, cache: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(f"anon 5\nactive_file {cache // 2}\ninactive_file {cache // 2}\n")


def v2_proc(root: Path, path: str, available: int = 64 * GIB) -> Path:
    mounts = f"20 1 8:1 / / rw - ext4 /dev/a rw\n30 20 0:26 / {root}/cg rw shared:9 - cgroup2 cgroup2 rw,delegate\n"
    return make_proc(root, available=available, cgroup=f"0::{path}\n", mounts=mounts)


def test_the_machine_limits_where_no_group_does(tmp_path: Path) -> None:
    make_v2(tmp_path / "cg/job", limit="max", current=GIB, cache=0)
    assert memory.available(v2_proc(tmp_path, "/job", available=3 * GIB)) == 3 * GIB


def test_page_cache_of_the_group_counts_as_room(tmp_path: Path) -> None:
    make_v2(tmp_path / "cg/job", limit=str(4 * GIB), current=3 * GIB, cache=2 * GIB)
    assert memory.available(v2_proc(tmp_path, "/job")) == 3 * GIB


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    make_v2(tmp_path / "cg/slice", limit=str(2 * GIB), current=GIB, cache=0)
    make_v2(tmp_path / "cg/slice/job", limit=str(8 * GIB), current=GIB, cache=0)
    assert memory.available(v2_proc(tmp_path, "/slice/job")) == GIB


def test_a_group_over_its_limit_has_no_room(tmp_path: Path) -> None:
    make_v2(tmp_path / "cg/job", limit=str(GIB), current=2 * GIB, cache=0)
    assert memory.available(v2_proc(tmp_path, "/job")) == 0


def test_in_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    """Without a namespace of its own, /proc/self/cgroup has the host's path, which isn't there."""
    make_v2(tmp_path / "cg", limit=str(2 * GIB), current=GIB, cache=0)
    assert memory.available(v2_proc(tmp_path, "/docker/0123abcd")) == GIB


def test_version_1(tmp_path: Path) -> None:
    group = tmp_path / "cg/memory/job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (group / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n")
    mounts = (
        f"31 30 0:27 / {tmp_path}/cg/cpu rw - cgroup cgroup rw,cpu\n"
        f"32 30 0:28 / {tmp_path}/cg/memory rw - cgroup cgroup rw,memory\n"
    )
    proc = make_proc(tmp_path, available=64 * GIB, cgroup="3:cpu:/other\n4:memory:/job\n0::/\n", mounts=mounts)
    assert memory.available(proc) == 3 * GIB


def test_nothing_known_is_none(tmp_path: Path) -> None:
    assert memory.available(tmp_path) is None


@pytest.mark.skipif(sys.platform != "linux", reason="procfs")
def test_this_machine_answers() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    room = memory.available()
    assert room is not None
    assert 0 <= room <= total * 1.5  # of a group without a limit, more than there is
