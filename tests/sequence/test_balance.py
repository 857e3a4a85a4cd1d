"""Layouts made for a mask: how even the work is, counted pair by pair, and how many keys travel.

Shape letters: S global tokens, W ranks.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ringtile import IntervalMask, Layout, LayoutError, ops
from ringtile.sequence.layout import resolved
from strategies import document_lengths
from torch import Tensor

TOLERANCE = 1.03  # of csrc/seq/balance.c: busiest rank over the mean


def random_packing(seq_len: int, rng: random.Random) -> list[int]:
    """Lengths log-uniform between 32 tokens and a limit, itself drawn between 512 and the whole sequence."""
    longest = math.log2(rng.choice([512, 4096, 32768, seq_len]))
    lengths, left = [], seq_len
    while left:
        lengths.append(min(left, int(2 ** rng.uniform(5, longest))))
        left -= lengths[-1]
    rng.shuffle(lengths)
    return lengths


def work(mask: IntervalMask, layout: Layout) -> list[int]:
    """Of each rank: the pairs that its queries attend."""
    attended = mask.num_keys.sum(0)
    return [int(attended[layout.positions(rank)].sum()) for rank in range(layout.world_size)]


def imbalance(mask: IntervalMask, layout: Layout) -> float:
    of_ranks = work(mask, layout)
    return max(of_ranks) * len(of_ranks) / sum(of_ranks)


def traveling(mask: IntervalMask, layout: Layout) -> int:
    """Keys that ranks receive of other ranks, from the plan that the ring executes."""
    keys, _ = ops.plan_counts(*mask.bounds, layout.tensor)
    return int(keys.sum() - keys.trace())


def test_packed_documents_are_balanced() -> None:
    """50 random packings of 131072 tokens over 8 ranks; zigzag leaves its busiest rank at up to 2.8 times the mean."""
    rng, zigzag = random.Random(0), Layout.zigzag(131072, 8)
    worst_zigzag = 0.0
    for _ in range(50):
        mask = IntervalMask.documents(random_packing(131072, rng))
        layout = Layout.balanced(mask, 8)
        assert imbalance(mask, layout) <= TOLERANCE
        assert {layout.local_len(rank) for rank in range(8)} == {131072 // 8}
        worst_zigzag = max(worst_zigzag, imbalance(mask, zigzag))
    assert worst_zigzag > 1.5  # the packings are hard


@pytest.mark.parametrize(
    "num_ranks", [64, pytest.param(256, marks=pytest.mark.long), pytest.param(1024, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("median", [1_100, 13_000, 160_000])
def test_many_ranks_do_the_same(num_ranks: int, median: int) -> None:
    """Log-normal lengths of documents in 16,384 tokens a rank; zigzag and contiguous leave up to 10 times the mean.

    Ranks have two runs each, so that a plan stays as short as zigzag's.
    """
    rng, seq_len = random.Random(num_ranks), 16384 * num_ranks
    lengths: list[int] = []
    while sum(lengths) < seq_len:
        lengths.append(min(seq_len - sum(lengths), int(rng.lognormvariate(math.log(median), 1.5)) + 1))
    mask = IntervalMask.documents(lengths)
    layout = Layout.balanced(mask, num_ranks)
    assert imbalance(mask, layout) <= TOLERANCE
    assert {layout.local_len(rank) for rank in range(num_ranks)} == {16384}
    assert len(layout.tensor) <= 2 * num_ranks


def test_documents_that_fit_a_rank_hardly_travel() -> None:
    """Each rank has two runs, so at most four documents are cut for it."""
    mask = IntervalMask.documents([100] * (64 * 80))
    layout = Layout.balanced(mask, 64)
    assert imbalance(mask, layout) <= TOLERANCE
    assert traveling(mask, layout) <= 64 * 4 * 100


def test_what_no_layout_balances_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ringtile")
    Layout.balanced(IntervalMask.documents([20, 4, 8]), 4, chunk=4)
    assert "the busiest rank does 1.31 times the mean" in caplog.text
    caplog.clear()
    Layout.balanced(IntervalMask.documents([100] * 40), 4)
    assert caplog.text == ""


@pytest.mark.parametrize("num_documents", [1, 3, 8, 20, 100])
def test_auto_balances_packed_rows(num_documents: int) -> None:
    """Rows cut at random; zigzag leaves the busiest rank at 1.36 to 1.74 times the mean."""
    zigzag, of_zigzag = Layout.zigzag(131072, 8), []
    for seed in range(4):
        cuts = [0, *sorted(random.Random(seed).sample(range(1, 8192), num_documents - 1)), 8192]
        mask = IntervalMask.documents([16 * (after - before) for before, after in itertools.pairwise(cuts)])
        layout = Layout.of_mask("auto", mask, 8)
        assert imbalance(mask, layout) <= 1.1
        assert (layout == zigzag) is (num_documents == 1)
        of_zigzag.append(imbalance(mask, zigzag))
    assert (sum(of_zigzag) / 4 > 1.2) is (num_documents > 1)
    assert resolved("auto", IntervalMask.from_padding(torch.tensor([[0] * 5 + [1] * 43])).padded(2)) == "zigzag"


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (IntervalMask.causal(4096), Layout.zigzag(4096, 4)),
        (IntervalMask.full(4096), Layout.contiguous(4096, 4)),
        (IntervalMask.documents([1024] * 4), Layout.contiguous(4096, 4)),
        (IntervalMask.chunked(4096, 512), Layout.contiguous(4096, 4)),
    ],
    ids=["causal", "full", "documents", "chunked"],
)
def test_a_named_layout_that_is_even_is_found(mask: IntervalMask, expected: Layout) -> None:
    layout = Layout.balanced(mask, 4, chunk=64)
    assert all(torch.equal(layout.positions(rank), expected.positions(rank)) for rank in range(4))


def test_balance_costs_fewer_keys_than_dealing_chunks_around() -> None:
    rng = random.Random(1)
    for _ in range(20):
        mask = IntervalMask.documents(random_packing(65536, rng))
        layout = Layout.balanced(mask, 8, chunk=512)
        dealt = Layout.from_runs(
            [[((i * 8 + rank) * 512, 1, i * 512, 512) for i in range(16)] for rank in range(8)]
        )  # fmt: skip
        assert traveling(mask, layout) < traveling(mask, dealt)


@given(st.integers(1, 6), st.data())
def test_documents_are_cut_each_by_itself(world_size: int, data: st.DataObject) -> None:
    """Every rank holds of every document its share, give or take two tokens: one per chunk."""
    # The first document alone gives every rank a token.
    lengths = [2 * world_size, *data.draw(document_lengths(data.draw(st.integers(1, 60))))]
    layout = Layout.per_document(lengths, world_size)
    begin = 0
    for length in lengths:
        for rank in range(world_size):
            positions = layout.positions(rank)
            held = int(((positions >= begin) & (positions < begin + length)).sum())
            assert abs(held - length / world_size) < 2
        begin += length


@pytest.mark.parametrize(("lengths", "world_size"), [([16, 48, 32], 4), ([4, 12], 2)])
def test_documents_of_whole_chunks_have_equal_work(lengths: list[int], world_size: int) -> None:
    layout = Layout.per_document(lengths, world_size)
    assert len(set(work(IntervalMask.documents(lengths), layout))) == 1


@pytest.mark.parametrize(("world_size", "chunk"), [(0, 4), (4, 0), (4, 6), (2, 16)])
def test_too_few_chunks_are_refused(world_size: int, chunk: int) -> None:
    with pytest.raises(LayoutError, match="a balanced layout of 16 tokens"):
        Layout.balanced(IntervalMask.causal(16), world_size, chunk)


def test_a_chunk_longer_than_the_sequence_is_the_sequence() -> None:
    assert Layout.balanced(IntervalMask.causal(16), 1, 10**30) == Layout.contiguous(16, 1)


@pytest.mark.parametrize(
    ("num_keys", "ranks", "chunk", "message"),
    [
        (torch.zeros(1, 8), 2, 3, "num_keys has dtype"),
        (torch.zeros(1, 7, dtype=torch.int64), 2, 3, "num_keys has shape"),
        *((None, *wrong, "at least 1") for wrong in ((0, 3), (2, 0), (-1, 3), (2, -1), (4, 3), (2**62, 1))),
    ],
)
def test_the_op_refuses_what_it_cannot_deal(num_keys: Tensor | None, ranks: int, chunk: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.balance(*IntervalMask.causal(8).bounds, num_keys, ranks, chunk)


def cut_documents(layout: Layout, lengths: list[int]) -> list[int]:
    """The lengths of the documents that several ranks hold."""
    owners = torch.empty(layout.seq_len, dtype=torch.int64)
    for rank in range(layout.world_size):
        owners[layout.positions(rank)] = rank
    of_each = torch.split(owners, lengths)
    return [len(ranks) for ranks in of_each if len(ranks) and bool((ranks != ranks[0]).any())]


def test_documents_that_fit_stay_whole() -> None:
    """Those of a sixteenth of a rank's share, of 30 random packings of 65536 tokens; longer ones where balance lets
    them."""
    rng, cut_by_balanced, cut = random.Random(2), 0, 0
    for _ in range(30):
        lengths = random_packing(65536, rng)
        mask = IntervalMask.documents(lengths)
        layout, balanced = Layout.whole_documents(mask, 8), Layout.balanced(mask, 8)
        assert imbalance(mask, layout) <= 1.05
        assert max(layout.local_len(rank) for rank in range(8)) <= 1.05 * 65536 / 8
        of_layout = cut_documents(layout, lengths)
        assert all(length > 65536 / 8 / 16 for length in of_layout)
        assert traveling(mask, layout) <= traveling(mask, balanced)
        cut, cut_by_balanced = cut + len(of_layout), cut_by_balanced + len(cut_documents(balanced, lengths))
    assert cut <= 0.6 * cut_by_balanced


def test_what_one_rank_holds_whole_is_not_sent() -> None:
    mask = IntervalMask.documents([100] * (64 * 80))
    layout = Layout.of_mask("whole_documents", mask, 64)
    assert traveling(mask, layout) == 0
    assert imbalance(mask, layout) <= 1.05


@given(st.integers(1, 6), st.data())
def test_cuts_at_documents_cost_little_balance(world_size: int, data: st.DataObject) -> None:
    lengths = [2 * world_size, *data.draw(document_lengths(data.draw(st.integers(1, 60))))]
    mask = IntervalMask.documents(lengths, causal=data.draw(st.booleans()))
    layout, balanced = Layout.whole_documents(mask, world_size), Layout.balanced(mask, world_size)
    assert imbalance(mask, layout) <= max(1.05, imbalance(mask, balanced))
