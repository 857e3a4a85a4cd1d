"""Compares backends on one workload: time, taken in turns; error; memory, on a CPU each in a process of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import importlib
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from ringtile.errors import RingtileError
from torch import Tensor

from benchmarks.measure import (
    PASSES,
    MatmulPeak,
    Sampler,
    mean_sample,
    take_turns,
    timed_passes,
)
from benchmarks.peak import Peak
from benchmarks.rows import Comparison, Cost, Measured, Untimed, make_rows, why_skipped
from tools.peak_memory import peak_bytes, reset_peak_bytes


class Candidate(NamedTuple):
    """A backend's code for one workload. forward returns a result with a graph; backward maps it to gradients."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], tuple[Tensor, ...]] | None


def gradient_candidate(forward: Callable[[], Tensor], dout: Tensor, leaves: Sequence[Tensor]) -> Candidate:
    """A candidate whose gradients arrive in .grad, because some tiled functions write theirs only there."""

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        torch.autograd.backward(out, dout)
        gradients = tuple(gradient_of(leaf) for leaf in leaves)
        for leaf in leaves:
            leaf.grad = None
        return gradients

    return Candidate(forward, backward)


def gradient_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def measure_each(subject: str, comparisons: Sequence[Comparison], repeats: int) -> Iterator[Measured]:
    """Measures the comparisons in order.

    subject: a module of benchmarks with `make_inputs(workload)`, `make_candidate(name, workload, inputs)`,
    `cost_of(workload, inputs)` and `exact_results(workload, inputs)`, the float64 results or None.
    """
    module = importlib.import_module(f"benchmarks.{subject}")
    for comparison in comparisons:
        workload = comparison.workload
        inputs = module.make_inputs(workload)
        yield compare(
            module.cost_of(workload, inputs),
            {name: partial(module.make_candidate, name, workload, inputs) for name in comparison.backends},
            repeats,
            exact=partial(module.exact_results, workload, inputs),
            memory=_memory(subject, workload) if comparison.memory else None,
            device=getattr(workload, "device", "cpu"),
        )


def compare(
    cost: Cost,
    makers: Mapping[str, Callable[[], Candidate | None]],
    repeats: int,
    exact: Callable[[], tuple[Tensor, ...] | None],
    memory: Callable[[str, Candidate], Mapping[str, int]] | None,
    device: str = "cpu",
) -> Measured:
    """Measures each backend that supports the workload: medians of `repeats` samples.

    All times are taken in this process, so that the candidates share threads, caches and allocator and none pays for
    waking threads that another process had put to sleep. makers: a function per backend that returns None if it does
    not support the workload. exact: returns the float64 results, or None to skip the errors. memory: returns the
    bytes of a backend and its warm candidate by pass. Says what is known of each before the first time is taken.
    """
    right = exact()
    peak = MatmulPeak() if device == "cuda" else Peak(getattr(cost.workload, "dtype", "float32"))
    samplers: dict[str, Sampler] = {"peak": partial(mean_sample, peak.run)}
    untimed: dict[str, Untimed] = {}
    skipped = {}
    for name, make in makers.items():
        try:
            candidate = make()
            if candidate is None:
                continue
            first = results(candidate)  # also warms it up
        except RingtileError:
            raise
        except Exception as error:  # libraries raise anything if they are missing or do not support a case
            skipped[name] = why_skipped(error)
            print(f" {name}: {skipped[name]}", file=sys.stderr, flush=True)
            continue
        max_error, rms_error = ({}, {}) if right is None else errors(first, right)
        del first
        peak_bytes = memory(name, candidate) if memory and candidate.backward else {}
        untimed[name] = Untimed(max_error, rms_error, peak_bytes)
        known = [f"{which} error {error:.1e}" for which, error in max_error.items()]
        known += [f"{which} {num_bytes / 2**20:.0f} MiB" for which, num_bytes in peak_bytes.items()]
        print(f" {name}: {', '.join(known) or 'ran'}", file=sys.stderr, flush=True)
        samplers[name] = partial(mean_sample, partial(timed, candidate, device))
    seconds = take_turns(samplers, repeats)
    peak_flops_per_s = peak.flops / seconds.pop("peak")["peak"].median
    return Measured(cost.workload, make_rows(cost, seconds, peak_flops_per_s, untimed), skipped)


def timed(candidate: Candidate, device: str = "cpu") -> dict[str, float]:
    """Seconds by pass."""
    return timed_passes(candidate.forward, candidate.backward, device)


def results(candidate: Candidate) -> tuple[Tensor, ...]:
    """The result of the forward, and the gradients."""
    out = candidate.forward()
    return (out.detach(), *(candidate.backward(out) if candidate.backward else ()))


def errors(got: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> tuple[dict[str, float], dict[str, float]]:
    """By pass, the largest absolute and the largest relative error among its tensors.

    The forward's tensor is the result, the backward's are the gradients. A tensor's relative error is the norm of its
    error divided by its norm.
    """
    differences = [mine.double() - right for mine, right in zip(got, exact, strict=False)]
    largest = [float(difference.abs().max()) for difference in differences]
    relative = [float(difference.norm() / right.norm()) for difference, right in zip(differences, exact, strict=False)]
    return by_pass(largest), by_pass(relative)


def by_pass(numbers: list[float]) -> dict[str, float]:
    """The largest number by pass; the first is the forward's, the others are the backward's."""
    if len(numbers) == 1:
        return {"forward": numbers[0]}
    return dict(zip(PASSES, (numbers[0], max(numbers[1:]), max(numbers)), strict=True))


# ---- memory -------------------------------------------------------------------------------------


def _memory(subject: str, workload: Any) -> Callable[[str, Candidate], dict[str, int]]:
    """Return what measures a backend's memory: a GPU's allocator counts the tensors of this process, while a CPU's peak
    and heap are those of all backends."""
    if getattr(workload, "device", "cpu") == "cuda":
        return lambda name, candidate: growth_of(candidate, "cuda")
    return lambda name, candidate: memory_of(subject, name, workload)


def memory_of(subject: str, name: str, workload: Any) -> dict[str, int]:
    """By how many bytes one forward and backward raise the memory of a fresh process, outputs included, by pass.

    The backward, like the two together, is counted from before the forward. subject: a module of benchmarks with
    `make_inputs(workload)`, `make_candidate(name, workload, inputs)` and `smaller(workload)`, which warms the process
    up.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as process:
        return process.submit(_memory_of, subject, name, workload, torch.get_num_threads()).result()


def _memory_of(subject: str, name: str, workload: Any, num_threads: int) -> dict[str, int]:
    torch.set_num_threads(num_threads)
    device = getattr(workload, "device", "cpu")
    module = importlib.import_module(f"benchmarks.{subject}")
    growth: dict[str, int] = {}
    for size in (module.smaller(workload), workload):  # the first run loads libraries and starts threads
        growth = growth_of(module.make_candidate(name, size, module.make_inputs(size)), device)
    return growth


def growth_of(candidate: Candidate, device: str) -> dict[str, int]:
    """By how many bytes one forward and backward raise this process's peak, by pass."""
    assert candidate.backward is not None
    _give_back_freed_memory()
    reset_peak_bytes(device)
    before = peak_bytes(device)
    out = candidate.forward()
    forward = peak_bytes(device) - before
    gradients = candidate.backward(out)
    both = peak_bytes(device) - before
    del out, gradients
    return dict(zip(PASSES, (forward, both, both), strict=True))


def _give_back_freed_memory() -> None:
    """To the system: what the warm-up freed, the measured run would take again without any growth."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
