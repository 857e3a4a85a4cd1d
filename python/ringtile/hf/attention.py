"""The attention and mask functions that transformers calls under the name "ringtile".

A batch that was cut over the ranks carries its `Cut` through the model as the keyword argument `ringtile_cut`; models
hand unknown keyword arguments down to their attention function, under activation checkpointing too. On the way into
the model its attention mask becomes a 4-D tensor without elements: transformers returns 4-D masks as they are, so no
S x S mask is built, and an attention function that sees it without a `Cut` knows that something on the way lost it.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from ringtile.errors import Refused
from ringtile.hf.cut import CUT, Cut
from ringtile.ring import ring_attention

NAME = "ringtile"

# Keyword arguments of attention functions that change the scores in ways the kernels do not know.
_REFUSED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "alibi": "ALiBi",
    "head_mask": "a head mask",
}


def register() -> None:
    """Makes "ringtile" a valid attention implementation of every transformers model. Adds a name, replaces nothing."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def hide_attention_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of the model: the intervals of the Cut say it all, so the mask (B, 1, 0, 0) says nothing."""
    if kwargs.get(CUT) is not None:
        position_ids = kwargs["position_ids"]
        nothing = torch.empty(position_ids.size(0), 1, 0, 0, dtype=torch.bool, device=position_ids.device)
        kwargs = {**kwargs, "attention_mask": nothing}
    return args, kwargs


def attention_forward(
    module: nn.Module,
    query: Tensor,  # (B, H, N, D)
    key: Tensor,  # (B, G, N, D)
    value: Tensor,  # (B, G, N, Dv)
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Ring attention over the ranks of the batch's Cut -> (B, N, H, Dv); without a Cut, transformers' own attention.

    Raises Refused for what the kernels cannot do exactly, and for a cut batch whose Cut did not arrive.
    """
    cut: Cut | None = kwargs.get(CUT)
    if cut is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise Refused(
                f"{type(module).__name__} got a shard of a sequence without the keyword argument {CUT!r}; the model "
                f"must hand its keyword arguments down to its attention function"
            )
        return _transformers_attention(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window, softcap, kwargs
        )
    _refuse_inexact(module, dropout, attention_mask, kwargs)
    cut.attention_calls += 1
    query, key, value = (_as_autocast(x) for x in (query, key, value))
    out = ring_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask=cut.mask_of(sliding_window),
        layout=cut.layout,
        group=cut.group,
        scale=scaling,
        softcap=softcap or 0.0,
        block_kernel=cut.block_kernel,
    )
    return out, None


def _as_autocast(x: Tensor) -> Tensor:
    """What autocast hands to scaled_dot_product_attention: queries and keys come out of RoPE wider than values."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def attention_mask(**kwargs: Any) -> Tensor | None:
    """The mask of a batch that was not cut, as transformers' own attention expects it."""
    mask = eager_mask if _needs_eager(kwargs["config"]) else sdpa_mask
    return cast("Tensor | None", mask(**kwargs))


def _needs_eager(config: Any) -> bool:
    """Whether scaled_dot_product_attention cannot compute this model: it knows no softcap and no sinks."""
    return getattr(config, "attn_logit_softcapping", None) is not None or config.model_type == "gpt_oss"


def _transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    forward = sdpa_attention_forward
    if _needs_eager(module.config):
        forward = sys.modules[type(module).__module__].eager_attention_forward
        kwargs = {**kwargs, "softcap": softcap}
    return cast(
        "tuple[Tensor, Tensor | None]",
        forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            **kwargs,
        ),
    )


def _refuse_inexact(module: nn.Module, dropout: float, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if dropout > 0:
        raise Refused(f"{name} uses attention dropout {dropout}; expected 0 under context parallelism")
    if attention_mask is not None and attention_mask.numel() > 0:
        raise Refused(
            f"{name} got an attention mask of shape {tuple(attention_mask.shape)} for a shard of a sequence; "
            f"expected none: the model builds a mask of its own"
        )
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise Refused(f"{name} is bidirectional (is_causal false); expected causal attention")
    for argument, meaning in _REFUSED.items():
        if kwargs.get(argument) is not None:
            raise Refused(f"{name} uses {meaning} ({argument}), which the ring cannot compute yet")
