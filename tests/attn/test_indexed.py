"""Attention over chosen keys, and the choice, on ranks: against dense masked attention in float64 and a stable sort.

Shape letters: B batch, S global tokens, H heads, G kv heads, D head dim, Dv value head dim, I indices of a query.
"""

from __future__ import annotations

import types
import weakref
from typing import NamedTuple

import pytest
import torch
from attention_calls import FLOAT64_TOLERANCE, MASKS, Problem, each_with_a_layout, layout_of, problem
from counting import Counting
from oracle import dense_attention
from ringtile import (
    AttentionDropout,
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RefusedError,
    ShardedSequence,
    ops,
    ring_attention,
    torch_ops,
)
from ringtile.attn import indexed
from ringtile.attn.indexed import choose_keys
from strategies import dense
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Indexer(NamedTuple):
    q: Tensor  # (B, S, H, D)
    k: Tensor  # (B, S, D)
    weights: Tensor  # (B, S, H)


def indexer(batch: int = 1, seq_len: int = 48, seed: int = 0) -> Indexer:
    """Of whole numbers, whose scores are exact: many are equal, most often 0 after the relu."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, seq_len, 3, 4), (batch, seq_len, 4), (batch, seq_len, 3)
    return Indexer(*(torch.randint(-2, 3, shape, generator=generator).float() for shape in shapes))


def by_sorting(of: Indexer, mask: IntervalMask, count: int) -> Tensor:
    """bool (B, S, S): the definition. relu(q k) by weights, and of equal ones the first."""
    scores = torch.einsum("bshd,btd->bsht", of.q.double(), of.k.double()).mul(0.5).relu()
    totals = torch.einsum("bsht,bsh->bst", scores, of.weights.double()).masked_fill(~dense(mask), -torch.inf)
    order = totals.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(totals, dtype=torch.bool).scatter(-1, order, value=True) & dense(mask)


def as_matrix(chosen: Tensor, seq_len: int) -> Tensor:
    """int (B, S, I) -> bool (B, S, S)."""
    found = torch.zeros(*chosen.shape[:2], seq_len + 1, dtype=torch.bool)
    return found.scatter(-1, chosen.long().masked_fill(chosen < 0, seq_len), value=True)[..., :-1]


def chosen_on(of: Indexer, mask: IntervalMask, layout: Layout, count: int, autocast: bool = False) -> Tensor:
    """int32 (B, S, I), put together."""

    def rank(group: object) -> Tensor:
        sequence = ShardedSequence(mask, layout, group)  # type: ignore[arg-type]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            local = choose_keys(*(sequence.shard(x, 1) for x in of), sequence, count, 0.5)
        return sequence.unshard(local, 1)

    return LoopbackWorld(layout.world_size).run(rank)[0]


@pytest.mark.parametrize(("name", "layout"), each_with_a_layout(name for name in MASKS if name != "tree"))
def test_choice_is_that_of_a_stable_sort_on_any_ranks(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties included; in blocks of few queries and keys; ascending, then -1."""
    mask, of = MASKS[name], indexer()
    monkeypatch.setattr(indexed, "_KEYS_AT_ONCE", 7)
    monkeypatch.setattr(torch_ops, "BLOCK_NUMBERS", 20)
    for world_size in (1, 2, 3, 4):
        for count in (5, 1000):
            found = chosen_on(of, mask, layout_of(layout, mask, world_size), count)
            assert found.shape == (1, 48, min(count, 48))
            assert torch.equal(as_matrix(found, 48), by_sorting(of, mask, count))
            ordered = torch.where(found < 0, 99, found)
            assert torch.equal(ordered, ordered.sort(dim=-1).values)


def test_choice_under_autocast_rounds_scores_as_the_indexer_does() -> None:
    """To bfloat16, as one process does: these whole numbers are exact there too."""
    mask, of = MASKS["documents"], indexer()
    found = as_matrix(chosen_on(of, mask, Layout.zigzag(48, 2), 5, autocast=True), 48)
    assert torch.equal(found, by_sorting(of, mask, 5))


def test_of_scores_of_zero_the_first_keys_are_chosen() -> None:
    """Below 0 is every other score."""
    of = indexer()
    of = Indexer(of.q[:, :, :1], of.k, torch.full((1, 48, 1), -1.0))
    mask = IntervalMask.causal(48)
    assert torch.equal(as_matrix(chosen_on(of, mask, Layout.zigzag(48, 2), 6), 48), by_sorting(of, mask, 6))


