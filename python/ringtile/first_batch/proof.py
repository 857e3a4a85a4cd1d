"""Proves that the ranks of a group compute a loss as one process does."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringtile.first_batch.compare import Comparison, compare, compare_written
from ringtile.first_batch.state import State
from ringtile.first_batch.trace import Trace
from ringtile.sequence.layout import Layout
from ringtile.transport.groups import Group, transport_of

logger = logging.getLogger("ringtile")

# Noise above which the proof is inconclusive: in units in the last place, and relative to the values. The model is so
# steep that errors may hide behind its rounding, or it draws random numbers.
_STEEP_UNITS, _STEEP = 4096.0, 0.25
_MOST_SECONDS = 60.0  # that a proof is expected to take, above which it is made of less
_MOST_WEIGHTS = 1 << 28  # bytes of the weights whose gradients are looked at


def record(
    computes: Callable[[Trace], contextlib.AbstractContextManager[Tensor | None]],
    trace: Trace,
    *,
    scale: float = 1.0,
    backward: bool = True,
    weights: Mapping[str, Tensor] | None = None,
) -> Trace:
    """Computes a loss and, if it has a graph, the gradients that reach the modules; no parameter gets a gradient.

    computes(trace): the context in which the loss has been computed, and the backward runs. scale: multiplies the loss
    in the backward. weights: whether the gradients of these are numbers is noted.
    """
    weights = weights or {}
    with trace, computes(trace) as loss:
        if backward and loss is not None and loss.requires_grad and trace.sources:
            # Neither hooks on parameters nor those of engines run: they are on what accumulates gradients.
            inputs = [*trace.sources, *weights.values()]
            gradients = torch.autograd.grad(loss * scale, inputs, torch.ones_like(loss), allow_unused=True)
            for name, x in zip(weights, gradients[len(trace.sources) :], strict=True):
                if x is not None:  # one that is infinite may be the sum of large ones
                    trace.finite[name, "weight"] = ~x.isnan().any()
    trace.sources.clear()
    trace.loss = None if loss is None else loss.detach()
    return trace


def _weights(paths: Mapping[nn.Module, str]) -> dict[str, Tensor]:
    """Weights that neither an engine nor a hook holds, the smallest first: their gradients take little memory."""
    found, num_bytes = dict[str, Tensor](), 0
    named = [(f"{path}.{name}", x) for module, path in paths.items() for name, x in module.named_parameters("", False)]
    for name, x in sorted(named, key=lambda each: each[1].numel()):
        num_bytes += x.numel() * x.element_size()
        is_plain = type(x) is nn.Parameter and not x._backward_hooks and not hasattr(x, "ds_id")
        if is_plain and x.requires_grad and num_bytes <= _MOST_WEIGHTS:
            found[name] = x
    return found


def prove(
    computes: Callable[[Trace], contextlib.AbstractContextManager[Tensor | None]],
    state: State,
    paths: Mapping[nn.Module, str],
    group: Group | None,
    *,
    averages: bool,
    num_tokens: int,
    num_items: int = 1,
    named: str = "the loss",
    key: str = "shared_prefix",
    own_code: bool = False,
    besides: Sequence[str] = (),
    largest_of_all: Callable[[int], int] = int,
) -> Comparison | None:
    """Runs a loss whole, whole with other rounding, and sharded, and compares. A collective of the group.

    computes: see `record`; on the same tokens, whole or sharded as the trace says. A group of one rank proves what key
    does, on a tree of rows or in streamed layers. state: put back before each run. paths: of the modules. averages:
    whether the loss is the mean of the ranks' losses; else it is their sum. num_tokens: of all rows together.
    num_items: a number that the loss is divided by, if more. named: the loss, in words. own_code: whether code of the
    user's runs, which may keep a state that is not put back: the sharded run is made again, without its backward, and
    must give the same bits. besides: what else the log says. largest_of_all: of a number of each rank of the world, by
    which every group makes the same runs: under FSDP2 and ZeRO-3 each is a collective of all. None, with a warning:
    the loss of one process is not finite, so that nothing can be compared. If rounding does not explain the difference,
    `refusal` says so on every rank.
    """
    began = time.perf_counter()
    scale = 2.0 ** max(num_tokens, num_items).bit_length()  # the gradients of a mean would underflow in 16 bits
    weights = _weights(paths)

    def run(
        is_whole: bool, *, restores: bool = True, draws: bool = False, backward: bool = True, **options: Any
    ) -> Trace:
        """restores: whether it begins where the first run did; draws: but for random numbers."""
        if restores:
            state.restore(draws=not draws)
        trace = Trace(paths, whole=is_whole, **options)
        record(computes, trace, scale=scale, backward=backward, weights=weights)
        trace.written = state.written()
        return trace

    whole = run(True)
    transport, device = transport_of(group), whole.device
    size = transport.world_size

    def anywhere(flag: bool) -> bool:
        return bool(largest_of_all(int(_of_all_ranks(torch.tensor([flag], device=device), group).any())))

    seconds = time.perf_counter() - began  # of a forward, about a third
    backward = not anywhere(3 * seconds > _MOST_SECONDS)
    makes_again = own_code and not anywhere(10 / 3 * seconds > _MOST_SECONDS)
    perturbed = functools.partial(run, True, follows=whole, rounding=True, backward=backward)
    on_shards = functools.partial(run, False, follows=whole)
    rounded, sharded = perturbed(), on_shards(backward=backward)
    again = on_shards(backward=False) if makes_again else sharded
    if anywhere(whole.loss is not None and not bool(whole.loss.isfinite())):
        if transport.rank == 0:
            logger.warning("ringtile: this batch proves nothing, the next will: %s is not finite in one process", named)
        return None
    losses = None if sharded.loss is None else _of_all_ranks(sharded.loss[None], group)
    loss = None if losses is None else losses.mean() if averages else losses.sum()
    # Of the sum of the ranks' losses, whose backward is one over all ranks.
    scales = {"gradient_scale": float(size) if averages else 1.0, "scale": scale}
    found = compare(whole, rounded, sharded, loss=loss, named=named, **scales)
    unsteady = sharded.differs_from(again)
    if anywhere(bool(found.difference)):  # but of other random numbers?
        drawn = perturbed(draws=True)
        by_draws = compare(whole, drawn, sharded, loss=loss, named=named, **scales)
        by_draws.random = rounded.differs_from(drawn)
        if by_draws.random and not by_draws.difference:
            found, rounded = by_draws, drawn
    found.unsteady = unsteady
    compare_written(found, whole, rounded, _written(whole, sharded, group, device))
    if anywhere(bool(found.parts)):  # does it read them? Once more, on what the last run has left
        reads = sharded.differs_from(on_shards(backward=False, restores=False))
        if found.parts and reads and not found.unsteady and not found.difference:
            found.difference = f"{reads} reads {found.parts[0]}, of which a forward on a shard writes a part"
    found.refusal = _refusal(found, group, device, key)
    if found.refusal:
        return found
    if found.random and transport.rank == 0:
        logger.warning(
            "ringtile: %s draws random numbers of its own, on the ranks others than in one process: they, and what is "
            "made of them, are left out of the comparison of the first batch, but for their size",
            found.random,
        )
    is_steep = not found.random and found.noise > min(_STEEP_UNITS * whole.unit, _STEEP)
    if _of_all_ranks(torch.tensor([is_steep], device=device), group).any():
        logger.warning(
            "ringtile: rounding alone, or random numbers that nothing counts, change hidden states of the first batch "
            "by %.1e of their size, so that smaller errors cannot be seen: are the weights of the model scaled as they "
            "should be?",
            found.noise,
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        what = f"{size} ranks compute what one process does" if size > 1 else f"{key} changes nothing"
        how = ", loss and gradients" if found.backward else ""
        costs = "; ".join([f"{num_tokens} tokens, {time.perf_counter() - began:.1f} s", *besides])
        _tell(
            f"ringtile: on the first batch {what}: {found.num_modules} modules{how}; the largest difference is "
            f"{found.largest:.1f} times that of rounding ({costs})"
        )
    return found


def _tell(text: str) -> None:
    """Log at INFO; where nobody has configured logging, write to stderr, as Python does with a warning."""
    logger.info(text)
    if not logger.hasHandlers() and logger.level == logging.NOTSET:
        print(text, file=sys.stderr)


def _refusal(found: Comparison, group: Group | None, device: torch.device, key: str) -> str:
    """Why every rank refuses, if one of them found a difference; "" if none did."""
    differs = _of_all_ranks(torch.tensor([bool(found.difference)], device=device), group)[:, 0]
    if not differs.any():
        return ""
    what = found.difference or f"rank {int(differs.argmax())} of the group found a difference, which its error names"
    if len(differs) == 1:
        return (
            f"{key} does not compute what one rank computes without it, on a cut of the first batch: {what}; expected "
            f"the same numbers. Code that mixes tokens, counts them, averages over them or draws random numbers sees a "
            f"shared token once, and one chunk of tokens. Set {key}: false"
        )
    return (
        f"{len(differs)} ranks do not compute what one process computes, on a cut of the first batch: {what}; expected "
        f"the same numbers. Code that mixes tokens, counts them, averages over them or draws random numbers sees a "
        f"shard only. Compute it from whole sequences (a loss in the Trainer's compute_loss_func), leave it out, or "
        f"train with one rank a sequence"
    )


def _written(whole: Trace, sharded: Trace, group: Group | None, device: torch.device) -> dict[str, Tensor]:
    """What the whole run has written, as each rank has: name -> (W, n). Without what has another shape on a shard."""
    lost = {name: torch.full_like(x, torch.inf) for name, x in whole.written.items()}
    mine = {name: sharded.written.get(name, torch.zeros_like(x)) for name, x in whole.written.items()}
    mine = {name: x if x.shape == lost[name].shape else lost[name] for name, x in mine.items()}
    if not mine:
        return {}
    rows = _of_all_ranks(torch.cat([*mine.values()]).to(device), group).cpu()
    parts = dict(zip(mine, torch.split(rows, [len(x) for x in mine.values()], dim=1), strict=True))
    return {name: x for name, x in parts.items() if not x.isinf().any()}


def _of_all_ranks(values: Tensor, group: Group | None) -> Tensor:
    """Numbers (n,) of each rank, on the device of the group -> float64 (ranks, n)."""
    size, count = transport_of(group).world_size, len(values)
    return Layout.contiguous(size * count, size).unshard(values.double(), 0, group).view(size, count)
