"""The pictures of a plan: what each rank computes, and who sends what to whom; a rank's memory."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from matplotlib.figure import Figure
from torch import Tensor

from ringtile.errors import ConfigError
from ringtile.planner.layer import Plan


def check_format(path: pathlib.Path) -> None:
    """ConfigError: matplotlib writes no pictures of the format that the path's suffix names."""
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(f"--plot: {path} names no picture; expected a path that ends in .{', .'.join(formats)}")


def plot_plan(path: pathlib.Path, plan: Plan, sent: Tensor) -> None:
    """Left a bar of flops for each rank, right the bytes that each rank sends to each other: (W, W), from and to."""
    world_size = len(plan.ranks)
    figure = Figure(figsize=(11, 3 + 0.5 * world_size), layout="constrained")
    work, matrix = figure.subplots(1, 2, width_ratios=[2, 1])
    begins = [0.0] * world_size
    for name in ("forward", "backward"):
        gigaflops = [getattr(rank, f"{name}_flops") / 1e9 for rank in plan.ranks]
        work.barh(range(world_size), gigaflops, left=begins, label=name)
        begins = [begin + count for begin, count in zip(begins, gigaflops, strict=True)]
    work.set_yticks(range(world_size), [f"rank {rank}" for rank in range(world_size)])
    work.invert_yaxis()
    work.set_xlabel("GFLOP")
    work.set_title(plan.scheme)
    work.legend()
    megabytes = sent / 1e6
    matrix.imshow(megabytes, cmap="Blues")
    for source, to in megabytes.nonzero().tolist():
        if world_size <= 16:
            matrix.text(to, source, f"{float(megabytes[source, to]):.3g}", ha="center", va="center", fontsize=8)
    matrix.set_xlabel("to rank")
    matrix.set_ylabel("from rank")
    matrix.set_title("MB, forward and backward")
    figure.savefig(path)


def plot_memory(path: pathlib.Path, bars: Mapping[str, Mapping[str, int]], memory: int | None) -> None:
    """Draw a stacked bar of bytes by part for each plan, and a line at what a device has."""
    figure = Figure(figsize=(4 + 1.6 * len(bars), 5), layout="constrained")
    axes = figure.subplots()
    bottoms = dict.fromkeys(bars, 0.0)
    for part in next(iter(bars.values())):
        heights = [parts[part] / 2**30 for parts in bars.values()]
        if any(heights):
            axes.bar(list(bars), heights, bottom=list(bottoms.values()), label=part)
            bottoms = {name: bottoms[name] + height for name, height in zip(bars, heights, strict=True)}
    if memory is not None:
        axes.axhline(memory / 2**30, color="black", linestyle="--", label="a device")
    axes.set_ylabel("GiB of a rank at its peak")
    axes.tick_params(axis="x", rotation=20)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path)
