"""Every scheme over virtual ranks against attention on one rank, and what it sends against the plan.

Shape letters: B batch, S global tokens, N local tokens, H query heads, G kv heads, D head dim, W ranks.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Attention, dense_gradients
from pool import run_ranks
from ringtile import (
    AttentionDropout,
    Config,
    ConfigError,
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RefusedError,
    RingMismatchError,
    ShardedSequence,
    plan,
    ring_attention,
)
from ringtile.attn import choose
from ringtile.attn.op import attend
from ringtile.scheme import Scheme, share
from ringtile.transport.loopback import LoopbackGroup
from strategies import any_masks, dense, layouts
from test_ring import FLOAT64_TOLERANCE, Problem, assemble, assert_close, assert_within_8_ulp, problem, run_ring
from test_sinks import by_definition, sinks_of
from torch import Tensor

SEQ_LEN = 48
MASKS = {
    "causal": IntervalMask.causal(SEQ_LEN),
    "full": IntervalMask.full(SEQ_LEN),
    "documents": IntervalMask.documents([13, 1, 20, 14]),
    "window": IntervalMask.sliding_window(SEQ_LEN, 7),
    "prefix": IntervalMask.prefix_lm(SEQ_LEN, 11),
    "padding": IntervalMask.from_padding(torch.tensor([[0] * 5 + [1] * 43, [1] * 40 + [0] * 8])),
    "tree": IntervalMask.tree([[-1, 0, 1, 1, 0, -1], [-1, 0, 0, 0, 0, 4]], [[9, 7, 3, 9, 5, 15], [20, 1, 9, 6, 5, 7]]),
}
LAYOUTS = ("contiguous", "zigzag", "striped")
HEADS = ((8, 8), (8, 2), (7, 7), (4, 1), (6, 3))
SCHEMES = ("all_gather", "ulysses", "usp:1", "usp:2")
WORLD_SIZES = (2, 3, 4)


def cells() -> list[tuple[str, str, str, tuple[int, int], int]]:
    return [
        cell
        for cell in itertools.product(SCHEMES, MASKS, LAYOUTS, HEADS, WORLD_SIZES)
        if cell[4] % (Scheme.parse(cell[0]).group_size or 1) == 0  # else refused: see below
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
    size = Scheme.parse(name).ranks_per_group(world_size)
    for of_rank, (forward, backward) in zip(cost.ranks, sent, strict=True):
        others = [other for other in cost.ranks if other.rank // size == of_rank.rank // size and other is not of_rank]
        # With return_lse: a float64 of each token and head back, and its gradient there.
        lse = 2 * 8 * of_rank.num_heads * sum(other.local_len for other in others)
        dlse = 2 * 8 * of_rank.local_len * sum(other.num_heads for other in others)
        assert (forward, backward) == (of_rank.forward_bytes_sent + lse, of_rank.backward_bytes_sent + dlse), where
    assert cost.forward_bytes == sum(rank.forward_bytes_received for rank in cost.ranks), where
    assert cost.backward_bytes == sum(rank.backward_bytes_received for rank in cost.ranks), where


def test_schemes_equal_one_rank_and_send_what_is_planned() -> None:
    for cell in pairwise(cells()):
        check_cell(*cell)


@pytest.mark.long
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_cells_equal_one_rank_and_send_what_is_planned(scheme: str) -> None:
    for cell in cells():
        if cell[0] == scheme:
            check_cell(*cell)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, IntervalMask, Layout, str]:
    world_size = draw(st.integers(1, 5))
    batch, seq_len = draw(st.integers(1, 2)), draw(st.integers(world_size, 24))
    num_kv_heads = draw(st.integers(1, 3))
    num_heads, dims = num_kv_heads * draw(st.integers(1, 4)), [draw(st.integers(1, 9)) for _ in range(2)]
    p = problem(batch, seq_len, num_heads, num_kv_heads, *dims, seed=draw(st.integers(0, 1000)))
    size = draw(st.sampled_from([size for size in range(1, world_size + 1) if world_size % size == 0]))
    scheme = draw(st.sampled_from(["all_gather", "ulysses", f"usp:{size}"]))
    return p, draw(any_masks(batch, seq_len)), draw(layouts(seq_len, world_size)), scheme


@settings(max_examples=40)
@given(cases(), st.sampled_from([0.0, 2.0]))
def test_schemes_equal_the_definition(case: tuple[Problem, IntervalMask, Layout, str], softcap: float) -> None:
    """Any heads, also fewer than ranks, ranks of any lengths, head dims that align nothing."""
    p, mask, layout, scheme = case
    expected = dense_gradients(p.q, p.k, p.v, dense(mask), p.dout, p.dlse, None, softcap)
    assert_close(run_scheme(p, mask, layout, scheme, softcap)[0], expected, FLOAT64_TOLERANCE)


@pytest.mark.parametrize("scheme", ["all_gather", "ulysses", "usp:2"])
def test_sinks_are_those_of_the_definition(scheme: str) -> None:
    """The gradient of the sinks is by what a rank works on: callers add those of the ranks."""
    p = problem(2, SEQ_LEN, 6, 2)
    sinks, layout = sinks_of(p), Layout.zigzag(SEQ_LEN, 4)
    expected = by_definition(p, sinks, MASKS["documents"])
    got, _, of_sinks = run_scheme(p, MASKS["documents"], layout, scheme, sinks=sinks)
    assert_close(got, expected.attention, FLOAT64_TOLERANCE)
    assert torch.allclose(sum(of_sinks), expected.dsinks, rtol=0, atol=FLOAT64_TOLERANCE)
    of_ring = run_scheme(p, MASKS["documents"], layout, "ring", sinks=sinks)[2]
    assert torch.allclose(sum(of_ring), expected.dsinks, rtol=0, atol=FLOAT64_TOLERANCE)


def test_bits_are_the_same_every_time_and_not_finite_stays_where_it_may_go() -> None:
    p = problem(2, SEQ_LEN, 6, 2, dtype=torch.bfloat16)
    runs = [run_scheme(p, MASKS["causal"], Layout.zigzag(SEQ_LEN, 3), "ulysses")[0] for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
    p.k[:, 40] = torch.nan  # attended by later queries only
    run = run_scheme(p, MASKS["causal"], Layout.zigzag(SEQ_LEN, 3), "ulysses")[0]
    assert torch.equal(run.out[:, :40], runs[0].out[:, :40])
    assert run.out[:, 40:].isnan().all()


# ---- shares -------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 12))
def test_shares_hold_each_head_once_and_know_its_kv_head(kv_heads: int, repeats: int, num_parts: int) -> None:
    heads: list[int] = []
    sizes = []
    for part in range(num_parts):
        of_part = share(kv_heads * repeats, kv_heads, num_parts, part)
        heads += of_part.heads
        sizes.append(len(of_part.heads))
        expected = [head // repeats for head in of_part.heads]
        each = len(of_part.heads) // max(1, len(of_part.kv_heads))  # query heads of a kernel call for a kv head
        index = of_part.kv_of_heads or [i // each for i in range(len(of_part.heads))]
        assert [of_part.kv_heads[i] for i in index] == expected
    assert heads == [*range(kv_heads * repeats)]
    assert max(sizes) - min(sizes) <= (repeats if kv_heads >= num_parts else 1)


def test_kv_heads_enough_for_all_ranks_travel_to_one_each() -> None:
    kv_heads = [head for part in range(4) for head in share(24, 6, 4, part).kv_heads]
    assert kv_heads == [*range(6)]


# ---- over processes ----------------------------------------------------------------------------


def on_gloo() -> dict[str, Any]:
    """This rank's results and the bytes that it sent, scheme by scheme."""
    p = problem(2, SEQ_LEN, 6, 2, dtype=torch.bfloat16)
    results = {}
    for scheme in ("all_gather", "ulysses"):
        sequence = ShardedSequence(MASKS["documents"], Layout.zigzag(SEQ_LEN, 2), dist.group.WORLD, scheme=scheme)
        leaves = [sequence.shard(x, 1).requires_grad_() for x in (p.q, p.k, p.v)]
        before = sequence.transport.bytes_sent
        out, lse = ring_attention(*leaves, sequence, return_lse=True)
        cotangents = [sequence.shard(p.dout, 1), sequence.shard(p.dlse, 2)]
        gradients = torch.autograd.grad([out, lse], leaves, cotangents)
        results[scheme] = Attention(out.detach(), lse.detach(), *gradients), sequence.transport.bytes_sent - before
    return results


