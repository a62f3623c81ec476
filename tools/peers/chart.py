"""The result as a bar chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

from peers.registry import SIDES

matplotlib.use("Agg")
from matplotlib import pyplot

OURS, PEER = "#D55E00", "#9AA5B1"  # told apart by colour-blind people, and in grey
TITLES = {"seed": "Resize 400, Rotate, ChannelDropout, Normalize", "rrc": "RandomResizedCrop 224, flip, Normalize"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw images per second, a panel a pipeline."""
    found = {name: of["summary"] for name, of in result["pipelines"].items() if of["summary"]}
    heights = [len(rows) for rows in found.values()]
    figure, panels = pyplot.subplots(len(found), 1, figsize=(7.5, 0.25 * sum(heights) + 0.75 * len(found)),
                                     height_ratios=heights, squeeze=False, layout="constrained")  # fmt: skip
    for panel, (pipeline, rows) in zip(panels[:, 0], found.items()):
        bars(panel, rows)
        panel.set_title(f"{pipeline}: {TITLES[pipeline]}; images/s, warm", loc="left", fontsize=9)
    figure.savefig(path, dpi=90, metadata={"Software": None}, pil_kwargs={"optimize": True})
    pyplot.close(figure)


def bars(panel: Any, rows: dict[str, dict[str, float]]) -> None:
    """Draw a panel."""
    names = sorted(rows, key=lambda name: rows[name]["images_per_second"])
    rates = [rows[name]["images_per_second"] for name in names]
    drawn = panel.barh(names, rates, color=[OURS if SIDES[name].ours else PEER for name in names])
    labels = [f"{rate:.0f}  ({rows[name]['against_fastest_peer']:.2f} x)" for name, rate in zip(names, rates)]
    panel.bar_label(drawn, labels, padding=3, fontsize=7)
    panel.set_xlim(0, max(rates) * 1.17)
    panel.tick_params(labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
