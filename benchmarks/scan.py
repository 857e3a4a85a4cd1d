"""`python -m benchmarks scan`: a recurrence or its convolution over one sequence, by ringtile and by transformers.

Shape letters: N tokens, H heads, G heads of q and k (of B and C), D head dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from ringtile.recurrent.choose import function_for
from torch import Tensor
from torch.nn import functional

from benchmarks.compare import Candidate, gradient_candidate, gradient_of, measure_each
from benchmarks.rows import DTYPES, Comparison, Cost, Grid, check_sizes, forward_backward, generator_on

CASES = ("delta", "kda", "ssd", "selective", "convolution")
WIDTH = 4  # of the convolution, whose channels, as the selective scan's, are the heads' together
STATE = 16  # of the selective scan: Mamba's default
CHUNK = {"ssd": 256}  # of transformers' functions: Mamba-2's default; 64 elsewhere


@dataclass(frozen=True)
class Workload:
    """case: "delta" (gated delta rule), "kda" (with a decay of each channel), "ssd" (Mamba-2), "selective"
    (Mamba, with the softplus of its step and its gate), "convolution"."""

    case: str
    dtype: str
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    world_size: int = 1
    device: str = "cpu"


class Inputs(NamedTuple):
    """The inputs by their argument's name, which require gradients; dout, the gradient of the output."""

    tensors: dict[str, Tensor]
    dout: Tensor


Apply = Callable[[dict[str, Tensor]], Tensor]


def make_inputs(workload: Workload) -> Inputs:
    """Random numbers, the same on every call. Keys have length 1, as the layers normalize them."""
    dtype, generator = DTYPES[workload.dtype], generator_on(workload.device)
    tokens, heads, groups, dim = workload.seq_len, workload.num_heads, workload.num_kv_heads, workload.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=workload.device)

    if workload.case == "convolution":
        wide = {"x": normal(1, tokens, heads * dim), "weight": normal(heads * dim, WIDTH) * WIDTH**-0.5}
        out_shape: tuple[int, ...] = (1, tokens, heads * dim)
    elif workload.case == "selective":
        out_shape = (1, tokens, heads * dim)
        wide = {"x": normal(*out_shape), "dt": normal(*out_shape) - 3, "A": -normal(heads * dim, STATE).abs()}
        wide |= {"B": normal(1, tokens, STATE), "C": normal(1, tokens, STATE) / STATE, "D": normal(heads * dim)}
        wide["z"] = normal(*out_shape)
    else:
        out_shape = (1, tokens, heads, dim)
        keys = functional.normalize(normal(1, tokens, groups, dim), dim=-1)
        queries = functional.normalize(normal(1, tokens, groups, dim), dim=-1)
        if workload.case == "ssd":
            wide = {"x": normal(*out_shape), "dt": normal(1, tokens, heads).abs() * 0.1, "A": -normal(heads).abs()}
            wide |= {"B": keys, "C": queries, "D": normal(heads)}
        else:
            decay = normal(1, tokens, heads, *([dim] if workload.case == "kda" else []))
            wide = {"q": queries, "k": keys, "v": normal(*out_shape), "g": -functional.softplus(decay) * 0.1}
            wide["beta"] = normal(1, tokens, heads).sigmoid()
    # Layers compute decays and steps in float32.
    in_float32 = ("g", "dt", "A", "D")
    narrow = {name: x if name in in_float32 else x.to(dtype) for name, x in wide.items()}
    dout = normal(*out_shape).to(dtype)
    return Inputs({name: x.requires_grad_() for name, x in narrow.items()}, dout)


# ---- backends ----------------------------------------------------------------------------------


def ringtile_apply(workload: Workload) -> Apply:
    call: dict[str, Any] = {
        "seq_idx": torch.zeros(1, workload.seq_len, dtype=torch.int32),
        "initial_state": None,
    }

    def apply(x: dict[str, Tensor]) -> Any:
        if workload.case == "convolution":
            convolve = function_for("causal_conv1d", x["x"], WIDTH)
            return convolve(x["x"], x["weight"], None, activation="silu", **call)[0]
        if workload.case == "selective":
            dt = functional.softplus(x["dt"])
            scan = function_for("selective_scan", x["x"], STATE)
            return scan(x["x"], dt, x["A"], x["B"], x["C"], x["D"], **call)[0] * functional.silu(x["z"])
        if workload.case == "ssd":
            return function_for("ssd", x["x"], workload.head_dim)(**x, **call)[0]
        rule = function_for("gated_delta_rule", x["v"], workload.head_dim, workload.case == "kda")
        return rule(**x, scale=workload.head_dim**-0.5, **call)[0]

    return apply


