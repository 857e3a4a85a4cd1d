"""Dropout of attention weights: which stay, against a Philox of its own; the numbers, against the definition in
float64; and that neither depends on ranks, layout or order.

Shape letters: B batch, S tokens, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import Attention, dense_attention, dense_gradients
from ringtile import (
    AttentionDropout,
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RefusedError,
    RingMismatchError,
    ShardedSequence,
    attention,
    ops,
    ring_attention,
    self_test,
)
from ringtile.transport.loopback import LoopbackGroup
from strategies import any_masks, dense, layouts
from test_dropout import random_word
from test_ring import FLOAT64_TOLERANCE, MASKS, Problem, assemble, assert_close, problem
from test_self_test import Ops
from torch import Tensor

MASK = 0xFFFFFFFF


def kept(drop: AttentionDropout, num_heads: int, seq_len: int) -> Tensor:
    """Whether each weight stays: bool (B, H, S, S). Philox4x32-10 in int64; 32 bits times 32 bits in two steps."""
    rows, heads = drop.rows.view(-1, 1, 1, 1), torch.arange(num_heads).view(-1, 1, 1)
    query, key = torch.arange(seq_len).view(-1, 1), torch.arange(seq_len)
    shape = (rows.size(0), num_heads, seq_len, seq_len)
    words = [(key // 4).expand(shape), query.expand(shape), (rows + heads * 2**20 & MASK).expand(shape)]
    words.append(torch.full(shape, drop.stream))
    keys = [drop.seed, drop.step]
    for _ in range(10):
        (high_0, low_0), (high_1, low_1) = (_product(words[0], 0xD2511F53), _product(words[2], 0xCD9E8D57))
        words = [high_1 ^ words[1] ^ keys[0], low_1, high_0 ^ words[3] ^ keys[1], low_0]
        keys = [(keys[0] + 0x9E3779B9) & MASK, (keys[1] + 0xBB67AE85) & MASK]
    chosen = torch.stack(words, dim=-1).gather(-1, (key % 4).expand(shape)[..., None])[..., 0]
    return chosen < round((1 - drop.probability) * 2**32)


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    lower, upper = (x & 0xFFFF) * factor, (x >> 16) * factor
    upper = upper + (lower >> 16)
    return upper >> 16, (upper & 0xFFFF) << 16 | lower & 0xFFFF


def dropout(probability: float = 0.3, rows: tuple[int, ...] = (0,), **numbers: int) -> AttentionDropout:
    return AttentionDropout(probability, torch.tensor(rows), **{"seed": 1234, "step": 5, "stream": 0xC0FFEE, **numbers})


def test_the_masks_of_these_tests_are_philoxs() -> None:
    drop = dropout(rows=(3, 2**20 - 1))
    mask = kept(drop, 3, 9)
    for row, head, query, key in ((0, 0, 0, 0), (1, 2, 8, 7), (0, 1, 3, 5), (1, 1, 4, 2)):
        word = random_word(int(drop.rows[row]) + head * 2**20, query, key, drop.seed, drop.step, drop.stream)
        assert bool(mask[row, head, query, key]) == (word < round(0.7 * 2**32))


# ---- the same as the definition -----------------------------------------------------------------


def run_ring(p: Problem, mask: IntervalMask, layout: Layout, **options: Any) -> Attention:
    """The ring on W virtual ranks, forward and backward, put together to global tensors."""

    def on_rank(group: LoopbackGroup) -> Attention:
        rank = group.transport.rank
        q, k, v = (layout.shard(x.detach(), 1, rank).requires_grad_() for x in (p.q, p.k, p.v))
        out, lse = ring_attention(q, k, v, ShardedSequence(mask, layout, group), return_lse=True, **options)
        cotangents = [layout.shard(p.dout, 1, rank), layout.shard(p.dlse, 2, rank)]
        return Attention(out.detach(), lse.detach(), *torch.autograd.grad([out, lse], [q, k, v], cotangents))

    return assemble(LoopbackWorld(layout.world_size).run(on_rank), layout)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, IntervalMask, Layout, float, AttentionDropout]:
    world_size = draw(st.integers(1, 5))
    batch, seq_len, num_kv_heads = draw(st.integers(1, 2)), draw(st.integers(world_size, 40)), draw(st.integers(1, 2))
    heads = (num_kv_heads * draw(st.integers(1, 3)), num_kv_heads)
    p = problem(
        batch, seq_len, *heads, draw(st.integers(1, 12)), draw(st.integers(1, 12)), seed=draw(st.integers(0, 9))
    )
    word = st.integers(0, 2**32 - 1)
    rows = tuple(draw(st.lists(st.integers(0, 2**34), min_size=batch, max_size=batch)))
    drop = dropout(draw(st.sampled_from([0.1, 0.5, 0.9])), rows, seed=draw(word), step=draw(word), stream=draw(word))
    return (
        p,
        draw(any_masks(batch, seq_len)),
        draw(layouts(seq_len, world_size)),
        draw(st.sampled_from([0.0, 1.5])),
        drop,
    )


@given(cases())
def test_ring_equals_the_definition(case: tuple[Problem, IntervalMask, Layout, float, AttentionDropout]) -> None:
    """Any layout, mask (documents, windows, rows without keys), softcap, group of heads."""
    p, mask, layout, softcap, drop = case
    factors = kept(drop, p.q.size(2), p.q.size(1)).double() / (1 - drop.probability)
    expected = dense_gradients(p.q, p.k, p.v, dense(mask), p.dout, p.dlse, softcap=softcap, factors=factors)
    # A factor of up to 10 multiplies what the tolerance is relative to, and the terms of the sums.
    assert_close(run_ring(p, mask, layout, softcap=softcap, dropout=drop), expected, 10 * FLOAT64_TOLERANCE)


def test_sinks_are_not_dropped() -> None:
    p, mask, drop = problem(batch=2), IntervalMask.causal(48), dropout(0.5, (0, 1))
    factors = 2 * kept(drop, 4, 48).double()
    leaves = [x.clone().requires_grad_() for x in (p.q, p.k, p.v, torch.linspace(-1, 3, 4, dtype=torch.float64))]
    results = []
    for attend in (
        lambda q, k, v, sinks: attention(q, k, v, mask=mask, sinks=sinks, dropout=drop, return_lse=True),
        lambda q, k, v, sinks: dense_attention(q, k, v, dense(mask), sinks=sinks, factors=factors),
    ):
        outputs = attend(*leaves)
        results.append((*outputs, *torch.autograd.grad(outputs, leaves, [p.dout, p.dlse])))
    for x, y in zip(*results, strict=True):
        assert (x - y).abs().max() <= 10 * FLOAT64_TOLERANCE * y.abs().max()


def masks_of(layout: Layout, drop: AttentionDropout, num_heads: int, probability: float) -> tuple[Tensor, Tensor]:
    """Which weights the ring keeps in its forward, and in its backward: bool (B, H, S, S).

    Scores are 0, out is a row of weights where v is the identity, and dv a column where dout is.
    """
    batch, S = drop.rows.numel(), layout.seq_len
    one = torch.eye(S)[None, :, None].expand(batch, S, num_heads, S).contiguous()
    zeros = torch.zeros(batch, S, num_heads, 2)
    p = Problem(zeros, zeros, one, one, torch.zeros(batch, num_heads, S))
    got = run_ring(p, IntervalMask.full(S), layout, dropout=replace(drop, probability=probability))
    return got.out.transpose(1, 2) != 0, got.dv.permute(0, 2, 3, 1) != 0


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_masks_are_those_of_the_counters_in_every_world_and_layout(name: str, world_size: int) -> None:
    drop = dropout(rows=(2, 7))
    expected = kept(drop, 3, 24)
    for got in masks_of(Layout.named(name, 24, world_size), drop, 3, 0.3):
        assert torch.equal(got, expected)


def test_nothing_and_all_can_be_dropped() -> None:
    p, mask, layout = problem(), IntervalMask.causal(48), Layout.zigzag(48, 2)
    none, without = run_ring(p, mask, layout, dropout=dropout(0.0)), run_ring(p, mask, layout)
    assert all(torch.equal(x, y) for x, y in zip(none, without, strict=True))
    all_ = run_ring(p._replace(dlse=torch.zeros_like(p.dlse)), mask, layout, dropout=dropout(1.0))
    assert torch.equal(all_.lse, without.lse)
    assert not any(x.any() for x in (all_.out, all_.dq, all_.dk, all_.dv))


# ---- the op -------------------------------------------------------------------------------------


def test_compiled_steps_share_a_graph_and_equal_the_others() -> None:
    """With sinks and the log-sum-exp too."""
    p, sequence = problem(), ShardedSequence(MASKS["documents"], Layout.contiguous(48, 1))
    rows, of_heads = torch.tensor([3]), torch.linspace(-1, 3, 4, dtype=torch.float64)

    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, step: int) -> Tensor:
        drop = AttentionDropout(0.3, rows, 1, step, 2)
        out, lse = ring_attention(q * 2, k, v, sequence, sinks=sinks + 1, dropout=drop, return_lse=True)
        return out.sin() + lse.mT[..., None]

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    graphs = []
    for step in range(3):
        results = []
        for function in (layer, compiled):
            leaves = [x.clone().requires_grad_() for x in (p.q, p.k, p.v, of_heads)]
            out = function(*leaves, step)
            results.append((out, *torch.autograd.grad(out, leaves, p.dout)))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[2]  # the second makes the step a number of the graph


def test_rows_that_were_written_to_are_noticed() -> None:
    p, drop = problem(), dropout()
    out = attention(p.q.requires_grad_(), p.k, p.v, mask=IntervalMask.causal(48), dropout=drop)
    drop.rows.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- what it refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (0.1, "dropout is a float; expected a ringtile.AttentionDropout"),
        (dropout(1.5), "probability of dropout is 1.5"),
        (dropout(math.nan), "probability of dropout is nan"),
        (dropout(seed=2**32), "the seed of dropout is 4294967296; expected 0"),
        (dropout(step=-1), "the step of dropout is -1; expected 0"),
        (dropout(stream=0.5), "the stream of dropout is 0.5; expected a whole"),
        (dropout(rows=(0, 1)), r"rows of dropout are torch.int64 \(2,\); expected int64 \(1,\)"),
        (replace(dropout(), rows=torch.zeros(1)), r"rows of dropout are torch.float32 \(1,\)"),
        (replace(dropout(), rows=[0]), "rows of dropout is a list"),
        (replace(dropout(), rows=torch.zeros(1, dtype=torch.int64, device="meta")), "rows of dropout is on meta"),
    ],
)  # fmt: skip
def test_bad_dropout_is_refused_by_name(drop: Any, message: str) -> None:
    p = problem()
    with pytest.raises(InputError, match=message):
        attention(p.q, p.k, p.v, mask=IntervalMask.causal(48), dropout=drop)


def test_aten_is_refused_by_name() -> None:
    p = problem(dtype=torch.float32, v_head_dim=16)
    sequence = ShardedSequence(IntervalMask.causal(48), Layout.contiguous(48, 1))
    ring_attention(p.q, p.k, p.v, sequence, attention_kernel="aten")
    with pytest.raises(RefusedError, match="draws dropout from a generator"):
        ring_attention(p.q, p.k, p.v, sequence, dropout=dropout(), attention_kernel="aten")


@pytest.mark.parametrize(("name", "num_rounded"), [("attn_fwd_", 1), ("attn_bwd_", 2)])
def test_a_kernel_that_drops_otherwise_is_refused(name: str, num_rounded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test of calls without dropout says nothing of those with it."""
    p, options = problem(dtype=torch.float32), {"mask": IntervalMask.causal(48)}
    real = getattr(torch.ops.ringtile, name)

    def of_another_head(*arguments: Any) -> None:
        at = len(arguments) - num_rounded - 2  # of rows, before positions and the rounded results
        rows = arguments[at]
        if isinstance(rows, Tensor):
            rows = rows + 2**20
        real(*arguments[:at], rows, *arguments[at + 1 :])

    self_test.forget()
    monkeypatch.setattr(ops, "_ops", Ops(**{name: of_another_head}))
    attention(p.q, p.k, p.v, **options)
    with pytest.raises(RefusedError, match=r"gives another (out|dv) than its definition"):
        attention(p.q, p.k, p.v, dropout=dropout(), **options)
    self_test.forget()


DIFFERENT = {
    "dropout": {"probability": 0.4},
    "dropout seed": {"seed": 1},
    "dropout stream": {"stream": 1},
    "dropout step": {"step": 6},
    "fingerprint of the data": {"rows": torch.tensor([1])},
}


def test_ranks_that_drop_differently_are_told() -> None:
    """Both, when rank 1 drops something else, once after they have agreed before."""
    p, layout = problem(), Layout.zigzag(48, 2)

    def on_rank(group: LoopbackGroup) -> list[str]:
        rank, said = group.transport.rank, []
        q, k, v = (layout.shard(x, 1, rank) for x in (p.q, p.k, p.v))
        sequence = ShardedSequence(IntervalMask.causal(48), layout, group)
        for changes in DIFFERENT.values():
            ring_attention(q, k, v, sequence, dropout=dropout())
            changed = replace(dropout(), **changes) if rank == 1 else dropout()
            with pytest.raises(RingMismatchError) as caught:
                ring_attention(q, k, v, sequence, dropout=changed)
            said.append(str(caught.value))
        return said

    for said in LoopbackWorld(2).run(on_rank):
        for field, text in zip(DIFFERENT, said, strict=True):
            assert text.startswith(f"ranks disagree on {field} in call"), text
