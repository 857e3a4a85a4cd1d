"""Masks with two sides against bool matrices written from the definition: trees from their ancestors, the rest pair by
pair."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ringtile import Layout, ShardedSequence, ops, tree_position_ids
from ringtile.errors import InputError, MaskNotExpressibleError, RefusedError
from ringtile.sequence.mask import IntervalMask
from strategies import dense, forests, masks, two_sided_masks
from torch import Tensor

SIZES = st.integers(1, 24)


def ways(parents: list[int], lengths: list[int]) -> list[list[int]]:
    """For each token of a row, the tokens from the root to it."""
    of_nodes: list[list[int]] = []  # up to the end of each node
    found = []
    position = 0
    for parent, length in zip(parents, lengths, strict=True):
        way = [*of_nodes[parent]] if parent >= 0 else []
        for _ in range(length):
            way.append(position)
            found.append([*way])
            position += 1
        of_nodes.append(way)
    return found


def attend_of(parents: list[int], lengths: list[int], causal: bool = True) -> Tensor:
    """bool (S, S): of its way each token attends all before it, and, not causal, the rest of its node."""
    seq_len = sum(lengths)
    attend = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    for query, way in enumerate(ways(parents, lengths)):
        attend[query, way] = True
    if not causal:
        for begin, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
            attend[begin:end, begin:end] = True
    return attend


@given(SIZES, st.booleans(), st.data())
def test_tree_attends_its_way_from_the_root(seq_len: int, causal: bool, data: st.DataObject) -> None:
    rows = data.draw(st.lists(forests(seq_len), min_size=1, max_size=3))
    parents, lengths = ([row[i] for row in rows] for i in (0, 1))
    mask = IntervalMask.tree(parents, lengths, causal)
    expected = torch.stack([attend_of(*row, causal) for row in rows])
    assert torch.equal(dense(mask), expected)
    assert IntervalMask.from_bool(expected) == mask
    assert IntervalMask.tree(*rows[0], causal) == IntervalMask.tree(parents[:1], lengths[:1], causal)
    positions = [[len(way) - 1 for way in ways(*row)] for row in rows]
    assert tree_position_ids(parents, lengths).tolist() == positions
    assert tree_position_ids(*rows[0]).tolist() == positions[:1]


@given(SIZES, st.data())
def test_documents_and_chains_have_one_side(seq_len: int, data: st.DataObject) -> None:
    """Where the keys' intervals say nothing there are none, whatever they were made of."""
    parents, lengths = data.draw(forests(seq_len))
    documents, chain = (
        IntervalMask.tree([-1] * len(parents), lengths),
        IntervalMask.tree([*range(-1, len(parents) - 1)], lengths),
    )
    assert documents == IntervalMask.documents(lengths)
    assert chain == IntervalMask.causal(seq_len)
    assert documents.key_begin is None
    assert len(chain.tensors) == 2


@given(st.integers(1, 3), SIZES, st.data())
def test_equal_pairs_are_equal_masks(batch: int, seq_len: int, data: st.DataObject) -> None:
    """Intersections, bool matrices, wider intervals that say the same, and the side of the keys alone."""
    a, b = (
        data.draw(two_sided_masks(batch, seq_len)),
        data.draw(st.one_of(two_sided_masks(batch, seq_len), masks(1, seq_len))),
    )
    both = a & b
    assert torch.equal(dense(both), dense(a) & dense(b))
    assert both == b & a == IntervalMask.from_bool(dense(a) & dense(b))
    assert hash(both) == hash(b & a)
    assert a & a == a
    assert (a == b) == torch.equal(dense(a), dense(b))
    assert torch.equal(a.num_keys, dense(a).sum(2))
    pairs = dense(a)
    loose = [bound.clone() for bound in IntervalMask.from_bool(pairs).tensors]
    if len(loose) == 4:
        query = int(torch.randint(0, seq_len, ()))
        at = torch.arange(seq_len)
        # Keys before the first one of this query that do not reach it: it may begin at any of them.
        free = (at < loose[0][0, query]) & ~((loose[2][0] <= query) & (query < loose[3][0]))
        first = int(loose[0][0, query])
        while first > 0 and free[first - 1]:
            first -= 1
        loose[0][0, query] = first
        assert IntervalMask(*loose) == a