def test_processes_equal_virtual_ranks() -> None:
    p, layout = problem(2, SEQ_LEN, 6, 2, dtype=torch.bfloat16), Layout.zigzag(SEQ_LEN, 2)
    ranks = run_ranks(2, on_gloo)
    for scheme in ranks[0]:
        virtual, sent, _ = run_scheme(p, MASKS["documents"], layout, scheme)
        result = assemble([rank[scheme][0] for rank in ranks], layout)
        assert all(torch.equal(x, y) for x, y in zip(result, virtual, strict=True)), scheme
        assert [rank[scheme][1] for rank in ranks] == [sum(each) for each in sent], scheme


def test_op_takes_a_scheme() -> None:
    """Under torch.compile and vmap the op finds the sequence by its tensors: the same tensors, another scheme."""
    p = problem(1, SEQ_LEN, 4, 2)
    layout = Layout.zigzag(SEQ_LEN, 2)

    def on_rank(group: LoopbackGroup) -> None:
        sequences = [ShardedSequence(MASKS["causal"], layout, group, scheme=scheme) for scheme in ("ulysses", "ring")]
        for sequence in sequences:
            leaves = [sequence.shard(x, 1).requires_grad_() for x in (p.q, p.k, p.v)]
            begin = group.transport.bytes_sent
            out = ring_attention(*leaves, sequence)
            gradients = torch.autograd.grad(out.sum(), leaves)
            middle = group.transport.bytes_sent
            through_op, _ = attend(*leaves, sequence, 0.25)
            of_op = torch.autograd.grad(through_op.sum(), leaves)
            sent = group.transport.bytes_sent - middle  # heads a second time in the backward, because none were kept
            assert (sent == middle - begin) == (sequence.scheme == "ring")
            assert all(torch.equal(x, y) for x, y in zip((out, *gradients), (through_op, *of_op), strict=True))

    LoopbackWorld(2).run(on_rank)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "Ring", "auto:2", "usp:0", "usp:-1", "staged:2", "ulysses:2", "ring ", None, 2])
