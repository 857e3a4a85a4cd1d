"""Reports a training run: a comparison of two runs, a plot of the losses, a printed summary."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from ringtile.cli.output import table, write_output

# Two runs of the same training may differ by this much. Losses and norms are float32 sums of the same terms in another
# order: an ulp is 1.2e-7 relative, a sum is off by a few, and every step starts from weights that are off as much.
MAX_REL_LOSS_DIFF = 1e-6
MAX_REL_GRAD_NORM_DIFF = 1e-5
SHOWN_STEPS = 10  # of a printed loss curve
DATA_CHANGED = "data.files changed between the two runs; expected the same files in both: run it again"


def rel_diffs(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """|value - reference| / |reference| of every pair."""

    def rel_diff(value: float, expected: float) -> float:
        if value == expected:
            return 0.0
        return abs(value - expected) / abs(expected) if expected else math.inf

    return [rel_diff(*pair) for pair in zip(values, reference, strict=True)]


def max_rel_diff(values: Sequence[float], reference: Sequence[float]) -> float:
    """The largest of rel_diffs; NaN if any is NaN, infinite if the counts differ."""
    if len(values) != len(reference):
        return math.inf
    diffs = rel_diffs(values, reference)
    return math.nan if any(map(math.isnan, diffs)) else max(diffs, default=0.0)


def compare(report: dict[str, Any], single: dict[str, Any]) -> list[str]:
    """Adds the run in one process to the report; returns the failed checks, one line each."""
    report["losses_single"] = single["losses"]
    report["grad_norms_single"] = single["grad_norms"]
    report["tokens_per_s_single"] = single["tokens_per_s"]
    report["max_rel_loss_diff"] = max_rel_diff(report["losses"], single["losses"])
    report["max_rel_grad_norm_diff"] = max_rel_diff(report["grad_norms"], single["grad_norms"])
    limits = {"max_rel_loss_diff": MAX_REL_LOSS_DIFF, "max_rel_grad_norm_diff": MAX_REL_GRAD_NORM_DIFF}
    failures = [
        f"{name} is {report[name]:.2e}, expected at most {limit:.0e}"
        for name, limit in limits.items()
        if not report[name] <= limit  # also when it is NaN
    ]
    if report["data_digest"] != single["data_digest"]:
        failures.insert(0, DATA_CHANGED)
    if report["bytes_moved"] != report["plan_bytes"]:
        failures.append(f"bytes_moved is {report['bytes_moved']}, expected plan_bytes = {report['plan_bytes']}")
    return failures


def plot_losses(path: pathlib.Path, report: dict[str, Any]) -> None:
    """Writes the loss curve as an image; with a comparison both curves, and their relative difference below."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    single = report.get("losses_single")
    heights = [3] if single is None else [3, 1]
    rows = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    top = rows[0]
    top.plot(report["steps"], report["losses"], label=ranks_of(report))
    top.set_ylabel("loss")
    if single is not None:
        top.plot(report["steps"], single, "--", label="one process")
        rows[1].plot(report["steps"], rel_diffs(report["losses"], single), ".")
        rows[1].axhline(MAX_REL_LOSS_DIFF, color="grey", linewidth=0.5)
        rows[1].set_ylabel("relative difference")
    top.legend()
    rows[-1].set_xlabel("step")
    write_output(path, figure.savefig)


def print_summary(report: dict[str, Any]) -> None:
    """The numbers of a run as a table, and the plan of its ring."""
    print(table("ringtile train", list(summary_rows(report).items())))
    if report.get("losses_single"):
        print(loss_table(report))
    if report["last_plan"] is not None:
        print("ring of one layer, last batch", report["last_plan"], sep="\n")


def loss_table(report: dict[str, Any]) -> str:
    """Both loss curves at no more than SHOWN_STEPS of their steps, the last step included."""
    curve = list(zip(report["steps"], report["losses"], report["losses_single"], strict=False))
    shown = curve[:: -math.ceil(len(curve) / SHOWN_STEPS)][::-1]
    rows = [(str(step), f"{loss:.7f}", f"{single:.7f}") for step, loss, single in shown]
    return table("loss", rows, ("step", ranks_of(report), "one process"), right=True)


def ranks_of(report: dict[str, Any]) -> str:
    """The label of the run, next to "one process"."""
    return f"{report['world_size']} ranks" if report["world_size"] > 1 else "one process"


def summary_rows(report: dict[str, Any]) -> dict[str, str]:
    """Name and text of every line of the summary."""
    losses = report["losses"]
    rows = {}
    if losses:
        rows["loss"] = f"{losses[0]:.4f} at step {report['steps'][0]}, {losses[-1]:.4f} at step {report['steps'][-1]}"
    if report["eval_losses"]:
        rows["evaluation loss"] = f"{report['eval_losses'][-1]:.4f} at step {report['eval_steps'][-1]}"
    rows["speed"] = f"{report['tokens_per_s']:,.0f} tokens/s in the median step, {report['world_size']} ranks"
    rows["peak memory"] = ", ".join(f"{peak / 2**20:,.0f}" for peak in report["peak_bytes"]) + " MiB, by rank"
    rows["bytes between ranks"] = f"{report['bytes_moved']:,} sent, {report['plan_bytes']:,} planned"
    for name, tokens in report["tile_tokens"].items():
        rows[f"{name} tiles"] = f"{tokens:,} of a rank's {report['batch_tokens']:,} tokens per batch"
    owners = sorted({entry.split(".")[0] for entry in report["patched"]})
    rows["patched"] = f"{len(report['patched'])} attributes of {', '.join(owners)}" if owners else "nothing"
    if "losses_single" in report:
        rows["against one process"] = (
            f"largest relative difference of a loss {report['max_rel_loss_diff']:.1e}, "
            f"of a gradient norm {report['max_rel_grad_norm_diff']:.1e}"
        )
    return rows