@given(st.integers(1, 3), SIZES, st.integers(0, 5), st.data())
def test_padding_attends_nothing(batch: int, seq_len: int, padding: int, data: st.DataObject) -> None:
    mask = data.draw(two_sided_masks(batch, seq_len))
    expected = torch.nn.functional.pad(dense(mask), (0, padding, 0, padding))
    assert torch.equal(dense(mask.padded(padding)), expected)
    among = torch.ones(padding, padding, dtype=torch.bool).tril()
    expected[:, seq_len:, seq_len:] = among
    assert torch.equal(dense(mask.padded(padding, attends=True)), expected)


@given(st.integers(1, 2), SIZES, st.data())
def test_hulls_are_counted_pair_by_pair(batch: int, seq_len: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    bounds = torch.randint(0, seq_len + 1, (4, batch, seq_len), generator=generator, dtype=torch.int32)
    at = torch.arange(seq_len)
    attend = (bounds[0][..., None] <= at) & (at < bounds[1][..., None])
    attend &= (bounds[2][:, None] <= at[:, None]) & (at[:, None] < bounds[3][:, None])
    for pairs, given_ in ((attend, bounds), (attend.mT, bounds[[2, 3, 0, 1]])):
        counts, first, after = ops.mask_hulls(*given_)
        assert torch.equal(counts, pairs.sum(2))
        for row, x in itertools.product(range(batch), range(seq_len)):
            found = pairs[row, x].nonzero().flatten().tolist()
            assert (first[row, x], after[row, x]) == ((found[0], found[-1] + 1) if found else (0, 0))


@given(st.integers(1, 2), SIZES, st.data())
def test_loose_bounds_of_keys_say_the_same(batch: int, seq_len: int, data: st.DataObject) -> None:
    mask = data.draw(two_sided_masks(batch, seq_len))
    if mask.key_begin is not None:
        assert IntervalMask(mask.begin, mask.end, *mask.loose_key_bounds) == mask


def test_loose_bounds_of_a_node_are_equal() -> None:
    begin, end = IntervalMask.tree([-1, 0, 0, -1], [2, 2, 1, 2]).loose_key_bounds
    assert begin.tolist() == [[0] * 7]
    assert end.tolist() == [[7, 7, 4, 4, 7, 7, 7]]
    assert IntervalMask.causal(4).loose_key_bounds == ()


@given(SIZES, st.integers(1, 8), st.data())
def test_window_goes_along_the_way(seq_len: int, window: int, data: st.DataObject) -> None:
    parents, lengths = data.draw(forests(seq_len))
    mask, layout = IntervalMask.tree(parents, lengths), Layout.contiguous(seq_len, 1)
    expected = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    for query, way in enumerate(ways(parents, lengths)):
        expected[query, way[-window:]] = True
    assert torch.equal(dense(mask.last_keys(window))[0], expected)
    if mask.key_begin is not None:
        assert ShardedSequence(mask, layout).with_window(window).mask == mask.last_keys(window)
        with pytest.raises(RefusedError, match="a window in both directions on a mask with two sides"):
            ShardedSequence(mask, layout).with_window(window, causal=False)


@given(SIZES, st.integers(1, 8))
def test_window_of_one_side_is_a_sliding_window(seq_len: int, window: int) -> None:
    assert IntervalMask.causal(seq_len).last_keys(window) == IntervalMask.sliding_window(seq_len, window)
    with pytest.raises(InputError, match="window is 0"):
        IntervalMask.causal(seq_len).last_keys(0)


def outcome(make: Callable[[], IntervalMask]) -> IntervalMask | str:
    """The mask, or why there is none."""
    try:
        return make()
    except MaskNotExpressibleError as error:
        return str(error)


@given(st.integers(1, 2), SIZES, st.integers(1, 8), st.integers(1, 8), st.data())
def test_first_keys_stay_beside_a_window(
    batch: int, seq_len: int, window: int, first: int, data: st.DataObject
) -> None:
    """Of any mask with one side; of causal documents always, and of a tree never."""
    mask = data.draw(masks(batch, seq_len))
    attend = torch.zeros_like(dense(mask))
    for row, query in itertools.product(range(attend.size(0)), range(seq_len)):
        keys = dense(mask)[row, query].nonzero().flatten()
        attend[row, query, keys[:first]] = True
        attend[row, query, keys[-window:]] = True
    assert outcome(lambda: mask.last_keys(window, first=first)) == outcome(lambda: IntervalMask.from_bool(attend))
    documents = IntervalMask.documents(data.draw(forests(seq_len))[1])
    num_keys = documents.last_keys(window, first=first).num_keys
    assert torch.equal(num_keys, documents.num_keys.clamp(max=first + window))
    assert documents.last_keys(window, first=0) == documents.last_keys(window)
    assert documents.last_keys(2**40, first=2**40) == documents


def test_first_keys_of_a_tree_are_refused() -> None:
    with pytest.raises(MaskNotExpressibleError, match=r"the first 1 keys beside the last 2, in .*two sides"):
        IntervalMask.shared_prefix(3, [2, 2]).last_keys(2, first=1)
    with pytest.raises(InputError, match="window is 2 and first -1; expected"):
        IntervalMask.causal(3).last_keys(2, first=-1)


def test_prefix_is_shared() -> None:
    mask = IntervalMask.shared_prefix(3, [2, 1, 2])
    assert mask == IntervalMask.tree([-1, 0, 0, 0], [3, 2, 1, 2])
    expected = attend_of([-1, 0, 0, 0], [3, 2, 1, 2])
    assert torch.equal(dense(mask)[0], expected)
    assert mask.num_keys.sum() == 6 + (4 + 5) + 4 + (4 + 5)
    assert repr(mask) == "IntervalMask(rows=1, seq_len=8, two sides)"
    assert IntervalMask.shared_prefix(3, []) == IntervalMask.causal(3)


@given(st.integers(1, 14), st.integers(1, 6))
def test_block_diffusion_is_that_of_the_paper(seq_len: int, block: int) -> None:
    """M = M_block_diagonal | M_offset_block_causal | M_block_causal (arXiv:2503.09573, section 3.1), in our order."""
    tokens = [(i // block, clean) for i in range(seq_len) for clean in (0, 1)]
    tokens.sort()  # by block: all noised tokens, then the clean ones
    attend = torch.zeros(2 * seq_len, 2 * seq_len, dtype=torch.bool)
    for q, (q_block, q_clean) in enumerate(tokens):
        for k, (k_block, k_clean) in enumerate(tokens):
            diagonal = q_block == k_block and q_clean == k_clean
            offset = q_block > k_block and k_clean and not q_clean
            causal = q_block >= k_block and k_clean and q_clean
            attend[q, k] = diagonal or offset or causal
    assert torch.equal(dense(IntervalMask.block_diffusion(seq_len, block))[0], attend)


def test_deep_and_wide_trees() -> None:
    deep = [*range(-1, 999)]
    assert IntervalMask.tree(deep, [1] * 1000) == IntervalMask.causal(1000)
    wide = IntervalMask.tree([-1, *[0] * 1000], [5, *[2] * 1000])
    assert int(wide.num_keys.sum()) == 15 + 1000 * (6 + 7)


@given(st.integers(1, 2), st.integers(1, 6), st.floats(0.3, 1), st.integers(0, 2**31))
def test_bool_is_two_intervals_or_refused(batch: int, seq_len: int, share: float, seed: int) -> None:
    """Refused where a pair that must not attend lies between pairs that do, along the keys and along the queries."""
    attend = torch.rand(batch, seq_len, seq_len, generator=torch.Generator().manual_seed(seed)) < share
    between = torch.zeros_like(attend)
    for row, q, k in itertools.product(range(batch), range(seq_len), range(seq_len)):
        keys, queries = attend[row, q], attend[row, :, k]
        between[row, q, k] = keys[:k].any() and keys[k + 1 :].any() and queries[:q].any() and queries[q + 1 :].any()
    wrong = (between & ~attend).nonzero()
    if wrong.numel() == 0:
        assert torch.equal(dense(IntervalMask.from_bool(attend)), attend)
    else:
        row, query, key = wrong[0].tolist()
        with pytest.raises(MaskNotExpressibleError, match=f"row {row}, query {query} needs .* and key {key}, which"):
            IntervalMask.from_bool(attend)


ROW = torch.zeros(1, 4, dtype=torch.int32)
REFUSALS = {
    "one of two": (lambda: IntervalMask(ROW, ROW, ROW), "only one of key_begin and key_end is given"),
    "dtype": (lambda: IntervalMask(ROW, ROW, ROW, ROW.long()), "key_end is torch.int64 .* expected int32"),
    "shape": (lambda: IntervalMask(ROW, ROW, ROW[:, :3], ROW[:, :3]), "key_begin is .*must agree"),
    "too far": (lambda: IntervalMask(ROW, ROW, ROW, ROW + 5), r"key_end up to 5; expected global positions in 0\.\.4"),
    "negative": (lambda: IntervalMask(ROW, ROW, ROW - 1, ROW), "key_begin goes down to -1"),
    "counts": (lambda: IntervalMask.tree([-1, 0], [3]), "parents has 2 nodes, lengths 1; expected as many"),
    "later parent": (lambda: IntervalMask.tree([1, -1], [3, 3]), r"parents\[0\] is 1; expected -1, or"),
    "own parent": (lambda: IntervalMask.tree([-1, 1], [3, 3]), r"parents\[1\] is 1; expected"),
    "parent -2": (lambda: IntervalMask.tree([-1, -2], [3, 3]), r"parents\[1\] is -2; expected"),
    "not depth-first": (
        lambda: IntervalMask.tree([-1, 0, 0, 1], [1, 1, 1, 1]),
        r"parents\[3\] is 1; expected -1, or node 2 or one of its ancestors: nodes in depth-first order",
    ),
    "other tree": (lambda: IntervalMask.tree([-1, -1, 0], [1, 1, 1]), r"parents\[2\] is 0; expected -1, or node 1"),
    "length": (lambda: IntervalMask.tree([-1, 0], [3, -1]), r"lengths\[1\] is -1; expected at least 0"),
    "no tokens": (lambda: IntervalMask.tree([-1], [0]), "not empty"),
    "no nodes": (lambda: IntervalMask.tree([], []), "not empty"),
    "uneven rows": (lambda: IntervalMask.tree([[-1], [-1]], [[3], [4]]), r"rows of \[3, 4\] tokens; expected as many"),
    "rows": (lambda: IntervalMask.tree([[-1], [-1]], [[3]]), "parents has 2 rows"),
    "too many tokens": (lambda: IntervalMask.shared_prefix(10**30, [1]), r"rows of 1000.* tokens; expected at most"),
    "too many blocks": (lambda: IntervalMask.block_diffusion(2**31, 1), r"seq_len is 2147483648 and block 1; expected"),
    "fraction": (lambda: IntervalMask.tree([-1], [1.5]), "expected integers"),
    "none": (lambda: IntervalMask.tree(None, [1]), "expected integers"),
    "mixed": (lambda: IntervalMask.tree([-1, [0]], [1, 1]), "expected integers"),
    "block": (lambda: IntervalMask.block_diffusion(4, 0), "block 0; expected 1..1073741823 tokens, and at least 1"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused_by_name(case: str) -> None:
    call, message = REFUSALS[case]
    with pytest.raises(InputError, match=message):
        call()
