"""What a recurrent layer costs over ranks in each scheme: bytes that travel, work that waits. Integers, until compared.

    states   states go from rank to rank, in the order of the sequence; bytes do not grow with it
    heads    each rank computes whole sequences of its share of the heads; all inputs and outputs travel

Shape letters: B batch, S global tokens, N local tokens, H heads, G heads of q and k (or groups of B and C), K key dim
(or state dim), V value dim, W ranks.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from ringtile import ops
from ringtile.errors import Refused
from ringtile.recurrent.documents import hand_overs, message_bytes, pieces_of
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask

SCHEMES = ("states", "heads")
_CHANNELS = 64  # of a selective scan, that its kernel takes at once (csrc/scan/chunks.h)
_PARTS_PER_RANK = 2  # of the heads, in states: two keep W ranks at work for two thirds of the time or more
# Numbers of states that a rank updates while a byte travels, as a mean of forward and backward. On a CPU of the order
# of what was measured over shared memory; on a GPU an estimate that nothing was measured for.
_UPDATES_PER_BYTE = {"cpu": 2}
_UPDATES_PER_BYTE_OF_A_GPU = 20


class Size(NamedTuple):
    """Of a batch. A unit is what the heads are parted into: a head, or those that share a head of q and k."""

    num_units: int
    unit_bytes: int  # of the inputs of a token that belong to a unit
    shared_bytes: int  # of the inputs of a token that all units take
    out_bytes: int  # of the outputs of a token and a unit
    state_numel: int  # of all states
    state_itemsize: int

    @property
    def state_bytes(self) -> int:
        return self.state_numel * self.state_itemsize


class Cost(NamedTuple):
    """Bytes by rank. All together they are as many in the backward as in the forward."""

    forward_sent: tuple[int, ...]
    backward_sent: tuple[int, ...]


def size_of(
    kind: str, num_heads: int, num_groups: int, key_dim: int, value_dim: int, dtype: torch.dtype, batch: int
) -> Size:
    """Of a layer whose inputs all are of dtype. kind: "gated_delta", "kda", "ssd" or "selective"."""
    of_groups = 2 * num_groups * key_dim  # q and k, C and B
    # v g beta; x dt
    of_head = value_dim + {"gated_delta": 2, "kda": 1 + key_dim, "ssd": 1, "selective": value_dim}[kind]
    num_units, shared, parted = num_heads, of_groups, num_heads * of_head
    if num_groups > 1:
        num_units, shared, parted = num_groups, 0, parted + of_groups
    state = ops.state_dtype(dtype).itemsize
    token = batch * dtype.itemsize
    out = token * num_heads // num_units * value_dim
    return Size(
        num_units, token * parted // num_units, token * shared, out, batch * num_heads * key_dim * value_dim, state
    )


def units_of_channels(num_channels: int) -> int:
    """What the channels of a selective scan are parted into: as many as its kernel takes at once, or single ones."""
    return num_channels if num_channels % _CHANNELS else num_channels // _CHANNELS


def parts(num_units: int, num_parts: int) -> list[tuple[int, int, int]]:
    """(begin, end, num_units) of each part, whose sizes differ by at most one."""
    bounds = [part * num_units // num_parts for part in range(num_parts + 1)]
    return [(begin, end, num_units) for begin, end in itertools.pairwise(bounds)]


def parts_of_states(num_units: int, world_size: int) -> list[tuple[int, int, int]]:
    """The parts of the heads that ranks work on at a time."""
    return parts(num_units, min(num_units, _PARTS_PER_RANK * world_size) if world_size > 1 else 1)


def cost(scheme: str, mask: IntervalMask, layout: Layout, size: Size) -> Cost:
    """The bytes of a scheme. Refused: it does not go with the mask or the layout, or there are too few heads."""
    ranks = range(layout.world_size)
    if scheme == "states":
        sent = message_bytes(mask, layout, size.state_bytes)
        return Cost(
            tuple(sum(sent.get((rank, other), 0) for other in ranks) for rank in ranks),
            tuple(sum(sent.get((other, rank), 0) for other in ranks) for rank in ranks),
        )
    check_heads(size.num_units, layout.world_size)
    units = [end - begin for begin, end, _ in parts(size.num_units, layout.world_size)]
    forward, backward = [], []
    for rank in ranks:
        own, others = layout.local_len(rank), layout.seq_len - layout.local_len(rank)
        units_of_others = size.num_units - units[rank]
        inputs = own * (units_of_others * size.unit_bytes + (len(ranks) - 1) * size.shared_bytes)
        forward.append(inputs + others * units[rank] * size.out_bytes)
        gradients = others * (units[rank] * size.unit_bytes + size.shared_bytes)
        backward.append(own * units_of_others * size.out_bytes + gradients)
    return Cost(tuple(forward), tuple(backward))


def check_heads(num_units: int, world_size: int) -> None:
    """Refused: there are fewer heads than ranks."""
    if num_units < world_size:
        raise Refused(
            f"the scheme heads with {num_units} heads, or groups of heads that share q and k (B and C), over "
            f"{world_size} ranks; expected as many as ranks or more: use the scheme states, or fewer ranks"
        )


def cheaper(mask: IntervalMask, layout: Layout, size: Size, device_type: str) -> str:
    """The scheme in which the last rank is done first, by `_updates`; states where they are equal, or heads are too
    few; heads where no state can follow the layout."""
    if size.num_units < layout.world_size:
        return "states"
    try:
        pieces_of(layout)
    except Refused:
        return "heads"
    per_byte = _UPDATES_PER_BYTE.get(device_type, _UPDATES_PER_BYTE_OF_A_GPU)
    states, heads = (_updates(scheme, mask, layout, size, per_byte) for scheme in SCHEMES)
    return "heads" if heads < states else "states"


def _updates(scheme: str, mask: IntervalMask, layout: Layout, size: Size, per_byte: int) -> float:
    """When the last rank is done with the forward, counted in numbers of states that a rank has updated by then.

    heads: S state_numel max(share) + per_byte max(bytes sent by a rank).
    states: each rank computes its pieces in order, part by part of the heads; a part takes n state_numel share for n
    tokens, begins when the state before it is there, and its state takes per_byte bytes to the next rank.
    """
    if scheme == "heads":
        share = -(-size.num_units // layout.world_size) / size.num_units
        return layout.seq_len * size.state_numel * share + per_byte * max(
            cost("heads", mask, layout, size).forward_sent
        )
    cuts = {cut.position: cut for cut in hand_overs(mask, layout)}
    shares = [(end - begin) / num_units for begin, end, num_units in parts_of_states(size.num_units, layout.world_size)]
    done = [0.0] * layout.world_size  # by rank
    arrived = [0.0] * len(shares)  # of the last piece's states, by part
    for rank, begin, _, length in pieces_of(layout):
        cut = cuts.get(begin)
        for part, share in enumerate(shares):
            if cut is not None:
                travels = cut.source != cut.target
                done[rank] = max(done[rank], arrived[part] + travels * per_byte * size.state_bytes * share)
            done[rank] += length * size.state_numel * share
            arrived[part] = done[rank]
    return max(done)
