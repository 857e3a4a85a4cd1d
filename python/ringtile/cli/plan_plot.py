"""The pictures of a plan: what each rank computes and receives when, and who sends what to whom; a rank's memory."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from matplotlib.figure import Figure
from torch import Tensor

from ringtile.sequence.price import COST_KINDS, Price

_COLORS = dict(zip(COST_KINDS, ("tab:gray", "tab:blue", "tab:orange", "tab:red", "tab:green"), strict=True))


def plot_plan(path: pathlib.Path, price: Price) -> None:
    """price: with events. Above, a line for each rank's kernels, and one below it for the messages that it receives."""
    world_size = price.num_bytes.size(0)
    figure = Figure(figsize=(11, 3 + 0.5 * world_size), layout="constrained")
    timeline, matrix = figure.subplots(1, 2, width_ratios=[3, 1])
    begin = 0.0
    for which, cost in (("forward", price.forward), ("backward", price.backward)):
        _draw(timeline, cost.events, begin)
        timeline.text(begin * 1e3, -0.6, which)
        begin += float(cost.seconds.max())
        timeline.axvline(begin * 1e3, color="black", linewidth=0.5)
    timeline.set_yticks(range(world_size), [f"rank {rank}" for rank in range(world_size)])
    timeline.invert_yaxis()
    timeline.set_xlabel("ms")
    timeline.set_title(f"{price.scheme}: {price.seconds * 1e3:.3g} ms predicted")
    timeline.legend(
        handles=[timeline.barh(-1, 0, color=color, label=kind) for kind, color in _COLORS.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.15),
        ncols=len(_COLORS),
    )
    timeline.set_ylim(world_size - 0.4, -0.9)
    megabytes = price.num_bytes / 1e6
    matrix.imshow(megabytes, cmap="Blues")
    for source, to in megabytes.nonzero().tolist():
        if world_size <= 16:
            matrix.text(to, source, f"{float(megabytes[source, to]):.3g}", ha="center", va="center", fontsize=8)
    matrix.set_xlabel("to rank")
    matrix.set_ylabel("from rank")
    matrix.set_title("MB, forward and backward")
    figure.savefig(path)


def _draw(timeline: object, events: Tensor, at: float) -> None:
    for kind, _, to, _, begin, end in events.tolist():
        name = COST_KINDS[int(kind)]
        place = to if name == "kernel" else to + 0.3
        height = 0.3 if name == "kernel" else 0.2
        timeline.barh(place, (end - begin) * 1e3, height, left=(at + begin) * 1e3, color=_COLORS[name], alpha=0.8)  # type: ignore[attr-defined]


def plot_memory(path: pathlib.Path, bars: Mapping[str, Mapping[str, int]], memory: int | None) -> None:
    """A stacked bar of bytes by part for each plan, and a line at what a device has."""
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
