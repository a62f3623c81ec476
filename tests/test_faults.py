"""Faults of disks and systems under a real process: strace makes system calls on one path fail.

After each: one line that says what to do, an old store under the name still whole, and a rerun that succeeds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Photos
from lmdbstore import ImageStore, ingest, verify

MAIN = "from lmdbstore.cli import main; main()"


@pytest.fixture
def strace() -> str:
    found = shutil.which("strace")
    if found is None or subprocess.run([found, "-qq", "true"], capture_output=True).returncode:
        pytest.skip("strace isn't installed, or may not trace here")
    return found


def command(photos: Photos, out: Path, *more: str) -> list[str]:
    arguments = ["ingest", str(photos.csv), "--images", str(photos.images), "--out", str(out), *more]
    return [sys.executable, "-c", MAIN, *arguments]


def under_fault(strace: str, path: Path, fault: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in which a system call on `path` fails, such as "pwrite64:error=EIO:when=3"."""
    calls = fault.split(":")[0]
    trace = ["-f", "-qq", "-o", "/dev/null", "-P", str(path), "-e", f"trace={calls}", "-e", f"inject={fault}"]
    return subprocess.run([strace, *trace, *words], capture_output=True, text=True)


@pytest.fixture
def old_store(photos: Photos, tmp_path: Path) -> Iterator[Path]:
    """A store that is to be replaced; at the end, and whatever happened, a whole one stands there."""
    out = tmp_path / "o.lmdb"
    ingest(photos.csv, images=photos.images, out=out)
    yield out
    assert verify(out, decode=True).problems == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("pwrite64,pwritev,writev:error=EIO:when=2", "what was stored before stays"),
        ("pwrite64,pwritev,writev:error=ENOSPC:when=2", "no space left on the disk"),
        ("fdatasync:error=EIO:when=2", "what was stored before stays"),
        ("fsync:error=EIO:when=1", "Input/output error"),
        ("rename,renameat,renameat2:error=EACCES", "Permission denied"),
        ("rename,renameat,renameat2:error=EIO", "Input/output error"),
        ("flock:error=ENOLCK", "no locks.*ingest to a local disk"),
        ("ftruncate,truncate:error=EIO", "Input/output error"),
    ],
)
def test_a_failing_target(photos: Photos, old_store: Path, strace: str, fault: str, message: str) -> None:
    build = ImageStore(old_store).build_id
    partial = old_store.with_name("o.lmdb.partial")
    failed = under_fault(strace, partial, fault, command(photos, old_store, "--overwrite"))
    assert failed.returncode == 1, failed.stderr
    assert __import__("re").search(message, failed.stderr), failed.stderr
    assert len(failed.stderr.splitlines()) == 1
    assert ImageStore(old_store).build_id == build
    again = subprocess.run(command(photos, old_store, "--overwrite"), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert not partial.exists()


@pytest.mark.parametrize("fault", ["read,pread64:error=EIO", "openat:error=EIO", "openat:error=EACCES"])
def test_a_failing_source_file_is_rejected_by_name(photos: Photos, tmp_path: Path, strace: str, fault: str) -> None:
    id, out = photos.ids[6], tmp_path / "o.lmdb"
    done = under_fault(strace, photos.path(id), fault, command(photos, out))
    assert done.returncode == 3, done.stderr
    with ImageStore(out) as store:
        (reject,) = store.rejects()
    assert reject.id == id and ("Input/output error" in reject.reason or "Permission denied" in reject.reason)


def test_a_bad_sector_is_an_error_and_not_a_signal(photos: Photos, store_path: Path, strace: str) -> None:
    """The page cache is empty, so the image's bytes are asked for by pread, before the map is touched."""
    subprocess.run(["sync"], check=True)
    code = (
        "import sys; from lmdbstore import ImageStore, pagecache; pagecache.evict(sys.argv[1])\n"
        "ImageStore(sys.argv[1]).read(sys.argv[2])"
    )
    words = [sys.executable, "-c", code, str(store_path), photos.ids[0]]
    failed = under_fault(strace, store_path, "preadv,preadv2:error=EIO", words)
    if failed.returncode == 0:
        pytest.skip("the file can't be dropped from the page cache here (tmpfs)")
    assert failed.returncode == 1, "a signal"
    assert "ReadError" in failed.stderr and str(store_path) in failed.stderr and "Input/output error" in failed.stderr
    words = [sys.executable, "-m", "lmdbstore", "verify", str(store_path)]
    found = under_fault(strace, store_path, "pread64:error=EIO", words)
    assert found.returncode == 1 and "Input/output error" in found.stdout + found.stderr


def test_a_read_only_target(photos: Photos, tmp_path: Path) -> None:
    folder = tmp_path / "ro"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        failed = subprocess.run(command(photos, folder / "o.lmdb"), capture_output=True, text=True)
    finally:
        subprocess.run(["umount", folder], check=True)
    assert failed.returncode == 1
    assert "Read-only file system; choose another --out" in failed.stderr and len(failed.stderr.splitlines()) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_an_unwritable_list_of_rejects(photos: Photos, tmp_path: Path, strict: bool) -> None:
    photos.path(photos.ids[0]).unlink()
    (tmp_path / "o.lmdb.rejects.csv").mkdir()
    words = command(photos, tmp_path / "o.lmdb", *["--strict"] * strict)
    done = subprocess.run(words, capture_output=True, text=True)
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if strict else 3)
    assert "Is a directory" in done.stdout + done.stderr
    if not strict:
        with ImageStore(tmp_path / "o.lmdb") as store:
            assert len(store.rejects()) == 1


def test_a_copy_taken_during_an_ingest_is_no_store(photos: Photos, tmp_path: Path) -> None:
    copies: list[Path] = []

    def copy(_: object) -> None:
        copies.append(tmp_path / f"copy{len(copies)}.lmdb")
        shutil.copy(tmp_path / "o.lmdb.partial", copies[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmdbstore.ingestion.pipeline._BATCH_ROWS", 4)
        ingest(photos.csv, images=photos.images, out=tmp_path / "o.lmdb", progress=copy)
    assert copies
    for path in copies:
        assert verify(path).problems, "it has no manifest yet"


def test_a_target_on_another_file_system(photos: Photos) -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm")
    out = shm / f"lmdbstore-{os.getpid()}.lmdb"
    try:
        assert ingest(photos.csv, images=photos.images, out=out).images == 40
    finally:
        out.unlink(missing_ok=True)
