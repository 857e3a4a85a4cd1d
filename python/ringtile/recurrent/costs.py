"""How heads are shared out in each scheme, and the bytes that a recurrent layer sends over ranks.

    states   states are passed from rank to rank, in the order of the sequence; bytes do not grow with it
    heads    each rank computes whole sequences of its share of the heads; all inputs and outputs travel

A head group is what cannot be split: heads that share a head of q and k (B and C); if all heads share one, or there are
none as in Mamba, a single head, or 64 channels of a selective scan.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from ringtile import ops
from ringtile.errors import RefusedError
from ringtile.recurrent.documents import Forest, message_bytes
from ringtile.sequence.layout import Layout

SCHEMES = ("states", "heads")
_CHANNELS = 64  # of a selective scan, that its kernel takes at once (csrc/scan/chunks.h)
_SHARES_PER_RANK = 2  # of the heads, in states: two keep W ranks at work for two thirds of the time or more

Share = tuple[int, int, int]  # (begin, end, num_head_groups): the head groups begin .. end of as many


class Size(NamedTuple):
    """Of a batch."""

    num_head_groups: int
    group_bytes: int  # of the inputs of a token that belong to a head group
    shared_bytes: int  # of the inputs of a token that all head groups take
    out_bytes: int  # of the outputs of a token and a head group
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
    """Return the sizes of a layer whose inputs all are of dtype. kind: "gated_delta", "kda", "ssd" or "selective"."""
    of_groups = 2 * num_groups * key_dim  # q and k, C and B
    # v g beta; x dt
    of_head = value_dim + {"gated_delta": 2, "kda": 1 + key_dim, "ssd": 1, "selective": value_dim}[kind]
    num_head_groups, shared, split = num_heads, of_groups, num_heads * of_head
    if num_groups > 1:
        num_head_groups, shared, split = num_groups, 0, split + of_groups
    state = ops.state_dtype(dtype).itemsize
    token = batch * dtype.itemsize
    out = token * num_heads // num_head_groups * value_dim
    return Size(
        num_head_groups,
        token * split // num_head_groups,
        token * shared,
        out,
        batch * num_heads * key_dim * value_dim,
        state,
    )


def groups_of_channels(num_channels: int) -> int:
    """Return the number of head groups of a selective scan: of as many channels as its kernel takes at once, or one."""
    return num_channels if num_channels % _CHANNELS else num_channels // _CHANNELS


def shares(num_head_groups: int, num_shares: int) -> list[Share]:
    """Return shares of the head groups whose sizes differ by at most one."""
    bounds = [share * num_head_groups // num_shares for share in range(num_shares + 1)]
    return [(begin, end, num_head_groups) for begin, end in itertools.pairwise(bounds)]


def shares_in_time(num_head_groups: int, world_size: int) -> list[Share]:
    """Return the shares of the heads that a rank computes one after another in the scheme states."""
    return shares(num_head_groups, min(num_head_groups, _SHARES_PER_RANK * world_size) if world_size > 1 else 1)


def cost(scheme: str, forest: Forest, layout: Layout, size: Size) -> Cost:
    """Count the bytes of a scheme. RefusedError: it does not go with the layout, or there are too few heads."""
    ranks = range(layout.world_size)
    if scheme == "states":
        sent = message_bytes(forest, layout, size.state_bytes)
        return Cost(
            tuple(sum(sent.get((rank, other), 0) for other in ranks) for rank in ranks),
            tuple(sum(sent.get((other, rank), 0) for other in ranks) for rank in ranks),
        )
    check_heads(size.num_head_groups, layout.world_size)
    counts = [end - begin for begin, end, _ in shares(size.num_head_groups, layout.world_size)]
    forward, backward = [], []
    for rank in ranks:
        own, others = layout.local_len(rank), layout.seq_len - layout.local_len(rank)
        of_others = size.num_head_groups - counts[rank]
        inputs = own * (of_others * size.group_bytes + (len(ranks) - 1) * size.shared_bytes)
        forward.append(inputs + others * counts[rank] * size.out_bytes)
        gradients = others * (counts[rank] * size.group_bytes + size.shared_bytes)
        backward.append(own * of_others * size.out_bytes + gradients)
    return Cost(tuple(forward), tuple(backward))


def check_heads(num_head_groups: int, world_size: int) -> None:
    """Raise RefusedError: there are fewer head groups than ranks."""
    if num_head_groups < world_size:
        raise RefusedError(
            f"the scheme heads with {num_head_groups} heads, or groups of heads that share q and k (B and C), over "
            f"{world_size} ranks; expected as many as ranks or more: use the scheme states, or fewer ranks"
        )
