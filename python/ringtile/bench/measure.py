"""How things are measured: candidates take turns, medians count; a sample that waited for a core is taken again.

Units: seconds, bytes, flops (2 a multiply-add), flops per second.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile import ops

PASSES = ("forward", "backward", "forward+backward")
SAMPLE_SECONDS = 0.05  # a sample is as many runs as take this long, so that the clock's own cost is nothing
MAX_WAITED = 0.02  # of a sample's time; more, and another is taken
SLEEP_CYCLES = 5_000_000  # of a GPU: 2 to 3 milliseconds, for what the CPU does before and in an attention call
MATMUL_SIZE = 8192  # of a GPU's peak
COPY_BYTES = 1 << 28  # larger than any cache
PROC = pathlib.Path("/proc")  # Linux; what is read there is left out elsewhere


class Sample(NamedTuple):
    """One run, or the mean of several."""

    seconds: dict[str, float]  # by pass
    waited: float  # time that threads of this process could have run and had no core, over the time of the sample


class Summary(NamedTuple):
    """The samples of one candidate and pass."""

    median: float
    spread: float  # distance of the quartiles, over the median
    waited: float  # the most of any sample, see Sample


Sampler = Callable[[], Sample]


def take_turns(samplers: Mapping[str, Sampler], repeats: int) -> dict[str, dict[str, Summary]]:
    """Samples every candidate once, then again, until each has `repeats` good samples: by candidate and pass.

    What slows the machine down for a while slows all of them down, so their ratios keep. On a machine that is never
    quiet the best half of twice as many samples counts.
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
    """By pass; a single sample has spread 0."""
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


def mean_sample(run: Callable[[], dict[str, float]], at_least: float = SAMPLE_SECONDS, threads: str = "*") -> Sample:
    """Runs for that many seconds, at least once. threads: as for waited_seconds."""
    total: dict[str, float] = {}
    num_runs, waited_before, began = 0, waited_seconds(threads), time.perf_counter()
    while num_runs == 0 or time.perf_counter() - began < at_least:
        for which, seconds in run().items():
            total[which] = total.get(which, 0.0) + seconds
        num_runs += 1
    waited = (waited_seconds(threads) - waited_before) / (time.perf_counter() - began)
    return Sample({which: seconds / num_runs for which, seconds in total.items()}, waited)


def waited_seconds(threads: str = "*") -> float:
    """How long threads of this process have stood ready without a core so far, by the scheduler's own account.

    threads: a pattern of thread ids.
    """
    waited = 0
    for thread in (PROC / "self/task").glob(f"{threads}/schedstat"):
        with contextlib.suppress(OSError):  # the thread has ended
            waited += int(thread.read_text().split()[1])  # running, waiting (ns), time slices
    return waited / 1e9


def reset_resident_peak(device: str = "cpu") -> None:
    """Makes resident_peak_bytes start anew, where the system can."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif (PROC / "self/clear_refs").exists():
        (PROC / "self/clear_refs").write_text("5")


def resident_peak_bytes(device: str = "cpu") -> int:
    """The most resident memory that this process held; on a GPU the most that its tensors took."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if (PROC / "self/status").exists():  # ru_maxrss would start at the parent's
        lines = (PROC / "self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def timed_passes(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], object] | None, device: str = "cpu"
) -> dict[str, float]:
    """The seconds of one forward and, of what it returned, one backward; on a GPU those of its work alone."""
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
    """Now; on a GPU when its work so far is done."""
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
    """The peak of a GPU's matrix units, as torch's product of two square bfloat16 matrices reaches it."""

    def __init__(self) -> None:
        self.left, self.right = (
            torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        self.flops = 2.0 * MATMUL_SIZE**3

    def run(self) -> dict[str, float]:
        return {"peak": timed_passes(lambda: self.left @ self.right, None, "cuda")["forward"]}


class Peak:
    """The multiply-add peak of this process's threads, as a candidate that takes turns with the others.

    It takes longer than waking the threads, so that it is theirs and not the wake-up's.
    """

    def __init__(self) -> None:
        self.iterations = 1000
        while self.run()["peak"] < SAMPLE_SECONDS:
            self.iterations *= 2

    def run(self) -> dict[str, float]:
        began = time.perf_counter()
        self.flops = ops.multiply_add(self.iterations)
        return {"peak": time.perf_counter() - began}


def copy_bytes_per_s(repeats: int, device: str = "cpu") -> float:
    """Memory bandwidth of torch's threads, or of a GPU: bytes read and written by a copy that no cache holds."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    run = partial(timed_passes, lambda: target.copy_(source), None, device)
    copy = take_turns({"copy": lambda: mean_sample(run)}, repeats)
    return 2 * COPY_BYTES / copy["copy"]["forward"].median


def machine(device: str = "cpu") -> dict[str, object]:
    """What a reader must know of the machine, to judge the numbers."""
    gpu: dict[str, object] = {}
    if device == "cuda":
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        gpu = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "cudnn": cudnn}
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
    """What the CPU calls itself."""
    if (PROC / "cpuinfo").exists():
        for line in (PROC / "cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
