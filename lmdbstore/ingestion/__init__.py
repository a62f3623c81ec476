"""The write side: from a csv and a folder to a published store."""

from lmdbstore.ingestion.pipeline import IngestOptions, IngestReport, Progress, ingest

__all__ = ["IngestOptions", "IngestReport", "Progress", "ingest"]
