"""Who computes recurrences on a GPU, and the selective scan through mamba_ssm, whose function is stood in for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import ringtile
import scan_oracle
import test_recurrent_trees as trees
import torch
from ringtile import IntervalMask, Layout, LoopbackWorld, ShardedSequence, self_test
from ringtile.recurrent import choose, fla, mamba, torch_path
from torch import Tensor

Tensors = dict[str, Tensor]
B, N, C, K = 2, 40, 6, 4


class _Scan(torch.autograd.Function):
    """From a state of 0; the gradient of the last state is not considered."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*given)
        return _scanned(*given)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        leaves = [x if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out, _ = _scanned(*leaves)
        found = iter(torch.autograd.grad(out, [x for x in leaves if x is not None], dout))
        return tuple(None if x is None else next(found) for x in leaves)


def _scanned(*given: Any) -> tuple[Tensor, Tensor]:
    u, delta, A, B, C, D = given
    now, outs = torch.zeros(u.size(0), *A.shape), []
    for t in range(u.size(2)):
        now = (delta[:, :, t, None] * A).exp() * now + (delta[:, :, t] * u[:, :, t])[..., None] * B[:, None, :, t]
        outs.append((now * C[:, None, :, t]).sum(-1) + (0 if D is None else D * u[:, :, t]))
    return torch.stack(outs, dim=2), now


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):  # type: ignore[no-untyped-def]
    """mamba_ssm's signature (later ones add cu_seqlens at the end), and what its kernel asks of the tensors."""
    batch, channels, length = u.shape
    state_dim = A.size(1)
    assert z is None
    assert delta_bias is None
    assert not delta_softplus
    assert u.dtype == delta.dtype == B.dtype == C.dtype
    assert A.dtype == torch.float32
    assert delta.shape == u.shape
    assert A.shape == (channels, state_dim)
    assert state_dim <= 256
    assert B.shape == C.shape == (batch, state_dim, length)
    assert D is None or (D.shape == (channels,) and D.dtype == torch.float32)
    out, last = _Scan.apply(u, delta, A, B, C, D)
    return (out, last) if return_last_state else out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    name = "mamba_ssm.ops.selective_scan_interface"
    for path in ("mamba_ssm", "mamba_ssm.ops", name):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    monkeypatch.setattr(sys.modules[name], "selective_scan_fn", selective_scan_fn, raising=False)
    monkeypatch.setattr(choose, "uses_libraries", lambda device: True)
    forget()
    yield
    forget()


def forget() -> None:
    self_test.forget()
    for cached in (mamba._scan, mamba._why_no_mamba, fla._function, fla._why_no_fla):
        getattr(cached, "cache_clear", int)()  # a test may have replaced it


