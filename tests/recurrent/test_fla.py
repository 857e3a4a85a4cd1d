"""Recurrences and convolution by flash-linear-attention against their definitions in float64.

Its Triton kernels run on the CPU, in Triton's interpreter, where it is installed and there is no GPU. Bounds: an error
is at most 2e-6 of a result's norm in float32, which is 32 units of rounding, and 1e-3 in float16, 2 units. bfloat16
does not work in the interpreter.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import scan_oracle
import torch
from ringtile import IntervalMask, Layout, RefusedError, self_test
from ringtile.recurrent import choose, fla
from scan_oracle import PARAMETERS, Layer, Tensors, layer, problem, seq_idx_of
from torch import Tensor

if importlib.util.find_spec("fla") is None:
    pytest.skip("flash-linear-attention is not installed", allow_module_level=True)
if torch.cuda.is_available() or "triton" in sys.modules:
    pytest.skip("Triton must be imported by this file, to interpret its kernels", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
os.environ["FLA_DISABLE_TENSOR_CACHE"] = "1"  # which threads would share

B, K, V, C, N = 2, 16, 8, 12, 80
KINDS = ("delta", "kda", "ssd", "convolution")
BOUND = {torch.float32: 2e-6, torch.float16: 1e-3}


class Index(int):
    """A number of a loop, which some kernels cast."""

    def to(self, dtype: object) -> Index:
        return self


def interpreted_range(*bounds: Any) -> Iterator[Index]:
    """The loop of an interpreted kernel, whose bounds may be tensors of one element."""
    for i in builtins.range(*(int(x.handle.data.item()) if hasattr(x, "handle") else int(x) for x in bounds)):
        yield Index(i)


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    """No kernel is tuned, since no driver measures time; one runs at a time, since the interpreter has globals."""
    with pytest.MonkeyPatch.context() as patch:
        from triton.runtime import autotuner, interpreter

        tuned, run, lock = autotuner.Autotuner.__init__, interpreter.GridExecutor.__call__, threading.RLock()

        def first(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
            tuned(self, fn, names, configs[:1], *args, **kwargs)

        def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
            with lock:
                return run(self, *args, **kwargs)

        patch.setattr(autotuner.Autotuner, "__init__", first)
        patch.setattr(interpreter.GridExecutor, "__call__", alone)
        assert fla.why_not("ssd", torch.zeros(1, 1, 2, 2), 2) == ""
        for name, module in list(sys.modules.items()):
            if name.startswith("fla."):
                patch.setitem(vars(module), "range", interpreted_range)
        patch.setattr(choose, "uses_libraries", lambda device: True)
        yield


def layer_of(kind: str, groups: int = 1) -> Layer:
    """Heads by two share those of q and k, or B and C."""
    return layer(kind, 2 * groups, groups, K, V, C, scale=0.7)


def in_dtype(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    wide = ("g", "beta", "dt", *PARAMETERS)
    return {name: x.to(torch.float32 if name in wide else dtype) for name, x in tensors.items()}


def tensors_of(kind: str, num_tokens: int, dtype: torch.dtype) -> Tensors:
    of = layer_of(kind)
    state = torch.randn(B, *of.state, generator=torch.Generator().manual_seed(1))
    initial_state = state.to(dtype if kind == "convolution" else torch.float32)
    return in_dtype(problem(of, B, num_tokens), dtype) | {"initial_state": initial_state}


def results(module: object, kind: str, tensors: Tensors, seq_idx: Tensor) -> Tensors:
    return scan_oracle.results(layer_of(kind), module, tensors, seq_idx)


def assert_near(got: Tensors, want: Tensors, dtype: torch.dtype, sizes: dict[str, float] | None = None) -> None:
    """sizes: what an error is relative to, where it is not the norm."""
    for name, x in want.items():
        size = (sizes or {}).get(name) or float(x.norm()) or 1.0
        error = float((got[name].double() - x).norm()) / size
        assert error <= BOUND[dtype], f"{name}: {error:.1e}"


def size_of_terms(exact: Tensors, seq_idx: Tensor) -> dict[str, float]:
    """Of the gradient of A: most of what its tokens add cancels, but no rounding of it."""
    if "A" not in exact:
        return {}
    of_tokens = exact | {"A": exact["A"].expand(exact["dt"].shape)}
    return {"A": float(results(scan_oracle, "ssd", of_tokens, seq_idx)["A"].abs().sum((0, 1)).norm())}


PLACES = {
    "from a state": seq_idx_of((set(), set()), num_tokens=N),
    "documents": seq_idx_of(({0, 1, 66}, set()), ({2}, set()), num_tokens=N),
    "padding": seq_idx_of(({70}, {0, 5, 79}), (set(), set(range(N))), num_tokens=N),
}
CELLS = [(kind, places, torch.float32) for kind in KINDS for places in PLACES if kind != "kda" or places == "documents"]
CELLS += [(kind, "documents", torch.float16) for kind in KINDS if kind != "kda"]


@pytest.mark.parametrize(("kind", "places", "dtype"), CELLS)
def test_results_and_gradients_are_those_of_the_definition(kind: str, places: str, dtype: torch.dtype) -> None:
    """Padding holds NaN, which nothing reads."""
    tensors, seq_idx = tensors_of(kind, N, dtype), PLACES[places]
    held = (seq_idx >= 0).expand(B, -1)
    padded = {
        name: torch.where(held.view(B, N, *[1] * (x.dim() - 2)), x, float("nan")) if x.shape[:2] == (B, N) else x
        for name, x in tensors.items()
    }
    exact = {name: x.double() for name, x in tensors.items()}
    want = results(scan_oracle, kind, exact, seq_idx)
    assert_near(results(fla, kind, padded, seq_idx), want, dtype, size_of_terms(exact, seq_idx))


@pytest.mark.parametrize("kind", ["delta", "ssd", "convolution"])
def test_without_an_initial_state(kind: str) -> None:
    tensors, seq_idx = tensors_of(kind, N, torch.float32), PLACES["padding"]
    del tensors["initial_state"]
    exact = {name: x.double() for name, x in tensors.items()}
    want = results(scan_oracle, kind, exact, seq_idx)
    assert_near(results(fla, kind, tensors, seq_idx), want, torch.float32, size_of_terms(exact, seq_idx))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_only(kind: str) -> None:
    tensors, seq_idx = tensors_of(kind, 3, torch.float32), torch.full((1, 3), -1, dtype=torch.int32)
    exact = {name: x.double() for name, x in tensors.items()}
    assert_near(results(fla, kind, tensors, seq_idx), results(scan_oracle, kind, exact, seq_idx), torch.float32)


# ---- over ranks ---------------------------------------------------------------------------------

RANKS = [(kind, size, "states") for kind in ("delta", "ssd", "convolution") for size in (1, 2, 3)]
RANKS += [("delta", 2, "heads"), ("ssd", 2, "heads")]
LONG_RANKS = [pytest.param("kda", 2, "states", marks=pytest.mark.long)]  # a minute in the interpreter


@pytest.mark.parametrize(("kind", "world_size", "scheme"), [*RANKS, *LONG_RANKS])
def test_packed_documents_over_ranks(kind: str, world_size: int, scheme: str) -> None:
    """States, and their gradients, travel between ranks in documents that are cut."""
    import test_recurrent_ranks as ranks  # which imports Triton, where it is installed

    lengths, of = [7, 33, 8], layer_of(kind, groups=1 if kind == "kda" else 2)
    of = of if kind == "convolution" else of._replace(of_ranks={"scheme": scheme})
    tensors = in_dtype(problem(of, 1, 48), torch.float32)
    mask, layout = IntervalMask.documents([lengths]), Layout.zigzag(48, world_size)
    generator = torch.Generator().manual_seed(0)
    dout = torch.randint(-8, 9, (1, 48, *of.of_out), generator=generator).float() / 8
    out, gradients = ranks.of_ranks(of, tensors, dout, mask, layout)
    exact = {name: x.double() for name, x in tensors.items()}
    expected, of_each = ranks.of_oracle(of, exact, dout.double(), ranks.seq_idx_of([lengths], 48))
    sizes = {"A": float(of_each["dt"].abs().sum())} if kind == "ssd" else {}
    assert_near({"out": out, **gradients}, {"out": expected, **of_each}, torch.float32, sizes)


@pytest.mark.parametrize("kind", ["delta", "ssd", "convolution"])
def test_each_path_of_a_tree(kind: str) -> None:
    """A segment at a time, as documents that go on from a state."""
    import test_recurrent_trees as trees  # which imports Triton, where it is installed

    tree, case = trees.Tree([-1, 0, 0, 2], [3, 4, 2, 3]), trees.CASES[kind]
    tensors = {n: x.float() for n, x in trees.problem(case, 1, 12).items()}
    dout, layout = torch.randn(1, 12, *case.of_out), Layout.contiguous(12, 2)
    out, gradients = trees.of_ranks(case, tensors, dout, trees.mask_of([tree], 12), layout)
    exact = {n: x.double() for n, x in tensors.items()}
    expected, of_each = trees.of_paths(case, exact, dout.double(), [tree])
    sizes = {n: sum(float(x.norm()) for x in of_each.values()) for n in ("A", "D", "dt")}  # terms that cancel
    assert_near({"out": out, **gradients}, {"out": expected, **of_each}, torch.float32, sizes)


# ---- who computes -------------------------------------------------------------------------------


def test_the_small_case_of_the_first_use_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    self_test.forget()
    x = torch.zeros(1, 1, 2, V)
    try:
        assert choose.why_not("ssd", x, K) == ""
        assert choose.function_for("ssd", x, K) is fla.ssd
        for spoilt in ("ssd", "causal_conv1d"):
            right = getattr(fla, spoilt)
            with monkeypatch.context() as patch:
                self_test.forget()
                patch.setattr(fla, spoilt, lambda *given, right=right, **named: _spoilt(*right(*given, **named)))
                like, dim = (x, K) if spoilt == "ssd" else (x[0], 4)
                assert "gives another output than its definition" in choose.why_not(spoilt, like, dim)
                with pytest.raises(RefusedError, match="gives another output than its definition"):
                    choose.function_for(spoilt, like, dim)
    finally:
        self_test.forget()


def _spoilt(out: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
    return out * 1.01, final
