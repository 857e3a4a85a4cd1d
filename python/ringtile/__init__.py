"""ringtile: train on sequences that do not fit one device; the loss curve does not change."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

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

__version__ = "0.1.0"

_HOME = {
    "Config": "config",
    "IntervalMask": "mask",
    "Layout": "layout",
    "Run": "layout",
    "LoopbackWorld": "transport",
    "attention": "ring",
    "ring_attention": "ring",
    "Plan": "plan",
    "plan": "plan",
    "tile_mlps": "hf.mlp",
    "tiled_mlp": "tiled_mlp",
    "tiled_linear_cross_entropy": "tiled_loss",
    "enable": "hf.trainer",
    "restore": "hf.trainer",
}

# Two functions are named like their modules. Importing them here, after the modules, makes the name the function for
# good; elsewhere the first import of the module would take the name.
with contextlib.suppress(BuildError):  # `ringtile doctor` must run where the ops are not built
    from .plan import plan as plan
    from .tiled_mlp import tiled_mlp as tiled_mlp


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"ringtile.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ringtile' has no attribute {name!r}")


__all__ = [
    "BuildError",
    "ConfigError",
    "InputError",
    "LayoutError",
    "MaskNotExpressible",
    "PeerLost",
    "Refused",
    "RingMismatch",
    "RingtileError",
]
