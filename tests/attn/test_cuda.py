"""Tensors on a device without kernels in this process are refused with the reason before anything runs.

The tensors are fake: they claim to be on a GPU on a machine without one.
"""

from __future__ import annotations

import pytest
import torch
from ringtile import InputError, ops
from ringtile.attn.call import check_tensors
from ringtile.cli import doctor
from torch._subclasses.fake_tensor import FakeTensorMode

# find_spec("ringtile._cuda"), torch.version.cuda, torch.cuda.is_available()
REASONS: dict[str, tuple[object, str | None, bool]] = {
    "not built": (None, "13.0", True),
    "is a build without CUDA": (True, None, False),
    "torch.cuda.is_available() is False": (True, "13.0", False),
    "not loaded: no such symbol": (True, "13.0", True),
}


@pytest.fixture(autouse=True)
def on_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first fake tensor of a device, torch makes a real one if CUDA is available, or a test says so."""
    with monkeypatch.context() as patch, FakeTensorMode():
        patch.setattr(torch.cuda, "is_available", lambda: False)
        for device in ("cuda", "cuda:0", "cuda:1"):
            torch.empty(1, device=device)


@pytest.fixture(autouse=True)
def forget() -> object:
    """The reason is cached per process."""
    ops.why_no_cuda.cache_clear()
    ops.why_not_on.cache_clear()
    yield None
    ops.why_no_cuda.cache_clear()
    ops.why_not_on.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, find_spec: object, version: str | None, available: bool) -> None:
    def import_module(name: str) -> None:
        raise ImportError("no such symbol")

    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: find_spec)
    monkeypatch.setattr(ops.importlib, "import_module", import_module)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)


@pytest.mark.parametrize("reason", REASONS)
def test_a_cuda_tensor_without_kernels_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    pretend(monkeypatch, *REASONS[reason])
    assert reason in doctor.cuda(ops)
    with FakeTensorMode():
        x = torch.empty(2, 8, 4, 16, device="cuda")
        matrix, labels, state = torch.empty(4, 16, device="cuda"), torch.zeros(4, dtype=torch.int64), torch.zeros(4)
        runs = ops.runs_tensor([(0, 1, 0, 8)])
        calls = [
            lambda: check_tensors(x, x, x, 1.0, 0.0),
            lambda: ops.shard_seq_(x, runs, 1, x),
            lambda: ops.unshard_seq_(x, runs, 1, x),
            lambda: ops.glu_fwd(matrix, matrix, 0),
            lambda: ops.glu_bwd_(matrix, matrix, matrix, 0),
            lambda: ops.cross_entropy_fwd_bwd_(matrix, labels, state, state, -100, 0.0, 0.0, 0.0, True),
        ]
        for call in calls:
            with pytest.raises(
                InputError, match="is on cuda:0, but ringtile's CUDA kernels are not in use here"
            ) as error:
                call()
            assert reason in str(error.value)


def test_an_old_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, True, "13.0", True)
    monkeypatch.setattr(ops.importlib, "import_module", lambda name: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((8, 0), (7, 5))[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ("A100", "T4")[index])
    wrong = "wrong architecture: T4 has compute capability 7.5, expected at least 8.0"
    assert doctor.cuda(ops) == f"in use; not on cuda:1, {wrong}"
    with FakeTensorMode():
        ops.check_device("x", torch.empty(1, device="cuda:0"))
        with pytest.raises(InputError, match=wrong):
            ops.check_device("x", torch.empty(1, device="cuda:1"))


def test_a_tensor_of_another_device_is_refused() -> None:
    with FakeTensorMode(), pytest.raises(InputError, match="x is on mps:0; expected a CPU or a CUDA tensor"):
        ops.check_device("x", torch.empty(1, device="mps"))


@pytest.mark.parametrize(("reason", "says"), [("not built", True), ("is a build without CUDA", False)])
def test_an_installation_without_kernels_says_so_where_a_gpu_is(
    reason: str, says: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, *REASONS[reason])
    ops.warn_of_missing_kernels()
    assert ("ringtile refuses CUDA tensors: its CUDA kernels are not built" in caplog.text) == says
