"""Recurrent layers over trees of tokens: each path from a root to a leaf alone, whatever the ranks and the layout.

Shape letters: B batch, S global tokens, L leaves, T tokens of the longest path.
"""

from __future__ import annotations

import itertools
import math
import random
import weakref
from typing import Any, NamedTuple

import pytest
import ringtile
import scan_oracle
import test_recurrent_heads as heads
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import run_ranks
from ringtile import IntervalMask, Layout, LoopbackWorld, RefusedError, RingMismatchError, ShardedSequence
from ringtile.recurrent import kernels, recurrence
from ringtile.recurrent.documents import Documents, Facts, Forest, message_bytes
from scan_oracle import PARAMETERS, Layer, Tensors, problem
from test_recurrent_ranks import CASES, C, K, V, bytes_sent, of_ranks, on_rank, together
from torch import Tensor


class Tree(NamedTuple):
    """Nodes of a row in depth-first order: node i has so many tokens and goes on from its parent, or from none (-1)."""

    parents: list[int]
    lengths: list[int]

    @property
    def first_tokens(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]

    def tokens(self, node: int) -> list[int]:
        begin, end = self.first_tokens[node : node + 2]
        return list(range(begin, end))

    def path(self, node: int) -> list[int]:
        """The tokens from the root to the node's last."""
        return (self.path(self.parents[node]) if self.parents[node] >= 0 else []) + self.tokens(node)

    def paths(self) -> list[list[int]]:
        leaves = [node for node in range(len(self.parents)) if node not in self.parents]
        return [self.path(leaf) for leaf in leaves]

    def is_below(self, node: int, other: int) -> bool:
        return node == other or (node > other and self.is_below(self.parents[node], other))


def random_tree(seed: int, num_nodes: int, longest: int, deepest: int = 64, deepens: float = 0.5) -> Tree:
    """Uneven, of several trees. deepens: how often a node hangs from the node before."""
    dice, parents, path = random.Random(seed), [], list[int]()
    for node in range(num_nodes):
        if len(path) == deepest or dice.random() > deepens:
            path = path[: dice.randint(0 if dice.random() < 0.3 else min(1, len(path)), len(path))]
            path = path[: deepest - 1]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return Tree(parents, [dice.randint(1, longest) for _ in range(num_nodes)])


def mask_of(trees: list[Tree], seq_len: int) -> IntervalMask:
    """With padding at the end of each row."""
    rows = [IntervalMask.tree(*tree).padded(seq_len - sum(tree.lengths)).bounds for tree in trees]
    return IntervalMask.of_bounds(*(torch.cat(bounds, dim=-2) for bounds in zip(*rows, strict=True)))


def of_paths(
    case: Layer, tensors: Tensors, dout: Tensor, trees: list[Tree], module: object = scan_oracle
) -> tuple[Tensor, Tensors]:
    """out and all gradients of a module's function on independent rows (L, T, ...), the paths of every row. The
    kernels, which know no trees, are the oracle of trees that are too large for the other one.

    The output of a token is that of its first path, whose gradient counts; padding has 0.
    """
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    batch, seq_len = dout.shape[:2]
    paths = [(row, path) for row in range(batch) for path in trees[row % len(trees)].paths()]
    longest = max(len(path) for _, path in paths)
    places = torch.tensor([[row * seq_len + t for t in path] + (longest - len(path)) * [-1] for row, path in paths])
    rows = {name: x if name in PARAMETERS else x.flatten(0, 1)[places.clamp(min=0)] for name, x in leaves.items()}
    out = case.alone(module, rows, torch.where(places < 0, -1, 0).int())[0].flatten(0, 1)
    found, taken = places.flatten().unique(return_inverse=True)
    first = torch.full(found.shape, taken.numel()).scatter_reduce(0, taken, torch.arange(taken.numel()), "amin")
    held = found >= 0
    result = dout.new_zeros(batch * seq_len, *dout.shape[2:], dtype=out.dtype)
    result = result.index_copy(0, found[held], out[first[held]]).view(dout.shape)
    result.backward(dout)
    return result.detach(), {name: x.grad for name, x in leaves.items() if x.grad is not None}


