"""What recurrent layers move between ranks, scheme by scheme, before anything runs: the part of `ringtile plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ringtile import ops
from ringtile.errors import InputError, RefusedError
from ringtile.recurrent.documents import Facts, Forest, message_bytes
from ringtile.recurrent.shares import SCHEMES, check_heads, groups_of_channels, shares
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask

KINDS = {  # of a layer, and the numbers that say how large it is
    **dict.fromkeys(("gated_delta", "kda", "ssd"), ("heads", "heads of q and k (B and C)", "key dim", "value dim")),
    "selective": ("channels", "state dim"),
    "conv": ("channels", "width"),
}


class Size(NamedTuple):
    """Byte counts of one batch."""

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


class SchemeCost(NamedTuple):
    """Of one layer in one scheme, without duplicates: bytes sent by all ranks, and by the one that sends most."""

    layer: str
    scheme: str
    forward_bytes: int
    backward_bytes: int
    busiest_forward_bytes: int
    busiest_backward_bytes: int
    refused: str  # why it cannot run; "" if it can


def scheme_costs(
    kind: str, numbers: Sequence[int], mask: IntervalMask, layout: Layout, dtype: torch.dtype, batch: int
) -> list[SchemeCost]:
    """Return the bytes of a layer of one of KINDS in each scheme. InputError; RefusedError: not with this mask."""
    names = KINDS.get(kind, ())
    if not names or len(numbers) != len(names) or not all(1 <= n < 2**31 for n in (*numbers, batch)):
        raise InputError(
            f"the layer is {kind}:{','.join(map(str, numbers))}, batch {batch}; expected "
            + " or ".join(f"{each}:{','.join(words).upper()}" for each, words in KINDS.items())
            + ", each 1..2^31 - 1"
        )
    if kind == "conv":
        channels, width = numbers
        if not 2 <= width <= ops.MAX_CONV_WIDTH:
            raise InputError(f"the layer is conv with a width of {width}; expected 2..{ops.MAX_CONV_WIDTH}")
        state = ops.state_dtype(dtype).itemsize
        size = Size(1, 0, 0, 0, batch * (width - 1) * channels, state)
    elif kind == "selective":
        channels, state_dim = numbers
        num_groups = groups_of_channels(channels)
        size = size_of(kind, num_groups, 1, state_dim, channels // num_groups, dtype, batch)
    else:
        num_heads, num_groups, key_dim, value_dim = numbers
        if num_heads % num_groups:
            raise InputError(f"the layer is {kind} of {num_heads} heads and {num_groups}; expected a multiple")
        size = size_of(kind, num_heads, num_groups, key_dim, value_dim, dtype, batch)
    forest = Facts(mask, layout, 0).forest  # refused
    costs = []
    for scheme in SCHEMES[:1] if kind == "conv" else SCHEMES:
        refused, sent = "", Cost((0,), (0,))
        try:
            sent = cost(scheme, forest, layout, size)
        except RefusedError as error:
            refused = str(error)
        costs.append(
            SchemeCost(
                f"{kind}:{','.join(map(str, numbers))}",
                scheme,
                sum(sent.forward_sent),
                sum(sent.backward_sent),
                max(sent.forward_sent),
                max(sent.backward_sent),
                refused,
            )
        )
    return costs


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


def table(costs: Sequence[SchemeCost]) -> str:
    rows = [["recurrent layer", "scheme", "fwd MB", "bwd MB", "busiest fwd MB", "busiest bwd MB", ""]]
    for of_scheme in costs:
        row = ["-"] * 4 if of_scheme.refused else [f"{count / 1e6:.3f}" for count in of_scheme[2:6]]
        rows.append([of_scheme.layer, of_scheme.scheme, *row, of_scheme.refused])
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = []
    for layer, scheme, *numbers, last in rows:
        right = [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True)]
        lines.append("  ".join([layer.ljust(widths[0]), scheme.ljust(widths[1]), *right, last]).rstrip())
    return "\n".join(lines)
