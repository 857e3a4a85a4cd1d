"""Providers of one thing at one point: their time in turns, their error, and their memory in processes of their own."""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile.bench.measure import (
    PASSES,
    MatmulPeak,
    Peak,
    Sampler,
    mean_sample,
    reset_resident_peak,
    resident_peak_bytes,
    take_turns,
    timed_passes,
)
from ringtile.bench.points import Entry, Found, Measured, Work, make_rows, why_skipped
from ringtile.errors import RingtileError


class Candidate(NamedTuple):
    """What one provider runs. forward: a result with a graph; backward: the gradients of what it returned."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], tuple[Tensor, ...]] | None


def gradient_candidate(forward: Callable[[], Tensor], dout: Tensor, leaves: Sequence[Tensor]) -> Candidate:
    """A forward, and a backward that leaves the gradients in .grad, where other tiled functions add theirs."""

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


def measure_each(subject: str, entries: Sequence[Entry], repeats: int) -> Iterator[Measured]:
    """Measures every entry, in their order.

    subject: the module of ringtile.bench with `make_inputs(point)`, `make_candidate(name, point, inputs)`,
    `work_of(point, inputs)`, and `exact_results(inputs)`, the float64 results.
    """
    module = importlib.import_module(f"ringtile.bench.{subject}")
    for entry in entries:
        inputs = module.make_inputs(entry.point)
        yield compare(
            module.work_of(entry.point, inputs),
            {name: partial(module.make_candidate, name, entry.point, inputs) for name in entry.providers},
            repeats,
            exact=partial(module.exact_results, inputs),
            memory=partial(memory_of, subject, point=entry.point) if entry.memory else None,
        )


def compare(
    work: Work,
    makers: Mapping[str, Callable[[], Candidate | None]],
    repeats: int,
    exact: Callable[[], tuple[Tensor, ...] | None],
    memory: Callable[[str], Mapping[str, int]] | None,
    device: str = "cpu",
) -> Measured:
    """The medians of `repeats` samples of every provider that has this case.

    Times are taken in one process: the candidates then share threads, caches and allocator, and none of them pays for
    waking up what another process had put to sleep. exact: the float64 results, if they are computed. memory:
    bytes by pass of a provider, measured elsewhere: a process keeps the peak, and the heap, of all that ran in it.
    """
    right = exact()
    peak = MatmulPeak() if device == "cuda" else Peak()
    samplers: dict[str, Sampler] = {"peak": partial(mean_sample, peak.run)}
    found: dict[str, Found] = {}
    skipped = {}
    for name, make in makers.items():
        try:
            candidate = make()
            if candidate is None:
                continue
            first = results(candidate)  # also warms it up
        except RingtileError:
            raise
        except Exception as error:  # whatever a library raises where it is not installed, or a function not supported
            skipped[name] = why_skipped(error)
            continue
        max_error, rms_error = ({}, {}) if right is None else errors(first, right)
        del first
        found[name] = Found(max_error, rms_error, memory(name) if memory and candidate.backward else {})
        samplers[name] = partial(mean_sample, partial(timed, candidate, device))
    seconds = take_turns(samplers, repeats)
    peak_flops_per_s = peak.flops / seconds.pop("peak")["peak"].median
    return Measured(work.point, make_rows(work, seconds, peak_flops_per_s, found), skipped)


def timed(candidate: Candidate, device: str = "cpu") -> dict[str, float]:
    """Seconds by pass."""
    return timed_passes(candidate.forward, candidate.backward, device)


def results(candidate: Candidate) -> tuple[Tensor, ...]:
    """What the forward returns, and the gradients."""
    out = candidate.forward()
    return (out.detach(), *(candidate.backward(out) if candidate.backward else ()))


def errors(got: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> tuple[dict[str, float], dict[str, float]]:
    """Of the result, of the gradients, and of all, by pass: the largest absolute error; the largest relative one.

    A tensor's relative error is the norm of its error over its norm.
    """
    differences = [mine.double() - right for mine, right in zip(got, exact, strict=False)]
    largest = [float(difference.abs().max()) for difference in differences]
    relative = [float(difference.norm() / right.norm()) for difference, right in zip(differences, exact, strict=False)]
    return by_pass(largest), by_pass(relative)


def by_pass(numbers: list[float]) -> dict[str, float]:
    """The first number is the forward's, the others are the backward's; the largest of them."""
    if len(numbers) == 1:
        return {"forward": numbers[0]}
    return dict(zip(PASSES, (numbers[0], max(numbers[1:]), max(numbers)), strict=True))


# ---- memory -------------------------------------------------------------------------------------


def memory_of(subject: str, name: str, point: Any) -> dict[str, int]:
    """How far one forward and backward raise the memory of a fresh process, outputs included, in bytes by pass.

    Both the backward and the two together are counted from before the forward. subject: the module of ringtile.bench
    with `make_inputs(point)`, `make_candidate(name, point, inputs)` and `smaller(point)`, a point to warm up with.
    """
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as process:
        return process.submit(_memory_of, subject, name, point, torch.get_num_threads()).result()


def _memory_of(subject: str, name: str, point: Any, num_threads: int) -> dict[str, int]:
    torch.set_num_threads(num_threads)
    device = getattr(point, "device", "cpu")
    module = importlib.import_module(f"ringtile.bench.{subject}")
    growth = (0, 0)
    for size in (module.smaller(point), point):  # the first loads what is loaded once
        candidate: Candidate = module.make_candidate(name, size, module.make_inputs(size))
        assert candidate.backward is not None
        reset_resident_peak(device)
        before = resident_peak_bytes(device)
        out = candidate.forward()
        forward = resident_peak_bytes(device) - before
        gradients = candidate.backward(out)
        growth = (forward, resident_peak_bytes(device) - before)
        del out, gradients
    return dict(zip(PASSES, (growth[0], growth[1], growth[1]), strict=True))