def attended(
    p: Problem, of: Indexer, mask: IntervalMask, layout: Layout, scheme: str = "ring", sinks: Tensor | None = None
) -> list[Tensor]:
    """The 6 keys of each query, out, dq, dk, dv, put together; and the gradient of sinks."""

    def rank(group: object) -> list[Tensor]:
        sequence = ShardedSequence(mask, layout, group, scheme=scheme)  # type: ignore[arg-type]
        leaves = [sequence.shard(x, 1).requires_grad_() for x in (p.q, p.k, p.v)]
        own = [] if sinks is None else [sinks.clone().requires_grad_()]
        chosen = choose_keys(*(sequence.shard(x, 1) for x in of), sequence, 6)
        out = ring_attention(*leaves, sequence, indices=chosen, sinks=own[0] if own else None)
        gradients = torch.autograd.grad(out, leaves + own, sequence.shard(p.dout, 1))
        whole = [sequence.unshard(x.detach(), 1) for x in (chosen, out, *gradients[:3])]
        return [*whole, *gradients[3:]]

    of_ranks = LoopbackWorld(layout.world_size).run(rank)
    return of_ranks[0][:5] if sinks is None else [*of_ranks[0][:5], sum(each[5] for each in of_ranks)]


@pytest.mark.parametrize(("name", "layout"), each_with_a_layout(["causal", "documents", "padding"]))
def test_attention_is_the_dense_one_over_the_chosen_keys(name: str, layout: str) -> None:
    """out and gradients, with sinks and without, on any ranks."""
    p, mask = problem(batch=2), MASKS[name]
    attend = by_sorting(indexer(2), mask, 6)
    for sinks in (None, torch.linspace(-1, 2, 4, dtype=torch.float64)):
        given = [x for x in (p.q, p.k, p.v, sinks) if x is not None]
        wanted = [x.clone().requires_grad_() for x in given]
        expected = dense_attention(*wanted[:3], attend, None, 0.0, *wanted[3:])[0]
        gradients = torch.autograd.grad(expected, wanted, p.dout)
        for world_size, scheme in ((1, "ring"), (2, "all_gather"), (2, "ulysses"), (3, "ring"), (4, "auto")):
            _, *got = attended(p, indexer(2), mask, layout_of(layout, mask, world_size), scheme, sinks)
            for x, y in zip(got, [expected, *gradients], strict=True):
                torch.testing.assert_close(x, y.detach(), rtol=0, atol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_index_is_a_key_that_the_mask_allows_and_counts_as_often_as_it_comes(world_size: int) -> None:
    p, mask = problem(), MASKS["documents"]
    indices = torch.randint(-3, 51, (1, 48, 9), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    known = torch.where((indices < 0) | (indices > 47), 48, indices).long()
    times = torch.zeros(1, 48, 49, dtype=torch.float64).scatter_add_(-1, known, torch.ones(1, 48, 9).double())[..., :48]
    scores = torch.einsum("bshd,bthd->bhst", p.q, p.k.repeat_interleave(p.q.size(2) // p.k.size(2), 2))
    weights = (scores * p.q.size(3) ** -0.5).exp() * (times * dense(mask))[:, None]
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    expected = torch.einsum("bhst,bthd->bshd", weights, p.v.repeat_interleave(p.q.size(2) // p.v.size(2), 2))

    def rank(group: object) -> Tensor:
        sequence = ShardedSequence(mask, Layout.zigzag(48, world_size), group)  # type: ignore[arg-type]
        local = [sequence.shard(x, 1) for x in (p.q, p.k, p.v)]
        return sequence.unshard(ring_attention(*local, sequence, indices=sequence.shard(indices, 1)), 1)

    found = LoopbackWorld(world_size).run(rank)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT64_TOLERANCE)


def test_a_checkpointed_layer_holds_no_indices() -> None:
    """Between the passes; and what it keeps of attention is what it computed."""
    p, held = problem(), []
    sequence = ShardedSequence(MASKS["causal"], Layout.contiguous(48, 1))

    def layer(q: Tensor) -> Tensor:
        indices = choose_keys(*indexer(), sequence, 6)
        held.append(weakref.ref(indices))
        out: Tensor = ring_attention(q, p.k, p.v, sequence, indices=indices)
        return out

    q = p.q.clone().requires_grad_()
    out = checkpoint(layer, q, use_reentrant=False)
    assert [each() for each in held] == [None]
    out.backward(p.dout)
    (expected,) = torch.autograd.grad(layer(q), q, p.dout)
    assert q.grad is not None
    assert torch.equal(q.grad, expected)


def test_another_document_moves_no_bit() -> None:
    """Of the choice, the output and the gradients of the other documents."""
    mask, layout, other = MASKS["documents"], Layout.zigzag(48, 2), slice(14, 34)  # the third document

    def results(changed: bool) -> list[Tensor]:
        p, of = problem(dtype=torch.float32), indexer()
        if changed:
            for x in (*of, p.q, p.k, p.v, p.dout):
                x[:, other] += 1
        return attended(p, of, mask, layout)

    keep = torch.ones(48, dtype=torch.bool)
    keep[other] = False
    for before, after in zip(results(changed=False), results(changed=True), strict=True):
        assert torch.equal(before[:, keep], after[:, keep])
        assert not torch.equal(before[:, other], after[:, other])


def test_no_tensor_is_as_large_as_the_scores() -> None:
    """Of 2048 tokens, each of which attends 64: the largest tensor is that of a few queries, or linear in S."""
    seq_len, count = 2048, 64
    mask, of = IntervalMask.causal(seq_len), indexer(seq_len=seq_len)
    sequence = ShardedSequence(mask, Layout.contiguous(seq_len, 1))
    leaves = [torch.randn(1, seq_len, 2, 8, requires_grad=True) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "BLOCK_NUMBERS", 1 << 14)
        with Counting() as counted:
            out = ring_attention(*leaves, sequence, indices=choose_keys(*of, sequence, count))
            out.sum().backward()
    assert counted.largest <= seq_len * count < seq_len**2 / 16


@pytest.mark.parametrize("dtype", ops.FLOAT_DTYPES)
def test_kernel_and_torch_operations_agree(dtype: torch.dtype) -> None:
    """The self-test, of both, finds nothing; and finds a kernel that leaves a key out."""
    cpu, test = torch.device("cpu"), ops.KERNELS["indexed attention"]
    assert ops.why_not_kernel("indexed attention", cpu, dtype) == ""

    def forgets(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return torch_ops.indexed_attn(q, k, v, indices[..., 1:], scale)

    assert test(torch_ops, cpu, dtype) == ""
    wrong = types.SimpleNamespace(indexed_attn=forgets, indexed_attn_backward=torch_ops.indexed_attn_backward)
    assert "another out" in test(wrong, cpu, dtype)


def test_what_it_refuses() -> None:
    sequence = ShardedSequence(MASKS["causal"], Layout.contiguous(48, 1))
    p, indices = problem(), torch.zeros(1, 48, 3, dtype=torch.int32)
    for q, given, message in (
        (p.q, indices.long(), r"indices are torch.int64 \(1, 48, 3\); expected int32 \(1, 48, I\)"),
        (p.q, indices[:, 1:], "indices are"),
        (p.q, 3, "indices is a int; expected a tensor"),
    ):
        with pytest.raises(InputError, match=message):
            ring_attention(q, p.k, p.v, sequence, indices=given)
    tree = ShardedSequence(MASKS["tree"], Layout.contiguous(48, 1))
    drop = AttentionDropout(0.5, torch.zeros(1, dtype=torch.int64), 1)
    for of, beside, message in (
        (sequence, {"softcap": 2.0}, "indices come with softcap; expected indices without"),
        (sequence, {"dropout": drop}, "indices come with dropout"),
        (tree, {}, "indices come with a mask with two sides"),
        (sequence, {"attention_kernel": "aten"}, "attends all keys of a mask, not those that indices choose"),
    ):
        with pytest.raises(RefusedError, match=message):
            ring_attention(p.q, p.k, p.v, of, indices=indices, **beside)
    attend = torch.compile(ring_attention, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"got indices under torch.compile; expected a call outside of it"):
        attend(p.q, p.k, p.v, sequence, indices=indices)
    with pytest.raises(InputError, match="the mask has two sides"):
        choose_keys(*indexer(), tree, 3)
