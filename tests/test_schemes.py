"""Every scheme over virtual ranks against attention on one rank, and what it sends against the plan.

Shape letters: B batch, S global tokens, N local tokens, H query heads, G kv heads, D head dim, W ranks.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from oracle import Attention
from ringtile import (
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    Refused,
    RingMismatch,
    ShardedSequence,
    ops,
    plan,
    ring_attention,
)
from ringtile.scheme import Scheme, share
from ringtile.sequence.plan import RankCost
from ringtile.transport.loopback import LoopbackGroup
from test_ring import Problem, assemble, assert_within_8_ulp, problem, run_ring
from torch import Tensor

SEQ_LEN = 48
MASKS = {
    "causal": IntervalMask.causal(SEQ_LEN),
    "full": IntervalMask.full(SEQ_LEN),
    "documents": IntervalMask.documents([13, 1, 20, 14]),
    "window": IntervalMask.sliding_window(SEQ_LEN, 7),
    "prefix": IntervalMask.prefix_lm(SEQ_LEN, 11),
    "padding": IntervalMask.from_padding(torch.tensor([[0] * 5 + [1] * 43, [1] * 40 + [0] * 8])),
}
LAYOUTS = ("contiguous", "zigzag", "striped")
HEADS = ((8, 8), (8, 2), (7, 7), (4, 1), (6, 3))
SCHEMES = ("all_gather", "ulysses", "usp:1", "usp:2", "staged:1", "staged:2", "staged:3")
WORLD_SIZES = (2, 3, 4)


def cells() -> list[tuple[str, str, str, tuple[int, int], int]]:
    return [
        cell
        for cell in itertools.product(SCHEMES, MASKS, LAYOUTS, HEADS, WORLD_SIZES)
        if not (cell[0] == "usp:2" and cell[4] == 3)  # refused: see below
    ]


def pairwise(all_cells: list[Any]) -> list[Any]:
    """A few of them, greedily chosen, in which each two values of two parameters meet."""

    def pairs(cell: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(cell), 2))

    left = set().union(*map(pairs, all_cells))
    chosen = []
    while left:
        chosen.append(max(all_cells, key=lambda cell: len(pairs(cell) & left)))
        left -= pairs(chosen[-1])
    return chosen


def run_scheme(
    p: Problem,
    mask: IntervalMask,
    layout: Layout,
    scheme: str,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    **options: Any,
) -> tuple[Attention, list[tuple[int, int]], list[Tensor | None]]:
    """Forward and backward on W virtual ranks, put together; the bytes that each sent in them; gradients of sinks."""

    def on_rank(group: LoopbackGroup) -> tuple[Attention, tuple[int, int], Tensor | None]:
        sequence = ShardedSequence(mask, layout, group, scheme=scheme)
        q, k, v = (sequence.shard(x, 1).requires_grad_() for x in (p.q, p.k, p.v))
        leaf = None if sinks is None else sinks.clone().requires_grad_()
        out, lse = ring_attention(q, k, v, sequence, softcap=softcap, sinks=leaf, return_lse=True, **options)
        forward = group.transport.bytes_sent
        cotangents = [sequence.shard(p.dout, 1), sequence.shard(p.dlse, 2)]
        leaves = [q, k, v] if leaf is None else [q, k, v, leaf]
        gradients = torch.autograd.grad([out, lse], leaves, cotangents)
        result = Attention(out.detach(), lse.detach(), *gradients[:3])
        return result, (forward, group.transport.bytes_sent - forward), None if leaf is None else gradients[3]

    of_ranks, sent, of_sinks = zip(*LoopbackWorld(layout.world_size).run(on_rank), strict=True)
    return assemble(list(of_ranks), layout), list(sent), list(of_sinks)


def check_cell(name: str, mask: str, layout: str, heads: tuple[int, int], world_size: int) -> None:
    """Within 8 ulp of one rank, and as many bytes as planned."""
    p = problem(2, SEQ_LEN, *heads, head_dim=8, v_head_dim=16, dtype=torch.float32)
    over = Layout.named(layout, SEQ_LEN, world_size)
    result, sent, _ = run_scheme(p, MASKS[mask], over, name)
    where = (name, mask, layout, heads, world_size)
    assert_within_8_ulp(result, run_ring(p, MASKS[mask], Layout.contiguous(SEQ_LEN, 1)), where)
    cost = plan(
        *(MASKS[mask], over),
        **{"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 8, "v_head_dim": 16, "scheme": name},
        dtype=torch.float32,
        batch=2,
    )
    assert sent == [(rank.forward_bytes_sent, rank.backward_bytes_sent) for rank in cost.ranks], where
    assert cost.forward_bytes == sum(rank.forward_bytes_received for rank in cost.ranks), where
    assert cost.backward_bytes == sum(rank.backward_bytes_received for rank in cost.ranks), where


def test_schemes_equal_one_rank_and_send_what_is_planned() -> None:
    for cell in pairwise(cells()):
        check_cell(*cell)


@pytest.mark.matrix
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_cells_equal_one_rank_and_send_what_is_planned(scheme: str) -> None:
    for cell in cells():
        if cell[0] == scheme:
            check_cell(*cell)