def transformers_apply(workload: Workload) -> Apply:
    """transformers' torch functions, which its layers call where fla, mamba_ssm and causal_conv1d are missing."""
    model, name = {
        "delta": ("qwen3_next", "torch_chunk_gated_delta_rule"),
        "kda": ("kimi_linear", "chunk_kimi_delta_attention"),
        "ssd": ("mamba2", "mamba2_chunk_scan"),
        "selective": ("mamba", "mamba_selective_scan"),
        "convolution": ("mamba2", "causal_conv1d_fn"),
    }[workload.case]
    function: Any = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    chunk, repeats = CHUNK.get(workload.case, 64), workload.num_heads // workload.num_kv_heads

    def apply(x: dict[str, Tensor]) -> Tensor:
        if workload.case == "convolution":
            out: Tensor = function(x["x"].transpose(1, 2), x["weight"], None, activation="silu").transpose(1, 2)
        elif workload.case == "selective":
            rows = {name: x[name].transpose(1, 2) for name in ("x", "dt", "B", "C", "z")}
            given = (rows["x"], rows["dt"], x["A"], rows["B"], rows["C"], x["D"], rows["z"])
            out = function(*given, delta_softplus=True).transpose(1, 2)
        elif workload.case == "ssd":
            out = function(x["x"], x["dt"], x["A"], x["B"], x["C"], chunk_size=chunk, D=x["D"])
        else:
            q, k = (x[name].repeat_interleave(repeats, dim=2) for name in ("q", "k"))  # as the layers do
            out = function(q, k, x["v"], x["g"], x["beta"], chunk_size=chunk)[0]
        return out.to(x["x" if "x" in x else "v"].dtype)

    return apply


BACKENDS: dict[str, Callable[[Workload], Apply]] = {"ringtile": ringtile_apply, "transformers": transformers_apply}


def make_candidate(name: str, workload: Workload, inputs: Inputs) -> Candidate:
    apply = BACKENDS[name](workload)
    return gradient_candidate(partial(apply, inputs.tensors), inputs.dout, tuple(inputs.tensors.values()))


def exact_results(workload: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    """The output and the gradients by ringtile in float64, which tests hold to the definitions."""
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.tensors.items()}
    out = ringtile_apply(workload)(exact)
    torch.autograd.backward(out, inputs.dout.double())
    return out.detach(), *(gradient_of(leaf) for leaf in exact.values())


# ---- the workloads ------------------------------------------------------------------------------


measure = partial(measure_each, "scan")


def cost_of(workload: Workload, inputs: Inputs) -> Cost:
    """Token by token: each product with a state takes D D multiply-adds of a head and token.

    Of those the delta rule has 3, SSD 2; the backward twice as many. The selective scan takes 5 operations, besides an
    exp, for each number of its states. Inputs are read once and outputs written once.
    """
    dim, rows = workload.head_dim, workload.seq_len * workload.num_heads
    products = {"delta": 3, "kda": 3, "ssd": 2}
    flops = 2 * rows * dim * (WIDTH if workload.case == "convolution" else products.get(workload.case, 0) * dim)
    if workload.case == "selective":
        flops = 5 * rows * dim * STATE
    read = sum(x.nbytes for x in inputs.tensors.values())
    out = inputs.dout.nbytes
    return Cost(workload, forward_backward(flops, 2 * flops), forward_backward(read + out, 2 * read + out))


def smaller(workload: Workload) -> Workload:
    """A workload that warms a process up."""
    return replace(workload, seq_len=1)


MEMORY = True  # whether memory is measured by default
GRID: Grid = {
    "case": CASES,
    "dtype": ("float32",),
    "seq_len": (4096,),
    "num_heads": (8,),
    "num_kv_heads": (8,),
    "head_dim": (128,),
    "device": ("cpu",),
}


check = partial(check_sizes, CASES)


def quick_comparisons() -> Iterator[Comparison]:
    """The comparisons quoted in the documentation."""
    sizes = (("delta", 4096, 4), ("kda", 1024, 1), ("ssd", 1024, 1), ("selective", 1024, 1), ("convolution", 4096, 8))
    for case, tokens, heads in sizes:
        yield Comparison(Workload(case, "float32", tokens, heads, heads, 128), tuple(BACKENDS), memory=True)
    for case in CASES:
        workload = Workload(case, "bfloat16", 32768, 16, 16, 128, device="cuda")
        yield Comparison(workload, tuple(BACKENDS), memory=True)
