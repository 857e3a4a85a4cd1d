"""Seconds of one attention layer by the rates of the machines: every rank, round by round, as the ring runs them.

Bytes and pairs are those of `Counts`, with which tests compare the transport's. The keys of a round travel while the
round before computes, and its gradients while the round after does (attn/ring.py); a message leaves once both ranks
have posted it and their links are free. Heads travel with nothing to hide behind.

Shape letters: W ranks, n rounds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.planner.layer import flops_of_pair
from ringtile.planner.sizes import Rates
from ringtile.sequence.plan import Counts


class RoundSeconds(NamedTuple):
    """What a round takes, forward and backward: the rank that it takes longest, but for the mean."""

    computing: float
    mean: float  # of computing
    sending: float
    waiting: float  # for keys


class LayerSeconds(NamedTuple):
    """Of the busiest rank, but for the mean; `together` is until the last rank has finished."""

    computing: float
    mean: float  # of computing
    sending: float
    together: float
    rounds: tuple[RoundSeconds, ...] = ()

    @property
    def exposed(self) -> float:
        """What computing does not hide."""
        return self.together - self.computing


def simulate(counts: Counts, rates: Rates, hosts: tuple[int, ...], backwards: float = 1.0) -> LayerSeconds:
    """Return what one attention layer takes, forward and so many backwards. hosts: of each rank."""
    size, ranks, host = counts.size, torch.arange(len(hosts)), torch.tensor(hosts)
    sent = counts.sent_bytes()  # (W, W), from and to
    rate = torch.where(host[:, None] == host, rates.within, rates.between).double()
    in_ring = (ranks[:, None] - ranks) % size == 0
    # (n, W): whose keys a rank works on in a round.
    owners = (ranks - size * torch.arange(len(counts.keys))[:, None]) % len(ranks)
    pairs = counts.pairs[ranks // size, owners // size] * counts.heads
    if counts.scheme.at_once:
        pairs, owners = pairs.sum(0, keepdim=True), ranks[None]
    together, parts = 0.0, torch.zeros(3, *pairs.shape, dtype=torch.float64)
    for of_pass, flops, times in zip(sent, flops_of_pair(counts.shape), (1.0, backwards), strict=True):
        # The backward sends the keys again, and their gradients the other way.
        keys, gradients = sent[0] / rate * in_ring, (of_pass - sent[0]) / rate * in_ring
        if counts.scheme.at_once:
            keys, gradients = (torch.diag(_busier_link(x)) for x in (keys, gradients))
        keys, gradients, computing = keys[owners, ranks], gradients[ranks, owners], pairs * (flops / rates.flops)
        of_heads = _busier_link(of_pass / rate * ~in_ring)
        start = of_heads.view(-1, size).amax(1).repeat_interleave(size)  # ranks that share heads wait for each other
        seconds, waiting = _run(start, keys, gradients, computing, owners)
        together += times * seconds
        parts += times * torch.stack((computing, keys + gradients, waiting))
    of_rank, busiest = parts[0].sum(0), parts.amax(2).tolist()
    links = _busier_link((sent[0] + backwards * sent[1]) / rate)
    rounds = zip(busiest[0], parts[0].mean(1).tolist(), *busiest[1:], strict=True)
    return LayerSeconds(
        float(of_rank.max()),
        float(of_rank.mean()),
        float(links.max()),
        together,
        tuple(RoundSeconds(*x) for x in rounds),
    )


def _busier_link(seconds: Tensor) -> Tensor:
    """Return (W,) what a rank sends or what it receives, whichever takes longer, of (W, W)."""
    return torch.maximum(seconds.sum(1), seconds.sum(0))


def _run(start: Tensor, keys: Tensor, gradients: Tensor, computing: Tensor, owners: Tensor) -> tuple[float, Tensor]:
    """Return when the last rank has finished, and what each waits for keys: (n, W), as all arguments but start (W,)."""
    out_free, in_free = start.clone(), start.clone()
    ranks, never = torch.arange(len(start)), torch.zeros_like(start)

    def message(seconds: Tensor, posted: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Return when the messages of each rank have arrived; 0 where it has none."""
        moves, source, target = seconds > 0, source[seconds > 0], target[seconds > 0]
        begin = torch.stack((posted[source], posted[target], out_free[source], in_free[target])).amax(0)
        out_free[source] = in_free[target] = begin + seconds[moves]
        arrived = never.clone()
        arrived[target] = in_free[target]
        arrived[source] = torch.maximum(arrived[source], out_free[source])
        return arrived

    ended, returned, waiting = start, never, torch.zeros_like(computing)
    arrived = message(keys[0], start, owners[0], ranks)
    for i in range(len(owners)):
        began = torch.maximum(ended, arrived)
        waiting[i] = began - ended
        if i + 1 < len(owners):
            arrived = message(keys[i + 1], began, owners[i + 1], ranks)
        ended = torch.maximum(began + computing[i], returned)
        returned = message(gradients[i], ended, ranks, owners[i])
    return float(torch.maximum(ended, returned).max()), waiting
