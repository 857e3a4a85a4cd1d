"""ringtile: train on sequences that do not fit one device; the loss curve does not change."""

from __future__ import annotations

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
    "tile_mlps": "tiled_mlp",
    "tiled_mlp": "tiled_mlp",
    "tiled_linear_cross_entropy": "tiled_loss",
    "enable": "hf.trainer",
    "restore": "hf.trainer",
}


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
