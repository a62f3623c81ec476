"""Readers in numbers: processes at once, killed ones, other users, replaced files, memory over many epochs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from conftest import Photos
from lmdbstore import BlockShuffleSampler, ImageDataset, ImageStore, ingest, verify

NOBODY = 65534


def open_read_close(path: str, times: int) -> None:
    for k in range(times):
        with ImageStore(path) as store:
            store.read(store.ids[k % len(store)])


def test_64_processes_open_read_and_close_at_once(store_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=open_read_close, args=(str(store_path), 60)) for _ in range(64)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 64
    assert sorted(os.listdir(store_path.parent)) == ["photos", "photos.lmdb"], "no lock file"


def read_for_ever(path: str) -> None:
    store = ImageStore(path)
    while True:
        store.decode_at(0)


def test_200_killed_readers_harm_nothing(photos: Photos, store_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(10):
        processes = [context.Process(target=read_for_ever, args=(str(store_path),)) for _ in range(20)]
        for process in processes:
            process.start()
        time.sleep(0.05)
        for process in processes:
            os.kill(process.pid or 0, signal.SIGKILL)
        for process in processes:
            process.join()
            process.close()
    assert verify(store_path).problems == []
    with ImageStore(store_path) as store:
        assert store.read(photos.ids[0]) == photos.data(photos.ids[0])


def test_readers_keep_the_old_store_while_new_ones_replace_it(photos: Photos, store_path: Path) -> None:
    dataset = ImageDataset(store_path, transform=small, label="landmark_id")
    loader = DataLoader(dataset, 4, num_workers=2, persistent_workers=True)
    expected = [labels.tolist() for _, labels in loader]
    lines = photos.csv.read_text().splitlines(True)
    for count in (30, 20, 10):
        photos.csv.write_text("".join(lines[: count + 1]))
        ingest(photos.csv, images=photos.images, out=store_path, overwrite=True)
        assert [labels.tolist() for _, labels in loader] == expected
        with ImageStore(store_path) as new:
            assert len(new) == count
    assert sorted(os.listdir(store_path.parent)) == ["photos", "photos.lmdb"]


def small(image: np.ndarray) -> np.ndarray:
    return cv2.resize(image, (16, 16))


def as_nobody(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    if os.getuid() != 0:
        pytest.skip("becoming another user needs root")
    modules = "secrets, numpy.random, cv2, turbojpeg, lmdbstore.turbo, lmdbstore.opencv, lmdbstore.samplers"
    script = f"import os, sys; sys.path[:] = {sys.path!r}; import {modules}, lmdbstore.dataset\n"
    script += f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n{code}"
    return subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True)


def test_another_users_store_on_a_read_only_mount(photos: Photos, store_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ro"
    folder.mkdir()
    os.chmod(store_path, 0o444)
    for parent in [store_path.parent, *store_path.parents]:
        if parent.stat().st_uid == 0 and parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(0o755)
    mounted = subprocess.run(["mount", "--bind", store_path.parent, folder], capture_output=True).returncode == 0
    place = folder / store_path.name if mounted else store_path
    if mounted:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
    code = """
from lmdbstore import pagecache
from lmdbstore.samplers import BlockShuffleSampler
from lmdbstore.dataset import ImageDataset
assert pagecache.resident(sys.argv[1]) is None, "the kernel doesn't tell others"
dataset = ImageDataset(sys.argv[1])
print(sum(dataset[i].size > 0 for i in BlockShuffleSampler(dataset)))
"""
    try:
        shown = as_nobody(code, place)
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)
    assert shown.stdout.strip() == "40", shown.stderr


def private_dirty() -> int:
    """Return the bytes that only this process has and has written: its own memory, without the store's pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


class Measured(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A dataset whose items are what its worker's memory is."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[int, int]:
        self.dataset[i]
        return os.getpid(), private_dirty()


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux")
def test_a_workers_own_memory_is_flat_over_20_epochs(store_path: Path) -> None:
    dataset = ImageDataset(store_path, small, "landmark_id")
    sampler = BlockShuffleSampler(dataset)
    loader = DataLoader(Measured(dataset), 4, sampler=sampler, num_workers=4, persistent_workers=True)
    used: dict[int, list[int]] = {}
    for _ in range(20):
        for pids, sizes in loader:
            for pid, size in zip(pids.tolist(), sizes.tolist(), strict=True):
                used.setdefault(pid, []).append(size)
    assert len(used) == 4
    for sizes in used.values():
        early, late = max(sizes[len(sizes) // 4 : len(sizes) // 2]), max(sizes[-len(sizes) // 4 :])
        assert late - early < 4 << 20, f"{early} -> {late} bytes"


def test_opening_reads_little_of_a_cold_store(store_path: Path) -> None:
    from lmdbstore import pagecache

    os.sync()
    if pagecache.evict(store_path) != 0:
        pytest.skip("the file can't be dropped from the page cache here")
    with ImageStore(store_path) as store:
        store.read(store.ids[0])
    read = pagecache.resident(store_path)
    assert read is not None and read < store_path.stat().st_size / 2
