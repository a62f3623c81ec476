"""From a finished staging file to the final name: the only place that renames.

A name is durable only after its content is: the file is synced, renamed, and then
its folder is synced.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from pathlib import Path

from lmdbstore.layout import Reject


def staging_path(store: Path) -> Path:
    """Return where a store stands while it is made."""
    return store.with_name(store.name + ".partial")


def rejects_path(store: Path) -> Path:
    """Return where the rejected rows of a store are listed."""
    return store.with_name(store.name + ".rejects.csv")


def publish(staging: Path, final: Path) -> None:
    """Give a complete file its final name, durably; what stood there goes on for who has it open."""
    fsync(staging)
    os.replace(staging, final)
    fsync(final.parent)


def write_rejects(rejects: Iterable[Reject], final: Path) -> None:
    """Write line, id and reason of every rejected row, at once or not at all."""
    partial = staging_path(final)
    try:
        with open(partial, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Reject._fields)
            writer.writerows(rejects)
        publish(partial, final)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def fsync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows can't sync a folder
        return
    fd = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