def test_unknown_schemes_are_refused_by_name(text: Any) -> None:
    with pytest.raises(InputError, match=r"the scheme is .*; expected ring, all_gather, ulysses, usp:M"):
        Scheme.parse(text)


def test_groups_that_do_not_come_out_even_are_refused() -> None:
    message = "the scheme is usp:2, but the group has 3 ranks; expected a number that divides it"

    def on_rank(group: LoopbackGroup) -> None:
        with pytest.raises(InputError, match=message):
            ShardedSequence(MASKS["causal"], Layout.zigzag(SEQ_LEN, 3), group, scheme="usp:2")

    LoopbackWorld(3).run(on_rank)
    with pytest.raises(InputError, match=message):
        plan(
            *(MASKS["causal"], Layout.zigzag(SEQ_LEN, 3)),
            **{"num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "scheme": "usp:2"},
            dtype=torch.float32,
        )
    with pytest.raises(ConfigError, match="context_parallel_scheme: the scheme is usp:2, but the group has 3 ranks"):
        Config(context_parallel_size=3, context_parallel_scheme="usp:2")
    with pytest.raises(ConfigError, match=r"context_parallel_scheme: the scheme is 'ulises'; expected ring"):
        Config(context_parallel_size=3, context_parallel_scheme="ulises")


def test_ranks_of_different_schemes_are_named() -> None:
    p = problem(1, SEQ_LEN, 4, 2)

    def on_rank(group: LoopbackGroup) -> None:
        scheme = ("ulysses", "all_gather")[group.transport.rank]
        sequence = ShardedSequence(MASKS["causal"], Layout.zigzag(SEQ_LEN, 2), group, scheme=scheme)
        with pytest.raises(RingMismatchError, match="ranks disagree on scheme in call 1"):
            ring_attention(*(sequence.shard(x, 1) for x in (p.q, p.k, p.v)), sequence)

    LoopbackWorld(2).run(on_rank)


@pytest.mark.parametrize("scheme", ["ulysses", "usp:2", "all_gather"])
def test_atens_kernels_compute_under_every_scheme(scheme: str) -> None:
    p, layout = problem(1, SEQ_LEN, 6, 2, 8, 8), Layout.zigzag(SEQ_LEN, 4)
    expected = dense_gradients(p.q, p.k, p.v, dense(MASKS["documents"]), p.dout, torch.zeros_like(p.dlse))

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        sequence = ShardedSequence(MASKS["documents"], layout, group, scheme=scheme)
        leaves = [sequence.shard(x, 1).requires_grad_() for x in (p.q, p.k, p.v)]
        out = ring_attention(*leaves, sequence, attention_kernel="aten")
        return [out.detach(), *torch.autograd.grad(out, leaves, sequence.shard(p.dout, 1))]

    of_ranks = LoopbackWorld(4).run(on_rank)
    for x, shards in zip((expected.out, *expected[2:]), zip(*of_ranks, strict=True), strict=True):
        for rank, shard in enumerate(shards):
            assert (shard - layout.shard(x, 1, rank)).abs().max() <= FLOAT64_TOLERANCE


@pytest.mark.parametrize("scheme", ["ulysses", "usp:2"])
def test_attention_dropout_is_that_of_one_rank_under_every_scheme(scheme: str) -> None:
    """What is dropped depends on the query head: 7 of them, of which shares begin at any."""
    p = problem(2, SEQ_LEN, 7, 7)
    drop = AttentionDropout(0.3, torch.tensor([5, 9]), seed=3, step=2, stream=7)
    expected = run_scheme(p, MASKS["documents"], Layout.contiguous(SEQ_LEN, 1), "ring", dropout=drop)[0]
    got = run_scheme(p, MASKS["documents"], Layout.zigzag(SEQ_LEN, 4), scheme, dropout=drop)[0]
    assert_close(got, expected, FLOAT64_TOLERANCE)
    without = run_scheme(p, MASKS["documents"], Layout.zigzag(SEQ_LEN, 4), scheme)[0]
    assert (got.out - without.out).abs().max() > 0.1


def test_a_wrong_kernel_of_single_heads_is_refused_before_any_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 query heads share a kv head, but over 4 ranks each has a single one, for which another kernel runs."""

    def of_single_heads(backend: Any, q: Tensor, k: Tensor, v: Tensor, *kind: bool) -> str:
        return "is wrong for single heads" if q.size(2) == k.size(2) else ""

    monkeypatch.setattr(choose, "why_wrong", of_single_heads)
    p = problem(1, SEQ_LEN, 4, 1)

    def on_rank(group: LoopbackGroup) -> None:
        sequence = ShardedSequence(MASKS["causal"], Layout.zigzag(SEQ_LEN, 4), group, scheme="ulysses")
        with pytest.raises(RefusedError, match="is wrong for single heads"):
            ring_attention(*(sequence.shard(x, 1) for x in (p.q, p.k, p.v)), sequence)
        assert group.transport.bytes_sent == 0
        whole = ShardedSequence(MASKS["causal"], Layout.zigzag(SEQ_LEN, 4), group, scheme="ring")
        ring_attention(*(whole.shard(x, 1) for x in (p.q, p.k, p.v)), whole)

    LoopbackWorld(4).run(on_rank)
