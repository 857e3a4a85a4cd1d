"""Runs all RMSNorms of a model in tiles: `ringtile.tile_norms` and the Trainer's `tiled_norm: true`.

transformers computes an RMSNorm in float32, step by step. Its backward holds seven float32 tensors as large as the
hidden states, which is the peak of a layer whose MLP is tiled. In tiles they are as large as one tile. On a GPU, a norm
that computes what torch's own does is that one kernel instead, which keeps its input and a number a row.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringtile.errors import RefusedError, with_kind
from ringtile.hf.batch import STREAMED
from ringtile.hf.feature import Feature
from ringtile.hf.liger import from_liger
from ringtile.hf.patches import Patches
from ringtile.hf.tiled_forward import TiledForward, own_forward
from ringtile.tiled.mlp import run_tiles
from ringtile.tiled.module_state import ModuleState
from ringtile.tiled.replay import as_tuple
from ringtile.tiled.tiles import check_tile_tokens, tile_limit


def tile_norms(model: nn.Module, tile_tokens: int = 16384) -> Patches:
    """Run every RMSNorm of the model in tiles of tile_tokens tokens; `.restore()` on the result undoes it.

    A norm of heads gets tiles of as many elements. Each tile runs the module's own forward, once more in the backward.
    On a GPU torch's rms_norm, which rounds once, takes the place of a forward that computes the same and rounds twice.
    An RMSNorm is a module whose class name ends so, with one weight for the last dim.

    InputError: tile_tokens is below 1. RefusedError: the model has none, or the forward of one was replaced.
    """
    return Patches.of(lambda patches: install_tiled_norm(model, tile_tokens, patches))


def install_tiled_norm(model: nn.Module, tile_tokens: int, patches: Patches) -> None:
    """`tile_norms`, undone by these patches."""
    check_tile_tokens(tile_tokens)
    norms = find_norms(model)
    if not norms:
        raise RefusedError(
            f"tiled norm: {type(model).__name__} has no RMSNorm of transformers' kind, which computes in float32; "
            "torch's own norms and Liger's need no tiles: set tiled_norm: false"
        )
    width = max(_width(module) for module in norms.values())
    for name, module in norms.items():
        forward = own_forward(name, module)
        patches.set(module, "forward", MethodType(_TiledNorm(name, forward, tile_tokens * width), module))


def find_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The RMSNorms of a model, by name: modules whose class is called so, with one weight, for the last dim.

    Not torch's own nor Liger's, which are one kernel, and not one that is streamed.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.endswith("RMSNorm")
        and not isinstance(module, nn.RMSNorm)
        and not from_liger(module)
        and STREAMED not in vars(module)
        and _width(module)
    }


def _width(module: nn.Module) -> int:
    """The size of the only weight, which has one dim; 0: it has others. ZeRO-3 knows the shape of what it has split."""
    shapes = [getattr(weight, "ds_shape", weight.shape) for weight in module.parameters()]
    return int(shapes[0][0]) if len(shapes) == 1 and len(shapes[0]) == 1 else 0


_local: weakref.WeakKeyDictionary[type[nn.Module], set[tuple[bool, int]]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _TiledNorm(TiledForward):
    """The forward of a norm."""

    tile_numbers: int
    # Of torch's norm, by mode and dtype; not of the hash, which a bound method takes from its function.
    eps: dict[tuple[bool, torch.dtype], float | None] = field(default_factory=dict, compare=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = next(iter((*args, *kwargs.values())), None)
        limit = tile_limit()
        if limit == 0 or len(args) + len(kwargs) != 1 or not isinstance(x, Tensor) or x.dim() < 2:
            return self.own_forward(module, *args, **kwargs)
        self._check(module, x)
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and (eps := self._torch_eps(module, weight, x)) is not None:
            with torch.autocast(x.device.type, enabled=False):  # which would make it float32
                return functional.rms_norm(x, x.shape[-1:], weight, eps)
        rows = max(1, self.tile_numbers // x.size(-1))
        return run_tiles(module, self.own_forward, x, min(rows, limit or rows), use_original_mlp=True)

    def _check(self, module: nn.Module, x: Tensor) -> None:
        """RefusedError: the forward mixes rows, draws or writes, or fails on a row: tiles would compute something else.

        Looked at once for each class, mode and number of dims, on two rows of each leading dim, then on each row with
        as many dims, as in tiles. A name that ends with RMSNorm promises nothing.
        """
        kind, known = (module.training, x.dim()), _local.setdefault(type(module), set())
        if kind in known or type(x) not in (Tensor, nn.Parameter) or x.is_meta or _is_captured(x):
            return
        state, shape = ModuleState(module), (*[2] * (x.dim() - 1), x.size(-1))
        problem = ""
        with torch.no_grad():
            numbers = torch.arange(1, 1 + math.prod(shape), device=x.device, dtype=torch.float32)
            some = ((0.7 * numbers).sin() * numbers.sqrt()).reshape(shape).to(x.dtype)
            try:
                whole = _rows(self.own_forward(module, some))
                alone = [
                    _rows(self.own_forward(module, row)) for row in some.view(-1, *[1] * (x.dim() - 1), x.size(-1))
                ]
                if not all(map(_near, whole, map(torch.cat, zip(*alone, strict=True)))):
                    problem = "computes another output for a row beside others than alone"
            except Exception as error:
                problem = f"fails on rows of {tuple(shape)}, or on one alone ({with_kind(error)})"
        if state.put_back():
            problem = "draws random numbers or writes into its module"
        if problem:
            raise RefusedError(
                f"tiled norm: the forward of {self.name} ({type(module).__name__}) {problem}; expected an RMSNorm, "
                "which treats each row of the last dim alone: set tiled_norm: false"
            )
        known.add(kind)

    def _torch_eps(self, module: nn.Module, weight: Tensor, x: Tensor) -> float | None:
        """Return the eps with which torch's norm is one kernel that computes what the module does; None: it is not.

        Found out once for a mode and dtype, by rows of several sizes and other weights, which a copy of the module has.
        """
        kind = (module.training, x.dtype)
        if not _has_kernel(x) or weight.dtype != x.dtype:
            return None
        if kind not in self.eps:
            if _is_captured(x):
                return None
            self.eps[kind] = self._found_eps(module, x)
        return self.eps[kind]

    def _found_eps(self, module: nn.Module, x: Tensor) -> float | None:
        waves = torch.arange(1, 1 + 3 * x.size(-1), device=x.device, dtype=torch.float32).sin().view(3, -1)
        sizes = torch.tensor([[30.0], [1.0], [1e-3]], device=x.device)  # of the last ones an eps is a part
        some = (waves * sizes).to(x.dtype).view(*[1] * (x.dim() - 2), 3, -1)
        weight = nn.Parameter((2 * waves[0].flip(0)).to(x.dtype))  # of both signs
        twin = object.__new__(type(module))
        vars(twin).update(vars(module), _parameters={"weight": weight})
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            expected = self.own_forward(twin, some)
            if not isinstance(expected, Tensor):
                return None
            for eps in {each for each in vars(module).values() if isinstance(each, float) and 0 < each < 1}:
                found = functional.rms_norm(some, some.shape[-1:], weight, eps)
                # A mean of n positive terms has log2 n roundings, half of which its root keeps; three products have 3.
                near = (found - expected).abs() <= 8 * torch.finfo(x.dtype).eps * expected.abs()
                if found.dtype == expected.dtype and bool(near.all()):
                    return eps
        return None


def _rows(output: Any) -> list[Tensor]:
    """The outputs of a norm, (rows, D) each."""
    return [x.flatten(0, -2) for x in as_tuple(output)]


def _near(whole: Tensor, alone: Tensor) -> bool:
    """Whether rows beside others are those alone, but for rounding."""
    largest = 32 * torch.finfo(whole.dtype).eps * whole.double().abs().amax()
    return whole.shape == alone.shape and bool((whole.double() - alone.double()).abs().amax() <= largest)


def _has_kernel(x: Tensor) -> bool:
    """Whether torch has its norm as one kernel there, which keeps no float32 copies."""
    return x.is_cuda


def _is_captured(x: Tensor) -> bool:
    """Whether x is in a CUDA graph that is being captured, where the host cannot read a number."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


FEATURE = Feature(
    frozenset({"forward"}),
    lambda run, patches: install_tiled_norm(run.base, run.config.tile_tokens, patches),
    key="tiled_norm",
)