def tensors_of(dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    halves = {"x": normal(B, N, C), "B": normal(B, N, K), "C": normal(B, N, K)}
    found = {"dt": normal(B, N, C).sigmoid(), "A": -normal(C, K).abs(), "D": normal(C)}
    found["initial_state"] = normal(B, C, K)
    return {name: x.to(dtype) for name, x in halves.items()} | {name: x.float() for name, x in found.items()}


def results(module: object, tensors: Tensors, seq_idx: Tensor) -> Tensors:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    given: dict[str, Any] = {"initial_state": None} | leaves
    out, final = module.selective_scan(**given, seq_idx=seq_idx)  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(0)
    slopes = [(torch.randint(-8, 9, x.shape, generator=generator).double() / 8).to(x) for x in (out, final)]
    gradients = torch.autograd.grad((out, final), list(leaves.values()), slopes, materialize_grads=True)
    return {"out": out.detach(), "final": final.detach(), **dict(zip(leaves, gradients, strict=True))}


def seq_idx_of(*rows: tuple[set[int], set[int]]) -> Tensor:
    return torch.tensor(
        [[-1 if t in padding else sum(b <= t for b in begins) for t in range(N)] for begins, padding in rows],
        dtype=torch.int32,
    )


PLACES = {
    "from a state": seq_idx_of((set(), set())),
    "documents": seq_idx_of(({0, 1, 30}, set()), ({2}, set())),
    "padding": seq_idx_of(({20}, {0, 5, 39}), (set(), set(range(N)))),
}


def assert_near(got: Tensors, want: Tensors, units: float = 32 * 2.0**-24) -> None:
    """In float32, a few roundings of each token; relative to the norm of each result."""
    for name, x in want.items():
        error = float((got[name].double() - x).norm()) / (float(x.norm()) or 1.0)
        assert error <= units, f"{name}: {error:.1e}"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("places", PLACES)
def test_mamba_ssm_computes_states_and_documents(places: str, has_state: bool) -> None:
    """Though its function has neither; padding holds NaN, which nothing reads, and one channel does not decay."""
    tensors, seq_idx = tensors_of(), PLACES[places]
    tensors["A"][0] = 0.0
    if not has_state:
        del tensors["initial_state"]
    held = (seq_idx >= 0).expand(B, -1)[..., None]
    padded = {n: torch.where(held, x, float("nan")) if x.shape[:2] == (B, N) else x for n, x in tensors.items()}
    exact = {name: x.double() for name, x in tensors.items()}
    assert_near(results(mamba, padded, seq_idx), results(scan_oracle, exact, seq_idx))


@pytest.mark.usefixtures("stand_in")
def test_16_bit_inputs_are_rounded_once() -> None:
    tensors = tensors_of(torch.bfloat16)
    got, want = (results(mamba, x, PLACES["documents"]) for x in (tensors, {n: x.float() for n, x in tensors.items()}))
    for name, x in want.items():
        assert torch.equal(got[name], x.to(got[name].dtype)), name


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("scheme", ["states", "heads"])
def test_states_of_mamba_ssm_travel_between_ranks(scheme: str) -> None:
    x = torch.zeros(B, N, C)
    assert choose.why_not("selective_scan", x, K) == ""
    tensors = {name: x for name, x in tensors_of().items() if name != "initial_state"}
    mask, layout = IntervalMask.documents([[7, 25, 8]]), Layout.zigzag(N, 2)
    dout = torch.randn(B, N, C, generator=torch.Generator().manual_seed(2))

    def rank(group: Any) -> tuple[Tensor, Tensors]:
        sequence = ShardedSequence(mask, layout, group)
        local = {n: x.clone() if n in ("A", "D") else sequence.shard(x, 1) for n, x in tensors.items()}
        local = {n: x.detach().requires_grad_() for n, x in local.items()}
        out = ringtile.selective_scan(**local, sequence=sequence, scheme=scheme)
        out.backward(sequence.shard(dout, 1))
        return out.detach(), {n: x.grad for n, x in local.items() if x.grad is not None}

    found = LoopbackWorld(2).run(rank)
    order = torch.cat([layout.positions(r) for r in range(2)]).argsort()
    got = {"out": torch.cat([out for out, _ in found], 1)[:, order]}
    for name in tensors:
        of_ranks = [gradients[name] for _, gradients in found]
        got[name] = of_ranks[0] + of_ranks[1] if name in ("A", "D") else torch.cat(of_ranks, 1)[:, order]
    leaves = {name: x.double().requires_grad_() for name, x in tensors.items()}
    seq_idx = torch.repeat_interleave(torch.tensor([7, 25, 8]))[None].int() + 1
    out, _ = scan_oracle.selective_scan(**leaves, seq_idx=seq_idx, initial_state=None)
    out.backward(dout.double())
    assert_near(got, {"out": out.detach(), **{n: x.grad for n, x in leaves.items() if x.grad is not None}})


@pytest.mark.usefixtures("stand_in")
def test_mamba_ssm_computes_each_path_of_a_tree() -> None:
    """A segment at a time, as documents that go on from a state."""
    case, tree = trees.CASES["selective"], trees.SMALL[0]
    tensors = {n: x.float() for n, x in trees.problem(case, 1, trees.SEQ_LEN).items()}
    dout, layout = torch.randn(1, trees.SEQ_LEN, trees.ranks.C), trees.layout_of("zigzag", 2)
    out, gradients = trees.of_ranks(case, tensors, dout, trees.mask_of([tree], trees.SEQ_LEN), layout)
    exact = {n: x.double() for n, x in tensors.items()}
    expected, of_each = trees.of_paths(case, exact, dout.double(), [tree], trees.oracle(case))
    assert_near({"out": out, **gradients}, {"out": expected, **of_each})


# ---- who computes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "x", "dim", "reason"),
    [
        ("ssd", torch.zeros(1, 1, 2, 3, dtype=torch.bfloat16), 4, "even head dims in 16 bits, not 4 and 3"),
        ("ssd", torch.zeros(1, 1, 2, 4, dtype=torch.float64), 4, "flash-linear-attention does not compute in float64"),
        ("gated_delta_rule", torch.zeros(1, 1, 2, 4), 257, "q and k (B and C) of 1..256 numbers, not 257"),
        ("selective_scan", torch.zeros(1, 1, 4, dtype=torch.float64), 4, "mamba_ssm does not compute in float64"),
        ("selective_scan", torch.zeros(1, 1, 4), 257, "a state dim of 1..256, not 257"),
    ],
)
def test_what_a_library_cannot_compute_torch_operations_do_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, op: str, x: Tensor, dim: int, reason: str
) -> None:
    monkeypatch.setattr(choose, "uses_libraries", lambda device: True)
    monkeypatch.setattr(choose, "_warned", set())
    with caplog.at_level(logging.WARNING, "ringtile"):
        for _ in range(2):
            assert choose.function_for(op, x, dim) is getattr(torch_path, op)
    (message,) = caplog.messages
    assert "an estimated 30 to 100 times slower than compiled kernels" in message
    assert reason in message


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (*fla._MODULES.values(), "mamba_ssm.ops.selective_scan_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    forget()
    x = torch.zeros(1, 1, 2, 4)
    for op, command in (("ssd", fla.INSTALL), ("causal_conv1d", fla.INSTALL), ("selective_scan", mamba.INSTALL)):
        assert choose.why_not(op, x, 4).endswith(command)
    forget()


def test_float32_is_not_multiplied_as_tf32_unless_torch_may() -> None:
    class OnCuda(torch.Tensor):
        is_cuda = True

    x = torch.zeros(1, 1, 2, 4).as_subclass(OnCuda)
    assert "multiplies float32 as TF32" in fla.why_not("ssd", x, 4)
    assert "TF32" not in fla.why_not("causal_conv1d", x, 4)
    torch.set_float32_matmul_precision("high")
    try:
        assert "TF32" not in fla.why_not("ssd", x, 4)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_wrong_scan_is_not_used(monkeypatch: pytest.MonkeyPatch, stand_in: None) -> None:
    x = torch.zeros(1, 1, C)
    assert choose.function_for("selective_scan", x, K) is mamba.selective_scan
    self_test.forget()
    right = mamba.selective_scan
    monkeypatch.setattr(mamba, "selective_scan", lambda *a, **named: tuple(1.001 * y for y in right(*a, **named)))
    assert "gives another output than its definition" in choose.why_not("selective_scan", x, K)


@pytest.mark.usefixtures("stand_in")
def test_the_small_case_runs_without_the_callers_hooks() -> None:
    """The first use may be inside a checkpoint, which counts what is saved."""

    def saved(x: Tensor) -> None:
        raise AssertionError("a tensor was saved")

    with torch.autograd.graph.saved_tensors_hooks(saved, saved), torch.no_grad():
        assert choose.why_not("selective_scan", torch.zeros(1, 1, C), K) == ""


@pytest.mark.usefixtures("stand_in")
def test_doctor_names_each_library_or_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "_why_no_fla", lambda: "flash-linear-attention is not installed")
    found = choose.who_computes(torch.device("cpu"))
    assert found.pop("selective scan") == "mamba_ssm, right for bfloat16"
    slow = "torch operations, an estimated 30 to 100 times slower than compiled kernels: flash-linear-attention is not"
    assert len(found) == 4
    assert all(who.startswith(slow) for who in found.values())
