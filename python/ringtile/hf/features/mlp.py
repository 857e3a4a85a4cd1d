"""Runs all MLPs of a model in tiles: `ringtile.tile_mlps` and the Trainer's `tiled_mlp: true`."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ringtile.errors import ConfigError, InputError, RefusedError
from ringtile.hf.feature import Feature
from ringtile.hf.liger import from_liger
from ringtile.hf.patches import Patches
from ringtile.hf.tiled_forward import TiledForward, gather_as_one, own_forward, with_recorded
from ringtile.tiled.mlp import check_parts, run_tiles
from ringtile.tiled.tiles import check_tile_tokens, tile_limit


def tile_mlps(
    model: nn.Module, tile_tokens: int = 16384, num_shards: int | None = None, use_original_mlp: bool = False
) -> Patches:
    """Make every MLP of the model run in tiles of tile_tokens tokens; `.restore()` on the result undoes it.

    `find_mlps` says which modules are MLPs: dense ones and mixtures of experts. num_shards: split each call into that
    many tiles instead, whatever the number of tokens. use_original_mlp: run the module's own forward on each tile even
    where ringtile's GLU kernels compute the same in fewer flops; see `tiled_mlp`. Call this before
    deepspeed.initialize: ZeRO-3 then gathers an MLP's parameters together, once per pass instead of once per tile.

    InputError: tile_tokens or num_shards is below 1. RefusedError: the model has no MLP, or ZeRO-3 already gathers one
    in parts, or the forward of one was replaced by something that cannot be called per tile. ConfigError: Liger has
    patched an MLP and use_original_mlp is false.
    """
    return Patches.of(lambda patches: install_tiled_mlp(model, tile_tokens, patches, num_shards, use_original_mlp))


def install_tiled_mlp(
    model: nn.Module, tile_tokens: int, patches: Patches, num_shards: int | None = None, use_original_mlp: bool = False
) -> None:
    """`tile_mlps`, undone by these patches."""
    check_tile_tokens(tile_tokens)
    if num_shards is not None and num_shards < 1:
        raise InputError(f"num_shards is {num_shards}, expected at least 1 tile per call")
    mlps = find_mlps(model)
    if not mlps:
        raise RefusedError(
            f"tiled MLP: the layers of {type(model).__name__} have no module that takes one tensor and maps it to an "
            "inner width and back; expected one like LlamaMLP or MixtralSparseMoeBlock (the layers of OPT and BERT "
            "call the linear maps themselves). Call ringtile.tiled_mlp(module, x) in the model, or set tiled_mlp: false"
        )
    for name, module in mlps.items():
        if from_liger(module) and not use_original_mlp:
            raise ConfigError(
                f"{name} is Liger's MLP, which tiled_mlp would replace by ringtile's GLU kernels; turn Liger's "
                "GLU off (liger_kernel_config={'swiglu': False}, or 'geglu'; in axolotl liger_glu_activation: false), "
                "or run it in tiles: ringtile.tile_mlps(model, use_original_mlp=True) after enable without tiled_mlp, "
                "in axolotl tiled_mlp_use_original_mlp: true"
            )
        check_parts(module)
        gather_as_one(module, patches)
        forward = _TiledMlp(name, own_forward(name, module), tile_tokens, num_shards, use_original_mlp)
        patches.set(module, "forward", MethodType(forward, module))


@dataclass(frozen=True)
class _TiledMlp(TiledForward):
    """The forward of an MLP."""

    tile_tokens: int
    num_shards: int | None
    use_original_mlp: bool

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if len(given) != 1 or not isinstance(given[0], Tensor):
            raise RefusedError(f"tiled MLP: {self.name} was called with {len(given)} arguments, expected one tensor")
        x = given[0]
        limit, tile_tokens = tile_limit(), self.tile_tokens
        if limit == 0:
            return self.own_forward(module, x)
        if self.num_shards is not None:
            num_tokens = x.shape[:-1].numel()
            tile_tokens = max(1, -(-num_tokens // self.num_shards))  # rounded up: at most num_shards tiles
        tile_tokens = min(tile_tokens, limit or tile_tokens)
        return with_recorded(
            self.own_forward, lambda forward: run_tiles(module, forward, x, tile_tokens, self.use_original_mlp)
        )


# ---- which modules are MLPs: found by structure, no class is known by name ----------------------


Maps = set[tuple[int, int]]  # {(input width, output width)} of a linear map; both orders if the module does not say


def find_mlps(model: nn.Module) -> dict[str, nn.Module]:
    """The MLPs of a model's layers, by name: gated or not, fused or not; a mixture of experts counts as one MLP.

    A layer is an element of an nn.ModuleList. Its MLPs are the outermost submodules, or the layer itself, that

    - take one tensor and nothing else: forward(self, x), keyword-only arguments aside;
    - hold a linear map from some width E to F or 2 F (gate and up fused), and another from F back to E;
    - do not mix tokens: nothing inside counts heads (attention, linear attention, state spaces) or convolves.

    An MLP that several layers share is found once. A module beside attention that breaks these rules is skipped with
    everything inside it: a mixture of experts that takes more than hidden states yields nothing.
    """
    found: dict[str, nn.Module] = {}
    _search(model, "", False, found)
    return found


def _search(parent: nn.Module, prefix: str, in_layer: bool, found: dict[str, nn.Module]) -> None:
    for name, child in parent.named_children():
        is_layer = isinstance(parent, nn.ModuleList)
        if child in found.values() or _stated_widths(child) or (in_layer and not is_layer and _mixes_tokens(child)):
            continue
        mixes_inside = any(_mixes_tokens(module) for module in child.modules())
        if (in_layer or is_layer) and not mixes_inside and _takes_one_tensor(child) and _returns_to_its_width(child):
            found[prefix + name] = child
        elif is_layer or mixes_inside or not in_layer or isinstance(child, nn.ModuleList):
            _search(child, f"{prefix}{name}.", in_layer or is_layer, found)


def _mixes_tokens(module: nn.Module) -> bool:
    counts_heads = any("head" in name and isinstance(value, int) for name, value in vars(module).items())
    return counts_heads or isinstance(module, nn.modules.conv._ConvNd)


def _takes_one_tensor(module: nn.Module) -> bool:
    _, *arguments = inspect.signature(type(module).forward).parameters.values()
    kinds = [argument.kind for argument in arguments]
    extra = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return kinds[:1] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] and all(kind in extra for kind in kinds[1:])


def _stated_widths(module: nn.Module) -> Maps:
    """Of a single linear layer: torch's, a quantized one, an adapter's or transformers' Conv1D; else none."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        width_in, width_out = (getattr(module, name, None) for name in names)
        if isinstance(width_in, int) and isinstance(width_out, int):
            return {(width_in, width_out)}
    return set()


def _returns_to_its_width(module: nn.Module) -> bool:
    """Whether the module holds a linear map from some E to F or 2 F, and another from F back to E."""
    maps: list[Maps] = []
    for part in module.modules():
        if stated := _stated_widths(part):
            maps.append(stated)
            continue
        for parameter in part.parameters(recurse=False):  # fused experts: (num_experts, both widths in either order)
            shape = getattr(parameter, "ds_shape", parameter.shape)  # the full shape under ZeRO-3
            if len(shape) in (2, 3):
                maps.append({(shape[-2], shape[-1]), (shape[-1], shape[-2])})
    return any(
        into[0] == back[1] and into[1] in (back[0], 2 * back[0])
        for first, second in itertools.permutations(maps, 2)
        for into, back in itertools.product(first, second)
    )


FEATURE = Feature(
    frozenset({"forward", "_z3_leaf"}),
    lambda run, patches: install_tiled_mlp(run.base, run.config.tile_tokens, patches),
    key="tiled_mlp",
)
