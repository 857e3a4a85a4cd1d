"""What a GPU's backends say of a block, asked without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_calls import MASKS, problem
from ringtile import AttentionDropout, IntervalMask, Layout, ops
from ringtile.attn import aten, choose
from ringtile.attn.backend import Block, Running, misaligned, why_slow
from ringtile.attn.call import Options
from ringtile.sequence.plan import RankPlan
from torch import Tensor

CPU = torch.device("cpu")
AMPERE, HOPPER, BLACKWELL, GEFORCE = (8, 0), (9, 0), (10, 0), (12, 0)


class OnGpu(Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def a_block(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, v_head_dim: int | None = None) -> Block:
    plan = RankPlan.of(IntervalMask.causal(8), Layout.contiguous(8, 1), 0)
    q, k, v = (torch.zeros(1, 8, 2, dim, dtype=dtype) for dim in (head_dim, head_dim, v_head_dim or head_dim))
    return Block(OnGpu(q), k, v, plan.on(CPU)[0], Options(0.25))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """With kernels in use, and the attention that aten has there."""
    monkeypatch.setattr(ops, "why_no_kernels", lambda device: "")
    monkeypatch.setitem(aten.ATEN, "cpu", aten.ATEN["cuda"])
    return lambda capability: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_cudnn_takes_no_packed_documents() -> None:
    """It plans each new shape for about a second, and each batch has new lengths."""
    cudnn = dataclasses.replace(aten.ATEN["cuda"][2], length_step=1)  # type: ignore[type-var]
    p = problem(v_head_dim=16, dtype=torch.bfloat16)
    reasons = {}
    for name in ("causal", "documents"):
        plan = RankPlan.of(MASKS[name], Layout.contiguous(48, 1), 0)
        reasons[name] = cudnn.lacks(Block(p.q, p.k, p.v, plan.on(p.q.device)[0], Options(0.25)))
    assert reasons["causal"] == ""
    assert reasons["documents"].endswith("times for a block's mask, more than 2 times")


def test_another_implementation_of_torchs_flash_attention_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found wrong of one says nothing of the other."""
    flash = aten.ATEN["cuda"][-1]
    assert flash.name == "aten's flash attention"
    monkeypatch.setattr(aten, "current_flash_attention_impl", lambda: "FA4")
    assert flash.name == "aten's flash attention (FA4)"


@pytest.mark.parametrize("name", ["FA4", "FA3"])
def test_a_library_that_is_missing_is_not_asked(name: str) -> None:
    missing = next(each for each in aten.ATEN["cuda"] if name in each.name)
    block = a_block()
    assert missing.lacks(block).startswith("is not installed (No module named 'flash_attn")
    running = Running(torch.zeros(1, 8, 2, 64), torch.zeros(1, 2, 8, dtype=torch.float64), fresh=True)
    with pytest.raises(NotImplementedError, match=f"{name} is not installed"):  # as `ringtile doctor` reports
        missing.forward(block, running)


def test_torch_stays_as_the_user_has_it() -> None:
    """Asking for a library's functions activates nothing: the user's own attention is no concern of a backend's."""
    assert torch.nn.attention.current_flash_attention_impl() is None
    for each in aten.ATEN["cuda"]:
        each.lacks(a_block())
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("block", "backward", "capability", "reason"),
    [
        (a_block(), True, HOPPER, ""),
        (a_block(head_dim=128), True, HOPPER, ""),
        (a_block(head_dim=256), False, HOPPER, ""),
        (a_block(head_dim=256), True, AMPERE, ""),
        (
            a_block(head_dim=192, v_head_dim=128),
            True,
            HOPPER,
            "the backward of head dim 192 has no kernel of sm_90a",
        ),
        (a_block(torch.float32), False, HOPPER, "torch.float32 has no kernel for tensor cores; train in bfloat16"),
        (a_block(head_dim=320), False, AMPERE, "head dim 320 has no kernel for tensor cores"),
        (
            a_block(head_dim=128),
            False,
            BLACKWELL,
            "sm_100 has no kernel of its own, only those of sm_80; install flash-attn-4",
        ),
        (a_block(head_dim=128), True, GEFORCE, ""),
    ],
)
def test_a_slow_path_has_a_name(on_gpu: Any, block: Block, backward: bool, capability: Any, reason: str) -> None:
    on_gpu(capability)
    assert why_slow(block, backward=backward).startswith(reason)
    assert bool(why_slow(block, backward=backward)) == bool(reason)


def test_rows_of_a_view_and_dropout_are_slow_by_name(on_gpu: Any) -> None:
    block = a_block()
    moved = torch.zeros(8 * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, 8, 2, 64)  # 2 bytes behind
    assert misaligned(block) == ""
    assert misaligned(block._replace(v=moved)).startswith("rows of v do not begin at multiples of 16 bytes")
    assert misaligned(a_block(head_dim=60)).startswith("rows of q do not begin at")
    narrow = a_block(head_dim=60)
    assert misaligned(narrow) == misaligned(narrow._replace(q=narrow.q[:, :5].contiguous()))  # of all lengths
    dropout = AttentionDropout(0.1, torch.zeros(1, dtype=torch.int64), 1)
    assert "dropout" in why_slow(block._replace(options=Options(0.25, dropout=dropout)), backward=False)


FA4, FA3, CUDNN, FLASH = aten.ATEN["cuda"]
OWN = choose.RINGTILE


@pytest.mark.parametrize(
    ("setting", "capability", "backward", "options", "order"),
    [
        ("auto", AMPERE, True, {}, (OWN, FA4, FA3, CUDNN, FLASH)),
        ("auto", HOPPER, True, {}, (OWN, FA4, FA3, CUDNN, FLASH)),
        ("auto", HOPPER, False, {"head_dim": 256}, (OWN, FA4, FA3, CUDNN, FLASH)),
        ("auto", HOPPER, True, {"head_dim": 256}, (FA4, FA3, CUDNN, OWN, FLASH)),
        ("auto", BLACKWELL, False, {}, (FA4, FA3, CUDNN, OWN, FLASH)),
        ("ringtile", BLACKWELL, False, {}, (OWN,)),
        ("aten", HOPPER, True, {}, (FA4, FA3, CUDNN, FLASH)),
    ],
)
def test_a_rule_says_who_is_asked_first(
    monkeypatch: pytest.MonkeyPatch,
    on_gpu: Any,
    setting: str,
    capability: Any,
    backward: bool,
    options: Any,
    order: Any,
) -> None:
    """So that all ranks and all runs choose alike."""
    on_gpu(capability)
    block = a_block(**options)
    assert choose._in_order(setting, block, backward) == order
    if setting == "auto":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert choose._in_order(setting, block, backward)[0] is OWN


def test_a_slow_path_is_named_once(on_gpu: Any, caplog: pytest.LogCaptureFixture) -> None:
    choose._say_once.cache_clear()
    for where in ("here", "there"):
        choose._tell(OWN, a_block(torch.float32), where, backward=False)
    (message,) = caplog.messages
    assert message.startswith("attention by ringtile's kernels is slow here: torch.float32 has no kernel for tensor")
