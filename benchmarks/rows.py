"""Shared by all subjects: comparisons of backends on a workload, and the rows of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from ringtile import ops
from ringtile.errors import ConfigError

from benchmarks.measure import PASSES, Summary

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

DEVICES = ("cpu", "cuda")

Row = dict[str, Any]
Grid = dict[str, tuple[str, ...] | tuple[int, ...]]  # by field of the workload, the values to combine


class Comparison(NamedTuple):
    """The backends to compare on one workload, a dataclass of the subject.

    memory: also measure each backend's memory.
    """

    workload: Any
    backends: tuple[str, ...]
    memory: bool = False


class Cost(NamedTuple):
    """The least a workload costs, whoever computes it, by pass: flops, and bytes read and written."""

    workload: Any
    flops: Mapping[str, int]
    num_bytes: Mapping[str, int]


class Untimed(NamedTuple):
    """Everything measured of a backend besides its time, by pass."""

    max_error: Mapping[str, float] = {}
    rms_error: Mapping[str, float] = {}
    peak_bytes: Mapping[str, int] = {}


class Measured(NamedTuple):
    """The rows of one comparison, and for each backend that was skipped the reason."""

    workload: Any
    rows: list[Row]
    skipped: dict[str, str]


def forward_backward(forward: int, backward: int) -> dict[str, int]:
    """A count by pass, given those of the forward and the backward."""
    return dict(zip(PASSES, (forward, backward, forward + backward), strict=True))


def make_rows(
    cost: Cost,
    seconds: Mapping[str, Mapping[str, Summary]],
    peak_flops_per_s: float,
    untimed: Mapping[str, Untimed],
) -> list[Row]:
    """The rows of one workload: one for each backend and pass in `seconds`.

    flops and bytes come from the cost and are equal for all backends; ratio_to maps each other backend to (its time /
    this row's time).
    """
    rows = []
    for backend, passes in seconds.items():
        for which, (median, spread, waited) in passes.items():
            others = {name: other for name, other in seconds.items() if name != backend and which in other}
            rows.append(
                {
                    **asdict(cost.workload),
                    "backend": backend,
                    "pass": which,
                    "threads": torch.get_num_threads(),
                    "median_s": median,
                    "spread": spread,
                    "waited": waited,
                    "flops": cost.flops[which],
                    "bytes": cost.num_bytes[which],
                    "peak_bytes": untimed[backend].peak_bytes.get(which),
                    "fraction_of_peak": cost.flops[which] / median / peak_flops_per_s,
                    "max_error": untimed[backend].max_error.get(which),
                    "rms_error": untimed[backend].rms_error.get(which),
                    "ratio_to": {name: other[which].median / median for name, other in others.items()},
                }
            )
    return rows


def generator_on(device: str) -> torch.Generator | None:
    """Return a generator with a seed; None on meta, whose tensors have no numbers."""
    return None if device == "meta" else torch.Generator(device).manual_seed(0)


def why_skipped(error: Exception) -> str:
    """One line saying why a backend could not run."""
    reason = next(iter(str(error).strip().splitlines()), "no reason given")
    return f"not installed: {reason}" if isinstance(error, ImportError) else f"{type(error).__name__}: {reason}"


def check_device(workload: Any, num_devices: int = 1) -> None:
    """ConfigError: there is no such device here, or are not so many of them."""
    if workload.device not in DEVICES:
        raise ConfigError(f"--device is {workload.device!r}; expected one of {', '.join(DEVICES)}")
    if workload.device == "cuda" and (reason := ops.why_not_on(0)):
        raise ConfigError(f"--device is cuda, expected cpu: ringtile's CUDA kernels are not in use here: {reason}")
    if workload.device == "cuda" and torch.cuda.device_count() < num_devices:
        raise ConfigError(
            f"--device is cuda with {num_devices} ranks; expected at most {torch.cuda.device_count()}, a GPU for each"
        )


def check_sizes(cases: Sequence[str], workload: Any) -> None:
    """ConfigError: the workload's case is none of these, a size is below 1, or its device is not here."""
    if workload.case not in cases:
        raise ConfigError(f"case is {workload.case!r}; expected one of {', '.join(cases)}")
    for name, value in vars(workload).items():
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1")
    check_device(workload)
