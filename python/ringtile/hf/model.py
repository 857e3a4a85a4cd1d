"""What `ringtile.enable` changes on the model: its attention, rotary embeddings that look at the length, a watch on
its loss function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ringtile.errors import Refused
from ringtile.hf import attention
from ringtile.hf.cut import CUT, Cut
from ringtile.hf.patches import Ledger


def base_model(model: nn.Module | None) -> PreTrainedModel:
    """The transformers model inside, adapters (PEFT) taken off. Raises Refused when there is none."""
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else model
    if not isinstance(base, PreTrainedModel):
        raise Refused(f"the model is a {type(base).__name__}; expected a transformers PreTrainedModel")
    return base


def makes_positions(model: PreTrainedModel) -> bool:
    """Whether the model counts positions 0, 1, ... where a batch has none: those with rotary embeddings do."""
    return bool(_rotary_embeddings(model))


def switch_attention(wrapped: nn.Module, ledger: Ledger) -> None:
    """Makes every layer call ringtile's attention and mask functions. wrapped: the model with its adapters."""
    attention.register()
    # On the outermost module: adapters call the forward of the one inside, and not its hooks.
    ledger.on_restore(wrapped.register_forward_pre_hook(attention.hide_attention_mask, with_kwargs=True).remove)
    model = base_model(wrapped)
    previous = {"": model.config._attn_implementation}
    for name in model.config.sub_configs:
        sub_config = getattr(model.config, name)
        if sub_config is not None:
            previous[name] = sub_config._attn_implementation
    ledger.on_restore(lambda: model.set_attn_implementation(previous))
    model.set_attn_implementation(attention.NAME)
    if model.config._attn_implementation != attention.NAME:
        raise Refused(f"{type(model).__name__} does not take its attention from transformers' AttentionInterface")


def watch_loss(model: PreTrainedModel, ledger: Ledger) -> None:
    """Counts on the Cut that the model's loss function got the globally shifted labels.

    A model that computes its loss in another way would shift the shifted labels again, inside each shard.
    """
    ledger.set(model, "_loss_function", functools.partial(_watched_loss, model.loss_function))


def _watched_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cut: Cut | None = kwargs.pop(CUT, None)
    if cut is not None and kwargs.get("shift_labels") is not None:
        cut.loss_calls += 1
    return original(*args, **kwargs)


def pin_rope_length(model: PreTrainedModel, ledger: Ledger, current_cut: Callable[[], Cut | None]) -> None:
    """Shows rotary embeddings whose frequencies depend on the length the largest position of the whole sequence.

    "dynamic" and "longrope" take the length from the position ids they are given; those of a shard give each rank
    other frequencies. The largest position is appended to them and its row dropped from the result.
    """
    for rotary in _rotary_embeddings(model):
        kinds = getattr(rotary, "rope_type", None)
        kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
        if any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds):
            ledger.set(rotary, "forward", _with_global_length(rotary.forward, current_cut))


def _with_global_length(original: Callable[..., Any], current_cut: Callable[[], Cut | None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        cut = current_cut()
        if cut is None:
            cos, sin = original(x, position_ids, *args, **kwargs)
            return cos, sin
        last = position_ids.new_full((position_ids.size(0), 1), cut.max_position)
        cos, sin = original(x, torch.cat([position_ids, last], dim=1), *args, **kwargs)
        return cos[:, :-1], sin[:, :-1]

    return forward


def _rotary_embeddings(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
