"""A store turned back into files and a csv, byte for byte as they are stored."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from lmdbstore.errors import ExportError
from lmdbstore.layout import Manifest
from lmdbstore.publish import publish, staging_path
from lmdbstore.store import ImageStore
from lmdbstore.template import PathTemplate


def export(
    store: ImageStore,
    *,
    out: str | os.PathLike[str],
    ids: Iterable[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write images and csv into a new folder, in the shape that they were ingested from.

    Parameters
    ----------
    store : ImageStore
    out : path
        The folder to make.  It gets its name when it is complete.
    ids : iterable of str, optional
        Only these images, and their rows of the csv.
    progress : callable, optional
        Called with (images written, images to write).

    Returns
    -------
    int
        Images written.

    Raises
    ------
    ExportError, MissingKey
        Nothing was left behind.
    """
    final = Path(out)
    if final.exists():
        raise ExportError(f"{final}: exists already; name a folder that doesn't")
    positions = np.arange(len(store)) if ids is None else np.unique(store.indices(ids))
    partial = staging_path(final)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _write(store, partial, positions, progress)
        publish(partial, final)
    except OSError as error:
        raise ExportError(f"{final}: {error.strerror or error}; nothing was exported") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return len(positions)


def changes(manifest: Manifest) -> list[str]:
    """Say in what way the images of a store aren't the files that were ingested; empty where they are."""
    options, said = manifest.options, []
    if options.get("short_side") or options.get("max_side"):
        said.append("images that were larger were made smaller by the ingest; their files can't be had back")
    if options.get("pixels"):
        said.append("images were ingested as pixels, and come out as PPM, whatever the ending of their names")
    if options.get("tile"):
        said.append("JPEG files were tiled by the ingest: their bytes differ from the files', their pixels don't")
    return said


def _write(store: ImageStore, folder: Path, positions: np.ndarray, progress: Callable[[int, int], None] | None) -> None:
    source = store.manifest.source
    images = folder / PathTemplate("{id}").fill({"id": source["folder"]})
    stored: dict[str, str] = source["columns"]  # name in the csv to name in the store
    template = PathTemplate(source["path"], columns=stored)
    images.mkdir(parents=True)
    made: set[str] = set()
    for done, i in enumerate(positions, 1):  # positions ascend: the store is read in the order of the file
        values = {name: str(store.column(stored[name])[i]) for name in template.columns}
        path = template.fill({"id": store.ids[i], **values})
        parent = os.path.dirname(path)
        if parent not in made:
            (images / parent).mkdir(parents=True, exist_ok=True)
            made.add(parent)
        (images / path).write_bytes(store.view(int(i)))
        if progress:
            progress(done, len(positions))
    _write_csv(store, folder / Path(source["csv"]).name, positions)


def _write_csv(store: ImageStore, path: Path, positions: np.ndarray) -> None:
    """Write header and rows as they stood in the csv, in its order."""
    rows = positions[np.argsort(store.column("line")[positions], kind="stable")]
    record = store.column("record")
    end = "\r\n" if store.manifest.source["header"].endswith("\r\n") else "\n"
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(store.manifest.source["header"])
        for k, i in enumerate(rows):
            text = record[int(i)]
            # only the last row of a csv can lack its line ending
            file.write(text if k == len(rows) - 1 or text.endswith(("\n", "\r")) else text + end)
