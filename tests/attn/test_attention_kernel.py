"""Who computes attention on a block of keys: masks in pieces, aten's kernels in the ring, what auto does, refusals.

Shape letters: B batch, S global tokens, N local tokens, K keys, H query heads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from aten_stand_ins import in_a_sequence
from attention_calls import MASKS, Problem, problem, run
from hypothesis import given
from hypothesis import strategies as st
from oracle import Attention, dense_gradients
from ringtile import (
    AttentionDropout,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RefusedError,
    ops,
    ring_attention,
)
from ringtile import self_test as checks
from ringtile.attn import aten
from ringtile.attn import choose as block
from ringtile.attn import self_test as attn_self_test
from ringtile.attn.aten import InSquares
from ringtile.attn.backend import Block, Final, Gradients, Ringtile
from ringtile.cli import doctor
from ringtile.sequence.layout import CHUNKS_PER_RANK
from ringtile.sequence.pieces import Piece, packs, pieces_of, squares
from ringtile.sequence.plan import RankPlan, Round
from ringtile.transport.loopback import LoopbackGroup
from strategies import any_masks, dense, layouts
from torch import Tensor

CPU = torch.device("cpu")


def run_ring(p: Problem, mask: IntervalMask, layout: Layout, kernel: str, **options: Any) -> Attention:
    """With gradients by dout alone."""
    return run(p, mask, layout, attention_kernel=kernel, of_lse=False, **options).results


# ---- masks in pieces ----------------------------------------------------------------------------


def drawn(pieces: tuple[Piece, ...], picture: Tensor) -> Tensor:
    """picture int (N, K), and 1 more for each piece that lets a query attend a key."""
    picture = picture.clone()
    for piece in pieces:
        for t in range(piece.num_queries):
            first = piece.k_begin + (t if piece.drops else 0)
            end = piece.k_end - (piece.num_queries - 1 - t if piece.gains else 0)
            assert piece.k_begin <= first < end <= piece.k_end
            picture[piece.q_begin + t, first:end] += 1
    return picture


def drawn_in_squares(pieces: tuple[Piece, ...], picture: Tensor) -> Tensor:
    picture = picture.clone()
    for q_begin, q_end, k_begin, k_end, causal, flipped in squares(pieces):
        area = torch.ones(q_end - q_begin, k_end - k_begin, dtype=torch.int64)
        assert area.numel()
        assert not causal or q_end - q_begin == k_end - k_begin
        area = area.tril() if causal else area
        picture[q_begin:q_end, k_begin:k_end] += area.flip(0, 1) if flipped else area
    return picture


def drawn_in_packs(pieces: tuple[tuple[Piece, ...], ...], batch: int, picture: Tensor) -> Tensor:
    """int (B N, B K)."""
    picture = torch.block_diag(*[picture] * batch)
    for pack in packs(pieces, batch, picture.size(0) // batch, picture.size(1) // batch):
        q_rows, k_rows = (torch.arange(picture.size(dim))[rows] for dim, rows in ((0, pack.q_rows), (1, pack.k_rows)))
        for rows in (q_rows, k_rows):
            assert rows.unique().numel() == rows.numel()
        sizes = []
        for q, q_end, k, k_end in zip(
            pack.q_offsets[:-1], pack.q_offsets[1:], pack.k_offsets[:-1], pack.k_offsets[1:], strict=True
        ):
            attend = in_a_sequence(int(q_end - q), int(k_end - k), pack.left, pack.right)
            picture[q_rows[q:q_end, None], k_rows[k:k_end]] += attend
            sizes.append(attend.shape)
        assert [max(each) for each in zip(*sizes, strict=True)] == [pack.max_queries, pack.max_keys]
    return picture


@given(st.data())
def test_pieces_squares_and_packs_are_the_mask(data: st.DataObject) -> None:
    """Of any round: together they say what the mask says of the block's rows, and nothing twice."""
    world_size, batch = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    seq_len = data.draw(st.integers(world_size, 24))
    mask, layout = data.draw(any_masks(batch, seq_len)), data.draw(layouts(seq_len, world_size))
    for rank in range(world_size):
        plan = RankPlan.of(mask, layout, rank)
        for round in plan.rounds:
            found = pieces_of(round)
            if found is None:
                continue
            at = layout.positions(rank)
            num_queries = at.numel()
            num_rows = max([num_queries, round.num_keys])
            attends = dense(mask)[:, at]
            nothing = torch.zeros(num_queries, num_rows, dtype=torch.int64)
            expected = []
            for attend, pieces in zip(attends, found, strict=True):
                of_row = nothing.clone()
                for first, stride, row, length in round.k_runs.tolist():
                    of_row[:, row : row + length] += attend[:, first + stride * torch.arange(length)]
                assert torch.equal(drawn(pieces, nothing), of_row)
                assert torch.equal(drawn_in_squares(pieces, nothing), of_row)
                expected.append(of_row)
            if len(expected) < batch:
                expected *= batch
            assert torch.equal(drawn_in_packs(found, batch, nothing), torch.block_diag(*expected))


