"""A store larger than the memory of its control group, read by tools/bench_memory in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lmdbstore import IngestOptions, codec, ingest, pagecache

TOOL = Path(__file__).parent.parent / "tools" / "bench_memory"
GROUPS = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/cgroup.controllers")]


@pytest.fixture(scope="module")
def large_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 300 MB."""
    folder = tmp_path_factory.mktemp("large")
    noise = np.random.default_rng(0).integers(0, 256, (8, 280, 400, 3), dtype=np.uint8)
    files = [codec.encode(image, quality=90) for image in noise]
    count = 300_000_000 // len(files[0])
    (folder / "images").mkdir()
    for k in range(count):
        (folder / "images" / f"{k:06d}.jpg").write_bytes(files[k % len(files)])
    (folder / "train.csv").write_text("id\n" + "".join(f"{k:06d}\n" for k in range(count)))
    out = folder / "x.lmdb"
    ingest(folder / "train.csv", images=folder / "images", out=out, options=IngestOptions(check="none"))
    return out


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="control groups need root")
def test_a_stated_part_stays_and_the_rest_is_read_once(large_store: Path, tmp_path: Path) -> None:
    if not any(group.exists() for group in GROUPS):
        pytest.skip("no memory control groups here")
    if pagecache.evict(large_store) != 0:
        pytest.skip("the file can't be dropped from the page cache here")
    words = [sys.executable, TOOL, large_store, "256", "--epochs", "3", "--workers", "2", "--json", tmp_path / "x.json"]
    done = subprocess.run(words, capture_output=True, text=True)
    if "Permission denied" in done.stderr or "Read-only file system" in done.stderr:
        pytest.skip("control groups can't be made here")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["limit_reached"] < 100, "the kernel had to reclaim"
    for number, epoch in enumerate(result["epochs"]):
        assert 0 < epoch["kept"] < 1
        assert epoch["read"] < (1.1 if number == 0 else 1.1 - 0.8 * epoch["kept"]), "read more than once"
