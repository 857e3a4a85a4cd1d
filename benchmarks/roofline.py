"""The roofline picture (Williams, Waterman, Patterson, 2009): what was reached, under the machine's two bounds."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.rows import Row

MARKERS = "osD^vP*X<>"


def plot_roofline(path: pathlib.Path, rows: Sequence[Row], peak_flops_per_s: float, copy_bytes_per_s: float) -> None:
    """Writes the picture: useful flops per second over flops per byte that must move, a mark for each row.

    A point is below min(peak_flops_per_s, intensity * copy_bytes_per_s). A color is a backend, a shape a case and
    dtype; forward marks are hollow.
    """
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    shown = [row for row in rows if row["pass"] != "forward+backward"]
    intensities = [row["flops"] / row["bytes"] for row in shown]
    ridge = peak_flops_per_s / copy_bytes_per_s
    low, high = min([ridge, *intensities]) / 2, max([ridge, *intensities]) * 2
    axes.plot(
        [low, ridge, high],
        [low * copy_bytes_per_s / 1e9, peak_flops_per_s / 1e9, peak_flops_per_s / 1e9],
        color="black",
    )
    axes.annotate(f"{copy_bytes_per_s / 1e9:.0f} GB/s", (low, low * copy_bytes_per_s / 1e9))
    axes.annotate(f"{peak_flops_per_s / 1e9:.0f} GFLOP/s, multiply-add", (ridge, peak_flops_per_s / 1e9), va="bottom")
    backends = list(dict.fromkeys(row["backend"] for row in shown))
    shapes = list(dict.fromkeys((row["case"], row["dtype"]) for row in shown))
    for row, intensity in zip(shown, intensities, strict=True):
        color = f"C{backends.index(row['backend'])}"
        axes.plot(
            intensity,
            row["flops"] / row["median_s"] / 1e9,
            MARKERS[shapes.index((row["case"], row["dtype"])) % len(MARKERS)],
            color=color,
            fillstyle="none" if row["pass"] == "forward" else "full",
        )
    for index, backend in enumerate(backends):
        axes.plot([], [], "s", color=f"C{index}", label=backend)
    for index, (case, dtype) in enumerate(shapes):
        axes.plot([], [], MARKERS[index % len(MARKERS)], color="gray", label=f"{case} {dtype}")
    axes.plot([], [], "s", color="gray", fillstyle="none", label="hollow: forward")
    axes.set(xscale="log", yscale="log", xlabel="useful flops per byte of input and output", ylabel="useful GFLOP/s")
    axes.legend(fontsize="small")
    figure.savefig(path)
