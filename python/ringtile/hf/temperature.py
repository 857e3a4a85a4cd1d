"""The temperature of queries that attend by position without a rotary embedding (Llama 4; arXiv:2501.19399).

Llama 4 multiplies a query by 1 + attn_scale log(1 + floor((i + 1) / floor_scale)), and takes for i the place of the
token in the tensor that it was given. In a shard that is not its place in the row. So for a sharded batch the module
leaves its queries alone, and the attention function multiplies them instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ringtile.hf.batch import ShardedBatch, active_batch
from ringtile.hf.patches import Patches
from ringtile.stream.attend import running_chunk


def leave_to_ringtile(model: nn.Module, patches: Patches) -> None:
    """Turns the temperature of every module off while it runs on a sharded batch, or on a chunk."""
    for module in model.modules():
        if _has_temperature(module):
            patches.wrap(module, "forward", _without_temperature)
            patches.set(module, "ringtile_temperature", True)


def scaled(module: nn.Module, query: Tensor, batch: ShardedBatch) -> Tensor:
    """query (B, H, N, D), times its temperature if the module was to multiply it; with the rounding of transformers."""
    chunk = running_chunk()
    return scaled_at(module, query, batch.places if chunk is None else batch.places[chunk.tokens])


def scaled_at(module: nn.Module, query: Tensor, places: Tensor) -> Tensor:
    """The same, for queries at these places (N,) of their row."""
    if not getattr(module, "ringtile_temperature", False):
        return query
    settings: Any = module
    counts = places.to(query.device).float() + 1.0
    factor = torch.log1p(torch.floor(counts / settings.floor_scale)) * settings.attn_scale + 1.0
    product: Tensor = query * factor[:, None]
    return product.to(query.dtype)


def _has_temperature(module: nn.Module) -> bool:
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def _without_temperature(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """original: the module's own method."""
    module: Any = original.__self__  # type: ignore[attr-defined]
    if active_batch() is None and running_chunk() is None:
        return original(*args, **kwargs)
    module.attn_temperature_tuning = False
    try:
        return original(*args, **kwargs)
    finally:
        module.attn_temperature_tuning = True
