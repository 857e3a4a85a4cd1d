"""Runs all MLPs of a model in tiles: `ringtile.tile_mlps` and the Trainer's `tiled_mlp: true`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from ringtile.config import Config
from ringtile.errors import ConfigError, InputError, RefusedError, shown
from ringtile.hf.liger import from_liger
from ringtile.hf.mlp_search import find_mlps
from ringtile.hf.patches import Patches
from ringtile.tiled.mlp import check_parts, run_tiles
from ringtile.tiled.tiles import check_tile_tokens, tile_limit


def tile_mlps(
    model: nn.Module, tile_tokens: int = 16384, num_shards: int | None = None, use_original_mlp: bool = False
) -> Patches:
    """Makes every MLP of the model run in tiles of tile_tokens tokens; `.restore()` on the result undoes it.

    `find_mlps` says which modules are MLPs: dense ones and mixtures of experts. num_shards: split each call into that
    many tiles instead, whatever the number of tokens. use_original_mlp: run the module's own forward on each tile even
    where ringtile's GLU kernels compute the same in fewer flops; see `tiled_mlp`. Call this before
    deepspeed.initialize: ZeRO-3 then gathers an MLP's parameters together, once per pass instead of once per tile.

    InputError: tile_tokens or num_shards is below 1. RefusedError: the model has no MLP, or ZeRO-3 already gathers one
    in parts, or the forward of one was replaced by something that cannot be called per tile. ConfigError: Liger has
    patched an MLP and use_original_mlp is false.
    """
    return Patches.of(lambda patches: _tile_mlps(model, tile_tokens, num_shards, use_original_mlp, patches))


def install_tiled_mlp(model: nn.Module, config: Config, patches: Patches) -> None:
    """`tile_mlps` with the tile_tokens of a Config."""
    _tile_mlps(model, config.tile_tokens, None, False, patches)


def _tile_mlps(
    model: nn.Module, tile_tokens: int, num_shards: int | None, use_original_mlp: bool, patches: Patches
) -> None:
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


def gather_as_one(module: nn.Module, patches: Patches) -> None:
    """Marks the module as a ZeRO-3 leaf: DeepSpeed then gathers its parameters once per pass, not once per tile."""
    if not hasattr(module, "_z3_leaf"):
        module._z3_leaf = True  # type: ignore[assignment]
        # Keep the mark if an engine was built since: it relies on it.
        patches.on_restore(lambda: None if hasattr(module, "ds_id") else delattr(module, "_z3_leaf"))


@dataclass(frozen=True)
class TiledForward:
    """The forward of a tiled module. Bound to it as a method, so a deep copy of the model uses its own weights."""

    name: str
    own_forward: Callable[..., Any]


def own_forward(name: str, module: nn.Module) -> Callable[..., Any]:
    """The module's forward as a function of (module, x). RefusedError: it was replaced."""
    forward = vars(module).get("forward")
    if forward is None:
        return type(module).forward
    if not isinstance(forward, MethodType) or forward.__self__ is not module:
        raise RefusedError(f"tiles: the forward of {name} was replaced by {shown(forward)}; expected its own method")
    if isinstance(forward.__func__, TiledForward):
        raise RefusedError(f"{name} is tiled already; restore() it first")
    return forward.__func__


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
        recorded = _active_collector.get()  # type: ignore[no-untyped-call]
        if not recorded:
            return run_tiles(module, self.own_forward, x, tile_tokens, self.use_original_mlp)
        forward = RecordingForward(self.own_forward, [key for key in recorded if not key.startswith("_")])
        return forward.deliver(run_tiles(module, forward, x, tile_tokens, self.use_original_mlp), recorded)


class RecordingForward:
    """A module's forward while transformers records outputs of modules inside it: router logits, for their loss.

    transformers' hooks append them to lists, one entry per tile and without a graph. Here each tile returns them after
    the module's own outputs, so the lists get one differentiable tensor over all tokens.
    """

    def __init__(self, own_forward: Callable[..., Any], keys: list[str]) -> None:
        self.own_forward, self.keys = own_forward, keys
        self.recorded_keys: list[str] = []  # the key of each recorded tensor

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        of_tile: dict[str, list[Tensor]] = {key: [] for key in self.keys}
        token = _active_collector.set(of_tile)  # type: ignore[no-untyped-call]
        try:
            result = self.own_forward(module, *args, **kwargs)
        finally:
            _active_collector.reset(token)  # type: ignore[no-untyped-call]
        self.recorded_keys = [key for key in self.keys for _ in of_tile[key]]
        if not self.recorded_keys:
            return result
        self.returns_tuple = isinstance(result, tuple)
        outputs = result if self.returns_tuple else (result,)
        return (*outputs, *(tensor for key in self.keys for tensor in of_tile[key]))

    def deliver(self, outputs: Any, recorded: dict[str, list[Tensor]]) -> Any:
        """Appends the recorded tensors to transformers' lists and returns the module's own outputs."""
        if not self.recorded_keys:
            return outputs
        for key, tensor in zip(self.recorded_keys, outputs[-len(self.recorded_keys) :], strict=True):
            recorded[key].append(tensor)
        own = outputs[: -len(self.recorded_keys)]
        return own if self.returns_tuple else own[0]
