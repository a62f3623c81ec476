"""Pictures of what lmdbstore measures, for a notebook cell or a file; only here matplotlib is needed."""

from __future__ import annotations

import os
from typing import Any

from lmdbstore.epochs import BenchResult
from lmdbstore.errors import MissingDependency

COLORS = {"folder": "tab:red", "store": "tab:blue"}
STYLES = {"cold": "-", "partly": "-.", "unknown": ":", "warm": "--"}


def plot_bench(result: BenchResult, path: str | os.PathLike[str] | None = None) -> Any:
    """Draw images/s over time, a line for each epoch: a slow first epoch is the long, low one.

    Parameters
    ----------
    result : BenchResult
    path : path, optional
        Write the picture here; the ending chooses the format.

    Returns
    -------
    matplotlib.figure.Figure
        Belongs to no window, and to nobody else: nothing to close.

    Raises
    ------
    MissingDependency
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency("plots need matplotlib: pip install 'lmdbstore[notebook]'") from None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot(
        title=f"{result.images:,} images, {result.bytes / 1e6:,.0f} MB, {result.options.workers} workers, "
        f"pipeline {result.options.pipeline}",
        xlabel="seconds since the start of the epoch",
        ylabel="images/s",
    )
    for epoch in result.epochs:
        label = f"{epoch.side} {epoch.number + 1}, {epoch.state}: {epoch.seconds:.1f} s"
        edges, rates = epoch.rates()
        axes.stairs(rates, edges, label=label, color=COLORS[epoch.side], linestyle=STYLES[epoch.state])
    axes.set_ylim(bottom=0)
    axes.legend()
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
