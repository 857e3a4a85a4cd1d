"""How `python -m benchmarks` measures: candidates take turns, medians count, and disturbed samples are retaken.

Units: seconds, bytes, flops (2 per multiply-add), flops per second.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from ringtile import ops
from torch import Tensor

PASSES = ("forward", "backward", "forward+backward")
SAMPLE_SECONDS = 0.05  # a sample repeats its run for this long, so that the cost of reading the clock vanishes
MAX_WAITED = 0.02  # a sample whose threads waited for a core for a larger share of its time is retaken
SLEEP_CYCLES = 5_000_000  # keeps a GPU busy for 2 to 3 ms while the CPU queues an attention call
MATMUL_SIZE = 8192  # rows and columns of the matrices that measure a GPU's peak
COPY_BYTES = 1 << 28  # larger than any cache
PROC = pathlib.Path("/proc")  # Linux only; other systems go without these numbers


class Sample(NamedTuple):
    """One run, or the mean of several."""

    seconds: dict[str, float]  # by pass
    waited: float  # time that runnable threads of this process waited for a core, over the time of the sample


class Summary(NamedTuple):
    """The samples of one candidate and pass."""

    median: float
    spread: float  # interquartile range over the median
    waited: float  # the largest of any sample, see Sample


Sampler = Callable[[], Sample]


def take_turns(samplers: Mapping[str, Sampler], repeats: int) -> dict[str, dict[str, Summary]]:
    """Samples the candidates in rotation until each has `repeats` undisturbed samples; summaries by candidate and pass.

    A slow phase of the machine then hits all candidates alike, so their ratios hold. On a machine that is never quiet,
    sampling stops after 2 * repeats samples and the least disturbed half counts.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in samplers}
    for _ in range(2 * repeats):
        for name, sampler in samplers.items():
            if sum(sample.waited <= MAX_WAITED for sample in samples[name]) < repeats:
                samples[name].append(sampler())
    return {
        name: summaries(sorted(taken, key=lambda sample: sample.waited)[:repeats]) for name, taken in samples.items()
    }


def summaries(samples: list[Sample]) -> dict[str, Summary]:
    """Summarizes samples by pass; a single sample has spread 0."""
    waited = max(sample.waited for sample in samples)
    found = {}
    for which in samples[0].seconds:
        values = [sample.seconds[which] for sample in samples]
        median, distance = statistics.median(values), 0.0
        if len(values) > 1:
            first, _, third = statistics.quantiles(values, n=4, method="inclusive")
            distance = third - first
        found[which] = Summary(median, distance / median, waited)
    return found


def mean_sample(run: Callable[[], dict[str, float]], at_least: float | None = None, threads: str = "*") -> Sample:
    """Repeats a run for at_least (SAMPLE_SECONDS) seconds, once or more, averaged. threads: as in waited_seconds."""
    at_least = SAMPLE_SECONDS if at_least is None else at_least
    total: dict[str, float] = {}
    num_runs, waited_before, began = 0, waited_seconds(threads), time.perf_counter()
    while num_runs == 0 or time.perf_counter() - began < at_least:
        for which, seconds in run().items():
            total[which] = total.get(which, 0.0) + seconds
        num_runs += 1
    waited = (waited_seconds(threads) - waited_before) / (time.perf_counter() - began)
    return Sample({which: seconds / num_runs for which, seconds in total.items()}, waited)


def waited_seconds(threads: str = "*") -> float:
    """The total time that runnable threads of this process have waited for a core, as the scheduler counts it.

    threads: a glob pattern of thread ids.
    """
    waited = 0
    for thread in (PROC / "self/task").glob(f"{threads}/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            waited += int(thread.read_text().split()[1])  # running, waiting (ns), time slices
    return waited / 1e9


def timed_passes(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], object] | None, device: str = "cpu"
) -> dict[str, float]:
    """The seconds of one forward and of the backward of its result; on a GPU, those of the GPU's work alone."""
    if device == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]  # the CPU runs ahead, as in training
    marks = [_mark(device)]
    out = forward()
    marks.append(_mark(device))
    if backward is None:
        return {"forward": _seconds(*marks)}
    backward(out)
    marks.append(_mark(device))
    spans = [(marks[0], marks[1]), (marks[1], marks[2]), (marks[0], marks[2])]
    return {which: _seconds(*span) for which, span in zip(PASSES, spans, strict=True)}


def _mark(device: str) -> float | torch.cuda.Event:
    """A timestamp: now, or on a GPU the moment its queued work is done."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(began: float | torch.cuda.Event, ended: float | torch.cuda.Event) -> float:
    if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
    return float(ended) - float(began)  # type: ignore[arg-type]


# ---- the machine --------------------------------------------------------------------------------


class MatmulPeak:
    """The peak of a GPU's matrix units, as reached by torch's product of two square bfloat16 matrices."""

    def __init__(self) -> None:
        self.left, self.right = (
            torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        self.flops = 2.0 * MATMUL_SIZE**3

    def run(self) -> dict[str, float]:
        return {"peak": timed_passes(lambda: self.left @ self.right, None, "cuda")["forward"]}


def copy_bytes_per_s(repeats: int, device: str = "cpu") -> float:
    """Memory bandwidth of torch's threads or of a GPU: bytes read and written by a copy too large for any cache."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    run = partial(timed_passes, lambda: target.copy_(source), None, device)
    copy = take_turns({"copy": lambda: mean_sample(run)}, repeats)
    return 2 * COPY_BYTES / copy["copy"]["forward"].median


def machine(device: str = "cpu") -> dict[str, object]:
    """The facts about the machine that a reader needs to judge the numbers."""
    gpu: dict[str, object] = {}
    if device == "cuda":
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        driver: int = importlib.import_module("ringtile._cuda").DRIVER_VERSION  # of CUDA: 1000 major + 10 minor
        gpu = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": driver, "cudnn": cudnn}
        gpu["cuda_isa"] = os.environ.get("RINGTILE_CUDA_ISA") or "the best of the GPU"
    return gpu | {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "isa": ops.cpu_isa(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
    }


def cpu_name() -> str:
    """Return the CPU's model name."""
    info = Path("/proc/cpuinfo")  # Linux only
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