def padded(tensors: Tensors, trees: list[Tree], value: float) -> Tensors:
    """With value in the padding at the end of each row."""
    result = {name: x.clone() for name, x in tensors.items()}
    for name, x in result.items():
        for row in range(x.size(0) if name not in PARAMETERS else 0):
            x[row, sum(trees[row % len(trees)].lengths) :] = value
    return result


def assert_close(ours: Tensor, expected: Tensor, relative: float = 1e-12) -> None:
    """To so much of the largest number."""
    torch.testing.assert_close(ours, expected, rtol=0, atol=relative * max(1.0, float(expected.abs().max())))


def compare(
    case: Layer,
    trees: list[Tree],
    layout: Layout,
    module: object = scan_oracle,
    batch: int = 0,
    decay: float = 0.5,
) -> None:
    """The ranks of a layout against the paths alone, in float64: outputs and all gradients."""
    seq_len, batch = layout.seq_len, batch or len(trees)
    tensors = problem(case, batch, seq_len, decay)
    dout = torch.randn(batch, seq_len, *case.of_out, dtype=torch.float64)
    nan = padded(tensors, trees, float("nan"))
    out, gradients = of_ranks(case, nan, dout, mask_of(trees, seq_len), layout)
    expected, of_each = of_paths(case, padded(tensors, trees, 0.0), dout, trees, module)
    assert_close(out, expected)
    assert gradients.keys() == tensors.keys()
    for name, gradient in gradients.items():
        assert_close(gradient, of_each[name])


SMALL = [random_tree(seed, 12, 5) for seed in (1, 2)]
SEQ_LEN = max(sum(tree.lengths) for tree in SMALL) + 5  # padding at the end


def layout_of(name: str, world_size: int, seq_len: int = SEQ_LEN) -> Layout:
    if name != "many":
        return Layout.named(name, seq_len, world_size)
    # Runs of a few tokens, shorter than a convolution, in any order on a rank.
    dice, ends = random.Random(0), [0]
    while ends[-1] < seq_len:
        ends.append(min(ends[-1] + dice.randint(1, 7), seq_len))
    runs: list[list[tuple[int, int, int, int]]] = [[] for _ in range(world_size)]
    for begin, end in dice.sample(list(itertools.pairwise(ends)), len(ends) - 1):
        of_rank = dice.choice(runs)
        of_rank.append((begin, 1, sum(run[3] for run in of_rank), end - begin))
    return Layout.from_runs(runs)


IN_EVERY_RUN = [("contiguous", 1), ("zigzag", 3), ("many", 4)]
OTHERS = [*(("contiguous", n) for n in (2, 3, 4)), *(("zigzag", n) for n in (2, 4)), ("many", 1), ("many", 2)]


@pytest.mark.parametrize(
    ("layout", "world_size"), [*IN_EVERY_RUN, *(pytest.param(*cell, marks=pytest.mark.long) for cell in OTHERS)]
)
@pytest.mark.parametrize("name", CASES)
def test_states_compute_each_path_alone(name: str, layout: str, world_size: int) -> None:
    """Of one tree for two rows, and of rows that differ."""
    compare(CASES[name], SMALL[:1], layout_of(layout, world_size), batch=2)
    compare(CASES[name], SMALL, layout_of(layout, world_size))


def test_branches_that_end_at_a_cut_which_another_row_goes_on_over() -> None:
    """They are computed in one call; nothing of them goes on."""
    compare(CASES["ssd"], [Tree([-1, 0, 0, -1], [3, 2, 2, 7]), Tree([-1, 0, 0], [10, 2, 2])], Layout.contiguous(14, 2))


