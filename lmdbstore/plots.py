"""Plots of what is in a store, and of what a benchmark measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lmdbstore.errors import OptionError
from lmdbstore.pictures import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, Picture
from lmdbstore.selection import Selection, count_values, default_label

if TYPE_CHECKING:
    from lmdbstore.epochs import BenchResult

COLORS = {"folder": VERMILLION, "store": BLUE}
STYLES = {"cold": "-", "partly": "-.", "unknown": ":", "warm": "--"}
PART_COLORS = {"disk": VERMILLION, "read": ORANGE, "decode": BLUE, "augment": SKY, "transfer": GREEN}
PART_NAMES = {"disk": "waiting for the disk"}
MOST_STRIPS = 40  # of a residency map: more lines than that can't be told apart
SIZE_BINS = 60
FEW_SIZES = 12  # distinct ones: up to here each is a disc with its count
LARGEST_DISC, SMALLEST_DISC = 1200, 30  # points squared
FEW_CLASSES = 30  # up to here they are drawn at equal distances


def plot_summary(selection: Selection, *, label: str | None = None) -> Picture:
    """Draw four views of a store or a selection: classes, sizes, bytes, formats (see `Inspected.summary`).

    Raises
    ------
    MissingColumn
    """
    picture = Picture((10, 7), layout="constrained")
    picture.suptitle(f"{selection.store.path.name}: {len(selection):,} images", fontsize=12, parse_math=False)
    (classes, sizes), (lengths, formats) = picture.subplots(2, 2)
    _draw_classes(classes, selection, label or default_label(selection.store))
    _draw_sizes(sizes, *selection.sizes)
    _draw_lengths(lengths, selection.column("length"))
    _draw_formats(formats, selection.formats)
    return picture


def plot_bench(result: BenchResult, path: str | os.PathLike[str] | None = None) -> Picture:
    """Draw images/s over time, a line for each epoch: a slow first epoch is the long, low one.

    Parameters
    ----------
    result : BenchResult
    path : path, optional
        Write the picture here; the ending chooses the format.

    Raises
    ------
    LmdbstoreError
        No such format.
    """
    picture = Picture((9, 4.5), layout="constrained")
    axes = picture.add_subplot(
        title=_bench_title(result), xlabel="time since the start of the epoch (s)", ylabel="images/s"
    )
    for epoch in result.epochs:
        label = f"{epoch.side} {epoch.number + 1}, {epoch.state}: {epoch.seconds:.1f} s"
        edges, rates = epoch.rates()
        axes.stairs(
            rates, edges, label=label, color=COLORS[epoch.side], linestyle=STYLES[epoch.state], baseline=None,
            linewidth=2.2 if epoch.number == 0 else 1.2,
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(title="epoch")
    if path is not None:
        picture.save(path)
    return picture


def plot_split(result: BenchResult) -> Picture:
    """Draw where the seconds of each epoch went: a bar an epoch, a colour for each part."""
    epochs = sorted(result.epochs, key=lambda epoch: (epoch.side, epoch.number))
    picture = Picture((9, 1.4 + 0.45 * len(epochs)), layout="constrained")
    axes = picture.add_subplot(title=f"Where the time goes; {_bench_title(result)}", xlabel="seconds of the epoch")
    names = [f"{epoch.side} {epoch.number + 1}, {epoch.state}" for epoch in epochs]
    left = np.zeros(len(epochs))
    for part, color in PART_COLORS.items():
        seconds = np.array([result.split(epoch)[part] for epoch in epochs])
        axes.barh(names, seconds, left=left, color=color, label=PART_NAMES.get(part, part), height=0.7)
        left += seconds
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.1f} s", va="center")
    axes.set_xlim(0, left.max() * 1.12)
    axes.invert_yaxis()
    picture.legend(loc="outside lower center", ncols=len(PART_COLORS), frameon=False)
    return picture


def plot_residency(maps: Mapping[str, Any], *, size: int) -> Picture:
    """Draw which parts of a file are in memory, a strip for each moment.

    Parameters
    ----------
    maps : mapping of str to ndarray or None
        Moment -> `pagecache.residency_map`; all of the same length.  None: the kernel won't tell.
    size : int
        Of the file, in bytes.

    Raises
    ------
    OptionError
        No strip, or more than can be told apart.
    """
    if not 1 <= len(maps) <= MOST_STRIPS:
        raise OptionError(f"{len(maps)} residency maps; 1 to {MOST_STRIPS} expected")
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("resident", ["#EEEEEE", BLUE])
    bins = next((len(strip) for strip in maps.values() if strip is not None), 1)
    rows = np.array([np.full(bins, np.nan) if strip is None else strip for strip in maps.values()], float)
    picture = Picture((9, 1.5 + 0.36 * len(maps)), layout="constrained")
    axes = picture.add_subplot(title="What of the file is in memory", xlabel="position in the file (MB)")
    image = axes.imshow(
        rows, aspect="auto", cmap=colors, vmin=0, vmax=1, interpolation="nearest",
        extent=(0, size / 1e6, len(maps) - 0.5, -0.5),
    )  # fmt: skip
    axes.set_yticks(range(len(maps)), [_strip_name(name, strip) for name, strip in maps.items()])
    axes.hlines(np.arange(len(maps) - 1) + 0.5, 0, size / 1e6, color="white", linewidth=3)
    axes.spines[:].set_visible(False)
    picture.colorbar(image, ax=axes, label="resident", ticks=[0, 1], format="{x:.0%}", aspect=25, pad=0.01)
    return picture


def _strip_name(name: str, strip: Any) -> str:
    return f"{name}: unknown" if strip is None else f"{name}: {np.mean(strip):.0%}"


def _bench_title(result: BenchResult) -> str:
    options = result.options
    return (
        f"{result.images:,} images, {result.bytes / 1e6:,.0f} MB, {options.workers} workers, "
        f"pipeline {options.pipeline}"
    )


def _draw_classes(axes: Any, selection: Selection, label: str | None) -> None:
    if label is None or not len(selection):
        _say_nothing(axes, "no column but the id" if label is None else "no images", "Images per class")
        return
    counts = count_values(selection.column(label))[1]
    axes.step(np.arange(1, len(counts) + 1), counts, where="mid", color=BLUE, linewidth=2)
    if len(counts) == 1:
        axes.plot([1], counts, "o", color=BLUE)
    axes.fill_between(np.arange(1, len(counts) + 1), counts, 0.8, step="mid", color=BLUE, alpha=0.15)
    median = int(np.median(counts))
    axes.axhline(median, color=VERMILLION, linestyle="--", label=f"median: {median:,} images")
    axes.set_title(f"Images per class: {label}, {len(counts):,} classes", parse_math=False)
    axes.set(xlabel="class, the largest first", ylabel="images", yscale="log", ylim=(0.8, None))
    _plain_ticks(axes.yaxis)
    if len(counts) > FEW_CLASSES:
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
    axes.legend()


def _draw_sizes(axes: Any, width: np.ndarray, height: np.ndarray) -> None:
    axes.set(title="Width × height", xlabel="width (pixels)", ylabel="height (pixels)")
    known = (width > 0) & (height > 0)
    if not known.any():
        _say_nothing(axes, "not known", "Width × height")
        return
    sizes = width[known].astype(np.int64) << 32 | height[known]
    distinct, counts = np.unique(sizes, return_counts=True)
    if len(distinct) <= FEW_SIZES:
        _draw_few_sizes(axes, distinct >> 32, distinct & 0xFFFFFFFF, counts)
    else:
        _draw_many_sizes(axes, width[known], height[known])


def _draw_few_sizes(axes: Any, width: np.ndarray, height: np.ndarray, counts: np.ndarray) -> None:
    area = np.maximum(LARGEST_DISC * counts / counts.max(), SMALLEST_DISC)
    axes.scatter(width, height, s=area, color=BLUE, alpha=0.6)
    for x, y, count in zip(width, height, counts):
        axes.annotate(f"{count:,}", (x, y), ha="center", va="center", fontsize=8)
    axes.margins(0.15)
    axes.set_title(f"Width × height: {len(counts)} sizes, images of each")


def _draw_many_sizes(axes: Any, width: np.ndarray, height: np.ndarray) -> None:
    from matplotlib.colors import LogNorm

    limits = [(float(side.min()), float(side.max()) + 1) for side in (width, height)]
    counts, x, y = np.histogram2d(width, height, bins=SIZE_BINS, range=limits)
    shown = np.ma.masked_equal(counts.T, 0)
    drawn = axes.pcolormesh(x, y, shown, cmap="cividis_r", norm=LogNorm(1, max(2, counts.max())))
    bar = axes.figure.colorbar(drawn, ax=axes, label="images")
    _plain_ticks(bar.ax.yaxis)


def _draw_lengths(axes: Any, lengths: np.ndarray) -> None:
    if not len(lengths):
        _say_nothing(axes, "no images", "Size of the files")
        return
    axes.hist(lengths / 1e3, bins=int(np.clip(2 * len(lengths) ** 0.5, 10, SIZE_BINS)), color=BLUE)
    axes.yaxis.get_major_locator().set_params(integer=True)
    median = float(np.median(lengths)) / 1e3
    axes.axvline(median, color=VERMILLION, linestyle="--", label=f"median: {median:,.0f} kB")
    axes.set(title=f"Size of the files: {lengths.sum() / 1e6:,.1f} MB in all", xlabel="kB an image", ylabel="images")
    axes.legend()


def _draw_formats(axes: Any, formats: dict[str, int]) -> None:
    names, counts = list(formats), list(formats.values())
    bars = axes.barh(names, counts, color=[BLUE, ORANGE, GREEN, PURPLE][: len(names)], height=0.5)
    axes.bar_label(bars, labels=[f"{count:,}" for count in counts], padding=4)
    axes.set(title="Formats", xlabel="images", xlim=(0, max(counts, default=1) * 1.18))
    axes.set_ylim(len(names) - 0.2, -0.8)


def _plain_ticks(*axis: Any) -> None:
    """Write 1, 10, 100 at a logarithmic axis, and nothing between."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for one in axis:
        one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else ""))
        one.set_minor_formatter(NullFormatter())


def _say_nothing(axes: Any, text: str, title: str) -> None:
    axes.set_title(title)
    axes.text(0.5, 0.5, text, ha="center", color=GREY, transform=axes.transAxes)
    axes.set_axis_off()
