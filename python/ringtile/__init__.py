"""ringtile: train on sequences that do not fit one device; the loss curve does not change.

The Trainer layer (`enable`, `restore`, `offload_activations`) needs transformers and is loaded when first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .config import Config
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
    from .hf.mlp import tile_mlps
    from .layout import Layout, Run
    from .mask import IntervalMask
    from .native.context import context_parallel
    from .plan import Plan, plan
    from .ring import attention, ring_attention
    from .tiled_loss import tiled_linear_cross_entropy
    from .tiled_mlp import tiled_mlp
    from .transport import LoopbackWorld
except BuildError as error:  # `ringtile doctor` must run where the compiled ops do not load, and say why
    _build_error = error

_FROM_TRAINER_LAYER = {"enable": "trainer", "restore": "trainer", "offload_activations": "offload"}
if TYPE_CHECKING:
    from .hf.offload import offload_activations
    from .hf.trainer import enable, restore

__version__ = "0.1.0"

__all__ = [
    "BuildError",
    "Config",
    "ConfigError",
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
    "enable",
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
    if name in _FROM_TRAINER_LAYER:
        return getattr(importlib.import_module(f"ringtile.hf.{_FROM_TRAINER_LAYER[name]}"), name)
    raise AttributeError(f"module 'ringtile' has no attribute {name!r}")
