"""libjpeg-turbo through PyTurboJPEG: loaded once per process, quiet, and refusing bombs.

Importing this module is what loads the library, so that Python's import lock makes
it once per process, whatever the threads and forks: codec.py imports it at the first
JPEG.  `TURBO` is None where it can't be had; a warning has then said why.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import warnings
from typing import Any

import numpy as np

from lmdbstore.errors import DecodeError
from lmdbstore.headers import check_size
from lmdbstore.integrity import MAX_SCANS

_ADVICE = ("JPEG images are decoded by OpenCV instead, which is slower and finds fewer damaged files. "
           "To install it: `pip install 'PyTurboJPEG>=1.8.3,<2'` and the library (`apt-get install libturbojpeg0` "
           "on Debian, `libturbojpeg` on Ubuntu, `brew install jpeg-turbo` on macOS); "
           "LMDBSTORE_TURBOJPEG=/path/to/libturbojpeg.so names one that isn't found by itself.")

# The JWRN_* texts of libjpeg's jerror.h, 6b to libjpeg-turbo 3.1: all that isn't fatal
_WARNINGS = ("Corrupt JPEG data: ", "Premature end of JPEG file", "Warning: ", "Unknown Adobe color transform",
             "Inconsistent progression sequence", "Invalid SOS parameters", "Application transferred too many")

# TurboJPEG 3's ABI
_TJINIT_TRANSFORM, _TJXOPT_OPTIMIZE = 2, 256
_TJPARAM_STOPONWARNING, _TJPARAM_SCANLIMIT, _TJPARAM_RESTARTBLOCKS = 0, 13, 18

try:
    import turbojpeg
    _Base: Any = getattr(turbojpeg, "TurboJPEG", None)
except ImportError:
    turbojpeg = None
    _Base = None


class Turbo(_Base or object):  # type: ignore[misc]  # a base class known at run time only
    """The decoder and encoder, with warnings handed back per call instead of `warnings.warn`.

    PyTurboJPEG reports through two private methods; both are overridden here, and a test
    holds that 1.8.3 still calls them.

    Notes
    -----
    Threads: any number at once; libjpeg-turbo's handle is made per call, the rest is per thread.
    Processes: holds nothing that a fork could break.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        self._path = path
        self._call = threading.local()

    @property
    def version(self) -> str:
        """The versions of library (the API tells no more) and wrapper, as "2.x (PyTurboJPEG 1.8.3)"."""
        major = 2 if self._TurboJPEG__transform3 is None else 3
        return f"{major}.x (PyTurboJPEG {turbojpeg.__version__})"

    def decompress(
        self, view: memoryview, pixel_format: int, *, max_pixels: int, scale: int = 1
    ) -> tuple[np.ndarray, str | None]:
        """Decode a JPEG.

        Parameters
        ----------
        view : memoryview
            The file's bytes, read in place.
        pixel_format : int
            PyTurboJPEG's TJPF_RGB, TJPF_BGR or TJPF_CMYK.
        max_pixels : int
            Checked against libjpeg's own idea of the size, before the pixels are allocated.
        scale : int
            1, 2, 4 or 8: the picture is decoded at 1/scale, its sides rounded up.

        Returns
        -------
        pixels : ndarray
            (H, W, channels) uint8; the part that could be decoded when there is a warning.
        warning : str or None
            libjpeg's first warning about this image (it keeps no other).

        Raises
        ------
        DecodeError
            In libjpeg's words.
        ImageTooLarge
            More than `max_pixels`.
        """
        call = self._call
        call.warning, call.max_pixels = None, max_pixels
        # No FASTDCT, no FASTUPSAMPLE: exact pixels. LIMITSCANS ends a progressive bomb after 500 scans.
        factor = None if scale == 1 else (1, scale)
        pixels = self.decode(view, pixel_format, scaling_factor=factor, flags=turbojpeg.TJFLAG_LIMITSCANS)
        return pixels, call.warning

    @property
    def divides(self) -> bool:
        """Whether `divide` is there: the library is libjpeg-turbo 3."""
        return self._TurboJPEG__transform3 is not None

    def divide(self, view: memoryview, interval: int) -> bytes:
        """Rewrite a JPEG, its coefficients unchanged, with a restart marker after every `interval` MCUs.

        As `jpegtran -copy all -optimize -restart`: markers like EXIF and ICC are kept.

        Raises
        ------
        DecodeError
            In libjpeg's words; its warnings, too, are errors here.
        """
        call = _transform_functions(self._path or self._TurboJPEG__find_turbojpeg())
        handle = ctypes.c_void_p(call.tj3Init(_TJINIT_TRANSFORM))
        target, size = ctypes.c_void_p(), ctypes.c_size_t()
        source = np.frombuffer(view, np.uint8)
        try:
            call.tj3Set(handle, _TJPARAM_STOPONWARNING, 1)
            call.tj3Set(handle, _TJPARAM_SCANLIMIT, MAX_SCANS)
            call.tj3Set(handle, _TJPARAM_RESTARTBLOCKS, interval)
            transform = turbojpeg.TransformStruct(options=_TJXOPT_OPTIMIZE)
            if call.tj3Transform(handle, ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(source.size), 1,
                                 ctypes.byref(target), ctypes.byref(size), ctypes.byref(transform)):
                raise DecodeError(f"libjpeg-turbo: {call.tj3GetErrorStr(handle).decode()}")
            return ctypes.string_at(target, size.value)
        finally:
            call.tj3Free(target)
            call.tj3Destroy(handle)

    def _TurboJPEG__report_error(self, handle: int) -> None:
        # Not by tjGetErrorCode: it calls a fatal error a warning when there was a warning before it,
        # and the pixels are then whatever was in memory.  libjpeg's warnings are few.
        message = self._TurboJPEG__get_error_string(handle)
        if not message.startswith(_WARNINGS):
            raise DecodeError(f"libjpeg-turbo: {message}")
        self._call.warning = message

    def _TurboJPEG__get_header_and_dimensions(
        self, handle: int, length: int, address: Any, factor: tuple[int, int] | None
    ) -> tuple[int, ...]:
        # asked for the whole picture, however small the pixels will be: a progressive one is held whole in any case
        width, height, *rest = super()._TurboJPEG__get_header_and_dimensions(handle, length, address, None)
        check_size(width, height, self._call.max_pixels)
        above, below = factor or (1, 1)
        return (-(-width * above // below), -(-height * above // below), *rest)


@functools.lru_cache(maxsize=1)
def _transform_functions(path: str) -> ctypes.CDLL:
    """Return the library's functions that PyTurboJPEG doesn't hand on."""
    library = ctypes.CDLL(path)
    library.tj3Init.restype = ctypes.c_void_p
    library.tj3GetErrorStr.restype = ctypes.c_char_p
    return library


def _load() -> Turbo | None:
    path = os.environ.get("LMDBSTORE_TURBOJPEG") or None
    reason = _obstacle()
    if reason is None:
        try:
            return Turbo(path)
        except (OSError, RuntimeError, AttributeError) as err:  # not found; not loadable; another library
            reason = f"{path or 'libturbojpeg'}: {err}"
    warnings.warn(f"libjpeg-turbo can't be used ({reason}). {_ADVICE}", RuntimeWarning, stacklevel=2)
    return None


def _obstacle() -> str | None:
    """Say why the Python module can't serve, or return None."""
    if turbojpeg is None:
        return "PyTurboJPEG isn't installed"
    if _Base is None:
        return (f"the module `turbojpeg` at {getattr(turbojpeg, '__file__', '?')} isn't PyTurboJPEG but another "
                "package of that name: uninstall it")
    version = str(getattr(turbojpeg, "__version__", "?"))
    return None if version.startswith("1.") else f"PyTurboJPEG {version} is installed, and 1.8.3 or a later 1.x needed"


TURBO: Turbo | None = _load()
