"""Attention on trees against each way from a root to a leaf computed as a sequence of its own.

Shape letters: B batch, S tokens of a row, H query heads, G kv heads, D head dim, W ranks.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Attention, dense_attention, dense_gradients
from ringtile import (
    IntervalMask,
    Layout,
    LoopbackWorld,
    RefusedError,
    ShardedSequence,
    attention,
    ops,
    plan,
    ring_attention,
)
from ringtile.sequence.pieces import MAX_STRETCHES, Piece, find_pieces
from ringtile.sequence.plan import rank_plan
from ringtile.transport.loopback import LoopbackGroup
from strategies import dense
from test_ring import FLOAT64_TOLERANCE, Problem, assert_close, assert_within_8_ulp, problem, run_ring
from test_schemes import run_scheme
from torch import Tensor

Tree = tuple[list[int], list[int]]  # parents, lengths


def random_tree(rng: random.Random, num_nodes: int, longest: int, max_depth: int = 64, roots: int = 3) -> Tree:
    """Uneven: a new node hangs from the node before, or from one of its ancestors, or is a root."""
    parents, lengths, path = [], [], []
    for node in range(num_nodes):
        if path and rng.random() < 0.6 and len(path) < max_depth:
            keep = len(path)
        else:
            least = 0 if parents.count(-1) < roots else min(1, len(path))
            keep = rng.randint(least, max(least, len(path) - 1))
        del path[keep:]
        parents.append(path[-1] if path else -1)
        lengths.append(rng.randint(0 if rng.random() < 0.1 else 1, longest))
        path.append(node)
    return parents, lengths


def ways_of(tree: Tree) -> list[list[int]]:
    """The tokens on the way to each leaf."""
    parents, lengths = tree
    begins = [sum(lengths[:node]) for node in range(len(lengths))]
    ways = []
    for leaf in sorted({*range(len(parents))} - {*parents}):
        way, node = [], leaf
        while node >= 0:
            way = [*range(begins[node], begins[node] + lengths[node]), *way]
            node = parents[node]
        ways.append(way)
    return ways


def by_ways(p: Problem, trees: list[Tree], **options: Any) -> Attention:
    """Each way alone, causal, in float64. The loss of a token that several ways share counts in the first of them."""
    leaves = [x.detach().double().requires_grad_() for x in (p.q, p.k, p.v)]
    out = torch.zeros(*p.q.shape[:3], p.v.size(3), dtype=torch.float64)
    lse = torch.full((p.q.size(0), p.q.size(2), p.q.size(1)), -torch.inf, dtype=torch.float64)
    grads = [torch.zeros_like(x) for x in leaves]
    for row, tree in enumerate(trees):
        counted = torch.zeros(p.q.size(1), dtype=torch.bool)
        for way in ways_of(tree):
            of_way = [x[row : row + 1, way] for x in leaves]
            causal = torch.ones(1, len(way), len(way), dtype=torch.bool).tril()
            way_out, way_lse = dense_attention(*of_way, causal, **options)
            new = ~counted[way]
            counted[way] = True
            cotangents = [p.dout[row : row + 1, way].double() * new[None, :, None, None]]
            cotangents.append(p.dlse[row : row + 1, :, way].double() * new)
            for total, grad in zip(grads, torch.autograd.grad([way_out, way_lse], leaves, cotangents), strict=True):
                total += grad
            out[row, way], lse[row, :, way] = way_out[0].detach(), way_lse[0].detach()
    return Attention(out, lse, *grads)


def padded_rows(rng: random.Random, *trees: Tree) -> tuple[IntervalMask, list[Tree]]:
    """Trees of any sizes as rows of one length: the shorter ones get a tree of padding, which is then switched off."""
    longest = max(sum(lengths) for _, lengths in trees) + rng.randint(0, 5)
    rows = [([*parents, -1], [*lengths, longest - sum(lengths)]) for parents, lengths in trees]
    tokens = torch.stack([torch.arange(longest) < sum(lengths) for _, lengths in trees])
    holds = IntervalMask(torch.zeros(len(trees), longest, dtype=torch.int32), (tokens * longest).int())
    mask = IntervalMask.tree([row[0] for row in rows], [row[1] for row in rows]) & holds
    return mask, list(trees)


def named_layouts(mask: IntervalMask, world_size: int) -> dict[str, Layout]:
    names = ("contiguous", "zigzag", "striped")
    named = {name: Layout.named(name, mask.seq_len, world_size) for name in names}
    return named | {"balanced": Layout.balanced(mask, world_size, chunk=7)}


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))])
def test_trees_equal_their_ways_on_any_number_of_ranks(seed: int) -> None:
    """float64, out, lse and gradients: rows of uneven trees with padding, layouts and schemes in turn."""
    rng = random.Random(seed)
    mask, trees = padded_rows(rng, *(random_tree(rng, rng.randint(2, 30), 9) for _ in range(2)))
    p = problem(2, mask.seq_len, 4, 2, 8, 12, seed=seed)
    expected = by_ways(p, trees)
    schemes = ["ring", "all_gather", "ulysses"]
    for world_size in (1, 2, 3, 4):
        for name, layout in named_layouts(mask, world_size).items():
            scheme = rng.choice(schemes) if world_size < 4 else rng.choice([*schemes, "usp:2"])
            got, sent, _ = run_scheme(p, mask, layout, scheme)
            assert_close(got, expected, FLOAT64_TOLERANCE)
            if scheme == "ring":
                shape: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 12}
                cost = plan(mask, layout, dtype=torch.float64, **shape)
                planned = [(rank.forward_bytes_sent, rank.backward_bytes_sent) for rank in cost.ranks]
                assert sent == planned, (name, world_size)


def test_softcap_and_sinks_on_trees() -> None:
    rng = random.Random(11)
    tree = random_tree(rng, 25, 8)
    mask, sinks = IntervalMask.tree(*tree), torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    p = problem(1, mask.seq_len, 4, 2, 8, 12)
    expected = by_ways(p, [tree], softcap=3.0, sinks=sinks)
    for scheme in ("ring", "ulysses"):
        got, _, _ = run_scheme(p, mask, Layout.zigzag(mask.seq_len, 3), scheme, softcap=3.0, sinks=sinks)
        assert_close(got, expected, FLOAT64_TOLERANCE)


@pytest.mark.parametrize(
    ("num_leaves", "depth"),
    [(300, 1), (4, 64), pytest.param(1000, 1, marks=pytest.mark.long), pytest.param(60, 64, marks=pytest.mark.long)],
)
def test_wide_and_deep_trees_equal_their_ways(num_leaves: int, depth: int) -> None:
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
    expected = by_ways(p, [(parents, lengths)])
    for world_size, layout in ((1, "contiguous"), (2, "zigzag")):
        got = run_ring(p, mask, Layout.named(layout, mask.seq_len, world_size))
        assert_close(got, expected, FLOAT64_TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_forest_of_1000_leaves_equals_its_ways(world_size: int) -> None:
    """Uneven trees, 64 nodes deep, and padding, in every layout; schemes in turn."""
    rng = random.Random(world_size)
    deep = [-1, *(3 * (node // 3) for node in range(3 * 63))]  # two leaves, and the node that goes on
    wide = random_tree(rng, 2500, 3)
    parents = [*deep, *(parent + len(deep) * (parent >= 0) for parent in wide[0])]
    mask, trees = padded_rows(rng, (parents, [*(rng.randint(1, 4) for _ in deep), *wide[1]]))
    assert len(ways_of(trees[0])) >= 1000
    p = problem(1, mask.seq_len, 4, 2, 8, 12, seed=world_size)
    expected = by_ways(p, trees)
    for layout in named_layouts(mask, world_size).values():
        for scheme in ("ring", rng.choice(["all_gather", "ulysses"])):
            assert_close(run_scheme(p, mask, layout, scheme)[0], expected, FLOAT64_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_trees_are_not_less_exact_than_torch(dtype: torch.dtype) -> None:
    """max |ours - float64| <= max |torch's attention in the same dtype - float64|, for out, dq, dk, dv; float32 of the
    ring within 8 ulp of one rank besides."""
    tree = [-1, 0, 1, 1, 0, 4], [100, 40, 30, 26, 20, 40]
    mask = IntervalMask.tree(*tree)
    p = problem(4, mask.seq_len, num_heads=4, num_kv_heads=4, head_dim=64, v_head_dim=64, dtype=dtype)
    p = p._replace(dlse=torch.zeros_like(p.dlse))
    exact = by_ways(p, [tree] * 4)
    leaves = [x.transpose(1, 2).clone().requires_grad_() for x in (p.q, p.k, p.v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=dense(mask)[:, None])
    torchs = (out, *torch.autograd.grad(out, leaves, p.dout.transpose(1, 2)))
    single = run_ring(p, mask, Layout.contiguous(mask.seq_len, 1))
    for world_size in (1, 4):
        ours = run_ring(p, mask, Layout.zigzag(mask.seq_len, world_size))
        for name, theirs in zip(("out", "dq", "dk", "dv"), torchs, strict=True):
            x, y = getattr(ours, name), getattr(exact, name)
            # As ringtile's own bar in float32, where both round alike: a tenth more.
            slack = 1.1 if dtype == torch.float32 else 1.0
            worst = (theirs.transpose(1, 2).double() - y).abs().max()
            assert (x.double() - y).abs().max() <= slack * worst, (name, world_size)
        if dtype == torch.float32:
            assert_within_8_ulp(ours, single, world_size)


@pytest.mark.parametrize("value", [3.0, 1e30, torch.nan, torch.inf])
def test_a_branch_leaves_no_trace_in_its_siblings(value: float) -> None:
    """To the bit: what q, k, v and dout of a branch hold shows in no number of another branch, nor in out of the
    prompt, whose keys' gradients alone know all branches. On 3 ranks, in tiles that hold many branches. Around numbers
    that are not finite, the kernels add in another order: within 8 ulp then."""
    lengths = [37, 11, 30, 9, 50, 2, 2, 3]
    mask = IntervalMask.tree([-1, 0, 1, 1, 0, 4, 4, 4], lengths)
    changed, rest = slice(37, 87), slice(87, None)  # nodes 1, 2, 3; nodes 4 to 7
    p = problem(1, mask.seq_len, 4, 2, 16, 8, torch.float32)
    q, k, v, dout = (x.clone() for x in p[:4])
    for x in (q, k, v, dout):
        x[:, changed] = value
    for layout in (Layout.contiguous(mask.seq_len, 1), Layout.striped(mask.seq_len, 3)):
        one, other = run_ring(p, mask, layout), run_ring(Problem(q, k, v, dout, p.dlse), mask, layout)
        cuts = [Attention(*(x[..., rest] if i == 1 else x[:, rest] for i, x in enumerate(x))) for x in (one, other)]
        if math.isfinite(value):
            assert torch.equal(one.out[:, :37], other.out[:, :37])
            assert all(torch.equal(x, y) for x, y in zip(*cuts, strict=True))
        else:
            assert_within_8_ulp(*cuts, "the rest")
            assert other.out[:, :37].isfinite().all()


# ---- the plan -----------------------------------------------------------------------------------


def test_only_needed_keys_travel() -> None:
    """A prompt of 16 and 4 completions of 16, 20 tokens a rank: a rank gets the prompt, and that part of its first
    completion that the rank before has."""
    mask = IntervalMask.shared_prefix(16, [16] * 4)
    layout = Layout.contiguous(80, 4)
    cost = plan(mask, layout, num_heads=2, num_kv_heads=1, head_dim=4, dtype=torch.float32)
    received = [{each.key_rank: each.num_keys for each in rank.rounds if each.num_keys} for rank in cost.ranks]
    assert received == [{0: 20}, {1: 20, 0: 20}, {2: 20, 1: 8, 0: 16}, {3: 20, 2: 12, 0: 16}]
    pairs = 16 * 17 // 2 + 4 * (16 * 16 + 16 * 17 // 2)
    assert cost.forward_flops == 2 * pairs * 2 * (4 + 4)


def test_balanced_layouts_weigh_unique_pairs() -> None:
    mask = IntervalMask.tree([-1, *[0] * 6], [512, 1500, 40, 300, 900, 10, 800])
    named = max(imbalance(mask, Layout.named(name, mask.seq_len, 4)) for name in ("contiguous", "zigzag"))
    assert imbalance(mask, Layout.balanced(mask, 4, chunk=64)) <= 1.05 < named


def imbalance(mask: IntervalMask, layout: Layout) -> float:
    of_ranks = [int(mask.num_keys[:, layout.positions(rank)].sum()) for rank in range(layout.world_size)]
    return max(of_ranks) * len(of_ranks) / sum(of_ranks)


# ---- one side costs what it did -----------------------------------------------------------------


def test_one_side_makes_the_same_calls_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hulls, no intervals of keys, two tensors of the mask, and the kernels' arguments end with what is rounded."""
    calls: list[tuple[int, bool]] = []

    def counted(kernel: Callable[..., None], *given: Any) -> None:
        calls.append((len(given), isinstance(given[-1], Tensor) and given[-1].dtype == torch.int32))
        kernel(*given)

    for name in ("attn_fwd_", "attn_bwd_"):
        monkeypatch.setattr(ops, name, functools.partial(counted, getattr(ops, name)))

    def forward_and_backward(mask: IntervalMask) -> None:
        leaves = [torch.randn(1, 24, 2, 4, requires_grad=True) for _ in range(3)]
        attention(*leaves, mask=mask).sum().backward()

    tree = IntervalMask.shared_prefix(8, [8, 8])
    forward_and_backward(IntervalMask.causal(24))  # the self-test's calls, of one side and of two
    forward_and_backward(tree)
    assert calls[-2:] == [(20, True), (25, True)]
    calls.clear()
    monkeypatch.setattr(ops, "mask_hulls", None)
    for mask in (IntervalMask.causal(24), IntervalMask.documents([10, 14]) & IntervalMask.sliding_window(24, 3)):
        forward_and_backward(mask)
        assert ShardedSequence.of(mask, Layout.contiguous(24, 1)).ring.plan.rounds[0].key_bounds == ()
    assert calls == [(18, False), (23, False)] * 2


