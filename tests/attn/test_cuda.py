"""Without kernels for them in this process, CUDA tensors are computed by torch operations, and attention by aten.

The tensors are fake: they claim to be on a GPU on a machine without one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from ringtile import InputError, IntervalMask, RefusedError, arguments, ops
from ringtile.attn import choose
from ringtile.attn.aten import ATEN
from ringtile.attn.backend import Backend, Block
from ringtile.attn.call import Options
from ringtile.cli import doctor
from ringtile.sequence.pieces import squares_of
from ringtile.sequence.plan import DeviceTensors, Round
from torch._subclasses.fake_tensor import FakeTensorMode

# find_spec("ringtile._cuda"), or the CUDA of a binary that loads; torch.version.cuda, torch.cuda.is_available()
REASONS: dict[str, tuple[object, str | None, bool]] = {
    "not built": (None, "13.0", True),
    "is a build without CUDA": (True, None, False),
    "torch.cuda.is_available() is False": (True, "13.0", False),
    "not loaded: no such symbol": (True, "13.0", True),
    "the driver is too old: it runs CUDA 12, the kernels were built with CUDA 13": (13000, "12.8", True),
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
    def import_module(name: str) -> object:
        if isinstance(find_spec, bool):
            raise ImportError("no such symbol")
        return SimpleNamespace(CUDART_VERSION=find_spec, DRIVER_VERSION=12080)

    monkeypatch.setattr(ops.importlib.util, "find_spec", lambda name: find_spec)
    monkeypatch.setattr(ops.importlib, "import_module", import_module)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)


def calls(device: str) -> dict[str, Callable[[], object]]:
    """Each op that has a kernel."""
    x, matrix = (torch.empty(*size, device=device, dtype=torch.bfloat16) for size in ((2, 8, 4, 16), (64, 16)))
    labels = torch.empty(64, dtype=torch.int64, device=device)
    loss, lse = (torch.empty(64, device=device) for _ in "12")
    dlse, runs = torch.empty(2, 4, 8, dtype=torch.float64, device=device), ops.runs_tensor([(0, 1, 0, 8)])
    return {
        "attn_delta": lambda: ops.attn_delta(x, x, dlse),
        "attn_merge_": lambda: ops.attn_merge_(x, dlse.float(), x.float(), dlse, False),
        "rows_pack_": lambda: ops.rows_pack_([x, x], runs, 1, [x.clone(), x.clone()]),
        "rows_unpack_": lambda: ops.rows_unpack_([x.clone()], runs, 1, [x]),
        "rows_add_": lambda: ops.rows_add_([x.float()], runs, 1, [x.float()]),
        "glu_fwd": lambda: ops.glu_fwd(matrix, matrix, 0),
        "glu_bwd_": lambda: ops.glu_bwd_(matrix, matrix.clone(), matrix.clone(), 0),
        "cross_entropy": lambda: ops.cross_entropy_fwd_bwd_(matrix, labels, loss, lse, -100, 0.1, 2.0, 0.1, True),
    }


@pytest.mark.parametrize("reason", REASONS)
def test_cuda_tensors_without_kernels_are_computed_in_torch(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Without a wait: neither a tensor on meta nor a fake one has a number to wait for."""
    pretend(monkeypatch, *REASONS[reason])
    assert reason in doctor.cuda(ops)
    why, cuda = ops.why_no_kernels, torch.device("cuda")
    assert reason in why(cuda)
    assert all(ops._in_torch(name, cuda, torch.float32) for name in ops.KERNELS)
    monkeypatch.setattr(ops, "why_no_kernels", lambda device: why(cuda))  # indexing a fake cuda tensor needs a GPU
    monkeypatch.setattr(ops, "_ops", None)
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode:
            results = {name: call() for name, call in calls("meta").items()}
        assert {name for name, x in results.items() if x is not None} == {"attn_delta", "glu_fwd"}
        assert all(x is None or x.is_meta for x in results.values())


def test_an_old_gpu_computes_in_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, 12060, "12.6", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((8, 0), (7, 5))[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ("A100", "T4")[index])
    wrong = "wrong architecture: T4 has compute capability 7.5, expected at least 8.0"
    for _ in range(2):
        assert ops.why_no_kernels(torch.device("cuda")) == ""
        assert ops.why_no_kernels(torch.device("cuda:1")) == wrong
    assert doctor.cuda(ops) == f"in use; cuda:0 has kernels of sm_80; torch operations on cuda:1, {wrong}"
    (said,) = caplog.messages
    assert said.startswith(f"ringtile's CUDA kernels are not in use on cuda:1: {wrong}. Torch operations run instead")


def test_attention_without_kernels_is_atens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a pretended GPU without a binary: ringtile's kernels are refused by name, and nobody tests them."""
    monkeypatch.setattr(ops, "why_not_on", lambda index: "not built: as a test says")
    monkeypatch.setattr(choose, "why_wrong", lambda backend, *given: "is tested" if backend.name[0] == "r" else "")
    mask = IntervalMask.causal(8)
    bounds, positions = ((mask.begin, mask.end), (torch.arange(8),))
    queries = (DeviceTensors(torch.device("cpu"), *x) for x in (bounds, positions))
    round = Round(*queries, ops.runs_tensor([(0, 1, 0, 8)]))
    assert len(squares_of(round)) == 1  # found in real tensors

    def chosen(block: Block, setting: str) -> Backend:
        return choose._choose(block, setting, takes_dlse=False, backward=False)

    with FakeTensorMode():
        x = torch.empty(1, 8, 2, 64, device="cuda", dtype=torch.bfloat16)
        block = Block(x, x, x, round, Options(1.0))
        assert chosen(block, "auto") in ATEN["cuda"]
        with pytest.raises(RefusedError, match=r"'ringtile', but .* is not in use here: not built: .*to auto or aten"):
            chosen(block, "ringtile")
        x = x.float()
        with pytest.raises(
            RefusedError, match=r"not built: .*takes bfloat16 and float16 on CUDA.*change what both lack"
        ):
            chosen(block._replace(q=x, k=x, v=x), "auto")


def test_doctor_says_which_kernels_serve_a_gpu() -> None:
    capabilities = ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
    blackwell = "kernels of sm_80, slow on its tensor cores: install flash-attn-4, whose kernels auto then takes"
    assert [doctor.cuda_kernels_of(capability) for capability in capabilities] == [
        "kernels of sm_80",
        "kernels of sm_80",
        "kernels of sm_90a, and of sm_80 for what they leave",
        blackwell,
        blackwell,
        "kernels of sm_80, compiled for sm_120 or, by the driver, from PTX",
    ]


def test_a_tensor_of_another_device_is_refused() -> None:
    with FakeTensorMode(), pytest.raises(InputError, match="x is on mps:0; expected a CPU or a CUDA tensor"):
        arguments.check_device("x", torch.empty(1, device="mps"))


@pytest.mark.parametrize(("reason", "says"), [("not built", True), ("is a build without CUDA", False)])
def test_an_installation_without_kernels_says_so_where_a_gpu_is(
    reason: str, says: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch, *REASONS[reason])
    assert ops.why_not_on(0)
    assert ("ringtile's CUDA kernels are not in use: not built" in caplog.text) == says
    assert ("Torch operations run instead" in caplog.text) == says
