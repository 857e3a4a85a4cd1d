"""ringtile: train on sequences that do not fit one device; the loss curve does not change.

What needs more than torch and ringtile's own kernels is loaded when it is first asked for: the Trainer layer
(`enable`, `restore`, `tile_mlps`, `offload_activations`) needs transformers, `Config` pydantic, the layer of plain
PyTorch DTensors and FlexAttention.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    BuildError,
    ConfigError,
    InputError,
    LayoutError,
    MaskNotExpressible,
    PeerLost,
    Refused,
    RingMismatch,
    RingtileError,
)

_build_error: BuildError | None = None
try:
    from .layout import Layout, Run
    from .mask import IntervalMask
    from .plan import Plan, plan
    from .ring import attention, ring_attention
    from .tiled_loss import tiled_linear_cross_entropy
    from .tiled_mlp import tiled_mlp
    from .transport import LoopbackWorld
except BuildError as error:  # `ringtile doctor` must run where the compiled ops do not load, and say why
    _build_error = error

_LAZY = {
    "Config": "config",
    "ContextParallel": "native.parallel_style",
    "context_parallel": "native.context",
    "context_parallel_shard": "native.buffers",
    "context_parallel_unshard": "native.buffers",
    "create_cp_block_mask": "native.flex",
    "disable_context_parallel_dispatcher": "native.parallel_style",
    "enable": "hf.trainer",
    "enable_context_parallel_dispatcher": "native.parallel_style",
    "flex_attention": "native.flex",
    "offload_activations": "hf.offload",
    "restore": "hf.trainer",
    "tile_mlps": "hf.mlp",
}
if TYPE_CHECKING:
    from .config import Config
    from .hf.mlp import tile_mlps
    from .hf.offload import offload_activations
    from .hf.trainer import enable, restore
    from .native.buffers import context_parallel_shard, context_parallel_unshard
    from .native.context import context_parallel
    from .native.flex import create_cp_block_mask, flex_attention
    from .native.parallel_style import (
        ContextParallel,
        disable_context_parallel_dispatcher,
        enable_context_parallel_dispatcher,
    )

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "Config",
    "ConfigError",
    "ContextParallel",
    "InputError",
    "IntervalMask",
    "Layout",
    "LayoutError",
    "LoopbackWorld",
    "MaskNotExpressible",
    "PeerLost",
    "Plan",
    "Refused",
    "RingMismatch",
    "RingtileError",
    "Run",
    "attention",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "create_cp_block_mask",
    "disable_context_parallel_dispatcher",
    "enable",
    "enable_context_parallel_dispatcher",
    "flex_attention",
    "offload_activations",
    "plan",
    "restore",
    "ring_attention",
    "tile_mlps",
    "tiled_linear_cross_entropy",
    "tiled_mlp",
]


def __getattr__(name: str) -> Any:
    if name in __all__ and _build_error is not None:
        raise _build_error
    if name in _LAZY:
        return getattr(importlib.import_module(f"ringtile.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'ringtile' has no attribute {name!r}")
