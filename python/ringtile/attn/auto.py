"""Schemes that a call has yet to resolve, by the ranks' hosts: `usp`, and `auto`, a rule over the plan.

`auto` is the scheme whose busiest rank receives the fewest bytes over the slowest link, forward and backward: between
hosts if there are several, else within the one; the ring when equal. It is computed from integers that all ranks have,
so every rank and every run finds the same.
"""

from __future__ import annotations

import functools

import torch

from ringtile.attn.call import AttentionCall
from ringtile.scheme import Scheme
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import Counts, Shape
from ringtile.sequence.sharded import ShardedSequence


def resolved(call: AttentionCall) -> AttentionCall:
    """Return a checked call with a scheme that names itself, alike on every rank. A group's first is a collective."""
    sequence = call.sequence
    if call.indices is not None:
        return call._replace(sequence=with_all_heads(sequence))
    if sequence.is_resolved:
        return call
    return call._replace(sequence=sequence.with_scheme(scheme_of(sequence, call.shape)))


def with_all_heads(sequence: ShardedSequence) -> ShardedSequence:
    """Return the sequence in a scheme that shares no heads, as where indices choose keys: they are of all heads."""
    return sequence if sequence.scheme in ("ring", "all_gather") else sequence.with_scheme("ring")


def scheme_of(sequence: ShardedSequence, shape: Shape) -> str:
    """Return the scheme of calls of that shape. A collective where the ranks' hosts are not known yet."""
    if sequence.is_resolved:
        return sequence.scheme
    if sequence.world_size == 1:
        return "ring"
    hosts = sequence.transport.find_hosts()
    if sequence.scheme == "usp":
        return usp_of_hosts(hosts)
    if shape not in sequence.schemes:
        sequence.schemes[shape] = cheapest(sequence.mask, sequence.layout, shape, hosts)
    return sequence.schemes[shape]


def candidates(hosts: tuple[int, ...]) -> list[str]:
    """Return what `auto` chooses from. hosts: by rank, as in `Transport`. all_gather receives what the ring does."""
    of_hosts = usp_of_hosts(hosts)
    names = ["ring", "ulysses"]
    return names if of_hosts in ("usp:1", f"usp:{len(hosts)}") else [*names, of_hosts]


@functools.cache  # every call of a layer asks
def usp_of_hosts(hosts: tuple[int, ...]) -> str:
    """Return usp for the most neighbors that always share a host: ulysses within hosts, a ring between them."""
    world_size = len(hosts)
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    within = [size for size in sizes if all(hosts[rank] == hosts[rank // size * size] for rank in range(world_size))]
    return f"usp:{within[-1]}"


def cheapest(mask: IntervalMask, layout: Layout, shape: Shape, hosts: tuple[int, ...]) -> str:
    """Return what `auto` is. hosts: by rank, as in `Transport`."""
    host = torch.tensor(hosts, device="cpu")
    is_slow = host[:, None] != host if len({*hosts}) > 1 else torch.ones(len(hosts), len(hosts), dtype=torch.bool)

    def received(scheme: str) -> int:
        forward, backward = Counts(mask, layout, shape, Scheme.parse(scheme)).sent_bytes()
        return int(((forward + backward) * is_slow).sum(0).max())

    return min(candidates(hosts), key=received)  # the first of equal ones
