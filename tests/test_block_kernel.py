"""aten's flash attention as the block kernel of the ring: the masks it takes, exactness, what auto does.

Shape letters: B batch, S global tokens, N local tokens, K keys.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Attention, dense_gradients
from ringtile import Config, ConfigError, InputError, IntervalMask, Layout, LoopbackWorld, block, ring_attention
from ringtile.block import MAX_PIECES, Piece, find_pieces
from ringtile.plan import rounds_of
from ringtile.transport import LoopbackGroup
from strategies import dense, layouts, masks
from test_attention import run_torch
from test_ring import FLOAT64_TOLERANCE, MASKS, Problem, assemble, assert_close, problem


def run_ring(p: Problem, mask: IntervalMask, layout: Layout, kernel: str) -> Attention:
    def on_rank(group: LoopbackGroup) -> Attention:
        rank = group.transport.rank
        leaves = [layout.shard(x.detach(), 1, rank).requires_grad_() for x in (p.q, p.k, p.v)]
        out, lse = ring_attention(*leaves, mask=mask, layout=layout, group=group, return_lse=True, block_kernel=kernel)
        cotangents = [layout.shard(p.dout, 1, rank), layout.shard(p.dlse, 2, rank)]
        return Attention(out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, cotangents))

    return assemble(LoopbackWorld(layout.world_size).run(on_rank), layout)


# ---- plain masks --------------------------------------------------------------------------------


def drawn(pieces: tuple[Piece, ...], num_queries: int, num_keys: int) -> torch.Tensor:
    """int (N, K): how many pieces let a query attend a row."""
    picture = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    for q_begin, q_end, k_begin, k_end, causal in pieces:
        area = torch.ones(q_end - q_begin, k_end - k_begin, dtype=torch.int64)
        picture[q_begin:q_end, k_begin:k_end] += area.tril() if causal else area
        assert not causal or q_end - q_begin == k_end - k_begin
    return picture


@settings(max_examples=150)
@given(st.data())
def test_pieces_are_the_mask(data: st.DataObject) -> None:
    """Of any round: together they say what the mask says of the block's rows, and nothing twice."""
    world_size = data.draw(st.integers(1, 4))
    seq_len = data.draw(st.integers(world_size, 24))
    mask, layout = data.draw(masks(1, seq_len)), data.draw(layouts(seq_len, world_size))
    for rank in range(world_size):
        plan = rounds_of(mask.begin, mask.end, layout.tensor, rank)
        for round in plan.rounds:
            pieces = find_pieces(plan.begin, plan.end, round.k_runs)
            if pieces is None:
                continue
            num_rows = max([plan.local_len, round.num_keys])
            expected = torch.zeros(plan.local_len, num_rows, dtype=torch.int64)
            for at, stride, row, length in round.k_runs.tolist():
                positions = at + stride * torch.arange(length)
                inside = (positions >= plan.begin[0][:, None]) & (positions < plan.end[0][:, None])
                expected[:, row : row + length] += inside
            assert torch.equal(drawn(pieces, plan.local_len, num_rows), expected)
            assert len(pieces) <= MAX_PIECES


@pytest.mark.parametrize("layout", [Layout.contiguous, Layout.zigzag])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_full_and_causal_are_plain_in_every_round(mask: str, layout: Callable[[int, int], Layout]) -> None:
    for rank in range(4):
        plan = rounds_of(MASKS[mask].begin, MASKS[mask].end, layout(48, 4).tensor, rank)
        found = [find_pieces(plan.begin, plan.end, round.k_runs) for round in plan.rounds]
        assert all(pieces is not None and len(pieces) <= 1 for pieces in found)


def test_what_is_not_plain_is_left_to_ringtile() -> None:
    window = IntervalMask.sliding_window(48, 7)
    rows = IntervalMask.documents([[20, 28], [28, 20]])
    for mask in (window, rows):
        plan = rounds_of(mask.begin, mask.end, Layout.contiguous(48, 1).tensor, 0)
        assert find_pieces(plan.begin, plan.end, plan.rounds[0].k_runs) is None


