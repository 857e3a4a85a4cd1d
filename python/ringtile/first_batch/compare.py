"""Compares three runs of one loss on the same tokens: whole, whole with other rounding, and sharded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile.first_batch.trace import TIMES, Event, ModelCall, Trace

_UNITS_OF_LOSS = 8  # roundings of a loss: its sum over tokens, its mean over ranks


@dataclass
class Comparison:
    """What `compare` found. Ratios: the largest difference over what rounding explains; at most TIMES where equal."""

    num_modules: int = 0
    forward: float = 0.0
    backward: float = 0.0
    loss: float = 0.0
    noise: float = 0.0  # the largest difference that rounding makes, relative to the values of its module
    difference: str = ""  # the first one that rounding does not explain, in words
    refusal: str = ""  # why no rank of the group is to train
    parts: tuple[str, ...] = ()  # what each rank writes a part of: one process, their sum, mean or largest
    random: str = ""  # the first module that draws other random numbers on the ranks
    unsteady: str = ""  # the first module that gave other bits when the sharded run was made again

    @property
    def largest(self) -> float:
        return max(self.forward, self.backward, self.loss)


def compare(
    whole: Trace,
    rounded: Trace,
    sharded: Trace,
    *,
    loss: Tensor | None,
    gradient_scale: float,
    scale: float = 1.0,
    named: str = "the loss",
) -> Comparison:
    """The sharded run against the whole one; what differs by more than TIMES what rounding explains is a difference.

    loss: that of the sharded run, over all ranks; named: in words. gradient_scale: a gradient of the sharded run over
    that of the whole one, where they are equal. scale: of all gradients. A collective of the ranks of the sharded run.
    """
    found, names, noise_of_loss = Comparison(), whole.names, 0.0
    backward: list[tuple[_Measure, Event, Tensor, Tensor, Tensor, float]] = []
    for one, other, shard in zip(whole.calls, rounded.calls, sharded.calls, strict=False):
        measure, order = _Measure(one), one.in_shared_order()
        of_values, of_slopes = ({x: kept[x] for x in order if x in kept} for kept in (one.values, one.gradients))
        values, disturbed, theirs = (call.joined(call.values, of_values) for call in (one, other, shard))
        slopes, others, theirs_back = (call.joined(call.gradients, of_slopes) for call in (one, other, shard))
        summed, others_summed = (shard.summed(x) for x in (slopes, others))
        found.num_modules += len({event.path for event in values if event in theirs})
        for event in (event for event in one.values if event in theirs and event in disturbed):
            ratio, words, noise = measure.compared(event, values[event], disturbed[event], theirs[event])
            found.forward, found.noise = max(found.forward, ratio), max(found.noise, noise)
            if ratio > TIMES and not found.difference:
                found.difference = f"{_place(event, names)} {words}"
            if event in slopes:
                effect = measure.effect(event, values[event], disturbed[event], slopes[event])
                noise_of_loss = max(noise_of_loss, effect / scale)
        backward += [
            (measure, event, summed[event], others_summed[event], theirs_back[event] / gradient_scale, around)
            for event in reversed(one.gradients)
            if event in others and event in theirs_back
            for around in [measure.around(event, summed)]
        ]
    _compare_loss(found, whole, rounded, loss, noise_of_loss, named)
    for measure, event, one_back, other_back, shard_back, around in backward:
        ratio, words, _ = measure.compared(event, one_back, other_back, shard_back, around)
        found.backward = max(found.backward, ratio)
        if ratio > TIMES and not found.difference:
            found.difference = f"the gradient that reaches what {_named(event.path, names)} returns {words}"
    found.difference = found.difference or _not_finite(whole, sharded)
    return found


def _not_finite(whole: Trace, sharded: Trace) -> str:
    """What is not finite on any token of a shard, padding included, and is in one process, in words: padding counts in
    no loss, but 0 times infinity would make every gradient of weights NaN."""
    for (path, kind), finite in sharded.finite.items():
        if not finite and whole.finite.get((path, kind), finite):
            module = _named(path, whole.names)
            what = {"output": f"what {module} returns", "weight": f"the gradient of {path}"}.get(
                kind, f"the gradient that reaches what {module} returns"
            )
            return f"{what} is not finite on a shard, or on its padding"
    return ""


def _compare_loss(
    found: Comparison, whole: Trace, rounded: Trace, loss: Tensor | None, noise: float, named: str
) -> None:
    if whole.loss is None or rounded.loss is None or loss is None:
        return
    mine, theirs = float(whole.loss), float(loss)
    if math.isnan(mine) and math.isnan(theirs):
        return
    unit = torch.finfo(whole.loss.dtype).eps
    noise = max(noise, abs(float(rounded.loss) - mine), _UNITS_OF_LOSS * unit * abs(mine))
    found.loss = _ratio(abs(theirs - mine), noise)
    if found.loss > TIMES and not found.difference:
        found.difference = (
            f"{named} is {theirs:.6g} on the ranks and {mine:.6g} in one process, from outputs of all modules that "
            f"are equal, where rounding explains a difference of {TIMES * noise:.1e}"
        )


def compare_written(found: Comparison, whole: Trace, rounded: Trace, ranks: Mapping[str, Tensor]) -> None:
    """What a forward has written, of the sharded run by the rank: name -> float64 (W, n) of whole.written's (n,)."""
    for name, theirs in ranks.items():
        mine = whole.written[name]
        noise = (rounded.written.get(name, mine) - mine).abs().amax() + _UNITS_OF_LOSS * 2.0**-23 * mine.abs().amax()
        differs = [(x - mine).abs() > TIMES * noise for x in (theirs, theirs.sum(0), theirs.mean(0), theirs.amax(0))]
        if not differs[0].any():
            continue
        if not all(x.any() for x in differs):
            found.parts += (name,)
        elif not found.difference:
            rank, place = (int(x) for x in differs[0].nonzero()[0])
            found.difference = (
                f"{name}, which a forward pass writes, changes at {place} by {float(mine[place]):.6g} in one "
                f"process, by {float(theirs[rank, place]):.6g} on rank {rank} and by "
                f"{float(theirs[:, place].sum()):.6g} on all ranks together"
            )


