"""`ringtile bench mlp`: one gated MLP, forward and backward, by ringtile's tiles and by what else there is.

Shape letters: T tokens, E hidden size, F intermediate size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringtile.bench.compare import Candidate, gradient_candidate, gradient_of, measure_each
from ringtile.bench.measure import PASSES
from ringtile.bench.points import DTYPES, Entry, Work, check_sizes
from ringtile.tiled_mlp import tiled_mlp

CASES = ("mlp", "checkpointed")
EXACT_TOKENS = 1024  # at a time


@dataclass(frozen=True)
class Point:
    """An MLP at one size. case: on its own, or inside a checkpointed layer, which runs it again in the backward."""

    case: str
    dtype: str
    seq_len: int
    hidden_size: int
    intermediate_size: int
    num_tiles: int
    world_size: int = 1


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
    """The MLP; x (1, T, E), which a gradient is asked for; the gradient of the output, dout (1, T, E)."""

    mlp: GatedMlp
    x: Tensor
    dout: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gets a gradient."""
        return (self.x, *self.mlp.parameters())


Apply = Callable[[GatedMlp, Tensor], Tensor]


def make_inputs(point: Point) -> Inputs:
    """Random numbers, the same at every call. Weights are about 1 / sqrt(inputs), so that nothing grows."""
    dtype, generator = DTYPES[point.dtype], torch.Generator().manual_seed(0)
    mlp = GatedMlp(point.hidden_size, point.intermediate_size).to(dtype)
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.size(1) ** -0.5)
    shape = (1, point.seq_len, point.hidden_size)
    x, dout = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return Inputs(mlp, x.requires_grad_(), dout)


def exact_results(inputs: Inputs) -> tuple[Tensor, ...]:
    """out, dx, and the gradients of gate, up and down in float64; a few tokens at a time, so that they fit."""
    mlp = GatedMlp(inputs.x.size(2), inputs.mlp.gate_proj.out_features).double()
    mlp.load_state_dict(inputs.mlp.state_dict())
    x = inputs.x.detach().double().requires_grad_()
    outs = []
    for rows, dout in zip(torch.split(x, EXACT_TOKENS, 1), torch.split(inputs.dout, EXACT_TOKENS, 1), strict=True):
        out = mlp(rows)
        torch.autograd.backward(out, dout.double())
        outs.append(out.detach())
    return torch.cat(outs, dim=1), *(gradient_of(leaf) for leaf in (x, *mlp.parameters()))


# ---- providers ----------------------------------------------------------------------------------


def ringtile_apply(point: Point, use_original_mlp: bool) -> Apply:
    tile_tokens = -(-point.seq_len // point.num_tiles)

    def apply(mlp: GatedMlp, x: Tensor) -> Tensor:
        out = tiled_mlp(mlp, x, tile_tokens, use_original_mlp)
        assert isinstance(out, Tensor)
        return out

    return apply


def plain_apply(point: Point) -> Apply:
    return lambda mlp, x: mlp(x)


def checkpoint_apply(point: Point) -> Apply | None:
    """torch.utils.checkpoint of the whole MLP; inside a checkpointed layer nobody would."""
    return checkpointed(plain_apply(point)) if point.case == "mlp" else None


def deepspeed_apply(point: Point) -> Apply:
    """DeepSpeed's TiledMLP, which adds every tile's gradient to the parameters' .grad."""
    tiled = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledMLP

    def apply(mlp: GatedMlp, x: Tensor) -> Tensor:
        out: Tensor = tiled.apply(GatedMlp.forward, mlp, x, point.num_tiles, list(mlp.parameters()))
        return out

    return apply


def liger_apply(point: Point) -> Apply:
    """Liger's tiled MLP around the MLP's own forward; its SwiGLU kernels need a GPU."""
    tiled = importlib.import_module("liger_kernel.ops.tiled_mlp").apply_tiled_mlp

    def apply(mlp: GatedMlp, x: Tensor) -> Tensor:
        out: Tensor = tiled(GatedMlp.forward, mlp, x, point.num_tiles, list(mlp.parameters()))
        return out

    return apply


PROVIDERS: dict[str, Callable[[Point], Apply | None]] = {
    "ringtile": partial(ringtile_apply, use_original_mlp=False),
    "ringtile_generic": partial(ringtile_apply, use_original_mlp=True),
    "plain": plain_apply,
    "checkpoint": checkpoint_apply,
    "deepspeed": deepspeed_apply,
    "liger": liger_apply,
}


def checkpointed(apply: Apply) -> Apply:
    """The same under a checkpoint that keeps x only; transformers' default kind."""

    def run(mlp: GatedMlp, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(apply, mlp, x, use_reentrant=False)
        return out

    return run


def make_candidate(name: str, point: Point, inputs: Inputs) -> Candidate | None:
    """None where the provider does not have the case."""
    apply = PROVIDERS[name](point)
    if apply is None:
        return None
    return gradient_candidate(
        partial(checkpointed(apply) if point.case == "checkpointed" else apply, inputs.mlp, inputs.x),
        inputs.dout,
        inputs.leaves,
    )


# ---- what is measured ---------------------------------------------------------------------------


measure = partial(measure_each, "mlp")


def work_of(point: Point, inputs: Inputs) -> Work:
    """Three products forward and six backward of 2 T*E*F flops each; every input read and every output written once."""
    product = 2 * point.seq_len * point.hidden_size * point.intermediate_size
    tokens = point.seq_len * point.hidden_size * DTYPES[point.dtype].itemsize  # x, out, dx and dout are as large
    weights = 3 * point.hidden_size * point.intermediate_size * DTYPES[point.dtype].itemsize
    num_bytes = (2 * tokens + weights, 3 * tokens + 2 * weights)
    return Work(
        point,
        dict(zip(PASSES, (3 * product, 6 * product, 9 * product), strict=True)),
        dict(zip(PASSES, (*num_bytes, sum(num_bytes)), strict=True)),
    )


def smaller(point: Point) -> Point:
    """What a process warms up with."""
    return replace(point, seq_len=point.num_tiles)


MEMORY = True  # measured without being asked to
GRID: dict[str, tuple[str, ...] | tuple[int, ...]] = {
    "case": ("mlp",),
    "dtype": ("float32",),
    "seq_len": (16384,),
    "hidden_size": (1024,),
    "intermediate_size": (4096,),
    "num_tiles": (16,),
}


check = partial(check_sizes, CASES)


def quick_entries() -> Iterator[Entry]:
    """What docs/performance.md quotes."""
    for case in CASES:
        yield Entry(Point(case, "float32", 4096, 1024, 4096, 16), tuple(PROVIDERS), memory=True)
    yield Entry(Point("mlp", "bfloat16", 1000, 1024, 4096, 62), tuple(PROVIDERS), memory=True)
