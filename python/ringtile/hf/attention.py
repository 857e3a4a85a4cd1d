"""The attention and mask functions that transformers calls under the name "ringtile".

A sharded batch carries its `ShardedBatch` through the model as the keyword argument `ringtile_batch`: models hand
unknown keyword arguments down to their attention function, also under activation checkpointing. Before the model runs,
its attention mask is replaced by a 4-D tensor without elements. transformers returns 4-D masks unchanged, so no S x S
mask is built. The empty mask holds the `ShardedBatch` too, for models that drop the keyword argument on the way to
their layers (StableLM, Nemotron); an attention function that gets neither knows that it has a shard without its batch.
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
from ringtile.hf import temperature
from ringtile.hf.batch import BATCH_ARGUMENT, ShardedBatch
from ringtile.hf.layers import is_causal, mask_of_layer
from ringtile.ring.attention import ring_attention

NAME = "ringtile"

# Models whose own eager function computes what scaled_dot_product_attention cannot: sinks.
_EAGER = frozenset({"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})

# Keyword arguments that change the scores in ways the kernels do not support.
_REFUSED = {
    "sinks": "attention sinks under a name that no model of transformers uses",
    "position_bias": "a position bias",
    "alibi": "ALiBi",
    "head_mask": "a head mask",
}


def register() -> None:
    """Makes "ringtile" a valid attention implementation of every transformers model. Adds a name, replaces nothing."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def hide_attention_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of the model: replaces the mask of a sharded batch by an empty one, (B, 1, 0, 0)."""
    if kwargs.get(BATCH_ARGUMENT) is not None:
        position_ids = kwargs["position_ids"]
        empty = torch.empty(position_ids.size(0), 1, 0, 0, dtype=torch.bool, device=position_ids.device)
        setattr(empty, BATCH_ARGUMENT, kwargs[BATCH_ARGUMENT])  # for models that do not hand keyword arguments down
        kwargs = {**kwargs, "attention_mask": empty}
    return args, kwargs


def refuse_use_of_mask(error: RuntimeError) -> None:
    """Raises Refused if a model's forward failed because it computes with the empty mask.

    A model that makes a mask of its own from the one it gets adds it to, or fills it into, a tensor of another shape.
    The function that failed then holds a mask without elements.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None or "(0)" not in str(error):  # The size of tensor a (8) must match the size of tensor b (0)
        return
    values, function = traceback.tb_frame.f_locals, traceback.tb_frame.f_code.co_name
    if any(isinstance(value, Tensor) and value.dim() == 4 and value.shape[2:] == (0, 0) for value in values.values()):
        owner = f"{type(values['self']).__name__}." if "self" in values else ""
        raise Refused(
            f"{owner}{function} makes an attention mask of its own; expected a model that hands the mask it gets "
            f"unchanged to transformers' attention: the mask of a shard lies in its {BATCH_ARGUMENT}"
        ) from error


def attention_forward(
    module: nn.Module,
    query: Tensor,  # (B, H, N, D)
    key: Tensor,  # (B, G, N, D)
    value: Tensor,  # (B, G, N, Dv)
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Ring attention over the group of the batch -> (B, N, H, Dv); for a batch that is not sharded, transformers' own.

    options: dropout, scaling, sliding_window, softcap, s_aux (attention sinks), and whatever else the model hands down.
    Raises Refused for options that the kernels cannot compute exactly, and for a shard without its ShardedBatch.
    """
    batch: ShardedBatch | None = options.get(BATCH_ARGUMENT, getattr(attention_mask, BATCH_ARGUMENT, None))
    if batch is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise Refused(
                f"{type(module).__name__} got a shard of a sequence without the keyword argument {BATCH_ARGUMENT!r}; "
                f"expected a model that hands its keyword arguments down to its attention function"
            )
        return _transformers_attention(module, query, key, value, attention_mask, options)
    _refuse_inexact(module, attention_mask, options, batch.causal)
    batch.attention_calls += 1
    query = temperature.scaled(module, query, batch)
    query, key, value = (_as_autocast(x) for x in (query, key, value))
    out = ring_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        batch.narrowed(mask_of_layer(module, options)),
        scale=options.get("scaling"),
        softcap=options.get("softcap") or 0.0,
        sinks=options.get("s_aux"),
        attention_kernel=batch.attention_kernel,
    )
    return out, None


def _as_autocast(x: Tensor) -> Tensor:
    """Casts as autocast does for scaled_dot_product_attention: RoPE returns queries and keys wider than values."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def attention_mask(**kwargs: Any) -> Tensor | None:
    """The mask of a batch that is not sharded, as transformers' own attention expects it."""
    mask = eager_mask if _needs_eager(kwargs["config"]) else sdpa_mask
    return cast("Tensor | None", mask(**kwargs))


def _needs_eager(config: Any) -> bool:
    """Whether the model has softcap or sinks, which scaled_dot_product_attention cannot compute."""
    return getattr(config, "attn_logit_softcapping", None) is not None or config.model_type in _EAGER


def _transformers_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    forward = sdpa_attention_forward
    if _needs_eager(module.config):
        forward = sys.modules[type(module).__module__].eager_attention_forward
    elif options.get("s_aux") is not None:
        raise Refused(
            f"{type(module).__name__} uses attention sinks (s_aux) on a batch that is not sharded, which transformers' "
            f"scaled_dot_product_attention leaves out; expected one of {', '.join(sorted(_EAGER))}"
        )
    return cast("tuple[Tensor, Tensor | None]", forward(module, query, key, value, attention_mask, **options))


def _refuse_inexact(
    module: nn.Module, attention_mask: Tensor | None, options: dict[str, Any], causal_batch: bool
) -> None:
    name, dropout = type(module).__name__, options.get("dropout", 0.0)
    if dropout > 0:
        raise Refused(f"{name} uses attention dropout {dropout}; expected 0 under context parallelism")
    if attention_mask is not None and (attention_mask.numel() > 0 or attention_mask.dtype != torch.bool):
        raise Refused(
            f"{name} got an attention mask of shape {tuple(attention_mask.shape)} for a shard of a sequence; "
            f"expected none: the model builds a mask of its own"
        )
    asked = options.get("is_causal")
    causal = is_causal(module) if asked is None else bool(asked)
    if causal != causal_batch:
        kinds = {True: "causal", False: "bidirectional"}
        raise Refused(
            f"{name} is {kinds[causal]} (is_causal {str(causal).lower()}) in a model that is {kinds[causal_batch]}; "
            f"expected all layers alike"
        )
    for argument, meaning in _REFUSED.items():
        if options.get(argument) is not None:
            raise Refused(f"{name} uses {meaning} ({argument}), which the ring cannot compute yet")
