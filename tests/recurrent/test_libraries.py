"""Who computes recurrences on a GPU: flash-linear-attention, or nobody."""

from __future__ import annotations

import re
import sys
import threading
from typing import Any

import pytest
import ringtile
import torch
from ringtile import IntervalMask, Layout, LoopbackWorld, RefusedError, self_test
from ringtile.recurrent import choose, fla, functions, kernels
from torch import Tensor


def forget() -> None:
    self_test.forget()
    for cached in (fla._function, fla._why_no_fla):
        getattr(cached, "cache_clear", int)()  # a test may have replaced it


@pytest.mark.parametrize(
    ("op", "x", "dim", "reason"),
    [
        ("ssd", torch.zeros(1, 1, 2, 3, dtype=torch.bfloat16), 4, "even head dims in 16 bits, not 4 and 3"),
        ("ssd", torch.zeros(1, 1, 2, 4, dtype=torch.float64), 4, "flash-linear-attention does not compute in float64"),
        ("gated_delta_rule", torch.zeros(1, 1, 2, 4), 257, "q and k (B and C) of 1..256 numbers, not 257"),
        ("selective_scan", torch.zeros(1, 1, 4), 4, "no scan of Mamba's first version"),
    ],
)
def test_what_the_library_cannot_compute_is_refused(
    monkeypatch: pytest.MonkeyPatch, op: str, x: Tensor, dim: int, reason: str
) -> None:
    monkeypatch.setattr(choose, "uses_libraries", lambda device: True)
    with pytest.raises(RefusedError, match=f"{op} on cpu is computed by flash-linear-attention: .*{re.escape(reason)}"):
        choose.function_for(op, x, dim)


def test_other_ranks_hear_of_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose GPU lacks the library does not make the call, and the others do not wait for it."""
    for module in fla._MODULES.values():
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(choose, "uses_libraries", lambda device: True)
    forget()
    mask, layout = IntervalMask.causal(8), Layout.contiguous(8, 2)
    asked, there = choose.function_for, threading.local()

    def function_for(op: str, *given: Any) -> Any:
        return asked(op, *given) if there.rank == 0 else getattr(kernels, op)

    monkeypatch.setattr(functions, "function_for", function_for)

    def rank(group: Any) -> str:
        x, weight, there.rank = torch.ones(1, 4, 3), torch.ones(3, 2), group.transport.rank
        try:
            ringtile.causal_conv1d(x, weight, mask=mask, layout=layout, group=group)
        except ringtile.RingtileError as error:
            return str(error)
        return ""

    for said in LoopbackWorld(2).run(rank):
        assert "pip install flash-linear-attention" in said
    forget()


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in fla._MODULES.values():
        monkeypatch.setitem(sys.modules, module, None)
    forget()
    x = torch.zeros(1, 1, 2, 4)
    for op in ("ssd", "causal_conv1d"):
        assert choose.why_not(op, x, 4).endswith(fla.INSTALL)
    forget()


def test_float32_is_not_multiplied_as_tf32_unless_torch_may() -> None:
    class OnCuda(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda")

    x = torch.zeros(1, 1, 2, 4).as_subclass(OnCuda)
    assert "multiplies float32 as TF32" in fla.why_not("ssd", x, 4)
    assert "TF32" not in fla.why_not("causal_conv1d", x, 4)
    torch.set_float32_matmul_precision("high")
    try:
        assert "TF32" not in fla.why_not("ssd", x, 4)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_small_case_runs_without_the_callers_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use may be inside a checkpoint, which counts what is saved."""

    def saved(x: Tensor) -> None:
        raise AssertionError("a tensor was saved")

    monkeypatch.setattr(fla, "_why_no_fla", lambda: "")
    monkeypatch.setattr(fla, "causal_conv1d", kernels.causal_conv1d)
    forget()
    assert kernels.why_not_kernel("convolution", torch.float32) == ""  # the lock of one self-test is no other's
    with torch.autograd.graph.saved_tensors_hooks(saved, saved), torch.no_grad():
        assert choose.why_not("causal_conv1d", torch.zeros(1, 1, 6), 4) == ""
    forget()


def test_a_kind_without_a_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "_why_no_fla", lambda: "flash-linear-attention is not installed")
    found = {kind: choose.why_not_kind(kind, torch.device("cpu")) for kind in kernels.KERNELS}
    assert found.pop("selective").startswith("it has no scan")
    assert set(found.values()) == {"flash-linear-attention is not installed"}
