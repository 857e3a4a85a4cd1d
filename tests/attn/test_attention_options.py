"""Sinks and dropout of weights beside the table of test_attention_table.py: their corners, compiled steps, refusals.

Shape letters: B batch, S tokens, H query heads.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_calls import MASKS, problem, run, run_ring
from oracle import kept
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
from torch import Tensor
from torch.fx.experimental import proxy_tensor


def random_word(row: int, position: int, feature: int, seed: int, step: int, stream: int) -> int:
    """Philox4x32-10 in Python integers."""
    word, keys = [feature // 4, position, row, stream], [seed, step]
    for _ in range(10):
        a, b = 0xD2511F53 * word[0], 0xCD9E8D57 * word[2]
        word = [b >> 32 ^ word[1] ^ keys[0], b % 2**32, a >> 32 ^ word[3] ^ keys[1], a % 2**32]
        keys = [(keys[0] + 0x9E3779B9) % 2**32, (keys[1] + 0xBB67AE85) % 2**32]
    return word[feature % 4]


def dropout(probability: float = 0.3, rows: tuple[int, ...] = (0,), **numbers: int) -> AttentionDropout:
    return AttentionDropout(probability, torch.tensor(rows), **{"seed": 1234, "step": 5, "stream": 0xC0FFEE, **numbers})


def test_the_masks_of_these_tests_are_philoxs() -> None:
    drop = dropout(rows=(3, 2**20 - 1))
    mask = kept(drop, 3, 9)
    for row, head, query, key in ((0, 0, 0, 0), (1, 2, 8, 7), (0, 1, 3, 5), (1, 1, 4, 2)):
        word = random_word(int(drop.rows[row]) + head * 2**20, query, key, drop.seed, drop.step, drop.stream)
        assert bool(mask[row, head, query, key]) == (word < round(0.7 * 2**32))


def test_nothing_and_all_can_be_dropped() -> None:
    p, mask, layout = problem(), MASKS["causal"], Layout.zigzag(48, 2)
    none, without = run_ring(p, mask, layout, dropout=dropout(0.0)), run_ring(p, mask, layout)
    assert all(torch.equal(x, y) for x, y in zip(none, without, strict=True))
    all_ = run_ring(p._replace(dlse=torch.zeros_like(p.dlse)), mask, layout, dropout=dropout(1.0))
    assert torch.equal(all_.lse, without.lse)
    assert not any(x.any() for x in (all_.out, all_.dq, all_.dk, all_.dv))


def test_a_sink_far_above_or_below_the_scores_is_exact() -> None:
    """-inf is no sink at all. 1e300 is infinite where the state is float32: it takes all the weight."""
    p = problem(dtype=torch.float32)
    sinks = torch.tensor([-torch.inf, -1e4, 1e4, 1e300], dtype=torch.float64)
    mask = IntervalMask.documents([13, 1, 20, 14]) & IntervalMask.from_padding(torch.tensor([[0] * 5 + [1] * 43]))
    got, without = (
        run(p, mask, Layout.zigzag(48, 2), sinks=each, of_lse=False) for each in (sinks, torch.full((4,), -torch.inf))
    )
    assert torch.equal(got.results.out[:, :, :2], without.results.out[:, :, :2])
    assert torch.all(got.results.out[:, :, 2:] == 0)
    assert torch.equal(got.results.lse[:, 0], without.results.lse[:, 0])
    assert torch.all(got.results.dq[:, :, 2:] == 0)
    assert torch.all(got.dsinks[:3] == 0)
    assert torch.all(without.dsinks == 0)
    plain = attention(p.q, p.k, p.v, mask=mask)
    assert (without.results.out - plain).abs().max() <= 8 * torch.finfo(torch.float32).eps * plain.abs().max()


def test_sinks_of_any_dtype_get_gradients_of_theirs() -> None:
    p = problem(dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        sinks = torch.linspace(-1, 3, 4, dtype=dtype).requires_grad_()
        attention(p.q, p.k, p.v, mask=MASKS["causal"], sinks=sinks).sum().backward()  # q needs no gradient
        assert sinks.grad is not None
        assert sinks.grad.dtype == dtype
        assert sinks.grad.abs().sum() > 0


# ---- the op -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [pytest.param("documents", marks=pytest.mark.long), "tree"])
def test_compiled_steps_share_a_graph_and_equal_the_others(mask: str) -> None:
    """With sinks and the log-sum-exp too."""
    p, sequence = problem(), ShardedSequence(MASKS[mask], Layout.contiguous(48, 1))
    rows, of_heads = torch.tensor([3]), torch.linspace(-1, 3, 4, dtype=torch.float64)

    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, step: int) -> Tensor:
        drop = AttentionDropout(0.3, rows, 1, step, 2)
        out, lse = ring_attention(q * 2, k, v, sequence, sinks=sinks + 1, dropout=drop, return_lse=True)
        return out.sin() + lse.mT[..., None] + attention(q, k, v, mask=MASKS[mask])

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


def test_one_compiled_graph_serves_all_lengths() -> None:
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    traced = proxy_tensor.make_fx(lambda *x: attention(*x, is_causal=True), tracing_mode="symbolic")(*problem()[:3])
    for seq_len in (48, 7, 31):
        leaves = [x.requires_grad_() for x in problem(seq_len=seq_len)[:3]]
        outs = attention(*leaves, is_causal=True), compiled(*leaves, is_causal=True), traced(*leaves)
        results = [(out, *torch.autograd.grad(out.sum(), leaves)) for out in outs]
        assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(*results, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_rows_that_were_written_to_are_noticed() -> None:
    p, drop = problem(), dropout()
    out = attention(p.q.requires_grad_(), p.k, p.v, mask=MASKS["causal"], dropout=drop)
    drop.rows.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- what it refuses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("dropout", 0.1, "dropout is a float; expected a ringtile.AttentionDropout"),
        ("dropout", dropout(1.5), "probability of dropout is 1.5"),
        ("dropout", dropout(math.nan), "probability of dropout is nan"),
        ("dropout", dropout(seed=2**32), "the seed of dropout is 4294967296; expected 0"),
        ("dropout", dropout(step=-1), "the step of dropout is -1; expected 0"),
        ("dropout", dropout(stream=0.5), "the stream of dropout is 0.5; expected a whole"),
        ("dropout", dropout(rows=(0, 1)), r"rows of dropout are torch.int64 \(2,\); expected int64 \(1,\)"),
        ("dropout", replace(dropout(), rows=torch.zeros(1)), r"rows of dropout are torch.float32 \(1,\)"),
        ("dropout", replace(dropout(), rows=[0]), "rows of dropout is a list"),
        ("dropout", replace(dropout(), rows=torch.zeros(1, device="meta").long()), "rows of dropout is on meta"),
        ("sinks", torch.zeros(3), r"sinks has shape \(3,\); expected \(4,\)"),
        ("sinks", torch.zeros(4, 1), r"sinks has shape \(4, 1\)"),
        ("sinks", torch.zeros(4, dtype=torch.int64), "sinks has dtype torch.int64"),
        ("sinks", torch.zeros(4, device="meta"), "sinks is on meta but q is on cpu"),
        ("sinks", 0.5, "sinks is a float; expected a tensor"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_by_name(option: str, given: Any, message: str) -> None:
    p = problem()
    with pytest.raises(InputError, match=message):
        attention(p.q, p.k, p.v, mask=MASKS["causal"], **{option: given})


@pytest.mark.parametrize("name", ["attn_fwd_", "attn_bwd_"])
def test_a_kernel_that_drops_otherwise_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test of calls without dropout says nothing of those with it."""
    p, options = problem(dtype=torch.float32), {"mask": MASKS["causal"]}
    real = getattr(ops, name)

    def of_another_head(*arguments: Any, **named: Any) -> None:
        if "rows" in named:
            named["rows"] = named["rows"] + 2**20
        real(*arguments, **named)

    self_test.forget()
    monkeypatch.setattr(ops, name, of_another_head)
    attention(p.q, p.k, p.v, **options)
    with pytest.raises(RefusedError, match=r"gives another (out|dv) than its definition"):
        attention(p.q, p.k, p.v, dropout=dropout(), **options)
    self_test.forget()


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
