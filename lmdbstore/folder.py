"""What people train from today: a folder of image files, read by a csv.  The other side of every comparison."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import albumentations
import cv2
import numpy as np

from lmdbstore.errors import CsvError, DecodeError, OptionError
from lmdbstore.template import PathTemplate

PIPELINES = ("seed", "rrc")


def pipeline(name: str) -> Callable[..., Any]:
    """Return a transform to measure with.

    "seed" is the augmentation of the question that this project answers: (400, 400, 3) float32.
    "rrc" is the usual one for training on crops, RandomResizedCrop 224 and a flip: (224, 224, 3) uint8.

    Raises
    ------
    OptionError
    """
    if name == "seed":
        return albumentations.Compose(
            [
                albumentations.Resize(400, 400),
                albumentations.Rotate(limit=15),
                albumentations.ChannelDropout(p=0.1),
                albumentations.Normalize(),
            ]
        )
    if name == "rrc":
        return albumentations.Compose([albumentations.RandomResizedCrop((224, 224)), albumentations.HorizontalFlip()])
    raise OptionError(f"pipeline {name!r}; there are {', '.join(PIPELINES)}")


class FolderDataset:
    """The question's Dataset: `cv2.imread`, `cvtColor`, transform.

    Parameters
    ----------
    paths : list of str
        One file an item.
    labels : ndarray, (n,), optional
        With them an item is ``(image, label)``, without the image alone.
    transform : callable, optional
        An albumentations transform.

    Notes
    -----
    Threads: as the transform allows.  Processes: paths and labels are flat arrays, so that workers don't copy
    them by counting references; many a training script is worse in this.
    """

    def __init__(
        self, paths: list[str], labels: np.ndarray | None = None, transform: Callable[..., Any] | None = None
    ) -> None:
        self.paths, self.labels, self.transform = np.array(paths, dtype=np.str_), labels, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        image = cv2.imread(str(self.paths[i]))
        if image is None:
            raise DecodeError("OpenCV can't read it").at(str(self.paths[i]))
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        if self.transform is not None:
            image = self.transform(image=image)["image"]
        return image if self.labels is None else (image, int(self.labels[i]))


def decode_file(data: bytes) -> np.ndarray:
    """Decode as `FolderDataset` does, from memory: (H, W, 3) uint8, RGB."""
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise DecodeError("OpenCV can't decode it")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


@contextmanager
def one_opencv_thread() -> Iterator[None]:
    """Keep OpenCV to the calling thread, so that a clock around it measures one core."""
    before = cv2.getNumThreads()
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(before)


def read_csv(
    path: Path, images: Path, *, id_column: str, label: str | None, template: str, only: Iterable[str]
) -> tuple[list[str], np.ndarray | None]:
    """Return the files and the labels of the rows of a csv whose ids are in `only`; the first row of each id.

    Parameters
    ----------
    path, images : Path
        The csv, and the folder that the paths start from.
    id_column, label : str
        Columns; without a label there are no labels.
    template : str
        Where a file is below the folder, as `PathTemplate` has it.
    only : iterable of str
        The ids to take, so that folder and store have the same images.

    Returns
    -------
    paths : list of str
    labels : ndarray of int64 or float64, (n,), or None

    Raises
    ------
    CsvError
        A column is missing, or none of the ids is there.
    """
    wanted, paths, labels = set(only), [], []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        names = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = names
        for column in (id_column, label):
            if column is not None and column not in names:
                raise CsvError(f"{path}: no column {column!r}; there are {', '.join(names)}")
        place = PathTemplate(template, columns=set(names) - {"id"})
        for row in reader:
            id = (row[id_column] or "").strip()
            if id in wanted:
                wanted.discard(id)
                paths.append(str(images / place.fill({**row, "id": id})))
                labels.append(_number(row[label]) if label is not None else 0)
    if not paths:
        raise CsvError(f"{path}: none of the ids in column {id_column!r} is in the store; is it another set's csv?")
    return paths, None if label is None else np.array(labels)


def read_ids(path: Path, *, id_column: str) -> list[str]:
    """Return the ids of a csv, in its order.

    Raises
    ------
    CsvError
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            reader.fieldnames = names = [name.strip() for name in reader.fieldnames or ()]
            if id_column not in names:
                raise CsvError(f"{path}: no column {id_column!r}; there are {', '.join(names)}")
            ids = [row[id_column].strip() for row in reader if row[id_column]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CsvError(f"{path}: {error}") from None
    if not ids:
        raise CsvError(f"{path}: no ids in column {id_column!r}")
    return ids


def _number(text: str) -> float:
    return int(text) if text.strip().lstrip("-").isdecimal() else float(text)
