"""`python -m benchmarks mlp`: one gated MLP, forward and backward, in ringtile's tiles and by other implementations.

Shape letters: T tokens, E hidden size, F intermediate size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from ringtile.tiled.mlp import tiled_mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.compare import Candidate, gradient_candidate, gradient_of, measure_each
from benchmarks.rows import DTYPES, Comparison, Cost, Grid, check_sizes, forward_backward, generator_on

CASES = ("mlp", "checkpointed")
EXACT_TOKENS = 1024  # the float64 results are computed this many tokens at a time, so that they fit in memory


@dataclass(frozen=True)
class Workload:
    """An MLP at one size. case: "mlp", on its own, or "checkpointed", in a layer that recomputes it in the backward."""

    case: str
    dtype: str
    seq_len: int
    hidden_size: int
    intermediate_size: int
    num_tiles: int
    world_size: int = 1
    device: str = "cpu"


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), as in Llama."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Inputs(NamedTuple):
    """The MLP; x (1, T, E), which requires a gradient; dout (1, T, E), the gradient of the output."""

    mlp: GatedMlp
    x: Tensor
    dout: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that receive a gradient."""
        return (self.x, *self.mlp.parameters())


Apply = Callable[[GatedMlp, Tensor], Tensor]


def make_inputs(workload: Workload) -> Inputs:
    """Random numbers, the same on every call; weights are about 1 / sqrt(input width), so that outputs are about 1."""
    dtype, device = DTYPES[workload.dtype], workload.device
    generator = generator_on(device)
    normal = partial(torch.randn, generator=generator, device=device)
    with torch.device(device):
        mlp = GatedMlp(workload.hidden_size, workload.intermediate_size).to(dtype)
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.copy_(normal(weight.shape) * weight.size(1) ** -0.5)
    x, dout = (normal(1, workload.seq_len, workload.hidden_size).to(dtype) for _ in range(2))
    return Inputs(mlp, x.requires_grad_(), dout)


def exact_results(workload: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    """out, dx and the gradients of gate, up and down in float64."""
    mlp = GatedMlp(inputs.x.size(2), inputs.mlp.gate_proj.out_features).to(workload.device, torch.float64)
    mlp.load_state_dict(inputs.mlp.state_dict())
    x = inputs.x.detach().double().requires_grad_()
    outs = []
    for rows, dout in zip(torch.split(x, EXACT_TOKENS, 1), torch.split(inputs.dout, EXACT_TOKENS, 1), strict=True):
        out = mlp(rows)
        torch.autograd.backward(out, dout.double())
        outs.append(out.detach())
    return torch.cat(outs, dim=1), *(gradient_of(leaf) for leaf in (x, *mlp.parameters()))


# ---- backends ----------------------------------------------------------------------------------


def ringtile_apply(workload: Workload, use_original_mlp: bool) -> Apply:
    tile_tokens = -(-workload.seq_len // workload.num_tiles)

    def apply(mlp: GatedMlp, x: Tensor) -> Tensor:
        out = tiled_mlp(mlp, x, tile_tokens, use_original_mlp)
        assert isinstance(out, Tensor)
        return out

    return apply


def plain_apply(workload: Workload) -> Apply:
    return lambda mlp, x: mlp(x)


def checkpoint_apply(workload: Workload) -> Apply | None:
    """torch.utils.checkpoint around the MLP; skipped inside a layer that is checkpointed already."""
    return checkpointed(plain_apply(workload)) if workload.case == "mlp" else None


def deepspeed_apply(workload: Workload) -> Apply:
    """DeepSpeed's TiledMLP, which adds each tile's gradient to the parameters' .grad."""
    tiled = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledMLP

    def apply(mlp: GatedMlp, x: Tensor) -> Tensor:
        out: Tensor = tiled.apply(GatedMlp.forward, mlp, x, workload.num_tiles, list(mlp.parameters()))
        return out

    return apply


def liger_apply(workload: Workload) -> Apply:
    """Liger's tiled MLP around the MLP's own forward; its SwiGLU kernels need a GPU."""
    tiled = importlib.import_module("liger_kernel.ops.tiled_mlp").apply_tiled_mlp

    def apply(mlp: GatedMlp, x: Tensor) -> Tensor:
        out: Tensor = tiled(GatedMlp.forward, mlp, x, workload.num_tiles, list(mlp.parameters()))
        return out

    return apply


BACKENDS: dict[str, Callable[[Workload], Apply | None]] = {
    "ringtile": partial(ringtile_apply, use_original_mlp=False),
    "ringtile_generic": partial(ringtile_apply, use_original_mlp=True),
    "plain": plain_apply,
    "checkpoint": checkpoint_apply,
    "deepspeed": deepspeed_apply,
    "liger": liger_apply,
}


def checkpointed(apply: Apply) -> Apply:
    """Runs apply under a non-reentrant checkpoint, transformers' default, which keeps only x."""

    def run(mlp: GatedMlp, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(apply, mlp, x, use_reentrant=False)
        return out

    return run


def make_candidate(name: str, workload: Workload, inputs: Inputs) -> Candidate | None:
    """None if the backend does not support the case."""
    apply = BACKENDS[name](workload)
    if apply is None:
        return None
    return gradient_candidate(
        partial(checkpointed(apply) if workload.case == "checkpointed" else apply, inputs.mlp, inputs.x),
        inputs.dout,
        inputs.leaves,
    )


# ---- the workloads ------------------------------------------------------------------------------


measure = partial(measure_each, "mlp")


def cost_of(workload: Workload, inputs: Inputs) -> Cost:
    """3 products forward and 6 backward of 2 T*E*F flops each; each input is read once and each output written once."""
    product = 2 * workload.seq_len * workload.hidden_size * workload.intermediate_size
    element = DTYPES[workload.dtype].itemsize
    tokens = workload.seq_len * workload.hidden_size * element  # x; out, dx and dout have the same size
    weights = 3 * workload.hidden_size * workload.intermediate_size * element
    num_bytes = forward_backward(2 * tokens + weights, 3 * tokens + 2 * weights)
    return Cost(workload, forward_backward(3 * product, 6 * product), num_bytes)


def smaller(workload: Workload) -> Workload:
    """A workload that warms a process up."""
    return replace(workload, seq_len=workload.num_tiles)


MEMORY = True  # whether memory is measured by default
GRID: Grid = {
    "case": ("mlp",),
    "dtype": ("float32",),
    "seq_len": (16384,),
    "hidden_size": (1024,),
    "intermediate_size": (4096,),
    "num_tiles": (16,),
    "device": ("cpu",),
}


check = partial(check_sizes, CASES)


def quick_comparisons() -> Iterator[Comparison]:
    """The comparisons quoted in the documentation."""
    for case in CASES:
        yield Comparison(Workload(case, "float32", 4096, 1024, 4096, 16), tuple(BACKENDS), memory=True)
    yield Comparison(Workload("mlp", "bfloat16", 1000, 1024, 4096, 62), tuple(BACKENDS), memory=True)
    for num_tiles in (1, 8):  # of a GPU: the MLP of an 8B model
        workload = Workload("mlp", "bfloat16", 16384, 4096, 14336, num_tiles, device="cuda")
        yield Comparison(workload, tuple(BACKENDS), memory=True)
