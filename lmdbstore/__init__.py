"""lmdbstore: feeds image training from one memory-mapped LMDB file."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# albumentations asks the network for its newest version whenever it is imported
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

if TYPE_CHECKING:
    from lmdbstore.dataset import ImageDataset as ImageDataset
    from lmdbstore.ingestion import IngestOptions as IngestOptions
    from lmdbstore.ingestion import ingest as ingest
    from lmdbstore.loader import BatchLoader as BatchLoader
    from lmdbstore.normalization import normalize as normalize
    from lmdbstore.samplers import BlockShuffleSampler as BlockShuffleSampler
    from lmdbstore.store import ImageStore as ImageStore
    from lmdbstore.verification import verify as verify

__version__ = "0.1.0"

# name -> module, loaded when it is first asked for (PEP 562): the import stays light
_PUBLIC = {
    "BatchLoader": "lmdbstore.loader",
    "BlockShuffleSampler": "lmdbstore.samplers",
    "ImageDataset": "lmdbstore.dataset",
    "ImageStore": "lmdbstore.store",
    "IngestOptions": "lmdbstore.ingestion",
    "LmdbstoreError": "lmdbstore.errors",
    "ingest": "lmdbstore.ingestion",
    "normalize": "lmdbstore.normalization",
    "verify": "lmdbstore.verification",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lmdbstore' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
