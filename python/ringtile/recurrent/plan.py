"""What recurrent layers move between ranks, scheme by scheme, before anything runs: the part of `ringtile plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ringtile import ops
from ringtile.errors import InputError, RefusedError
from ringtile.recurrent.costs import SCHEMES, Cost, Size, cost, groups_of_channels, size_of
from ringtile.recurrent.documents import Facts
from ringtile.recurrent.kernels import MAX_WIDTH
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask

KINDS = {  # of a layer, and the numbers that say how large it is
    **dict.fromkeys(("gated_delta", "kda", "ssd"), ("heads", "heads of q and k (B and C)", "key dim", "value dim")),
    "selective": ("channels", "state dim"),
    "conv": ("channels", "width"),
}


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
        if not 2 <= width <= MAX_WIDTH:
            raise InputError(f"the layer is conv with a width of {width}; expected 2..{MAX_WIDTH}")
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