@pytest.mark.parametrize(("layout", "world_size"), [("striped", 2), ("zigzag", 4)])
@pytest.mark.parametrize("name", ["delta", "kda", "ssd", "selective"])
def test_heads_compute_each_path_alone(name: str, layout: str, world_size: int) -> None:
    compare(heads.case(name), SMALL, layout_of(layout, world_size))


def comb(depth: int) -> Tree:
    """A path of so many nodes, from each of which leaves hang too."""
    dice, parents = random.Random(0), [-1]
    trunk = [0]
    for _ in range(depth - 1):  # leaves first, then the node that goes on
        parents += dice.randint(2, 5) * trunk[-1:]
        trunk.append(len(parents))
        parents.append(trunk[-2])
    return Tree(parents, [dice.randint(1, 6) for _ in parents])


LARGE = {"deep": comb(64), "wide": random_tree(4, 420, 4, deepens=0.2)}


ONE_AND_THREE = [pytest.param("contiguous", 1, marks=pytest.mark.long), ("zigzag", 3)]


@pytest.mark.parametrize(("layout", "world_size"), ONE_AND_THREE)
@pytest.mark.parametrize(
    ("name", "tree"),
    [
        pytest.param(*cell, marks=() if cell[0] == "delta" or cell == ("convolution", "deep") else pytest.mark.long)
        for cell in itertools.product(CASES, LARGE)
    ],
)
def test_deep_and_wide_trees(name: str, tree: str, layout: str, world_size: int) -> None:
    """64 nodes deep, and 200 leaves or more."""
    of_row, seq_len = LARGE[tree], sum(LARGE[tree].lengths) + 3
    assert len(of_row.paths()) >= 200
    compare(CASES[name], [of_row], layout_of(layout, world_size, seq_len), kernels, decay=0.05)


def forest() -> Tree:
    """Several uneven trees: 64 nodes deep, 1,000 leaves and more."""
    deep, wide = comb(64), random_tree(4, 2500, 3)
    parents = [parent + len(deep.parents) * (parent >= 0) for parent in wide.parents]
    return Tree(deep.parents + parents, deep.lengths + wide.lengths)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced", "per_document", "many"])
