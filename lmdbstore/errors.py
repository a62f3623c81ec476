"""The errors of lmdbstore, one tree.

    LmdbstoreError
    ├── StoreError                  the file as a whole
    │   ├── NotAStore       (ValueError)   nothing there, or something else
    │   ├── CorruptStore    (ValueError)   was a store once; damaged or cut short
    │   ├── FormatVersionError (ValueError) written by a newer lmdbstore
    │   ├── StoreChanged    (RuntimeError) another store stands under this name now
    │   └── StoreClosed     (ValueError)   used after close()
    ├── MissingKey          (KeyError)     no image of this id
    ├── MissingColumn       (KeyError)     no column of this name
    ├── LabelError          (ValueError)   a column that can't serve as label
    ├── DecodeError         (ValueError)   bytes that don't become pixels
    │   └── ImageTooLarge                  refused by its header, before any allocation
    ├── OptionError         (ValueError)   an argument that makes no sense; quotes it
    ├── TemplateError       (ValueError)   a path template of the wrong form
    ├── PathError           (ValueError)   an id that makes no path inside its folder
    ├── ExportError         (RuntimeError) nothing was exported
    ├── IngestError         (RuntimeError) nothing was published
    │   ├── CsvError        (ValueError)   the csv as a whole
    │   ├── IngestBusy                     another ingest writes this store
    │   ├── OptionsChanged                 an interrupted ingest had other options
    │   ├── StoreExists     (FileExistsError) the name is taken
    │   └── RowsRejected                   --strict, and a row can't be stored
    ├── ReadError           (OSError)      the disk failed under a read
    ├── NotCold             (RuntimeError) what was evicted is still in memory
    └── MissingDependency   (ImportError)  an optional library isn't there

Every message says where, what was found, and what to do.  All of them survive
pickling, since they cross from DataLoader workers to the training process.
"""

from __future__ import annotations


class LmdbstoreError(Exception):
    """Anything that lmdbstore itself raises."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class StoreError(LmdbstoreError):
    """The store file can't be used."""


class NotAStore(StoreError, ValueError):
    """There is no store at this path."""


class CorruptStore(StoreError, ValueError):
    """The file is a store, and damaged."""


class FormatVersionError(StoreError, ValueError):
    """The store was written in a format that this version doesn't know."""


class StoreChanged(StoreError, RuntimeError):
    """The path holds another store than the one that was opened first."""


class StoreClosed(StoreError, ValueError):
    """The store was closed."""


class MissingKey(LmdbstoreError, KeyError):
    """The store has no image of this id."""


class MissingColumn(LmdbstoreError, KeyError):
    """The store has no column of this name."""


class LabelError(LmdbstoreError, ValueError):
    """The column can't serve as a label as asked."""


class DecodeError(LmdbstoreError, ValueError):
    """Bytes that don't become pixels.

    Parameters
    ----------
    reason : str
        What is wrong with the bytes.
    where : str, optional
        The id and the store, once they are known (see `at`).
    """

    def __init__(self, reason: str, where: str = "") -> None:
        super().__init__(reason, where)
        self.reason, self.where = reason, where

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" if self.where else self.reason

    def at(self, where: str) -> DecodeError:
        """Return the same error with the place where it happened."""
        return type(self)(self.reason, where)


class ImageTooLarge(DecodeError):
    """The header declares more pixels than the limit allows."""


class OptionError(LmdbstoreError, ValueError):
    """An argument that makes no sense."""


class TemplateError(LmdbstoreError, ValueError):
    """A path template isn't of the form that it must have."""


class PathError(LmdbstoreError, ValueError):
    """An id makes no path inside the folder."""


class ExportError(LmdbstoreError, RuntimeError):
    """An export that left nothing behind."""


class IngestError(LmdbstoreError, RuntimeError):
    """An ingest that published nothing."""


class CsvError(IngestError, ValueError):
    """The csv can't be read as a table with an id column."""


class IngestBusy(IngestError):
    """Another ingest is writing this store."""


class OptionsChanged(IngestError):
    """An interrupted ingest of this store had other options or another csv."""


class StoreExists(IngestError, FileExistsError):
    """The output path is taken."""


class RowsRejected(IngestError):
    """A row can't be stored, and the caller asked for all or nothing."""


class ReadError(LmdbstoreError, OSError):
    """The disk failed under a read."""


class NotCold(LmdbstoreError, RuntimeError):
    """A measurement was to start with nothing in memory, and something is."""


class MissingDependency(LmdbstoreError, ImportError):
    """An optional library isn't installed."""
