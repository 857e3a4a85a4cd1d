"""Schemes that a call has yet to resolve: `usp` by the ranks' hosts, `auto` by measuring.

The first call of a kind runs each candidate on its own tensors, forward and backward, and takes the one whose slowest
rank is fastest. A kind is the shape, and about how many pairs the mask has and how many keys a ring would send, since
packed batches change from step to step.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ringtile.attn import choose, ulysses
from ringtile.attn.call import AttentionCall
from ringtile.errors import RefusedError
from ringtile.sequence.plan import Shape
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.measure import hosts_of, measure
from ringtile.transport.messages import all_gather_object


def resolved(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
    """Return a checked call with a scheme that names itself, alike on every rank. A collective, first of a kind."""
    sequence, drops = call.sequence, call.dropout is not None
    if sequence.is_resolved:
        return call
    transport = sequence.transport
    with transport.propagate_errors("ring_attention forward"):
        kind = _kind(sequence, Shape.of(q, k, v), q.device.type, call.attention_kernel, drops)
    if kind not in transport.fastest:
        transport.fastest[kind] = _found(call, q, k, v)
    return call._replace(sequence=sequence.with_scheme(transport.fastest[kind]))


def known_scheme(sequence: ShardedSequence, shape: Shape, device_type: str, kernel: str, drops: bool) -> str:
    """Return the scheme that such calls were resolved to. Raise KeyError where there was none."""
    if sequence.is_resolved:
        return sequence.scheme
    return sequence.transport.fastest[_kind(sequence, shape, device_type, kernel, drops)]


def _kind(sequence: ShardedSequence, shape: Shape, device_type: str, kernel: str, drops: bool) -> object:
    """Return what calls of which the same scheme is fastest have in common; the same on every rank."""
    if sequence.scheme == "usp" or sequence.world_size == 1:
        return sequence.scheme
    return shape, device_type, kernel, drops, sequence.size_class


def candidates(hosts: tuple[int, ...]) -> list[str]:
    """Return what `auto` tries. hosts: by rank, as in `hosts_of`."""
    of_hosts = usp_of_hosts(hosts)
    names = ["ring", "all_gather", "ulysses"]
    return names if of_hosts in ("usp:1", f"usp:{len(hosts)}") else [*names, of_hosts]


@functools.cache  # every call of a layer asks
def usp_of_hosts(hosts: tuple[int, ...]) -> str:
    """Return usp for the most neighbours that always share a host: ulysses within hosts, a ring between them."""
    world_size = len(hosts)
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    within = [size for size in sizes if all(hosts[rank] == hosts[rank // size * size] for rank in range(world_size))]
    return f"usp:{within[-1]}"


@torch.no_grad()  # as inside an autograd function, where a call runs: no graph is recorded, nor its time measured
def _found(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> str:
    sequence, transport = call.sequence, call.sequence.transport
    if transport.world_size == 1:
        return "ring"
    hosts = hosts_of(transport)
    if sequence.scheme == "usp":
        return usp_of_hosts(hosts)
    calls = [call._replace(sequence=sequence.with_scheme(name)) for name in candidates(hosts)]
    able_here = [_is_able(each, q, k, v) for each in calls]
    able = all_gather_object(able_here, transport, "agree on candidates")
    # The ring is among them in any case: where it is refused, the call is.
    calls = [each for i, each in enumerate(calls) if i == 0 or all(of_rank[i] for of_rank in able)]
    seconds = measure([functools.partial(_forward_and_backward, each, q, k, v) for each in calls], transport, q.device)
    return calls[seconds.index(min(seconds))].sequence.scheme


def _is_able(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether a backend that may be used computes every round of this rank."""
    try:
        choose.check(call, q, k, v, Shape.of(q, k, v))
    except RefusedError:
        return False
    return True


def _forward_and_backward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> None:
    out, _, stages = ulysses.forward(call, q, k, v)
    ulysses.backward(call, stages, Shape.of(q, k, v), out, None)