# ---- who cannot ---------------------------------------------------------------------------------


def test_a_tree_of_many_branches_is_refused_by_aten() -> None:
    """Which knows a mask by its pieces; a node takes two or three."""
    wide = IntervalMask.shared_prefix(16, [1] * (MAX_STRETCHES + 1))
    q = torch.randn(1, wide.seq_len, 2, 8)
    layout = Layout.contiguous(wide.seq_len, 1)
    with pytest.raises(RefusedError, match=r"aten's flash attention takes masks of few pieces.* auto or ringtile"):
        ring_attention(q, q, q, mask=wide, layout=layout, attention_kernel="aten")
    of_rank = rank_plan(IntervalMask.shared_prefix(16, [16, 16]), Layout.contiguous(48, 1), 0)
    round = of_rank.rounds[0]
    found = find_pieces(of_rank.begin, of_rank.end, round.k_runs, round.key_bounds, torch.arange(48))
    prompt = Piece(0, 16, 0, 16, gains=True), Piece(16, 48, 0, 16)
    assert found == ((*prompt, Piece(16, 32, 16, 32, gains=True), Piece(32, 48, 32, 48, gains=True)),)


def test_ranks_with_other_trees_notice() -> None:
    """Same intervals of queries, other intervals of keys."""
    masks = [IntervalMask.tree([-1, 0, 0, 0], [4, 4, 8 - n, 4 + n]) for n in (0, 2)]
    assert torch.equal(masks[0].begin, masks[1].begin)
    assert torch.equal(masks[0].end, masks[1].end)

    def on_rank(group: LoopbackGroup) -> str:
        q = torch.randn(1, 10, 1, 4)
        try:
            ring_attention(q, q, q, mask=masks[group.transport.rank], layout=Layout.zigzag(20, 2), group=group)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    for said in LoopbackWorld(2).run(on_rank):
        assert said.startswith("RingMismatchError"), said
        assert "mask" in said


def test_definition_of_the_oracle() -> None:
    """Ways say what the mask says."""
    rng = random.Random(5)
    tree = random_tree(rng, 20, 6)
    mask = IntervalMask.tree(*tree)
    p = problem(1, mask.seq_len)
    assert_close(by_ways(p, [tree]), dense_gradients(p.q, p.k, p.v, dense(mask), p.dout, p.dlse), FLOAT64_TOLERANCE)
