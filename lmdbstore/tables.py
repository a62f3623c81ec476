"""A store's columns as pandas DataFrames; the only module that knows pandas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lmdbstore.errors import MissingDependency
from lmdbstore.layout import FORMATS
from lmdbstore.selection import Selection

try:
    import pandas
except ImportError:
    raise MissingDependency("tables need pandas: pip install 'lmdbstore[notebook]'") from None

if TYPE_CHECKING:
    from lmdbstore.duplicates import Duplicates

#: After the columns of the csv; where an image lies in the file is nothing to look at.
ABOUT_THE_FILE = ("width", "height", "orientation", "format", "length", "line")


def table(selection: Selection) -> Any:
    """Return a row for each image (see `Inspected.table`).

    Returns
    -------
    DataFrame
        The id (under the csv's name for it), the csv's other columns, then width and height in pixels, the EXIF
        orientation, the format as a categorical, the length in bytes and the line of the csv.
    """
    store = selection.store
    values = {store.manifest.source["id_column"]: selection.ids}
    values.update({name: selection.column(name) for name in (*store.columns, *ABOUT_THE_FILE)})
    values["format"] = pandas.Categorical.from_codes(values["format"], FORMATS)
    return pandas.DataFrame(values, index=pandas.Index(selection.indices, name="position"))


def rejects_table(store: Any) -> Any:
    """Return a row for each rejected row: line of the csv, id, reason."""
    return pandas.DataFrame(store.rejects(), columns=["line", "id", "reason"])


def duplicates_table(duplicates: Duplicates) -> Any:
    """Return a row for each image of each group: number of the group, id, label, whether the labels conflict."""
    groups = np.repeat(np.arange(len(duplicates)), np.diff(duplicates.starts))
    members = Selection(duplicates.store, duplicates.members)
    values: dict[str, Any] = {"group": groups, "id": members.ids}
    if duplicates.label is not None:
        values[duplicates.label] = members.column(duplicates.label)
        values["conflict"] = duplicates.in_conflict[groups]
    return pandas.DataFrame(values)
