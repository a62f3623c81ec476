"""All sides of a pipeline, an epoch each in turn, every side in a process of its own that waits for its turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from peers.registry import SIDES, Entry

TOOLS = Path(__file__).resolve().parent.parent
SHARED = ("torch", "torchvision", "numpy", "albumentations", "opencv-python-headless", "PyTurboJPEG")
Runs = dict[str, list[dict[str, Any]]]


class Absent(Exception):
    """A side that doesn't run here, and why."""


class Racer:
    """The process of a side."""

    def __init__(self, job: str, name: str, log: Path) -> None:
        quiet = {"NO_ALBUMENTATIONS_UPDATE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(TOOLS)}
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "peers.side", job, name], env={**os.environ, **quiet}, cwd=TOOLS, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """Read the figures of an epoch."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            said = self.log.read_text(errors="replace").strip().splitlines() or [f"exit {self.process.wait()}"]
            raise Absent(said[-1])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self) -> dict[str, Any]:
        """Run an epoch."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        figures = self.answer()
        rate, cpu_ms = figures["images"] / figures["seconds"], 1e3 * figures["cpu_seconds"] / figures["images"]
        return {**figures, "images_per_second": rate, "cpu_ms": cpu_ms, "load": os.getloadavg()[0]}

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def measure(options: Any) -> dict[str, Any]:
    """Run every pipeline."""
    result: dict[str, Any] = {"load_before": os.getloadavg(), "versions": versions(), "pipelines": {}}
    with folder(options.work) as work:
        for pipeline in options.pipelines:
            result["pipelines"][pipeline] = measure_pipeline(options, pipeline, work)
    return result


@contextmanager
def folder(work: Path | None) -> Iterator[Path]:
    """Give the folder of the converted photos: that one, or one for now."""
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
        yield work.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="bench_peers-") as made:
        yield Path(made)


def measure_pipeline(options: Any, pipeline: str, work: Path) -> dict[str, Any]:
    """Start the sides of a pipeline one after the other, then run their epochs in turn."""
    skipped: dict[str, str] = {}
    samples: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        racers: dict[str, Racer] = {}
        for name, entry in SIDES.items():
            if pipeline not in entry.pipelines or (options.sides and name not in options.sides):
                continue
            racer = Racer(job(options, pipeline, work, entry), name, work / "side.log")
            stack.callback(racer.stop)
            try:
                samples[name] = racer.answer()
                racers[name] = racer
            except Absent as absent:
                skipped[name] = str(absent)
            say(f"{pipeline}: {name}: {samples.get(name) or 'skipped: ' + skipped[name]}")
        runs = in_turn(racers, options.epochs, pipeline)
    return {"skipped": skipped, "samples": samples, "runs": runs, "summary": summary(runs)}


def in_turn(racers: dict[str, Racer], epochs: int, pipeline: str) -> Runs:
    """Run the epochs; each round begins with another side."""
    names = list(racers)
    runs: Runs = {name: [] for name in names}
    for number in range(epochs):
        shift = number * len(names) // epochs
        for name in names[shift:] + names[:shift]:
            runs[name].append(racers[name].run())
            say(f"{pipeline} {number + 1}/{epochs} {name}: {runs[name][-1]['images_per_second']:.0f}/s")
    return runs


def job(options: Any, pipeline: str, work: Path, entry: Entry) -> str:
    """Return what a side is told."""
    paths = {"csv": str(options.train_csv.resolve()), "images": str(options.images.resolve()),
             "data": str(work / f"{entry.module}-{options.limit}")}  # fmt: skip
    numbers = {"limit": options.limit, "batch": options.batch_size, "workers": options.workers}
    return json.dumps({**paths, **numbers, "pipeline": pipeline})


def summary(runs: Runs) -> dict[str, dict[str, float]]:
    """Return the medians of each side, and the speed as a multiple of the fastest peer's."""
    found = {
        name: {of: statistics.median(run[of] for run in side) for of in ("images_per_second", "cpu_ms")}
        for name, side in runs.items()
    }
    peers = [row["images_per_second"] for name, row in found.items() if not SIDES[name].ours]
    for row in found.values():
        row["against_fastest_peer"] = row["images_per_second"] / max(peers, default=row["images_per_second"])
    return found


def versions() -> dict[str, str]:
    """Return the versions of what is installed of the peers and what they share."""
    found = {}
    for name in sorted({*SHARED, *(entry.distribution for entry in SIDES.values())}):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def table(result: dict[str, Any]) -> str:
    """Return the medians as Markdown tables."""
    lines: list[str] = []
    for pipeline, of in result["pipelines"].items():
        lines += [f"| {pipeline} | images/s (slowest to fastest epoch) | x fastest peer | CPU ms an image |",
                  "|---|---|---|---|"]  # fmt: skip
        for name, row in of["summary"].items():
            rates = [run["images_per_second"] for run in of["runs"][name]]
            lines.append(f"| {name} | {row['images_per_second']:.0f} ({min(rates):.0f} to {max(rates):.0f}) "
                         f"| {row['against_fastest_peer']:.2f} | {row['cpu_ms']:.2f} |")  # fmt: skip
        lines += [f"| {name} | skipped: {reason} | | |" for name, reason in of["skipped"].items()]
        lines.append("")
    return "\n".join(lines)


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, file=sys.stderr, flush=True)
