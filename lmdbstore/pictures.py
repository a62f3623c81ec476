"""Pictures that a cell shows and a file takes; the only module that knows matplotlib."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

from lmdbstore.errors import LmdbstoreError, MissingDependency

try:
    from matplotlib.figure import Figure
except ImportError:
    raise MissingDependency("pictures need matplotlib: pip install 'lmdbstore[notebook]'") from None

# Okabe and Ito's palette: eight colours that people with any kind of colour vision tell apart
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#BBBBBB"

DPI = 96  # a notebook's cell is about 950 pixels wide: ten inches
JPEG_QUALITY = 78


class Picture(Figure):
    """A matplotlib figure that belongs to no window: a cell shows it, nothing has to be closed.

    Parameters
    ----------
    size : (float, float)
        Width and height in inches, at 96 dots an inch in a cell.
    photos : bool
        It consists of photographs: shown as JPEG, a fifth of the PNG.

    Notes
    -----
    Threads: one at a time.  Processes: holds nothing.
    """

    def __init__(self, size: tuple[float, float], *, photos: bool = False, **options: Any) -> None:
        super().__init__(figsize=size, dpi=DPI, facecolor="white", **options)
        self.photos = photos

    def save(self, path: str | os.PathLike[str], *, dpi: int = 2 * DPI) -> None:
        """Write the picture; the ending of the name chooses the format.

        Raises
        ------
        LmdbstoreError
            An ending that matplotlib has no writer for; the message lists those that there are.
        OSError
        """
        known = self.canvas.get_supported_filetypes()
        if Path(path).suffix.lower().lstrip(".") not in known:
            raise LmdbstoreError(f"{os.fspath(path)}: the ending chooses the format; one of .{', .'.join(known)}")
        self.savefig(path, dpi=dpi)

    def jpeg(self) -> bytes:
        """Return the picture as a JPEG file."""
        return self._encoded("jpeg", pil_kwargs={"quality": JPEG_QUALITY, "optimize": True})

    def data_url(self) -> str:
        """Return the picture as the source of an HTML image."""
        return "data:image/jpeg;base64," + base64.b64encode(self.jpeg()).decode()

    def _encoded(self, format: str, **options: Any) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format=format, dpi=DPI, **options)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes | None:
        return None if self.photos else self._encoded("png", pil_kwargs={"optimize": True})

    def _repr_jpeg_(self) -> bytes | None:
        return self.jpeg() if self.photos else None
