"""The plan against bool matrices over global positions; bytes and flops against counting them pair by pair."""

from __future__ import annotations

import doctest
import itertools
import pathlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ringtile import ops
from ringtile.errors import InputError
from ringtile.planner.layer import Plan, plan_attention
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import RankPlan
from strategies import any_masks, dense, layouts
from torch import Tensor


@st.composite
def problems(draw: st.DrawFn) -> tuple[IntervalMask, Layout]:
    world_size = draw(st.integers(1, 5))
    seq_len = world_size + draw(st.integers(0, 20))
    return draw(any_masks(draw(st.integers(1, 2)), seq_len)), draw(layouts(seq_len, world_size))


def keys_needed(mask: IntervalMask, layout: Layout, query_rank: int, key_rank: int) -> Tensor:
    """Global positions that key_rank holds, in its local order, and some query of query_rank attends in some row."""
    keys = layout.positions(key_rank)
    attends = dense(mask)[:, layout.positions(query_rank)][:, :, keys]
    return keys[attends.any(1).any(0)]


def num_pairs(mask: IntervalMask, layout: Layout, query_rank: int, key_rank: int) -> int:
    attends = dense(mask)[:, layout.positions(query_rank)][:, :, layout.positions(key_rank)]
    return int(attends.sum())


@pytest.mark.parametrize("layout", [Layout.zigzag(64, 8), Layout.contiguous(64, 8), Layout.striped(64, 8)])
def test_runs_of_several_ranks_that_continue_each_other_are_one(layout: Layout) -> None:
    """A GPU's kernel takes few runs in a launch, and reads the keys of a run faster than those of many."""
    (round,) = RankPlan.of(IntervalMask.full(64), layout, 3, at_once=True).rounds
    is_striped = layout.runs(3)[0].stride > 1
    assert round.k_runs.tolist() == ([[r, 8, 8 * r, 8] for r in range(8)] if is_striped else [[0, 1, 0, 64]])


@given(problems(), st.booleans())
def test_rounds_move_exactly_the_keys_that_are_needed(problem: tuple[IntervalMask, Layout], at_once: bool) -> None:
    """Every rank packs its rows with the runs of outgoing; what arrives are the positions that k_runs names."""
    mask, layout = problem
    world_size = layout.world_size
    plans = [RankPlan.of(mask, layout, rank, at_once=at_once) for rank in range(world_size)]
    for rank, of_rank in enumerate(plans):
        queries = layout.positions(rank)
        begin, end = of_rank.rounds[0].bounds.host
        assert torch.equal(begin, mask.begin[:, queries])
        assert torch.equal(end, mask.end[:, queries])
        key_ranks = [
            ([*range(world_size)] if at_once else [rank])  # of which only its own are needed
            if round.in_place
            else [incoming.rank for incoming in round.incoming]
            for round in of_rank.rounds
        ]
        assert sorted(itertools.chain(*key_ranks)) == [*range(world_size)]
        if not at_once:
            assert key_ranks == [[(rank - i) % world_size] for i in range(world_size)]
        busy = {round.index for round in of_rank.on(torch.device("cpu"))}
        for i, round in enumerate(of_rank.rounds):
            sent = sum(outgoing.num_keys for outgoing in round.outgoing)
            assert (i in busy) == (i == 0 or round.num_pairs + sent > 0)
            needed = [keys_needed(mask, layout, rank, key_rank) for key_rank in key_ranks[i]]
            assert round.num_pairs == sum(num_pairs(mask, layout, rank, key_rank) for key_rank in key_ranks[i])
            assert round.num_keys == sum(map(torch.numel, needed))
            assert [incoming.num_keys for incoming in round.incoming] in ([], [*map(torch.numel, needed)])
            block = torch.full((round.num_keys,), -1)
            for incoming in round.incoming:
                sender = plans[incoming.rank].rounds[i]
                if sender.in_place:
                    assert incoming.num_keys == 0
                    continue
                [outgoing] = [each for each in sender.outgoing if each.rank == rank]
                assert outgoing.num_keys == incoming.num_keys
                local = layout.positions(incoming.rank)  # stands for k: the row of a position is the position
                message = torch.empty(incoming.num_keys, dtype=torch.int64)
                ops.rows_pack_([local], outgoing.runs, 0, [message])
                assert outgoing.is_head == torch.equal(message, local[: outgoing.num_keys])
                ops.rows_unpack_([block], incoming.runs, 0, [message])
            block = layout.positions(rank) if round.in_place else block
            assert round.in_place or torch.equal(block.sort()[0], torch.cat(needed).sort()[0])
            starts = round.k_runs[:, 0]
            assert round.in_place or not at_once or torch.equal(starts, starts.sort()[0])

            named = torch.full_like(block, -1)
            for global_begin, stride, local_begin, length in round.k_runs.tolist():
                named[local_begin : local_begin + length] = global_begin + stride * torch.arange(length)
            assert torch.equal(named[named >= 0].sort()[0], torch.cat(needed).sort()[0])
            assert torch.equal(named[named >= 0], block[named >= 0])
            key_bounds = round.key_bounds.host if round.key_bounds else ()
            assert len(key_bounds) == len(mask.tensors) - 2
            for bound, of_mask in zip(key_bounds, mask.loose_key_bounds, strict=True):
                assert torch.equal(bound[:, named >= 0], of_mask[:, block[named >= 0]])


