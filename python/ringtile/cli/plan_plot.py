"""The picture of a plan: what each rank computes and receives when, by the model, and who sends what to whom."""

from __future__ import annotations

import pathlib

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
