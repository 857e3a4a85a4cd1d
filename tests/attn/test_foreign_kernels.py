"""Kernels of other libraries: what they raise ends no run, and what is known to be wrong of them is found."""

from __future__ import annotations

import dataclasses
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_calls import MASKS, problem, run
from ringtile import IntervalMask, Layout, RefusedError, ShardedSequence, ops, self_test
from ringtile.attn import aten, choose
from ringtile.attn import self_test as attn_self_test
from ringtile.attn.aten import InSquares
from ringtile.attn.backend import Block
from ringtile.attn.call import Call, Options
from ringtile.sequence.pieces import packs_of, squares_of
from ringtile.sequence.plan import RankPlan, Shape
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
FLASH = aten.ATEN["cpu"][0]
assert isinstance(FLASH, InSquares)


class OfItsOwnError(Exception):
    """As CuTe DSL has."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    choose._say_once.cache_clear()
    self_test.forget()
    yield
    self_test.forget()


def fails(error: Exception, when: Callable[[Tensor], bool], name: str = "a library") -> InSquares:
    """A kernel that raises for such queries (B, H, M, D), and is right for others."""

    def attend(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        if when(q):
            raise error
        return FLASH.attend(q, *others)

    def attend_backward(dout: Tensor, q: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        if when(q):
            raise error
        return FLASH.attend_backward(dout, q, *others)

    return InSquares(name, attend, attend_backward)


def results(backends: tuple[InSquares, ...], monkeypatch: pytest.MonkeyPatch, mask: str = "causal") -> list[Tensor]:
    """Outputs and gradients where these are all that aten has."""
    monkeypatch.setitem(aten.ATEN, "cpu", backends)
    p = problem(v_head_dim=16, dtype=torch.float32)
    return [*run(p, MASKS[mask], Layout.contiguous(48, 1), attention_kernel="aten", of_lse=False).results]


@pytest.mark.parametrize("error", [TypeError("no return_lse"), AssertionError("sm100 alone"), OfItsOwnError("OpError")])
@pytest.mark.parametrize("when", ["in its test", "later"])
def test_whatever_a_library_raises_the_next_one_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, when: str
) -> None:
    """With one warning, and without another number."""
    right = results((FLASH,), monkeypatch)
    self_test.forget()
    for _ in range(2):
        found = results((fails(error, lambda q: when == "in its test" or q.size(2) == 48), FLASH), monkeypatch)
        assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))
    (message,) = caplog.messages
    assert (
        f"a library is not used for torch.float32 with head dims 16 and 16 on cpu: it raises {type(error).__name__}"
        in message
    )
    assert f"{FLASH.name} runs instead" in message


def test_where_all_raise_the_call_is_refused_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (fails(OfItsOwnError(name), lambda q: q.size(2) == 48, name) for name in ("one", "other"))
    with pytest.raises(RefusedError, match=r"one raises OfItsOwnError: one; other raises OfItsOwnError: other"):
        results((one, other), monkeypatch)


def test_an_error_after_a_part_was_added_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another backend would add the part again. The first square of the mask has two documents' first one alone."""
    sizes: list[int] = []

    def second(q: Tensor) -> bool:
        sizes.append(q.size(2))
        return q.size(2) != sizes[0] and len(sizes) > 1

    doomed = fails(OfItsOwnError("of the second square"), second)
    plan = RankPlan.of(IntervalMask.sliding_window(48, 9), Layout.contiguous(48, 1), 0)
    p = problem(v_head_dim=16, dtype=torch.float32)
    block = Block(p.q, p.k, p.v, plan.on(CPU)[0], Options(0.25))
    assert len(squares_of(block.round)) > 1
    state = torch.zeros(p.q.shape), torch.zeros(*p.q.shape[:1], p.q.size(2), p.q.size(1), dtype=torch.float64)
    versions = choose._versions(state)
    sequence = ShardedSequence.of(IntervalMask.full(48), Layout.contiguous(48, 1))
    call = Call.kept(sequence, Shape.of(*block[:3]), CPU, block.options)
    monkeypatch.setattr(choose, "_choose", lambda *given, **options: doomed)
    with pytest.raises(OfItsOwnError):
        choose.forward(call, *(block.round, *block[:3]), choose.Running(*state, fresh=False))
    assert versions != choose._versions(state)


def test_no_memory_drops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        results((fails(torch.OutOfMemoryError("full"), lambda q: q.size(2) == 48), FLASH), monkeypatch)
    assert set(self_test.failures.values()) == {""}


# ---- what is known to be wrong ------------------------------------------------------------------


def _tail(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float) -> Any:
    """cuDNN's backward on sm_90: exp(0 - lse) overflows in a tail of 64 keys."""
    dq, dk, dv = FLASH.attend_backward(dout, q, k, v, out, lse, causal, scale)
    overflows = (lse < -88.7) & (k.size(2) % 128 == 64)
    return torch.where(overflows[..., None], torch.nan, dq), dk, dv


