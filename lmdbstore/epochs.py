"""What a benchmark measured: epochs, their split, and the table; pure values, no clock, no I/O."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lmdbstore import folder
from lmdbstore.costs import Costs
from lmdbstore.errors import OptionError

WARM_SHARE = 0.99  # resident share from which an epoch is called warm; the free pages of a store are never read
BATCHES_A_STRETCH, MOST_STRETCHES = 4, 60  # of a plot
LOADERS = ("dataloader", "batch")
PARTS = ("read", "decode", "augment", "transfer")


@dataclasses.dataclass(frozen=True)
class Options:
    """What `run` was asked for; checked here.

    Raises
    ------
    OptionError
        Quotes the value.
    """

    store: Path
    csv: Path | None
    images: Path | None
    epochs: int
    workers: int
    batch_size: int
    pipeline: str
    cold: bool
    loader: str = "dataloader"

    def __post_init__(self) -> None:
        if (self.csv is None) != (self.images is None):
            raise OptionError(f"csv={self.csv}, images={self.images}: give both to measure the folder, or neither")
        for name, least in (("epochs", 1), ("workers", 0), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"{name}={getattr(self, name)}; at least {least} expected")
        if self.pipeline not in folder.PIPELINES:
            raise OptionError(f"pipeline={self.pipeline!r}; there are {', '.join(folder.PIPELINES)}")
        if self.loader not in LOADERS:
            raise OptionError(f"loader={self.loader!r}; there are {', '.join(LOADERS)}")


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One pass over all images.

    Attributes
    ----------
    side : {"folder", "store"}
    number : int
        From 0.
    resident : float or None
        Share of the side's bytes in memory at the start; None where the kernel won't tell.
    seconds, first_batch : float
        From the start to the last and to the first batch.
    disk_wait : float or None
        Seconds; counted by the store's sampler, else the difference to the warm epochs.
    timeline : tuple of (float, int)
        For each batch: seconds since the start, images so far.
    """

    side: str
    number: int
    resident: float | None
    seconds: float
    first_batch: float
    disk_wait: float | None
    timeline: tuple[tuple[float, int], ...]

    @property
    def state(self) -> str:
        """What was in memory at the start: nothing is "cold", all "warm"; else "partly" or "unknown"."""
        if self.resident is None:
            return "unknown"
        if self.resident == 0:
            return "cold"
        return "warm" if self.resident >= WARM_SHARE else "partly"

    @property
    def images(self) -> int:
        """How many images came."""
        return self.timeline[-1][1]

    @property
    def images_per_second(self) -> float:
        """Over the whole epoch."""
        return self.images / self.seconds

    def rates(self) -> tuple[list[float], list[float]]:
        """Return images/s over equal stretches of the epoch, for a plot.

        Batches come in bursts, one from each worker: a stretch holds `BATCHES_A_STRETCH` of them or more.  A batch
        counts evenly over the time since the batch before it.

        Returns
        -------
        edges : list of float
            Seconds since the start, one more than there are stretches; at most `MOST_STRETCHES` + 1.
        rates : list of float
        """
        times, totals = (np.array([0, *column], float) for column in zip(*self.timeline))
        stretches = min(MOST_STRETCHES, max(1, len(self.timeline) // BATCHES_A_STRETCH))
        edges = np.linspace(0, self.seconds, stretches + 1)
        return edges.tolist(), (np.diff(np.interp(edges, times, totals)) / np.diff(edges)).tolist()


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """What `run` measured.

    Attributes
    ----------
    options : Options
    images, bytes : int
        Of the store; the folder side has the same images.
    epochs : tuple of Epoch
        In the order in which they ran.
    costs : dict of str to Costs
        By side.
    machine : dict
        Where, when, and with which versions.
    """

    options: Options
    images: int
    bytes: int
    epochs: tuple[Epoch, ...]
    costs: dict[str, Costs]
    machine: dict[str, Any]

    def split(self, epoch: Epoch) -> dict[str, float]:
        """Return the seconds of an epoch by what they went into: disk, read, decode, augment, transfer."""
        cost, disk = self.costs[epoch.side], min(epoch.disk_wait or 0.0, epoch.seconds)
        return {"disk": disk, **{part: (epoch.seconds - disk) * getattr(cost, part) / cost.total for part in PARTS}}

    def first_to_later(self, side: str) -> float | None:
        """Return how many times as long as the later ones (their median) the first epoch took."""
        seconds = [epoch.seconds for epoch in self.epochs if epoch.side == side]
        return seconds[0] / statistics.median(seconds[1:]) if len(seconds) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers, strings, lists and dicts, for JSON."""
        derived = ("state", "images", "images_per_second")
        epochs = [
            {
                **dataclasses.asdict(epoch),
                **{name: getattr(epoch, name) for name in derived},
                "split": self.split(epoch),
            }
            for epoch in self.epochs
        ]
        options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(self.options).items()}
        return {
            "options": options,
            "machine": self.machine,
            "images": self.images,
            "bytes": self.bytes,
            "epochs": epochs,
            "costs_ms": {side: dataclasses.asdict(cost) for side, cost in self.costs.items()},
            "first_to_later": {side: self.first_to_later(side) for side in self.costs},
        }

    def table(self) -> str:
        """Return the result as lines of text for a terminal: one an epoch, in seconds; then costs and ratios."""
        return "\n".join([*self._epoch_lines(), "", *self._cost_lines(), *self._verdict_lines()])

    def _epoch_lines(self) -> Iterator[str]:
        yield "epoch  side    pages    seconds  images/s  1st batch     disk    read  decode  augment  transfer"
        for e in self.epochs:
            part = self.split(e)
            disk = "-" if e.disk_wait is None else f"{part['disk']:.2f}"
            yield (
                f"{e.number + 1:>5}  {e.side:<6}  {e.state:<7}  {e.seconds:>7.2f}  {e.images_per_second:>8.0f}  "
                f"{e.first_batch:>9.2f}  {disk:>7}  {part['read']:>6.2f}  {part['decode']:>6.2f}  "
                f"{part['augment']:>7.2f}  {part['transfer']:>8.2f}"
            )

    def _cost_lines(self) -> Iterator[str]:
        for side, c in self.costs.items():
            yield (
                f"{side}, one core, ms an image: read {c.read:.3f}, decode {c.decode:.2f}, augment {c.augment:.2f}, "
                f"transfer {c.transfer:.2f}"
            )

    def _verdict_lines(self) -> Iterator[str]:
        for side in self.costs:
            ratio = self.first_to_later(side)
            if ratio is not None:
                yield f"{side}: the first epoch took {ratio:.2f} times as long as the later ones"


def with_disk_wait(epochs: list[Epoch]) -> tuple[Epoch, ...]:
    """Fill in the wait for the disk where nobody counted it: the difference to the side's warm epochs."""
    warm: dict[str, list[float]] = {}
    for epoch in epochs:
        if epoch.state == "warm":
            warm.setdefault(epoch.side, []).append(epoch.seconds)

    def wait(epoch: Epoch) -> float | None:
        if epoch.disk_wait is not None or epoch.side not in warm:
            return epoch.disk_wait
        return 0.0 if epoch.state == "warm" else max(0.0, epoch.seconds - statistics.median(warm[epoch.side]))

    return tuple(dataclasses.replace(epoch, disk_wait=wait(epoch)) for epoch in epochs)