@pytest.mark.parametrize("layout", CHUNKS_PER_RANK)
@pytest.mark.parametrize(("mask", "most"), [("full", 1), ("causal", 1), ("documents", 4), ("window", 4), ("tree", 16)])
def test_common_masks_take_few_pieces(mask: str, most: int, layout: str) -> None:
    for rank in range(4):
        layout_of = Layout.named(layout, 48, 4)
        plan = RankPlan.of(MASKS[mask], layout_of, rank)
        for round in plan.rounds:
            found = pieces_of(round)
            assert found is not None
            assert len(found[0]) <= most


# ---- auto ---------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    """No kernel is tested."""
    checks.forget()
    yield
    checks.forget()


def test_auto_is_ringtile_on_a_cpu() -> None:
    p, layout = problem(v_head_dim=16, dtype=torch.float32), Layout.zigzag(48, 2)
    one, other = (run_ring(p, MASKS["window"], layout, kernel) for kernel in ("auto", "ringtile"))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_auto_is_aten_in_bfloat16_where_amx_is_not_built(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """aten has it then; it lacks dropout, and other dtypes have no tiles."""
    layout = Layout.contiguous(48, 1)
    monkeypatch.setattr("ringtile.ops.why_no_amx", lambda: "not built: as a test says")
    for dtype, options, chosen in (
        (torch.bfloat16, {}, "aten"),
        (torch.bfloat16, {"dropout": AttentionDropout(0.5, torch.tensor([0]), seed=1)}, "ringtile"),
        (torch.float16, {}, "ringtile"),
    ):
        p = problem(v_head_dim=16, dtype=dtype)
        one, other = (run_ring(p, MASKS["causal"], layout, kernel, **options) for kernel in ("auto", chosen))
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_a_build_without_amx_is_named_where_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    why = ops.why_no_amx.__wrapped__
    for names, has, said in (((), True, True), ((), False, False), (("amx_bf16",), True, False)):
        monkeypatch.setattr(ops, "ISA_NAMES", ("generic", "avx2", "avx512", "avx512_bf16", *names))
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has=has: has)
        assert bool(why()) == said
    monkeypatch.setattr(ops, "why_no_amx", lambda: "not built")
    assert doctor.kernels()["amx"] == "not built; attention_kernel auto takes aten's in bfloat16"


