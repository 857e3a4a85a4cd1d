"""Kernels that are wrong on purpose are found at their first use, and torch operations replace them.
(test_attention_kernel.py has attention.)"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ringtile import Layout, ops, self_test, tiled_linear_cross_entropy
from ringtile.attn import self_test as attn_self_test
from ringtile.attn.aten import ATEN
from ringtile.attn.choose import RINGTILE
from ringtile.cli import doctor, self_tests
from ringtile.recurrent import kernels
from torch import Tensor

REAL = torch.ops.ringtile
# By kernel: one of its ops.
ARGUMENTS = {
    "GLU": "glu_bwd_",
    "loss": "cross_entropy_fwd_bwd_",
    "rows": "rows_pack_",
    "delta": "attn_delta",
    "merge": "attn_merge_",
}
DTYPES = dict.fromkeys(ARGUMENTS, ops.FLOAT_DTYPES) | {"rows": (*ops.FLOAT_DTYPES, torch.bool, torch.int64)}


class Ops:
    """ringtile's ops, of which some are replaced."""

    def __init__(self, **replaced: Callable[..., Any]) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL, name)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    self_test.forget()
    yield
    self_test.forget()


def glu_bwd_(gate: Tensor, up: Tensor, dprod: Tensor, kind: int) -> None:
    REAL.glu_bwd_(gate, up, dprod, kind)
    gate[-1, -1] *= 1.02


def cross_entropy_fwd_bwd_(logits: Tensor, *arguments: Any) -> None:
    REAL.cross_entropy_fwd_bwd_(logits, *arguments)
    logits[:, -1] *= 1.02  # of one class


def rows_pack_(xs: list[Tensor], runs: Tensor, dim: int, ys: list[Tensor], table: Tensor | None = None) -> None:
    REAL.rows_pack_(xs, runs, dim, ys, table)
    last = ys[-1].narrow(dim, ys[-1].size(dim) - 1, 1)
    last.copy_(ys[-1].narrow(dim, 0, 1))


def attn_delta(dout: Tensor, out: Tensor, dlse: Tensor) -> Tensor:
    return REAL.attn_delta(dout, out, dlse) * 1.02


def attn_merge_(part: Tensor, *arguments: Any) -> None:
    REAL.attn_merge_(part * 1.02, *arguments)


def raises(*arguments: Any) -> None:
    raise RuntimeError("an illegal instruction\nand where")


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in DTYPES for dtype in DTYPES[name]])
def test_every_kernel_is_right_and_a_wrong_one_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    cpu = torch.device("cpu")
    assert ops.why_not_kernel(name, cpu, dtype) == ""
    for replaced, reason in ((globals()[ARGUMENTS[name]], "gives another "), (raises, "raises RuntimeError: an illeg")):
        self_test.forget()
        monkeypatch.setattr(ops, "_ops", Ops(**{ARGUMENTS[name]: replaced}))
        assert ops.why_not_kernel(name, cpu, dtype).startswith(reason)


def use(name: str) -> Tensor:
    """A result that the wrong kernel above spoils."""
    x = torch.arange(24.0).view(4, 6) / 24
    if name == "GLU":
        gate, up, dprod = (x.clone() for _ in range(3))
        ops.glu_bwd_(gate, up, dprod, 0)
        return gate
    if name == "loss":
        weight = torch.eye(5, 6).requires_grad_()
        loss = tiled_linear_cross_entropy(x, weight, torch.zeros(4, dtype=torch.int64))
        return torch.autograd.grad(loss, weight)[0]
    if name == "delta":
        return ops.attn_delta(*[x.view(1, 2, 2, 6)] * 2, torch.zeros(1, 2, 2, dtype=torch.float64))
    if name == "merge":
        out, lse = torch.zeros(1, 4, 2, 3), torch.zeros(1, 2, 4, dtype=torch.float64)
        ops.attn_merge_(x.view(1, 4, 2, 3), torch.zeros(1, 2, 4), out, lse, False)
        return out
    return Layout.zigzag(4, 2).shard(x, 0, 1)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_torch_operations_replace_a_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """With one warning; unless nothing is tested."""
    expected, wrong = use(name), Ops(**{ARGUMENTS[name]: globals()[ARGUMENTS[name]]})
    for replaced in (wrong, Ops(**{ARGUMENTS[name]: raises})):
        self_test.forget()
        caplog.clear()
        monkeypatch.setattr(ops, "_ops", replaced)
        for _ in range(2):
            torch.testing.assert_close(use(name), expected)
        (said,) = caplog.messages
        assert said.startswith(f"ringtile's {name} kernel is not used for torch.float32 on cpu: it ")
        assert "A slower version in torch operations runs instead" in said
    self_test.forget()
    monkeypatch.setenv(self_test.VARIABLE, "0")
    monkeypatch.setattr(ops, "_ops", wrong)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(use(name), expected)


def test_a_kernel_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.dtype] = []
    monkeypatch.setattr(self_test, "of_op", lambda name, ops, device, dtype: calls.append(dtype) or "")
    x = torch.ones(2, 3)
    for _ in range(3):
        ops.glu_fwd(x, x, 0)
        ops.glu_bwd_(x.clone(), x.clone(), x.clone(), 0)
    assert calls == [torch.float32]


