"""Attention sinks: one more key of each head, with a score of its own for all queries and value 0.

Shape letters: B batch, S global tokens, H query heads, D head dim, Dv value head dim, W ranks.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import Attention, dense_attention
from ringtile import (
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RingMismatchError,
    ShardedSequence,
    attention,
    ring_attention,
)
from ringtile.transport.loopback import LoopbackGroup
from strategies import any_masks, dense, layouts
from test_ring import FLOAT64_TOLERANCE, MASKS, Problem, assemble, problem
from torch import Tensor


class WithSinks(NamedTuple):
    """Global results, and the gradient of the sinks summed over the ranks."""

    attention: Attention
    dsinks: Tensor


def sinks_of(p: Problem, seed: int = 0) -> Tensor:
    """Of both signs, about as large as scores."""
    return torch.randn(p.q.size(2), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(p: Problem, sinks: Tensor, mask: IntervalMask, **numbers: Any) -> WithSinks:
    leaves = [x.detach().double().requires_grad_() for x in (p.q, p.k, p.v, sinks)]
    out, lse = dense_attention(*leaves[:3], dense(mask), **numbers, sinks=leaves[3])
    *gradients, dsinks = torch.autograd.grad([out, lse], leaves, [p.dout.double(), p.dlse.double()])
    return WithSinks(Attention(out.detach(), lse.detach(), *gradients), dsinks)


def by_ring(p: Problem, sinks: Tensor, mask: IntervalMask, layout: Layout, **numbers: Any) -> WithSinks:
    def on_rank(group: LoopbackGroup) -> WithSinks:
        rank = group.transport.rank
        leaves = [layout.shard(x.detach(), 1, rank).requires_grad_() for x in (p.q, p.k, p.v)]
        leaves.append(sinks.detach().clone().requires_grad_())
        out, lse = ring_attention(
            *leaves[:3], ShardedSequence(mask, layout, group), sinks=leaves[3], **numbers, return_lse=True
        )
        cotangents = [layout.shard(p.dout, 1, rank), layout.shard(p.dlse, 2, rank)]
        *gradients, dsinks = torch.autograd.grad([out, lse], leaves, cotangents)
        return WithSinks(Attention(out.detach(), lse.detach(), *gradients), dsinks)

    of_ranks = LoopbackWorld(layout.world_size).run(on_rank)
    return WithSinks(assemble([rank.attention for rank in of_ranks], layout), sum(rank.dsinks for rank in of_ranks))


def assert_equal(got: WithSinks, expected: WithSinks, tolerance: float = FLOAT64_TOLERANCE) -> None:
    for x, y in zip((*got.attention, got.dsinks), (*expected.attention, expected.dsinks), strict=True):
        assert (x.double() - y).abs().amax() <= tolerance * max(1, y.abs().amax())


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, IntervalMask, Layout, dict[str, Any]]:
    world_size = draw(st.integers(1, 3))
    batch, seq_len, num_kv_heads = draw(st.integers(1, 2)), draw(st.integers(world_size, 30)), draw(st.integers(1, 2))
    heads = num_kv_heads * draw(st.integers(1, 3))
    p = problem(batch, seq_len, heads, num_kv_heads, draw(st.integers(1, 20)), draw(st.integers(1, 20)))
    numbers = {"scale": draw(st.sampled_from([None, 0.3])), "softcap": draw(st.sampled_from([0.0, 2.0]))}
    return p, draw(any_masks(batch, seq_len)), draw(layouts(seq_len, world_size)), numbers


@given(cases())
def test_ring_with_sinks_equals_the_definition(
    case: tuple[Problem, IntervalMask, Layout, dict[str, Any]],
) -> None:
    """Queries that attend nothing have out 0 and the sink itself as lse."""
    p, mask, layout, numbers = case
    expected = by_definition(p, sinks_of(p), mask, **numbers)
    assert_equal(by_ring(p, sinks_of(p), mask, layout, **numbers), expected)


def test_a_sink_far_above_or_below_the_scores_is_exact() -> None:
    """-inf is no sink at all. 1e300 is infinite where the state is float32: it takes all the weight."""
    p = problem(dtype=torch.float32)
    sinks = torch.tensor([-torch.inf, -1e4, 1e4, 1e300], dtype=torch.float64)
    mask = IntervalMask.documents([13, 1, 20, 14]) & IntervalMask.from_padding(torch.tensor([[0] * 5 + [1] * 43]))
    got = by_ring(p._replace(dlse=torch.zeros_like(p.dlse)), sinks, mask, Layout.zigzag(48, 2))
    without = by_ring(
        p._replace(dlse=torch.zeros_like(p.dlse)), torch.full((4,), -torch.inf), mask, Layout.zigzag(48, 2)
    )
    assert torch.equal(got.attention.out[:, :, :2], without.attention.out[:, :, :2])
    assert torch.all(got.attention.out[:, :, 2:] == 0)
    assert torch.equal(got.attention.lse[:, 0], without.attention.lse[:, 0])
    assert torch.all(got.attention.dq[:, :, 2:] == 0)
    assert torch.all(got.dsinks[:3] == 0)
    assert torch.all(without.dsinks == 0)
    plain = attention(p.q, p.k, p.v, mask=mask)
    assert (without.attention.out - plain).abs().max() <= 8 * torch.finfo(torch.float32).eps * plain.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_with_sinks_is_not_less_exact_than_torch(dtype: torch.dtype) -> None:
    """The yardstick is torch's softmax and products in the same dtype, as transformers computes sinks."""
    p = problem(2, 128, 4, 4, 64, 64, dtype=dtype)
    p, mask, sinks = p._replace(dlse=torch.zeros_like(p.dlse)), IntervalMask.causal(128), sinks_of(p).to(dtype)
    exact = by_definition(p, sinks, mask)
    leaves = [x.clone().requires_grad_() for x in (p.q, p.k, p.v, sinks)]
    q, k, v = (x.transpose(1, 2) for x in leaves[:3])
    scores = (q @ k.transpose(2, 3) * 64**-0.5).masked_fill(~dense(mask)[:, None], -torch.inf)
    scores = torch.cat([scores, leaves[3][:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    out = (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2)
    torchs = (out, *torch.autograd.grad(out, leaves, p.dout))
    ours = by_ring(p, sinks, mask, Layout.zigzag(128, 2))
    a, e = ours.attention, exact.attention
    for x, y, z in zip(
        (a.out, a.dq, a.dk, a.dv, ours.dsinks), (e.out, e.dq, e.dk, e.dv, exact.dsinks), torchs, strict=False
    ):
        assert (x.double() - y).abs().max() <= (z.double() - y).abs().max()


def test_aten_with_sinks_equals_the_definition() -> None:
    """It merges into a state that holds the sinks, as ringtile's kernels do. It takes no gradient of lse."""
    p, layout, mask = problem(1, 24, 4, 2, 8, 8), Layout.zigzag(24, 2), IntervalMask.causal(24)
    p = p._replace(dlse=torch.zeros_like(p.dlse))

    def on_rank(group: LoopbackGroup) -> WithSinks:
        leaves = [layout.shard(x.detach(), 1, group.transport.rank).requires_grad_() for x in (p.q, p.k, p.v)]
        leaves.append(sinks_of(p).requires_grad_())
        kernel: dict[str, Any] = {"attention_kernel": "aten", "sinks": leaves[3]}
        out, lse = ring_attention(*leaves[:3], ShardedSequence(mask, layout, group), **kernel, return_lse=True)
        *gradients, dsinks = torch.autograd.grad(out, leaves, layout.shard(p.dout, 1, group.transport.rank))
        return WithSinks(Attention(out.detach(), lse.detach(), *gradients), dsinks)

    of_ranks = LoopbackWorld(2).run(on_rank)
    got = WithSinks(assemble([rank.attention for rank in of_ranks], layout), sum(rank.dsinks for rank in of_ranks))
    assert_equal(got, by_definition(p, sinks_of(p), mask))


def test_sinks_of_any_dtype_get_gradients_of_theirs() -> None:
    p = problem(dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        sinks = sinks_of(p).to(dtype).requires_grad_()
        attention(p.q, p.k, p.v, mask=MASKS["causal"], sinks=sinks).sum().backward()  # q needs no gradient
        assert sinks.grad is not None
        assert sinks.grad.dtype == dtype
        assert sinks.grad.abs().sum() > 0


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(3), r"sinks has shape \(3,\); expected \(4,\)"),
        (torch.zeros(4, 1), r"sinks has shape \(4, 1\)"),
        (torch.zeros(4, dtype=torch.int64), "sinks has dtype torch.int64"),
        (torch.zeros(4, device="meta"), "sinks is on meta but q is on cpu"),
        (0.5, "sinks is a float; expected a tensor"),
    ],
)  # fmt: skip
def test_bad_sinks_are_refused_by_name(sinks: Any, message: str) -> None:
    p = problem()
    with pytest.raises(InputError, match=message):
        attention(p.q, p.k, p.v, mask=MASKS["causal"], sinks=sinks)


def test_freed_sinks_are_refused() -> None:
    """As FSDP frees parameters; before they are converted, which would read them."""
    p, sinks = problem(), torch.zeros(4, dtype=torch.bfloat16)
    sinks.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="sinks needs 8 bytes but its storage has 0"):
        attention(p.q, p.k, p.v, mask=MASKS["causal"], sinks=sinks)


@pytest.mark.parametrize("own", [torch.zeros(4), torch.zeros(3)])
def test_rank_that_alone_has_sinks_is_named_on_all_ranks(own: Tensor) -> None:
    """Good sinks or bad ones: the ranks without wait for neither."""
    p, layout = problem(), Layout.zigzag(48, 2)

    def on_rank(group: LoopbackGroup) -> str:
        rank = group.transport.rank
        local = [layout.shard(x, 1, rank) for x in (p.q, p.k, p.v)]
        try:
            ring_attention(*local, ShardedSequence(MASKS["causal"], layout, group), sinks=own if rank else None)
        except (RingMismatchError, InputError) as error:
            return str(error)
        return json.dumps("no error")

    for message in LoopbackWorld(2).run(on_rank):
        assert "sinks" in message
