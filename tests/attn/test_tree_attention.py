"""Attention on trees beside the table of test_attention_table.py: large ones, their plan, who refuses them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_calls import FLOAT64_TOLERANCE, assert_close, problem, run_ring
from oracle import dense_gradients
from ringtile import (
    IntervalMask,
    Layout,
    RefusedError,
    ShardedSequence,
    attention,
    ops,
    ring_attention,
)
from ringtile.sequence.pieces import MAX_STRETCHES, Piece, pieces_of
from ringtile.sequence.plan import RankPlan
from strategies import dense


@pytest.mark.parametrize(
    ("num_leaves", "depth"),
    [(300, 1), (4, 64), pytest.param(600, 1, marks=pytest.mark.long), pytest.param(12, 64, marks=pytest.mark.long)],
)
def test_wide_and_deep_trees_equal_the_definition(num_leaves: int, depth: int) -> None:
    """Tiles of the kernels hold many branches, and ways go through many tiles. A prompt, then chains of `depth` nodes.

    A sum has up to 700 terms, of which float64 loses some 700 eps = 1.6e-13 of the largest magnitude.
    """
    rng = random.Random(num_leaves)
    parents, lengths = [-1], [150]
    for _ in range(num_leaves):
        parents.append(0)
        parents.extend(range(len(parents) - 1, len(parents) + depth - 2))
        lengths.extend(rng.randint(1, 7) for _ in range(depth))
    mask = IntervalMask.tree(parents, lengths)
    p = problem(1, mask.seq_len, 2, 1, 4, 4)
    expected = dense_gradients(p.q, p.k, p.v, dense(mask), p.dout, p.dlse)
    for world_size, layout in ((1, "contiguous"), (2, "zigzag")):
        got = run_ring(p, mask, Layout.named(layout, mask.seq_len, world_size))
        assert_close(got, expected, FLOAT64_TOLERANCE)


# ---- the plan -----------------------------------------------------------------------------------


def test_balanced_layouts_weigh_unique_pairs() -> None:
    mask = IntervalMask.tree([-1, *[0] * 6], [512, 1500, 40, 300, 900, 10, 800])
    named = max(imbalance(mask, Layout.named(name, mask.seq_len, 4)) for name in ("contiguous", "zigzag"))
    assert imbalance(mask, Layout.balanced(mask, 4, chunk=64)) <= 1.05 < named


def imbalance(mask: IntervalMask, layout: Layout) -> float:
    of_ranks = [int(mask.num_keys[:, layout.positions(rank)].sum()) for rank in range(layout.world_size)]
    return max(of_ranks) * len(of_ranks) / sum(of_ranks)


# ---- one side costs what it did -----------------------------------------------------------------


def test_one_side_makes_the_same_calls_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hulls, no intervals of keys, and two tensors of the mask: the kernels get nothing by name."""
    calls: list[set[str]] = []

    def counted(kernel: Callable[..., None], *given: Any, **named: Any) -> None:
        calls.append({*named})
        kernel(*given, **named)

    for name in ("attn_fwd_", "attn_bwd_"):
        monkeypatch.setattr(ops, name, functools.partial(counted, getattr(ops, name)))

    def forward_and_backward(mask: IntervalMask) -> None:
        leaves = [torch.randn(1, 24, 2, 4, requires_grad=True) for _ in range(3)]
        attention(*leaves, mask=mask).sum().backward()

    tree = IntervalMask.shared_prefix(8, [8, 8])
    forward_and_backward(IntervalMask.causal(24))  # the self-test's calls, of one side and of two
    forward_and_backward(tree)
    assert calls[-2:] == [{"key_begin", "key_end", "positions"}] * 2
    calls.clear()
    monkeypatch.setattr(ops, "mask_hulls", None)
    for mask in (IntervalMask.causal(24), IntervalMask.documents([10, 14]) & IntervalMask.sliding_window(24, 3)):
        forward_and_backward(mask)
        assert ShardedSequence.of(mask, Layout.contiguous(24, 1)).plan.rounds[0].key_bounds is None
    assert calls == [set()] * 4


# ---- who cannot ---------------------------------------------------------------------------------


def test_a_tree_of_many_branches_is_refused_by_aten() -> None:
    """Which knows a mask by its pieces; a node takes two or three."""
    wide = IntervalMask.shared_prefix(16, [1] * (MAX_STRETCHES + 1))
    q = torch.randn(1, wide.seq_len, 2, 8)
    layout = Layout.contiguous(wide.seq_len, 1)
    with pytest.raises(RefusedError, match=r"aten's flash attention takes masks of few pieces.* auto or ringtile"):
        ring_attention(q, q, q, mask=wide, layout=layout, attention_kernel="aten")
    of_rank = RankPlan.of(IntervalMask.shared_prefix(16, [16, 16]), Layout.contiguous(48, 1), 0)
    prompt = Piece(0, 16, 0, 16, gains=True), Piece(16, 48, 0, 16)
    branches = Piece(16, 32, 16, 32, gains=True), Piece(32, 48, 32, 48, gains=True)
    assert pieces_of(of_rank.rounds[0]) == ((*prompt, *branches),)
