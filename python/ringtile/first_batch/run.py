"""One computation of a loss, with what its modules gave and got."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ringtile.first_batch.trace import Choices, Trace

# A sharded run rounds where the run with rounding does, by a few units in the last place instead of at most one, and
# both differences are the largest of many.
TIMES = 16.0


class LossRun(NamedTuple):
    """One computation of a loss: its value, and what the modules gave and got."""

    loss: Tensor | None  # float64 ()
    trace: Trace
    rounding: float  # the unit in the last place of the loss, relative
    written: Mapping[str, Tensor]  # float64: tensors and numbers of the model that it has changed, by name


def record(
    loss_of: Callable[[], Tensor | None],
    paths: Mapping[nn.Module, str],
    within: Callable[[Trace], contextlib.AbstractContextManager[Any]],
    *,
    like: LossRun | None = None,
    rounding: bool = False,
    scale: float = 1.0,
    backward: bool = True,
    written: Callable[[], Mapping[str, Tensor]] = dict,
) -> LossRun:
    """Computes a loss and, if it has a graph, the gradients that reach the modules; no parameter gets a gradient.

    within: the context of the run, which tells the trace what tokens enter the model. like: a run whose choices of
    experts this one makes too. scale: multiplies the loss in the backward. written: what was changed, asked at the end.
    """
    follows = None if like is None else like.trace.choices
    trace = Trace(paths, rounding=rounding, choices=Choices(follows, rounding=rounding, times=TIMES))
    with trace, within(trace):
        loss = loss_of()
        if backward and loss is not None and loss.requires_grad and trace.sources:
            # Gradients of activations alone: no engine's hook on a parameter runs.
            torch.autograd.grad(loss * scale, trace.sources, torch.ones_like(loss), allow_unused=True)
    trace.sources.clear()
    if loss is None:
        return LossRun(None, trace, 0.0, written())
    return LossRun(loss.detach().double(), trace, torch.finfo(loss.dtype).eps, written())