def test_no_memory_is_no_result() -> None:
    def test() -> str:
        raise torch.OutOfMemoryError("no memory left")

    with pytest.raises(torch.OutOfMemoryError):
        self_test.why_not("a kernel", test)
    assert self_test.why_not("a kernel", lambda: "") == ""


def test_a_check_saves_nothing_for_a_backward() -> None:
    """The first use may be inside a checkpoint, which counts what is saved."""

    def saved(x: Tensor) -> None:
        raise AssertionError("a tensor was saved")

    with torch.autograd.graph.saved_tensors_hooks(saved, saved), torch.enable_grad():
        for name in ARGUMENTS:
            assert ops.why_not_kernel(name, torch.device("cpu"), torch.float32) == ""
        for backend in (RINGTILE, *ATEN["cpu"]):
            case = attn_self_test.Case("float32", 8, 8, True)
            assert attn_self_test.failure(backend, torch.device("cpu"), case) == ""


def test_no_check_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does its result count later."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert self_test.why_not("a kernel", lambda: "is wrong") == ""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert self_test.why_not("a kernel", lambda: "is wrong") == "is wrong"


# ---- doctor's children -----------------------------------------------------------------------------

# Answers as cli/self_tests.py does, without importing torch: case 2 of each child that gets so far ends it.
STAND_IN = """
import os, sys, signal, time
print("a library says something")
print("ringtile: ", flush=True)
for i in range(int(sys.argv[2]), {count}):
    {fault}
    print("ringtile: " + {{1: "gives another out"}}.get(i, ""), flush=True)
"""


def answers(monkeypatch: pytest.MonkeyPatch, fault: str, count: int = 5) -> list[str]:
    monkeypatch.setattr(self_tests, "PROGRAM", STAND_IN.format(fault=fault, count=count))
    return self_tests.in_children(torch.device("cpu"), count)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("signal.raise_signal(signal.SIGSEGV)", "crashes: signal 11 (SIGSEGV)"),
        ("signal.setitimer(signal.ITIMER_REAL, 0.1); time.sleep(30)", "hangs: no answer within 180 s"),
        ("os._exit(3)", "ends its process with status 3: "),
    ],
)
def test_a_child_that_ends_costs_its_case_alone(monkeypatch: pytest.MonkeyPatch, fault: str, said: str) -> None:
    assert answers(monkeypatch, f"if i == 2: {fault}") == ["", "gives another out", said, "", ""]
    assert answers(monkeypatch, f"if i in (0, 4): {fault}") == [said, "gives another out", "", "", said]


def test_a_device_that_does_not_start_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_tests, "PROGRAM", "import sys; sys.exit('no device')")
    said = self_tests.in_children(torch.device("cpu"), 3)
    assert said == ["cannot be tested, its process ends its process with status 1: no device"] * 3


def test_doctor_tells_a_wrong_kernel_of_ringtiles(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    asked = self_tests.cases(cpu)
    assert {case.kernel.partition(",")[0] for case in asked} >= {"ringtile's attention", "aten's flash attention"}
    assert {f"ringtile's {name}" for name in (*ops.KERNELS, *kernels.KERNELS.values())} <= {x.kernel for x in asked}

    def found(device: torch.device, num_cases: int) -> list[str]:
        return ["crashes" if case[:2] == ("ringtile's GLU", "float16") else "" for case in asked]

    monkeypatch.setattr(self_tests, "in_children", found)
    report = doctor.self_tests()
    assert report["cpu: ringtile's GLU"] == "right for float64, float32, bfloat16; not used for float16: it crashes"
    assert report["cpu: ringtile's SSD"] == "right for float64, float32, bfloat16, float16"
    monkeypatch.setattr(doctor, "kernels", lambda: {"error": None})
    assert doctor.run(argparse.Namespace()).status == 1


FAULTY = """
import sys; sys.path[:] = sys.argv[3:]
import ctypes
from ringtile.cli import self_tests
some = self_tests.cases(self_tests.torch.device("cpu"))[-20:]
some[6] = some[6]._replace(test=lambda: ctypes.string_at(0))
self_tests.cases = lambda device: some
self_tests.main()
"""


@pytest.mark.long  # in every run test_cli_doctor.py runs the program, and the stand-in crashes
def test_the_program_runs_the_cases_and_names_one_that_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment of one of torchrun's workers; the last cases, of recurrences."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no.such.host", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(self_tests, "PROGRAM", FAULTY)
    expected = [""] * 6 + ["crashes: signal 11 (SIGSEGV)"] + [""] * 13
    assert self_tests.in_children(torch.device("cpu"), 20) == expected


# ---- cases of a GPU's size -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ops.KERNELS)
def test_kernels_are_right_in_a_gpus_cases(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(self_test.REPEATS, "cpu", self_test.REPEATS["cuda"])
    assert self_test.run(lambda: self_test.of_op(name, REAL, torch.device("cpu"), torch.float32)) == ""


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", (True, True)),
        ("bfloat16", (False, False)),
        pytest.param("float32", (False, False), marks=pytest.mark.long),
        pytest.param("bfloat16", (True, True), marks=pytest.mark.long),
    ],
)
def test_attention_is_right_in_a_gpus_case(dtype: str, options: tuple[bool, bool]) -> None:
    case = attn_self_test.Case(dtype, 64, 64, True, *options)
    given = RINGTILE, torch.device("cpu"), case, attn_self_test.PIPELINE
    assert self_test.run(lambda: attn_self_test.run_case(*given)) == ""