class _Measure:
    """Norms over the tokens of a call that are no padding."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call

    def compared(
        self, event: Event, value: Tensor, disturbed: Tensor, theirs: Tensor, around: float = 0.0
    ) -> tuple[float, str, float]:
        """A difference over what rounding explains, both in words, and rounding's relative to the values.

        around: the size of what the tensor is a part of. Where it is 0 but for rounding (the gradient of the scores of
        a query that sees one key), rounding is that of the terms that cancel.
        """
        size = max(self._largest(value.nan_to_num()), around)
        difference = self._largest((theirs - value).nan_to_num(nan=math.inf).where(value.isfinite(), 0.0))
        # At least the rounding of the tensor itself, which the run with rounding may happen to hide.
        noise = max(self._largest((disturbed - value).nan_to_num()), self._call.units.get(event, 0.0) * size)
        words = f"differs by {difference / (size or 1.0):.1e} of its size, rounding by {noise / (size or 1.0):.1e}"
        return _ratio(difference, noise), words, noise / (size or 1.0)

    def around(self, event: Event, gradients: Mapping[Event, Tensor]) -> float:
        """The size of the gradient that reaches the module around the one of an event."""
        path = event.path
        while path:
            path = path.rpartition(".")[0]
            for number in (event.number, 0):
                if (outer := event._replace(path=path, number=number)) in gradients:
                    return self._largest(gradients[outer].nan_to_num())
        return 0.0

    def effect(self, event: Event, value: Tensor, disturbed: Tensor, slope: Tensor) -> float:
        """What the rounding of one place does to the loss: of random signs, over features and tokens."""
        each = self._norms((disturbed - value).nan_to_num()) * self._norms(slope.nan_to_num())
        return float(each.square().sum().sqrt()) / math.sqrt(self._call.widths[event])

    def _largest(self, sketch: Tensor) -> float:
        norms = self._norms(sketch)
        return float(norms.max()) if norms.numel() else 0.0

    def _norms(self, sketch: Tensor) -> Tensor:
        """(tokens,)"""
        norms = sketch.square().mean(-1).sqrt()
        return norms.flatten() if self._call.counted is None else norms[self._call.counted]


def _ratio(difference: float, noise: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / noise if noise > 0.0 else math.inf


def _place(event: Event, names: Mapping[str, str]) -> str:
    """Where forward passes begin to differ, in words."""
    if event.kind == "output":
        return f"what {_named(event.path, names)} returns"
    parent = event.path.rpartition(".")[0]
    return f"what {_named(parent, names)} hands to its {event.path.removeprefix(parent + '.')}"


def _named(path: str, names: Mapping[str, str]) -> str:
    return f"{path} ({names[path]})" if path in names and path else names.get(path, path) or "the model"