def _one_query(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    out, lse = FLASH.attend(q, *others)
    return (out * 0 if q.size(2) == 1 else out), lse


@pytest.mark.parametrize("wrong", [{"attend_backward": _tail}, {"attend": _one_query}])
def test_known_defects_are_found(wrong: dict[str, Any]) -> None:
    stand_in = dataclasses.replace(FLASH, name="cuDNN on sm_90", **wrong)
    for grouped in (False, True):
        case = CPU, attn_self_test.Case("bfloat16", 64, 64, grouped)
        assert attn_self_test.run_cases(FLASH, *case) == ""
        assert attn_self_test.run_cases(stand_in, *case).startswith("gives another ")
        # It is used, and judged, at lengths that it is right for.
        assert attn_self_test.run_cases(dataclasses.replace(stand_in, length_step=128), *case) == ""


@pytest.mark.parametrize(("num_tokens", "right"), [(256, True), (192, False), (200, False)])
def test_cudnn_gets_lengths_that_it_is_right_for(num_tokens: int, right: bool) -> None:
    cudnn = aten.ATEN["cuda"][2]
    plan = RankPlan.of(IntervalMask.causal(num_tokens), Layout.contiguous(num_tokens, 1), 0)
    x = torch.zeros(1, num_tokens, 2, 64, dtype=torch.bfloat16)
    reason = cudnn.lacks(Block(x, x, x, plan.on(CPU)[0], Options(0.25)))
    assert reason == ("" if right else "takes lengths that are multiples of 128")


def test_a_library_of_another_signature_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 2.8 ships a module of the name of FA4's, whose functions do not take what torch's adapter passes."""
    module = types.ModuleType(aten.FLASH_ATTENTION_4)
    module._flash_attn_fwd = lambda q, k, v, softmax_scale=None: None  # type: ignore[attr-defined]
    module._flash_attn_bwd = lambda q: None  # type: ignore[attr-defined]
    names = [aten.FLASH_ATTENTION_4.rsplit(".", i)[0] for i in range(3)]
    for name in names:
        monkeypatch.setitem(sys.modules, name, module)
    adapter = __import__("torch.nn.attention._fa4", fromlist=["_fa4_import_module"])
    adapter._fa4_import_module.cache_clear()
    aten._flash_functions.cache_clear()
    try:
        assert "takes no return_lse" in str(aten._flash_functions("FA4"))
    finally:
        adapter._fa4_import_module.cache_clear()
        aten._flash_functions.cache_clear()


# ---- who computes -------------------------------------------------------------------------------


def test_the_choice_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ringtile"):
        for _ in range(2):
            results((FLASH,), monkeypatch)
    where = "torch.float32 with head dims 16 and 16 on cpu"
    assert caplog.messages == [
        f"attention {direction} of {where} is computed by {FLASH.name}" for direction in ("forward", "backward")
    ]


@pytest.mark.parametrize("fresh", [True, False])
def test_what_is_not_finite_is_not_hidden_by_a_row_without_a_weight(fresh: bool) -> None:
    """Flash attention gives inf and 0 where all scores are -inf, and inf and NaN where one is infinite."""
    part, part_lse = torch.randn(1, 3, 2, 4).bfloat16(), torch.randn(1, 2, 3)
    part_lse[..., 0], part_lse[..., 1], part[:, 0], part[:, 1, 0] = torch.inf, -torch.inf, torch.nan, 0
    out, lse = torch.zeros(1, 3, 2, 4), torch.full((1, 2, 3), -torch.inf, dtype=torch.float64)
    ops.attn_merge_(part, part_lse, out, lse, fresh)
    assert bool(out[:, 0].isnan().all())
    assert torch.equal(out[:, 1], torch.zeros(1, 2, 4))
    assert torch.equal(out[:, 2], part[:, 2].float())
    assert torch.equal(lse, torch.where(part_lse == torch.inf, -torch.inf, part_lse).double())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_of_zigzag_is_one_call_besides_the_kernels(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads a block once, and reads and writes no row of out more than once; the first round reads none."""

    def attend(q: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
        with torch.utils._python_dispatch._disable_current_modes():
            return torch.zeros_like(q), torch.zeros(q.shape[1::-1])

    monkeypatch.setattr(aten, "_flash_functions", lambda library: aten._FlashFunctions(attend, attend))
    rounds = RankPlan.of(IntervalMask.causal(128), Layout.zigzag(128, 2), rank).on(CPU)
    p = problem(seq_len=64, dtype=torch.bfloat16)
    out, lse = torch.zeros(p.q.shape), torch.zeros(1, 4, 64, dtype=torch.float64)
    for i, round in enumerate(rounds):
        keys = p.k[:, : round.num_keys]
        (pack,) = packs_of(round, p.q, keys)
        state = choose.Running(out, lse, fresh=i == 0, rounded=torch.empty_like(p.q) if i and rank else None)
        with Calls() as calls:
            aten.InPacks().forward(Block(p.q, keys, keys, round, Options(1.0)), state)
        copies = [] if state.rounded is None or pack.num_queries == 64 else ["aten::copy_"]  # the other half of out
        assert calls.names == ["ringtile::attn_merge_", *copies]


class Calls(TorchDispatchMode):
    """The names of ops that are no view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [] if func.is_view else [func._schema.name]
        return func(*args, **(kwargs or {}))
