"""aten's attention as the block kernel of the ring: the masks it takes, exactness, what auto does, what is refused.

Shape letters: B batch, S global tokens, N local tokens, K keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Attention, dense_gradients
from ringtile import Config, ConfigError, InputError, IntervalMask, Layout, LoopbackWorld, ring_attention
from ringtile.ring import block_kernel as block
from ringtile.ring.block_kernel import MAX_PIECES, Piece, find_pieces
from ringtile.sequence.plan import rank_plan
from ringtile.transport.loopback import LoopbackGroup
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
        plan = rank_plan(mask, layout, rank)
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
        plan = rank_plan(MASKS[mask], layout(48, 4), rank)
        found = [find_pieces(plan.begin, plan.end, round.k_runs) for round in plan.rounds]
        assert all(pieces is not None and len(pieces) <= 1 for pieces in found)


def test_what_is_not_plain_is_left_to_ringtile() -> None:
    window = IntervalMask.sliding_window(48, 7)
    rows = IntervalMask.documents([[20, 28], [28, 20]])
    for mask in (window, rows):
        plan = rank_plan(mask, Layout.contiguous(48, 1), 0)
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
    monkeypatch.setattr(block, "_merge_piece_", lambda *arguments: (calls.append(arguments[1]), merge(*arguments)))
    p = problem(v_head_dim=16)
    expected = dense_gradients(p.q, p.k, p.v, dense(MASKS[mask]), p.dout, p.dlse)
    for layout in (Layout.zigzag(48, world_size), Layout.striped(48, world_size)):
        assert_close(run_ring(p, MASKS[mask], layout, "aten"), expected, FLOAT64_TOLERANCE)
    assert {piece.q_end for piece in calls} - {block.CHECKED_LEN} or mask not in ("full", "causal")


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
        monkeypatch.setattr(block, "_chosen", {})
        monkeypatch.setattr(block, "_seconds", lambda *arguments, answers=answers: answers.pop(0))
        results = [run_ring(p, MASKS["causal"], layout, kernel) for kernel in ("auto", "auto", expected)]
        assert answers == []
        assert all(torch.equal(x, y) for result in results[:2] for x, y in zip(result, results[2], strict=True))


def test_auto_leaves_the_running_state_alone_while_it_measures() -> None:
    p = problem(v_head_dim=16)
    expected = dense_gradients(p.q, p.k, p.v, dense(MASKS["causal"]), p.dout, p.dlse)
    assert_close(run_ring(p, MASKS["causal"], Layout.zigzag(48, 3), "auto"), expected, FLOAT64_TOLERANCE)


# ---- a kernel of aten's that is not what it was taken for ---------------------------------------

attend = block._flash_for_cpu
STAND_INS: dict[str, tuple[block.Attend, str]] = {  # and what is said of them
    "one that gives lse (B, H, N, 1)": (lambda *x: (attend(*x)[0], attend(*x)[1][..., None]), ""),
    "lse in base 2": (lambda *x: (attend(*x)[0], attend(*x)[1] / math.log(2)), "gives another lse than ringtile's"),
    "lse without the scale": (lambda *x: (attend(*x)[0], attend(*x[:4], 1.0)[1]), "gives another lse than ringtile's"),
    "causal from the last key": (
        lambda q, k, v, causal, scale: attend(q.flip(2), k.flip(2), v.flip(2), causal, scale),
        "gives another out than ringtile's",
    ),
    "nan": (lambda *x: (attend(*x)[0] * torch.nan, attend(*x)[1]), "gives another out than ringtile's"),
    "of other heads": (lambda q, k, v, *x: attend(q[:, :1], k[:, :1], v[:, :1], *x), "raises RuntimeError: "),
    "one that is not there": (
        lambda *x: torch.ops.aten._scaled_dot_product_cudnn_attention(*x[:3], None, True, 0.0, *x[3:4], scale=x[4]),
        "raises NotImplementedError: Could not run 'aten::_scaled_dot_product_cudnn_attention'",
    ),
}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Takes the place of aten's kernels on the CPU, by names of STAND_INS."""
    block.why_not.cache_clear()
    yield lambda *names: monkeypatch.setitem(block.ATEN, "cpu", {name: STAND_INS[name][0] for name in names})
    block.why_not.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", STAND_INS)
def test_a_kernel_of_atens_is_compared_before_it_is_used(
    stand_in: Callable[..., None], name: str, dtype: torch.dtype
) -> None:
    """What is refused with "aten" is ringtile's with "auto"."""
    stand_in(name)
    p, layout = problem(v_head_dim=16, dtype=dtype), Layout.contiguous(48, 1)
    reason = STAND_INS[name][1]
    said = block.why_not(name, p.q.device, dtype, 16, 4, 2)
    assert said.startswith(reason)
    assert bool(said) == bool(reason)
    if not reason:
        run_ring(p, MASKS["causal"], layout, "aten")
        return
    with pytest.raises(InputError, match=re.escape(f"block_kernel is 'aten', but on cpu {name} {reason}")):
        run_ring(p, MASKS["causal"], layout, "aten")
    one, other = (run_ring(p, MASKS["causal"], layout, kernel) for kernel in ("auto", "ringtile"))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_no_key_is_sent_where_no_kernel_of_atens_is_right(stand_in: Callable[..., None]) -> None:
    """Every rank says why, and none that it lost another one."""
    stand_in("nan")
    p, layout = problem(v_head_dim=16), Layout.zigzag(48, 2)

    def on_rank(group: LoopbackGroup) -> str:
        q, k, v = (layout.shard(x.detach(), 1, group.transport.rank) for x in (p.q, p.k, p.v))
        with pytest.raises(InputError) as caught:
            ring_attention(q, k, v, mask=MASKS["causal"], layout=layout, group=group, block_kernel="aten")
        ring_attention(q, k, v, mask=MASKS["causal"], layout=layout, group=group)
        return str(caught.value)

    for message in LoopbackWorld(2).run(on_rank):
        assert message.startswith("block_kernel is 'aten', but on cpu nan gives another out than ringtile's")


def test_of_several_kernels_one_that_is_right_is_used(
    stand_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest of them."""
    right = "one that gives lse (B, H, N, 1)"
    stand_in("lse in base 2", right)
    p, layout = problem(v_head_dim=16), Layout.contiguous(48, 1)
    expected = dense_gradients(p.q, p.k, p.v, dense(MASKS["causal"]), p.dout, p.dlse)
    assert_close(run_ring(p, MASKS["causal"], layout, "aten"), expected, FLOAT64_TOLERANCE)
    measured: list[dict[str, block.Merge]] = []
    monkeypatch.setattr(block, "_fastest", lambda merges, *rest: measured.append(merges) or merges[right])
    run_ring(p, MASKS["causal"], layout, "auto")
    assert [list(merges) for merges in measured] == [[right, "ringtile"]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 96, 256])
def test_atens_flash_attention_is_what_it_is_taken_for(head_dim: int, dtype: torch.dtype) -> None:
    for heads in ((1, 1), (8, 2)):
        assert block.why_not("aten's flash attention", torch.device("cpu"), dtype, head_dim, *heads) == ""


def test_unknown_kernels_are_refused() -> None:
    p = problem()
    with pytest.raises(InputError, match="block_kernel is 'cudnn'; expected one of auto, ringtile, aten"):
        ring_attention(p.q, p.k, p.v, mask=MASKS["full"], layout=Layout.contiguous(48, 1), block_kernel="cudnn")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="block_kernel is 'flash'"):
        Config(block_kernel="flash")
