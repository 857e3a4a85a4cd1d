"""Runs every MLP of a model in tiles: `ringtile.tile_mlps`, and the Trainer's `tiled_mlp: true`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn

from ringtile.config import Config
from ringtile.errors import ConfigError, InputError, Refused
from ringtile.hf.patches import Ledger
from ringtile.tiled_mlp import run_tiles
from ringtile.tiles import check_tile_tokens

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def tile_mlps(
    model: nn.Module, tile_tokens: int = 16384, num_shards: int | None = None, use_original_mlp: bool = False
) -> Ledger:
    """Makes every MLP of the model run in tiles of tile_tokens tokens; `.restore()` on the result undoes it.

    An MLP is a module with gate_proj, up_proj and down_proj (Llama, Qwen, Mistral and their kin). num_shards:
    as many tiles per call instead, whatever the number of tokens. use_original_mlp: run the module's own
    forward on each tile, also where ringtile's GLU kernels do the same in fewer flops; see `tiled_mlp`.

    InputError: tile_tokens or num_shards below 1. Refused: no MLP found, or one whose forward was replaced by
    something that cannot be called tile by tile. ConfigError: Liger's MLP without use_original_mlp.
    """
    ledger = Ledger()
    try:
        _tile_mlps(model, tile_tokens, num_shards, use_original_mlp, ledger)
    except BaseException:
        ledger.restore()
        raise
    return ledger


def install_tiled_mlp(model: nn.Module, config: Config, ledger: Ledger) -> None:
    """`tile_mlps` with the keys tile_tokens, tiled_mlp_num_shards and tiled_mlp_use_original_mlp of a Config."""
    _tile_mlps(model, config.tile_tokens, config.tiled_mlp_num_shards, config.tiled_mlp_use_original_mlp, ledger)


def from_liger(module: nn.Module) -> bool:
    """Whether Liger has replaced the module's class or its forward."""
    homes = (type(module).__module__, getattr(module.forward, "__module__", None) or "")
    return any(home.split(".")[0] == "liger_kernel" for home in homes)


def _tile_mlps(
    model: nn.Module, tile_tokens: int, num_shards: int | None, use_original_mlp: bool, ledger: Ledger
) -> None:
    check_tile_tokens(tile_tokens)
    if num_shards is not None and num_shards < 1:
        raise InputError(f"num_shards is {num_shards}, expected at least 1 tile per call")
    mlps = {
        name: module
        for name, module in model.named_modules()
        if all(isinstance(getattr(module, projection, None), nn.Module) for projection in _PROJECTIONS)
    }
    if not mlps:
        raise Refused(
            f"tiled MLP: {type(model).__name__} has no module with {', '.join(_PROJECTIONS)}; call "
            "ringtile.tiled_mlp(module, x) in its MLP's place, or set tiled_mlp: false"
        )
    for name, module in mlps.items():
        if from_liger(module) and not use_original_mlp:
            raise ConfigError(
                f"{name} is Liger's MLP, which tiled_mlp would replace; set tiled_mlp_use_original_mlp: true to run "
                "Liger's in tiles, or switch Liger's GLU off (swiglu=False, geglu=False)"
            )
        forward = _TiledForward(_own_forward(name, module), tile_tokens, num_shards, use_original_mlp)
        ledger.set(module, "forward", MethodType(forward, module))


def _own_forward(name: str, module: nn.Module) -> Callable[..., Any]:
    """The module's forward as a function of (module, x)."""
    forward = vars(module).get("forward")
    if forward is None:
        return type(module).forward
    if not isinstance(forward, MethodType) or forward.__self__ is not module:
        raise Refused(f"tiled MLP: the forward of {name} was replaced by {forward!r}; expected a method of the module")
    if isinstance(forward.__func__, _TiledForward):
        raise Refused(f"tiled MLP: {name} is tiled already; restore() it first")
    return forward.__func__


@dataclass(frozen=True)
class _TiledForward:
    """The forward of a tiled module. Bound to it as a method, so a deep copy of the model uses its own weights."""

    own_forward: Callable[..., Any]
    tile_tokens: int
    num_shards: int | None
    use_original_mlp: bool

    def __call__(self, module: nn.Module, x: Tensor) -> Any:
        tile_tokens = self.tile_tokens
        if self.num_shards is not None:
            num_tokens = x.shape[:-1].numel()
            tile_tokens = max(1, -(-num_tokens // self.num_shards))  # rounded up: never more tiles than asked for
        return run_tiles(module, self.own_forward, x, tile_tokens, self.use_original_mlp)
