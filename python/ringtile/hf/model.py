"""Changes to a model under context parallelism: its attention, rotary embeddings that depend on the sequence length,
and a watch on its loss function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ringtile.errors import Refused
from ringtile.hf import attention, temperature
from ringtile.hf.batch import BATCH_ARGUMENT, ShardedBatch
from ringtile.hf.ledger import Ledger


def base_model(model: nn.Module | None) -> PreTrainedModel:
    """The transformers model inside PEFT's adapters. Raises Refused when there is none."""
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else model
    if not isinstance(base, PreTrainedModel):
        raise Refused(f"the model is a {type(base).__name__}; expected a transformers PreTrainedModel")
    return base


def makes_positions(model: PreTrainedModel) -> bool:
    """Whether the model counts positions 0, 1, ... for a batch without position ids: with rotary embeddings it does."""
    return bool(_rotary_embeddings(model))


def switch_attention(wrapped: nn.Module, ledger: Ledger) -> None:
    """Makes every layer call ringtile's attention and mask functions. wrapped: the model with its adapters."""
    attention.register()
    # On the outermost module: adapters call the inner module's forward, which skips its hooks.
    ledger.on_restore(wrapped.register_forward_pre_hook(attention.hide_attention_mask, with_kwargs=True).remove)
    model = base_model(wrapped)
    previous = {"": model.config._attn_implementation}
    for name in model.config.sub_configs:
        sub_config = getattr(model.config, name)
        if sub_config is not None:
            previous[name] = sub_config._attn_implementation
    ledger.on_restore(lambda: model.set_attn_implementation(previous))
    model.set_attn_implementation(attention.NAME)
    temperature.leave_to_ringtile(model, ledger)
    if model.config._attn_implementation != attention.NAME:
        raise Refused(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface; expected a "
            f"model that does"
        )


def watch_loss(model: PreTrainedModel, ledger: Ledger) -> None:
    """Counts, on the ShardedBatch, calls of the model's loss function with the globally shifted labels.

    A model that computes its loss in another way would shift the labels again, within each shard.
    """
    ledger.set(model, "_loss_function", functools.partial(_watched_loss, model.loss_function))


def _watched_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    batch: ShardedBatch | None = kwargs.pop(BATCH_ARGUMENT, None)
    if batch is not None and kwargs.get("shift_labels") is not None:
        batch.loss_calls += 1
    return original(*args, **kwargs)


def pin_rope_length(model: PreTrainedModel, ledger: Ledger, active_batch: Callable[[], ShardedBatch | None]) -> None:
    """Shows the largest global position to rotary embeddings whose frequencies depend on the sequence length.

    "dynamic" and "longrope" read the length off their position ids, and the ids of a shard would give each rank other
    frequencies. The largest global position is appended to the ids, and its row dropped from the result.
    """
    for rotary in _rotary_embeddings(model):
        kinds = getattr(rotary, "rope_type", None)
        kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
        if any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds):
            ledger.set(rotary, "forward", _with_global_length(rotary.forward, active_batch))


def _with_global_length(
    original: Callable[..., Any], active_batch: Callable[[], ShardedBatch | None]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        batch = active_batch()
        if batch is None:
            cos, sin = original(x, position_ids, *args, **kwargs)
            return cos, sin
        last = position_ids.new_full((position_ids.size(0), 1), batch.max_position)
        cos, sin = original(x, torch.cat([position_ids, last], dim=1), *args, **kwargs)
        return cos[:, :-1], sin[:, :-1]

    return forward


def _rotary_embeddings(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
