"""Proves that the ranks of a group compute a loss as one process does."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ringtile.errors import RefusedError
from ringtile.first_batch.compare import Comparison, compare, compare_written
from ringtile.first_batch.run import LossRun
from ringtile.sequence.layout import Layout
from ringtile.transport.groups import Group, transport_of

logger = logging.getLogger("ringtile")

# Noise above which the proof is inconclusive: in units in the last place, and relative to the values. The model is so
# steep that errors may hide behind its rounding, or it draws random numbers.
_STEEP_UNITS, _STEEP = 4096.0, 0.25
_MOST_SECONDS = 60.0  # that a proof is expected to take, above which it is made of less


def prove(
    run: Callable[..., LossRun],
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
    raises: bool = True,
) -> Comparison | None:
    """Runs a loss whole, whole with other rounding, and sharded, and compares. A collective of the group.

    run(whole, like=..., rounding=...): `record` on the same tokens, whole or sharded; a group of one rank proves what
    key does, on a tree of rows or in streamed layers. averages: whether the loss is the mean of the ranks' losses; else
    it is their sum. num_tokens: of all rows together. num_items: a number that the loss is divided by, if more. named:
    the loss, in words. own_code: whether code of the user's runs, which may keep a state that is not put back: the
    sharded run is made again, without its backward, and must give the same bits. besides: what else the log says.
    largest_of_all: of a number of each rank of the world, by which every group makes the same runs: under FSDP2 and
    ZeRO-3 each is a collective of all. None, with a warning: the loss of one process is not finite, so that nothing can
    be compared. If rounding does not explain the difference, raises RefusedError on every rank, or, without `raises`,
    returns it as `refusal`.
    """
    began = time.perf_counter()
    scale = 2.0 ** max(num_tokens, num_items).bit_length()  # the gradients of a mean would underflow in 16 bits
    whole = run(True, scale=scale)
    transport, device = transport_of(group), whole.trace.device
    size = transport.world_size

    def anywhere(flag: bool) -> bool:
        return bool(largest_of_all(int(_of_all_ranks(torch.tensor([flag], device=device), group).any())))

    seconds = time.perf_counter() - began  # of a forward, about a third
    backward = not anywhere(3 * seconds > _MOST_SECONDS)
    makes_again = own_code and not anywhere(10 / 3 * seconds > _MOST_SECONDS)
    perturbed = functools.partial(run, True, scale=scale, like=whole, rounding=True, backward=backward)
    on_shards = functools.partial(run, False, scale=scale, like=whole)
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
    unsteady = sharded.trace.differs_from(again.trace)
    if anywhere(bool(found.difference)):  # but of other random numbers?
        drawn = perturbed(draws=True)
        by_draws = compare(whole, drawn, sharded, loss=loss, named=named, **scales)
        by_draws.random = rounded.trace.differs_from(drawn.trace)
        if by_draws.random and not by_draws.difference:
            found, rounded = by_draws, drawn
    found.unsteady = unsteady
    compare_written(found, whole, rounded, _written(whole, sharded, group, device))
    if anywhere(bool(found.parts)):  # does it read them? Once more, on what the last run has left
        reads = sharded.trace.differs_from(on_shards(backward=False, restores=False).trace)
        if found.parts and reads and not found.unsteady and not found.difference:
            found.difference = f"{reads} reads {found.parts[0]}, of which a forward on a shard writes a part"
    found.refusal = _refusal(found, group, device, key)
    if found.refusal and raises:
        raise RefusedError(found.refusal)
    if found.refusal:
        return found
    if found.random and transport.rank == 0:
        logger.warning(
            "ringtile: %s draws random numbers of its own, on the ranks others than in one process: they, and what is "
            "made of them, are left out of the comparison of the first batch, but for their size",
            found.random,
        )
    is_steep = not found.random and found.noise > min(_STEEP_UNITS * whole.trace.unit, _STEEP)
    if _of_all_ranks(torch.tensor([is_steep], device=device), group).any():
        logger.warning(
            "ringtile: rounding alone, or random numbers that nothing counts, change hidden states of the first batch "
            "by %.1e of their size, so that smaller errors cannot be seen: are the weights of the model scaled as they "
            "should be?",
            found.noise,
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        what = f"{size} ranks compute what one process does" if size > 1 else f"{key} changes nothing"
        logger.info(
            "ringtile: on the first batch %s: %d modules%s; the largest difference is %.1f times that of rounding (%d "
            "tokens, %.1f s%s)",
            what,
            found.num_modules,
            ", loss and gradients" if found.backward else "",
            found.largest,
            num_tokens,
            time.perf_counter() - began,
            "".join(f"; {text}" for text in besides),
        )
    return found


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


def _written(whole: LossRun, sharded: LossRun, group: Group | None, device: torch.device) -> dict[str, Tensor]:
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
