"""A side in a process of its own: each line on standard input is an epoch to run, its figures are the answer.

Run as ``python -m peers.side JOB SIDE``, the job as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peers.job import Job
from peers.registry import SIDES, Entry

_TICKS = os.sysconf("SC_CLK_TCK")


def opened(entry: Entry, job: Job) -> Iterable[Any]:
    """Convert the photos if that hasn't been done, and return what iterates them."""
    module = importlib.import_module(f"peers.{entry.module}")
    if hasattr(module, "convert") and not job.data.exists():
        half = job.data.with_name(job.data.name + ".half")
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        module.convert(job, half)
        half.rename(job.data)
    found: Iterable[Any] = getattr(module, entry.function)(job)
    return found


def epoch(loader: Iterable[Any]) -> dict[str, Any]:
    """Run an epoch; return its time, processor time of all processes of the session, and images."""
    if hasattr(loader, "ready"):
        loader.ready()
    count, before, start = 0, processor(), time.perf_counter()
    for images, _ in loader:
        count += len(images)
    seconds = time.perf_counter() - start
    used = processor() - before
    settle()
    return {"images": count, "seconds": seconds, "cpu_seconds": used}


def settle() -> None:
    """Wait until nothing works ahead any more (DALI does), at the cost of the side that is next."""
    before = -1.0
    while (now := processor()) - before > 0.03:
        before = now
        time.sleep(0.3)


def sample(loader: Iterable[Any]) -> dict[str, Any]:
    """Run an epoch and describe what comes out."""
    first, count, labels = None, 0, set()
    for images, classes in loader:
        first = images if first is None else first
        count += len(images)
        labels |= {int(label) for label in classes.flatten()}
    numbers = first.double()  # type: ignore[union-attr]
    return {"images": count, "classes": len(labels), "shape": list(numbers.shape), "dtype": str(first.dtype),  # type: ignore[union-attr]
            "mean": round(numbers.mean().item(), 3), "std": round(numbers.std().item(), 3)}  # fmt: skip


def processor() -> float:
    """Return the seconds of processor time of the living processes of this session, and of their ended children."""
    total, session = 0, os.getsid(0)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[3]) == session:
            total += sum(map(int, fields[11:15]))
    return total / _TICKS


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    facts = json.loads(sys.argv[1])
    paths = {name: Path(facts.pop(name)) for name in ("csv", "images", "data")}
    loader = opened(SIDES[sys.argv[2]], Job(**facts, **paths))
    described = sample(loader)
    settle()
    answers.write(json.dumps(described) + "\n")
    for _ in sys.stdin:
        answers.write(json.dumps(epoch(loader)) + "\n")


if __name__ == "__main__":
    main()
