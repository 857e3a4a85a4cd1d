"""Runs all RMSNorms of a model in tiles: `ringtile.tile_norms` and the Trainer's `tiled_norm: true`.

transformers computes an RMSNorm in float32, step by step. Its backward holds seven float32 tensors as large as the
hidden states, which is the peak of a layer whose MLP is tiled. In tiles they are as large as one tile.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ringtile.errors import RefusedError
from ringtile.hf.feature import Feature
from ringtile.hf.liger import from_liger
from ringtile.hf.patches import Patches
from ringtile.hf.tiled_forward import TiledForward, own_forward
from ringtile.tiled.mlp import run_tiles
from ringtile.tiled.module_state import ModuleState
from ringtile.tiled.tiles import check_tile_tokens, tile_limit


def tile_norms(model: nn.Module, tile_tokens: int = 16384) -> Patches:
    """Run every RMSNorm of the model in tiles of tile_tokens tokens; `.restore()` on the result undoes it.

    A norm of heads gets tiles of as many elements. Each tile runs the module's own forward, once more in the backward.
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

    Not torch's own nor Liger's, which are one kernel.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.endswith("RMSNorm")
        and not isinstance(module, nn.RMSNorm)
        and not from_liger(module)
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = next(iter((*args, *kwargs.values())), None)
        limit = tile_limit()
        if limit == 0 or len(args) + len(kwargs) != 1 or not isinstance(x, Tensor) or x.dim() < 2:
            return self.own_forward(module, *args, **kwargs)
        self._check(module, x)
        rows = max(1, self.tile_numbers // x.size(-1))
        return run_tiles(module, self.own_forward, x, min(rows, limit or rows), use_original_mlp=True)

    def _check(self, module: nn.Module, x: Tensor) -> None:
        """RefusedError: the forward mixes rows, or writes into the module: in tiles it would compute something else.

        Looked at once for each class, mode and number of dims, on two rows of each leading dim. A name that ends with
        RMSNorm promises nothing.
        """
        kind, known = (module.training, x.dim()), _local.setdefault(type(module), set())
        if kind in known or type(x) not in (Tensor, nn.Parameter) or x.is_meta or _is_captured(x):
            return
        state, shape = ModuleState(module), (*[2] * (x.dim() - 1), x.size(-1))
        with torch.no_grad():
            numbers = torch.arange(1, 1 + math.prod(shape), device=x.device, dtype=torch.float32)
            some = ((0.7 * numbers).sin() * numbers.sqrt()).reshape(shape).to(x.dtype)
            whole, alone = (
                self.own_forward(module, some),
                [self.own_forward(module, row) for row in some.view(-1, 1, x.size(-1))],
            )
        changed = state.put_back()
        difference = (whole.flatten(0, -2).double() - torch.cat(alone).double()).abs().amax()
        if changed or not difference <= 32 * torch.finfo(x.dtype).eps * whole.double().abs().amax():
            what = "writes into its module" if changed else "computes another output for a row beside others than alone"
            raise RefusedError(
                f"tiled norm: the forward of {self.name} ({type(module).__name__}) {what}; expected an RMSNorm, which "
                "treats each row of the last dim alone: set tiled_norm: false"
            )
        known.add(kind)


def _is_captured(x: Tensor) -> bool:
    """Whether x is in a CUDA graph that is being captured, where the host cannot read a number."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


FEATURE = Feature(
    frozenset({"forward"}),
    lambda run, patches: install_tiled_norm(run.base, run.config.tile_tokens, patches),
    key="tiled_norm",
)