# ---- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_ring_over_atens_kernel_equals_the_definition(
    monkeypatch: pytest.MonkeyPatch, mask: str, world_size: int
) -> None:
    """And it does run where the mask is plain."""
    calls = []
    merge = block._merge_piece_
    monkeypatch.setattr(block, "_merge_piece_", lambda *arguments: (calls.append(arguments[0]), merge(*arguments)))
    p = problem(v_head_dim=16)
    expected = dense_gradients(p.q, p.k, p.v, dense(MASKS[mask]), p.dout, p.dlse)
    for layout in (Layout.zigzag(48, world_size), Layout.striped(48, world_size)):
        assert_close(run_ring(p, MASKS[mask], layout, "aten"), expected, FLOAT64_TOLERANCE)
    assert calls or mask not in ("full", "causal")


@pytest.mark.parametrize("options", [{"v_head_dim": 8}, {"dtype": torch.float32}, {"num_kv_heads": 4}])
def test_other_shapes_work_too(options: dict[str, object]) -> None:
    """aten's kernel has one head dim, and no softcap; what it does not take goes to ringtile's."""
    p = problem(**{"v_head_dim": 16, **options})  # type: ignore[arg-type]
    one, other = (run_ring(p, MASKS["causal"], Layout.zigzag(48, 2), kernel) for kernel in ("aten", "ringtile"))
    for x, y in zip(one, other, strict=True):
        tolerance = 1e-12 if p.q.dtype == torch.float64 else 16 * torch.finfo(p.q.dtype).eps
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_bfloat16_is_not_rounded_once_a_block(mask: str, world_size: int) -> None:
    """Merging two blocks that are rounded to bfloat16 would be less exact than torch; one block is exactly torch's."""
    seq_len = 256
    p = problem(2, seq_len, 4, 2, 64, 64, torch.bfloat16)
    whole = IntervalMask.causal(seq_len) if mask == "causal" else IntervalMask.full(seq_len)
    expected = dense_gradients(p.q, p.k, p.v, dense(whole), p.dout).out
    ring = run_ring(p, whole, Layout.zigzag(seq_len, world_size), "aten").out
    theirs = run_torch(p, mask == "causal")[0].detach()  # type: ignore[arg-type]
    assert (ring.double() - expected).abs().max() <= (theirs.double() - expected).abs().max()
    if world_size == 1:
        assert torch.equal(ring, theirs)


# ---- auto, and what is refused ------------------------------------------------------------------


def test_auto_measures_once_and_keeps_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    p, layout = problem(v_head_dim=16), Layout.contiguous(48, 1)
    for seconds, expected in (((1.0, 2.0), "aten"), ((2.0, 1.0), "ringtile")):
        answers = list(seconds)
        monkeypatch.setattr(block, "_faster", {})
        monkeypatch.setattr(block, "_seconds", lambda *arguments, answers=answers: answers.pop(0))
        results = [run_ring(p, MASKS["causal"], layout, kernel) for kernel in ("auto", "auto", expected)]
        assert answers == []
        assert all(torch.equal(x, y) for result in results[:2] for x, y in zip(result, results[2], strict=True))


def test_auto_leaves_the_running_state_alone_while_it_measures() -> None:
    p = problem(v_head_dim=16)
    expected = dense_gradients(p.q, p.k, p.v, dense(MASKS["causal"]), p.dout, p.dlse)
    assert_close(run_ring(p, MASKS["causal"], Layout.zigzag(48, 3), "auto"), expected, FLOAT64_TOLERANCE)


def test_unknown_kernels_are_refused() -> None:
    p = problem()
    with pytest.raises(InputError, match="block_kernel is 'cudnn'; expected one of auto, ringtile, aten"):
        ring_attention(p.q, p.k, p.v, mask=MASKS["full"], layout=Layout.contiguous(48, 1), block_kernel="cudnn")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="block_kernel is 'flash'"):
        Config(block_kernel="flash")