@given(
    problems(),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_costs_are_counted_pair_by_pair(
    problem: tuple[IntervalMask, Layout], group: int, kv_heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype
) -> None:
    mask, layout = problem
    batch, ranks = 2, range(layout.world_size)
    cost = plan_attention(
        mask,
        layout,
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
        batch=batch,
    )
    copies = batch // mask.begin.size(0)

    def key_elements(query_rank: int, key_rank: int) -> int:
        if query_rank == key_rank:
            return 0
        return batch * keys_needed(mask, layout, query_rank, key_rank).numel() * kv_heads * (head_dim + v_head_dim)

    gradient_bytes = 8 if dtype == torch.float64 else 4
    for rank in ranks:
        received = sum(key_elements(rank, other) for other in ranks)
        sent = sum(key_elements(other, rank) for other in ranks)
        of_rank = cost.ranks[rank]
        assert of_rank.forward_bytes_received == received * dtype.itemsize
        assert of_rank.forward_bytes_sent == sent * dtype.itemsize
        assert of_rank.backward_bytes_received == received * dtype.itemsize + sent * gradient_bytes
        assert of_rank.backward_bytes_sent == sent * dtype.itemsize + received * gradient_bytes
        # A multiply-add of one score or one output element is 2 flops.
        pairs = copies * sum(num_pairs(mask, layout, rank, other) for other in ranks) * group * kv_heads
        scores, weighted_values = 2 * head_dim * pairs, 2 * v_head_dim * pairs
        assert of_rank.forward_flops == scores + weighted_values
        scores_again, dp, dv, dq, dk = scores, weighted_values, weighted_values, scores, scores
        assert of_rank.backward_flops == scores_again + dp + dv + dq + dk
    assert cost.forward_bytes == sum(of_rank.forward_bytes_received for of_rank in cost.ranks)
    assert cost.backward_bytes == sum(of_rank.backward_bytes_received for of_rank in cost.ranks)
    if cost.forward_flops:
        work = [of_rank.forward_flops for of_rank in cost.ranks]
        assert cost.imbalance == pytest.approx(max(work) / (sum(work) / len(work)))


def causal_plan(layout: Layout, mask: IntervalMask | None = None) -> Plan:
    mask = mask or IntervalMask.causal(layout.seq_len)
    return plan_attention(mask, layout, num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_zigzag_balances_causal_work_and_moves_three_quarters(world_size: int) -> None:
    """Chunk c of 2W is needed by the ranks that hold a later chunk. Head chunk r: all but r; tail chunk 2W-1-r: r."""
    seq_len = 2 * world_size * 16
    zigzag = causal_plan(Layout.zigzag(seq_len, world_size))
    everything = world_size * (world_size - 1) * (seq_len // world_size) * 2 * (8 + 8) * 4
    assert zigzag.imbalance == 1.0
    assert zigzag.forward_bytes * 4 == everything * 3
    assert causal_plan(Layout.contiguous(seq_len, world_size)).imbalance > 1.4


def test_sliding_window_moves_a_halo() -> None:
    window, world_size = 5, 4
    cost = causal_plan(Layout.contiguous(64, world_size), IntervalMask.sliding_window(64, window))
    assert [round.num_keys for round in cost.ranks[2].rounds] == [16, window - 1, 0, 0]
    assert cost.forward_bytes == (world_size - 1) * (window - 1) * 2 * (8 + 8) * 4


def test_documents_that_end_at_the_cuts_move_nothing() -> None:
    cost = causal_plan(Layout.contiguous(64, 4), IntervalMask.documents([16, 16, 10, 6, 16]))
    assert cost.forward_bytes == cost.backward_bytes == 0
    straddling = causal_plan(Layout.contiguous(64, 4), IntervalMask.documents([16, 20, 28]))
    assert [round.num_keys for round in straddling.ranks[2].rounds[1:]] == [16, 0, 0]


def test_mask_that_attends_nothing_costs_nothing() -> None:
    nothing = IntervalMask.from_padding(torch.zeros(1, 8, dtype=torch.int64))
    cost = causal_plan(Layout.zigzag(8, 2), nothing)
    assert (cost.forward_bytes, cost.backward_flops, cost.imbalance) == (0, 0, 1.0)


def test_table_names_ranks_and_totals() -> None:
    cost = causal_plan(Layout.zigzag(64, 2))
    table = str(cost).splitlines()
    assert table[0].startswith("rank  tokens  from  keys  fwd MB out  fwd MB in  bwd MB out  bwd MB in")
    assert [line.split()[:4] for line in table[1:3]] == [["0", "32", "1", "32"], ["1", "32", "1", "16"]]
    assert table[3].startswith("64 tokens over 2 ranks: 0.006 MB forward")


@pytest.mark.parametrize("page", ["masks.md", "sharing.md"])
def test_pages_show_what_the_code_prints(page: str) -> None:
    path = pathlib.Path(__file__).parents[2] / "docs" / "guide" / page
    failed, tried = doctest.testfile(str(path), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 0
    assert failed == 0


GOOD = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
TWO_ROWS = IntervalMask.documents([[4, 4], [8]])
REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "length": (
        lambda: plan_attention(IntervalMask.causal(9), Layout.zigzag(8, 2), **GOOD),
        "the mask is of 9 tokens, the layout of 8",
    ),
    "heads": (
        lambda: plan_attention(IntervalMask.causal(8), Layout.zigzag(8, 2), **{**GOOD, "num_kv_heads": 3}),
        "num_heads 4, num_kv_heads 3.* num_heads a multiple of num_kv_heads",
    ),
    "head dim": (
        lambda: plan_attention(IntervalMask.causal(8), Layout.zigzag(8, 2), v_head_dim=0, **GOOD),
        r"v_head_dim 0.* head dims of 1\.\.512",
    ),
    "a billion heads": (
        lambda: plan_attention(IntervalMask.causal(8), Layout.zigzag(8, 2), **{**GOOD, "num_heads": 10**9}),
        "num_heads 1000000000, .* at most 65536",
    ),
    "a large head": (
        lambda: plan_attention(IntervalMask.causal(8), Layout.zigzag(8, 2), **{**GOOD, "head_dim": 10**6}),
        r"head_dim 1000000, .* head dims of 1\.\.512",
    ),
    "more than is counted": (
        lambda: plan_attention(IntervalMask.causal(8), Layout.zigzag(8, 2), batch=2**60, **GOOD),
        "batch 1152921504606846976; expected .* that 62 bits can count",
    ),
    "many heads": (
        lambda: plan_attention(IntervalMask.causal(8), Layout.zigzag(8, 2), **{**GOOD, "num_heads": 4 * 10**30}),
        r"num_heads 40*, .* at most 65536, head dims of 1\.\.512",
    ),
    "batch": (
        lambda: plan_attention(TWO_ROWS, Layout.zigzag(8, 2), batch=3, **GOOD),
        "the mask has 2 rows but batch is 3; expected 3 or 1",
    ),
    "dtype": (
        lambda: plan_attention(IntervalMask.causal(8), Layout.zigzag(8, 2), **{**GOOD, "dtype": torch.int64}),
        "dtype is torch.int64; expected one of torch.float64",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_numbers_that_do_not_fit_are_refused_by_name(case: str) -> None:
    call, message = REFUSALS[case]
    with pytest.raises(InputError, match=message):
        call()