@pytest.mark.parametrize("name", CASES)
def test_a_forest_of_1000_leaves_on_any_number_of_ranks(name: str, layout: str) -> None:
    tree = forest()
    assert len(tree.paths()) >= 1000
    seq_len = sum(tree.lengths) + 7
    for world_size in (1, 2, 3, 4):
        padded_to = -(-seq_len // (2 * world_size)) * 2 * world_size
        named = layout in ("balanced", "per_document")
        split = Layout.of_mask(layout, mask_of([tree], padded_to), world_size) if named else None
        compare(CASES[name], [tree], split or layout_of(layout, world_size, padded_to), kernels, decay=0.05)


@pytest.mark.parametrize(
    ("dtype", "layout", "world_size"),
    [
        *((torch.float32, "zigzag", 3), (torch.bfloat16, "contiguous", 1)),
        pytest.param(torch.float16, "contiguous", 1, marks=pytest.mark.long),  # as kernels round it in documents
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_narrow_dtypes_are_rounded_as_in_documents(name: str, dtype: torch.dtype, layout: str, world_size: int) -> None:
    """States and sums are float32. A result sums, for each token before or after it, over the dims of a state or the
    channels; of each of these terms a few operations (4) are rounded, by half an ulp of what is summed: at most 1, an
    input, or the largest result. What is of the 16-bit dtype is rounded to it once, by half an eps of itself: on one
    rank, where no gradient is a sum of rounded ones, and that of a parameter is not rounded for each branch."""
    case = CASES[name]
    narrow = {n: torch.float32 if n in ("g", "beta", "dt") else dtype for n in case.shapes}
    tensors = {n: x.to(narrow[n]) for n, x in problem(case, 2, SEQ_LEN).items()}
    tensors = padded(tensors, SMALL, 0.0)
    dout = torch.randn(2, SEQ_LEN, *case.of_out).to(dtype)
    out, gradients = of_ranks(case, tensors, dout, mask_of(SMALL, SEQ_LEN), layout_of(layout, world_size))
    wide = {n: x.double() for n, x in tensors.items()}
    expected, of_each = of_paths(case, wide, dout.double(), SMALL)
    assert {n: x.dtype for n, x in gradients.items()} == narrow
    assert out.dtype == dtype
    largest = max(float(x.abs().max()) for x in (expected, *of_each.values()))
    bound = 4 * (SEQ_LEN + K + V + C) * 2.0**-24 * (1 + largest)
    for n, x in {"out": expected, **of_each}.items():
        ours = out if n == "out" else gradients[n]
        own = torch.finfo(ours.dtype).eps / 2
        torch.testing.assert_close(ours.double(), x, rtol=own, atol=bound, msg=lambda text, n=n: f"{n}: {text}")


@pytest.mark.parametrize(("layout", "world_size"), ONE_AND_THREE)
@pytest.mark.parametrize("name", CASES)
def test_branches_do_not_reach_each_other(name: str, layout: str, world_size: int) -> None:
    """NaN in one branch: no bit of another's outputs and gradients changes. There is no decay."""
    case, tree, node = CASES[name], SMALL[1], 6
    mask, split = mask_of([tree], SEQ_LEN), layout_of(layout, world_size)
    others = [n for n in range(len(tree.parents)) if not tree.is_below(n, node) and not tree.is_below(node, n)]
    apart = [t for n in others for t in tree.tokens(n)]
    before = [t for t in tree.path(node) if t not in tree.tokens(node)]
    assert apart
    assert before
    dout, results = torch.randn(1, SEQ_LEN, *case.of_out, dtype=torch.float64), []
    for value in (0.0, float("nan")):
        tensors = problem(case, 1, SEQ_LEN, 0.0)
        for n, x in tensors.items():
            if n not in PARAMETERS:
                x[:, tree.tokens(node)] += value
        out, gradients = of_ranks(case, tensors, dout, mask, split)
        results.append({"out": out} | {n: x for n, x in gradients.items() if n not in PARAMETERS})
    (base, other) = results
    assert other["out"][:, tree.tokens(node)].isnan().all()
    assert torch.equal(other["out"][:, before], base["out"][:, before])
    for n, x in base.items():
        assert torch.equal(other[n][:, apart], x[:, apart]), n


@pytest.mark.parametrize(("layout", "world_size"), ONE_AND_THREE)
@pytest.mark.parametrize("name", CASES)
def test_a_chain_is_a_document_and_roots_are_documents(name: str, layout: str, world_size: int) -> None:
    """Bit for bit."""
    case, split = CASES[name], layout_of(layout, world_size)
    tensors = problem(case, 1, SEQ_LEN)
    dout = torch.randn(1, SEQ_LEN, *case.of_out, dtype=torch.float64)
    lengths = [3, 1, 1, 9, 20]
    for parents, documents in (([-1, 0, 1, 2, 3], [sum(lengths)]), (5 * [-1], lengths), ([-1, 0, 1, -1, 3], [5, 29])):
        of_documents = IntervalMask.documents(documents).padded(SEQ_LEN - sum(documents))
        results = [
            of_ranks(case, tensors, dout, mask, split)
            for mask in (mask_of([Tree(parents, lengths)], SEQ_LEN), of_documents)
        ]
        (out, gradients), (expected, of_each) = results
        assert torch.equal(out, expected)
        for n, gradient in gradients.items():
            assert torch.equal(gradient, of_each[n]), n


def of_process(name: str) -> tuple[Tensor, Tensors, tuple[int, int]]:
    """Of one rank of a real group, whose messages of several states go through sockets."""
    sequence = ShardedSequence(mask_of(SMALL, SEQ_LEN), layout_of("zigzag", 2), dist.group.WORLD)
    return on_rank(CASES[name], problem(CASES[name], 2, SEQ_LEN), sequence)


@pytest.mark.parametrize("name", ["convolution", "delta"])
def test_processes_compute_what_threads_do(name: str) -> None:
    case, layout = CASES[name], layout_of("zigzag", 2)
    out, gradients = of_ranks(case, problem(case, 2, SEQ_LEN), None, mask_of(SMALL, SEQ_LEN), layout)
    of_processes, of_each = together(run_ranks(2, of_process, name), layout)
    assert torch.equal(of_processes, out)
    for n, gradient in gradients.items():
        assert torch.equal(of_each[n], gradient), n


# ---- what travels -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_only_the_states_of_open_branches_travel(name: str) -> None:
    """Forward and backward as planned; over the cut after a prompt and its first completion two states."""
    case, tree, layout = CASES[name], Tree([-1, 0, 0, 0], [10, 9, 9, 2]), Layout.contiguous(30, 3)
    mask, state_bytes = mask_of([tree], 30), 4 * math.prod(case.state)
    # Cuts at 10, the end of the prompt, which three go on from, and at 20, in the second completion.
    assert message_bytes(Forest.of(mask), layout, state_bytes) == {(0, 1): state_bytes, (1, 2): 2 * state_bytes}
    assert bytes_sent(case, 1, mask, layout) == [(state_bytes, 0), (2 * state_bytes, state_bytes), (0, 2 * state_bytes)]


def test_a_path_is_computed_once() -> None:
    """One call for each stretch of nodes that nothing else goes on from, none for a chain, in documents one for all;
    and one for the leaves of a fork, if the longest is at most twice as long as the shortest."""

    def calls(tree: Tree, seq_len: int) -> list[list[tuple[int, ...]]]:
        layout = Layout.contiguous(seq_len, 1)
        (stretch,) = Documents(ShardedSequence(mask_of([tree], seq_len), layout)).stretches
        for walk in stretch.walks:
            for call in walk.calls:
                lengths = [walk.segments[number].length for number in call.numbers]
                assert (call.seq_idx >= 0).sum(1).tolist() == lengths or len(lengths) == 1
        return [[call.numbers for call in of_row.calls] for of_row in stretch.walks]

    assert calls(Tree([-1, 0, 1, 2], [3, 3, 3, 3]), 12) == [[(0,)]]
    assert calls(Tree([-1, -1, 1, -1], [3, 3, 3, 3]), 14) == [[(0,)]]
    assert calls(Tree([-1, 0, 0, 0], [3, 3, 3, 3]), 12) == [[(0,), (1, 2, 3)]]
    assert calls(Tree([-1, 0, 0, -1, -1], [3, 3, 3, 1, 1]), 11) == [[(0,), (1, 2)]]  # the last leaf and documents
    assert calls(Tree([-1, 0, 0, 2, 2, 0, 0], [3, 5, 1, 2, 4, 3, 11]), 29) == [[(0,), (5, 1), (2,), (3, 4), (6,)]]
    assert [len(call) for call in calls(Tree([-1, *[0] * 40], [3, *[1] * 40]), 43)[0]] == [1, 32, 8]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), num_nodes=st.integers(1, 30), deepens=st.floats(0, 1), data=st.data())
def test_what_goes_on_from_what_is_read_off_the_mask(
    seed: int, num_nodes: int, deepens: float, data: st.DataObject
) -> None:
    """Parents, and which tokens before a position others behind it go on from."""
    tree = random_tree(seed, num_nodes, 4, deepens=deepens)
    length = sum(tree.lengths)
    parents = dict.fromkeys(range(length), -1)
    for node in range(num_nodes):
        path = tree.path(node)
        parents |= dict(itertools.pairwise(reversed(path)))
    mask = mask_of([tree], length + 2)
    forest = Forest.of(mask)
    assert forest.parents.tolist() == [[*(parents[t] for t in range(length)), -2, -2]]
    position = data.draw(st.integers(0, length + 2))
    found = {parents[t] for t in range(position, length) if 0 <= parents[t] < position}
    assert forest.open_at(position) == [sorted(found)]


@pytest.mark.parametrize("name", CASES)
def test_an_empty_batch_follows_a_tree(name: str) -> None:
    tensors = {n: x.requires_grad_() for n, x in problem(CASES[name], 0, 12).items()}
    mask = mask_of([Tree([-1, 0, 0, 0], [3, 3, 3, 3])], 12)
    out = CASES[name].ours(tensors, ShardedSequence(mask, Layout.contiguous(12, 1)))
    out.sum().backward()
    assert out.shape == (0, 12, *CASES[name].of_out)
    assert all(x.grad.shape == x.shape for x in tensors.values())


def test_states_that_nothing_goes_on_from_are_let_go() -> None:
    """Without gradients, as in generation: a leaf's at once, a fork's with its last branch."""
    stretch = Facts(mask_of([LARGE["deep"]], 1200), Layout.contiguous(1200, 1), 0).whole
    finals: list[weakref.ref[Tensor]] = []
    most = 0

    def compute(given: list[Tensor], seq_idx: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        nonlocal most
        final = torch.zeros(1, 1)
        finals.append(weakref.ref(final))
        most = max(most, sum(each() is not None for each in finals))
        return given[0], final

    out, sent = recurrence.walk(stretch, [torch.zeros(1, 1200, 1)], [True], None, compute)
    assert out.shape == (1, 1200, 1)
    assert sent is None
    assert len(finals) > 100
    assert most <= 4  # of the fork, of its last branch, of leaves, and a new one


# ---- refusals -----------------------------------------------------------------------------------


def test_what_is_refused_and_how() -> None:
    tensors, tree = problem(CASES["delta"], 1, 12), Tree([-1, 0, 1, 0], [2, 2, 4, 4])
    right = mask_of([tree], 12)
    assert right.key_end is not None

    def said(mask: IntervalMask) -> str:
        sequence = ShardedSequence(mask, Layout.contiguous(12, 1))
        with pytest.raises(RefusedError) as caught:
            ringtile.gated_delta_rule(**tensors, sequence=sequence)
        return str(caught.value)

    key_end = right.key_end.clone()
    key_end[0, 4:8] += 1
    wrong = IntervalMask(right.begin, right.end, right.key_begin, key_end)
    assert "token 4 (row 0) is attended up to token 8, but token 3, which it goes on from, up to token 7" in said(wrong)
    window = IntervalMask.sliding_window(12, 5)
    assert "token 5 (row 0) attends [1, 6); expected causal documents" in said(right & window)
    both_ways = IntervalMask.tree(tree.parents, tree.lengths, causal=False)
    assert "token 0 (row 0) attends [0, 2); expected causal documents" in said(both_ways)

    def rank(group: Any) -> None:
        layout = Layout.striped(12, 2)
        sequence = ShardedSequence(mask_of([tree], 12), layout, group)
        local = {n: sequence.shard(x, 1) for n, x in tensors.items()}
        with pytest.raises(RefusedError, match="holds every 2th token; expected runs of neighboring tokens"):
            ringtile.gated_delta_rule(**local, sequence=sequence, scheme="states")

    def rank_of_another_tree(group: Any) -> None:
        layout, own = Layout.contiguous(12, 2), Tree([-1, 0, group.transport.rank, 0], [2, 2, 4, 4])
        sequence = ShardedSequence(mask_of([own], 12), layout, group)
        local = {n: sequence.shard(x, 1) for n, x in tensors.items()}
        with pytest.raises(RingMismatchError, match="disagree on mask digest"):
            ringtile.gated_delta_rule(**local, sequence=sequence)

    LoopbackWorld(2).run(rank)
    LoopbackWorld(2).run(rank_of_another_tree)