def test_tiles_that_linux_refuses_are_named_once(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the thread that asks has an alternate signal stack of 8 KiB. The kernel stays ringtile's."""
    why = functools.cache(ops.why_amx_is_refused.__wrapped__)
    monkeypatch.setattr(ops, "why_amx_is_refused", why)
    monkeypatch.setattr(ops, "ISA_NAMES", ("generic", "avx2", "avx512", "avx512_bf16", "amx_bf16"))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(ops, "why_no_amx", lambda: "")
    monkeypatch.delenv("RINGTILE_CPU_ISA", raising=False)
    monkeypatch.setattr(ops, "cpu_isa", lambda: "amx_bf16")
    assert not why()
    why.cache_clear()
    monkeypatch.setattr(ops, "cpu_isa", lambda: "avx512_bf16")
    for _ in range(2):
        run_ring(problem(v_head_dim=16, dtype=torch.bfloat16), MASKS["causal"], Layout.contiguous(48, 1), "auto")
    assert [each.message for each in caplog.records if "AMX" in each.message] == [
        f"ringtile's CPU kernels run as avx512_bf16: AMX is {why()}"
    ]
    assert doctor.kernels()["amx"] == why()
    why.cache_clear()
    monkeypatch.setenv("RINGTILE_CPU_ISA", "avx512")  # asked for
    assert not why()


# ---- a kernel that is not what it was taken for -------------------------------------------------

RIGHT = aten.ATEN["cpu"][0]
assert isinstance(RIGHT, InSquares)
attend, attend_backward = RIGHT.attend, RIGHT.attend_backward
WRONG: dict[str, tuple[dict[str, Any], str]] = {  # and what is said of them
    "lse in base 2": ({"attend": lambda *x: (attend(*x)[0], attend(*x)[1] / math.log(2))}, "gives another "),
    "lse without the scale": ({"attend": lambda *x: (attend(*x)[0], attend(*x[:4], 1.0)[1])}, "gives another out"),
    "causal from the last key": (
        {"attend": lambda q, k, v, causal, scale: attend(q.flip(2), k.flip(2), v.flip(2), causal, scale)},
        "gives another out",
    ),
    "nan": ({"attend": lambda *x: (attend(*x)[0] * torch.nan, attend(*x)[1])}, "gives another out"),
    "of one head": (
        {"attend": lambda q, k, v, *x: attend(q[:, :1], k[:, :1], v[:, :1], *x)},
        "raises RuntimeError: ringtile.attn_merge_: out has shape",
    ),
    "one that is not there": (
        {"attend": aten._cudnn},
        "raises NotImplementedError: Could not run 'aten::_scaled_dot_product_cudnn_attention'",
    ),
    "dq and dk without the scale": (
        {"attend_backward": lambda *x: (*(grad / x[-1] for grad in attend_backward(*x)[:2]), attend_backward(*x)[2])},
        "gives another dq",
    ),
    "dv halved": (
        {"attend_backward": lambda *x: (*attend_backward(*x)[:2], attend_backward(*x)[2] / 2)},
        "gives another dv",
    ),
    "without delta": (
        {"attend_backward": lambda dout, q, k, v, out, *x: attend_backward(dout, q, k, v, out * 0, *x)},
        "gives another dq",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_found(fresh: None, name: str, dtype: torch.dtype) -> None:
    functions, reason = WRONG[name]
    stand_in = dataclasses.replace(RIGHT, name=name, **functions)
    question = attn_self_test.Case(str(dtype)[6:], 16, 16)
    assert checks.run(lambda: attn_self_test.run_case(stand_in, CPU, question)).startswith(reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("passes", [("forward",), ("backward",), ()])
def test_a_kernel_that_forgets_the_second_side_is_found(
    fresh: None, monkeypatch: pytest.MonkeyPatch, passes: tuple[str, ...], dtype: torch.dtype
) -> None:
    for name in passes:
        right = getattr(Ringtile, name)
        monkeypatch.setattr(
            Ringtile,
            name,
            lambda self, block, *others, right=right: right(
                self,
                block._replace(round=Round(block.round.bounds, block.round.positions, block.round.k_runs)),
                *others,
            ),
        )
    question = attn_self_test.Case(str(dtype)[6:], 16, 16)
    found = checks.run(lambda: attn_self_test.run_case(Ringtile(), CPU, question._replace(two_sides=True)))
    assert found.startswith(f"gives another {'out' if 'forward' in passes else 'dv'} than") if passes else found == ""
    assert checks.run(lambda: attn_self_test.run_case(Ringtile(), CPU, question)) == ""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 96])
def test_atens_flash_attention_is_what_it_is_taken_for(head_dim: int, dtype: torch.dtype) -> None:
    shapes = [torch.empty(1, 1, heads, head_dim, dtype=dtype) for heads in (8, 2, 2)]
    assert attn_self_test.why_wrong(RIGHT, *shapes) == ""
    assert attn_self_test.why_wrong(block.RINGTILE, *shapes) == ""


class OffBy(type(block.RINGTILE)):  # type: ignore[misc]
    """ringtile's kernels, except that a dk is wrong."""

    def backward(self, block: Block, final: Final, grads: Gradients) -> None:
        super().backward(block, final, grads)
        grads.dk[:, 0] *= 1.001


def test_the_next_provider_takes_over_from_a_wrong_kernel(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same losses and gradients as before, step after step, and one warning."""
    p, mask, layout = problem(v_head_dim=16, dtype=torch.float32), MASKS["documents"], Layout.zigzag(48, 2)

    def losses(kernel: str) -> list[float]:
        q, found = p.q, []
        for _ in range(3):
            result = run_ring(p._replace(q=q), mask, layout, kernel)
            found.append(float((result.out * p.dout).sum()))
            q = q - 0.1 * result.dq
        return found

    right = losses("auto")
    assert caplog.messages == []
    checks.forget()
    monkeypatch.setattr(block, "RINGTILE", OffBy())
    assert losses("auto") == pytest.approx(right, rel=1e-5)
    (message,) = caplog.messages
    assert message.startswith(
        "ringtile's attention is not used for torch.float32 with head dims 16 and 16 on cpu: it gives another dk than "
        "its definition: off by "
    )
    assert "aten's flash attention runs instead" in message


def test_no_key_is_sent_where_no_provider_is_right(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank says why, and none that it lost another one."""
    monkeypatch.setattr(block, "RINGTILE", OffBy())
    p, layout = problem(v_head_dim=16), Layout.zigzag(48, 2)

    def on_rank(group: LoopbackGroup) -> str:
        q, k, v = (layout.shard(x.detach(), 1, group.transport.rank) for x in (p.q, p.k, p.v))
        with pytest.raises(RefusedError) as caught:
            ring_attention(q, k, v, mask=MASKS["causal"], layout=layout, group=group, attention_kernel="ringtile")
        ring_attention(q, k, v, mask=MASKS["causal"], layout=layout, group=group, attention_kernel="aten")
        return str(caught.value)

    for message in LoopbackWorld(2).run(on_rank):
        assert message.startswith(
            "attention_kernel is 'ringtile', but for torch.float64 with head dims 16 and 16 on cpu: ringtile's "
            "attention gives another dk than its definition"
        )
        assert message.endswith("set attention_kernel to auto or aten")


def test_the_check_can_be_switched_off(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checks.VARIABLE, "0")
    monkeypatch.setattr(block, "RINGTILE", OffBy())
    p, layout = problem(dtype=torch.float32), Layout.contiguous(48, 1)
    run_ring(p, MASKS["causal"], layout, "ringtile")
    assert checks.failures == {}


def test_a_kernel_is_tested_once_and_without_the_callers_modes(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    p, calls, right = problem(dtype=torch.float32), [], attn_self_test.run_case

    def testing(*arguments: Any) -> str:
        calls.append(arguments)
        return right(*arguments)

    monkeypatch.setattr(attn_self_test, "run_case", testing)
    before = torch.get_rng_state()
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        ring_attention(p.q, p.k, p.v, mask=MASKS["causal"], layout=Layout.contiguous(48, 1))
    run_ring(p, MASKS["causal"], Layout.zigzag(48, 3), "ringtile")
    assert len(calls) == 2  # the cases of one test
    assert set(checks.failures.values()) == {""}
    assert torch.equal(torch.get_rng_state(), before)


# ---- what aten has no kernel for ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({"v_head_dim": 8}, {}, "has one head dim, which is 16 for q and k, and 8 for v"),
        ({}, {"softcap": 2.0}, "has no softcap, which is 2.0"),
        ({}, {"dropout": AttentionDropout(0.3, torch.tensor([0]), seed=1)}, "draws dropout from a generator"),
        ({}, {"layout": Layout.from_runs([[(24, 1, 0, 24), (0, 1, 24, 24)]])}, "keys in the order of their positions"),
    ],
)
def test_what_aten_cannot_compute_is_refused_by_name(change: dict[str, Any], options: Any, reason: str) -> None:
    """And is ringtile's with auto."""
    p = problem(**{"v_head_dim": 16, **change})
    given = {"mask": MASKS["causal"], "layout": Layout.contiguous(48, 1), **options}
    with pytest.raises(RefusedError, match=f"attention_kernel is 'aten', but for .*{reason}.*to auto or ringtile"):
        ring_attention(p.q, p.k, p.v, **given, attention_kernel="aten")
    out = ring_attention(p.q, p.k, p.v, **given, attention_kernel="auto")
    assert torch.equal(out, ring_attention(p.q, p.k, p.v, **given))


def test_a_gradient_of_the_log_sum_exp_is_refused_by_name() -> None:
    p = problem(v_head_dim=16)
    leaves = [x.requires_grad_() for x in (p.q, p.k, p.v)]
    given: Any = {"mask": MASKS["causal"], "layout": Layout.contiguous(48, 1), "return_lse": True}
    out, lse = ring_attention(*leaves, **given, attention_kernel="aten")
    with pytest.raises(RefusedError, match="takes no gradient of the log-sum-exp"):
        torch.autograd.grad([out, lse], leaves, [p.dout, p.dlse])
    expected = dense_gradients(p.q, p.k, p.v, dense(MASKS["causal"]), torch.zeros_like(p.dout), p.dlse)
    _, lse = ring_attention(*leaves, **given, attention_kernel="auto")
    for one, other in zip(torch.autograd.grad(lse, leaves, p.dlse), expected[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_mask_of_too_many_calls_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    (flash,) = aten.ATEN["cpu"]
    assert isinstance(flash, InSquares)
    monkeypatch.setitem(aten.ATEN, "cpu", (dataclasses.replace(flash, max_squares=3),))
    p = problem(v_head_dim=16)
    with pytest.raises(RefusedError, match=r"would be called \d+ times for a block's mask, more than 3 times"):
        ring_attention(*(p.q, p.k, p.v), mask=MASKS["window"], layout=Layout.contiguous(48, 1), attention_kernel="aten")
