"""The attention and mask functions that transformers calls under the name "ringtile".

They ask `active_batch` what is inside the model. Before a model runs on a shard, its attention mask is replaced by a
4-D tensor without elements. transformers returns 4-D masks unchanged, so no S x S mask is built, and an attention
function that gets the empty mask without an active batch knows that it has a shard.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ringtile import keep
from ringtile.attn.attention import ring_attention
from ringtile.attn.call import AttentionDropout
from ringtile.errors import RefusedError
from ringtile.first_batch.trace import running_trace
from ringtile.hf.batch import CHECKPOINTING, ShardedBatch, active_batch, waiting_batch
from ringtile.hf.drawn_masks import intervals_of, intervals_of_drawn
from ringtile.hf.families import EAGER_SINKS
from ringtile.hf.keys import DOCUMENTS, LOSS, MASK, OUTPUT, key_of_tree
from ringtile.hf.layers import mask_of_layer
from ringtile.hf.patches import Patches
from ringtile.hf.registered_attention import DECLARED, is_replaceable, shown_function
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.stream.attend import WHOLE, running_chunk

NAME = "ringtile"
_KERNEL: Any = os.environ.get("RINGTILE_ATTENTION_KERNEL", "auto")  # as the argument of ring_attention
_INTERVALS = "ringtile_intervals"  # the attribute of a mask that holds it as intervals
LATENTS = "ringtile_latents"  # the attribute of empty values that holds latents, and what makes keys of them
SEQUENCE = "ringtile_sequence"  # the attribute of an empty mask that holds the sequence under the mask that was drawn
_PACKED = "ringtile_packed"  # and of one that holds it with documents apart

# Keyword arguments of an attention function that ringtile computes.
_COMPUTED = frozenset({"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal"})
# Those that say what the batch says, or that are no concern of attention: models hand on all of their own. The last one
# is a switch of flash-attention's kernels.
WITHOUT_EFFECT = DOCUMENTS - {"attention_mask"} | LOSS | OUTPUT | {"deterministic"}
_KNOWN = _COMPUTED | WITHOUT_EFFECT


def refuse_own_functions(modules: Iterable[nn.Module]) -> None:
    """RefusedError: the configuration of a module names an attention or mask function that is a user's, which the ring
    does not compute. One that has the attribute DECLARED may be replaced."""
    for module in modules:
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        defined = vars(sys.modules.get(type(module).__module__, sys))
        own = defined.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS).get(name)
        if own is None and name == "eager" and type(module).__module__.startswith("transformers."):
            own = defined.get("eager_attention_forward")
        for kind, function in (("attention", own), ("mask", ALL_MASK_ATTENTION_FUNCTIONS.get(name))):
            if function is not None and not is_replaceable(function):
                raise RefusedError(
                    f"{type(module).__name__} has attn_implementation {name!r}, whose {kind} function "
                    f"{shown_function(function)} is none of transformers' own: ringtile would compute another one in "
                    f"its place. Expected sdpa, eager, flash_attention_*, flex_attention, or a function that computes "
                    f"what sdpa does and says so, by an attribute {DECLARED} = True: it is replaced, and not called"
                )


def hide_attention_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of the model: replaces the mask of a sharded batch by an empty one, (B, 1, 0, 0), and that of a
    batch which the model is to get whole by the whole one."""
    if (waiting := waiting_batch()) is not None:
        return args, {**kwargs, "attention_mask": waiting.whole_mask}
    if (batch := active_batch()) is not None:
        if not torch.compiler.is_compiling():
            check_switched(cast("PreTrainedModel", module))
        assert batch.position_ids is not None
        kwargs = {**kwargs, "attention_mask": empty_mask(batch.position_ids.size(0), batch.position_ids.device)}
    return args, kwargs


def check_switched(model: PreTrainedModel) -> None:
    """RefusedError: the attention of a switched model was set again."""
    name = model.config.get_text_config()._attn_implementation
    if name != NAME:
        raise RefusedError(
            f"{type(model).__name__} was set to attn_implementation {name!r} after ringtile.enable, which had set "
            f"{NAME!r}; expected it before: call ringtile.restore(trainer) first"
        )


def empty_mask(num_rows: int, device: torch.device) -> Tensor:
    return torch.empty(num_rows, 1, 0, 0, dtype=torch.bool, device=device)


def hidden_mask(name: str, mask: Any, batch: ShardedBatch, num_rows: int, device: torch.device) -> Any:
    """What stands in for the mask that a model hands to its language model: empty, with the mask if it has drawn one.

    name: of the model. mask: (B, S), None, drawn (B, 1, S, S) or by `attention_mask`, or a mapping of these by type.
    """
    if isinstance(mask, dict):
        return {kind: hidden_mask(name, one, batch, num_rows, device) for kind, one in mask.items()}
    empty = empty_mask(num_rows, device)
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        return empty
    drawn = getattr(mask, _INTERVALS, (None,))[0]
    if drawn is None and isinstance(mask, Tensor) and mask.shape[1:] == (1, batch.seq_len, batch.seq_len):
        drawn = intervals_of_drawn(mask)
    if drawn is None or batch.documents is None:
        kind = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise RefusedError(
            f"{name} hands its language model an attention mask {kind} in which the keys of a query are not one "
            f"interval; expected a mask of transformers' masking_utils"
        )
    padding = batch.sequence.seq_len - batch.seq_len
    setattr(empty, SEQUENCE, batch.sequence.with_mask((drawn & batch.documents).padded(padding, attends=True)))
    batch.draws_masks = True
    return empty


def attention_forward(
    module: nn.Module,
    query: Tensor,  # (B, H, N, D)
    key: Tensor,  # (B, G, N, D)
    value: Tensor,  # (B, G, N, Dv)
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a shard over the group of its batch, or under a mask that holds its sequence -> (B, N, H, Dv); for
    anything else, transformers' own.

    options: dropout, scaling, sliding_window, softcap, s_aux (attention sinks), is_causal, and what does not concern
    attention, which models hand on.
    Raises RefusedError for any other option that is set, and for a shard without its ShardedBatch.
    """
    batch, chunk = active_batch(), running_chunk()
    sequence = _sequence_of(module, attention_mask, options, batch)
    if sequence is None:
        return _of_whole_rows(module, query, key, value, attention_mask, options)
    if attention_mask is not None and (attention_mask.numel() > 0 or attention_mask.dtype != torch.bool):
        raise RefusedError(
            f"{type(module).__name__} got an attention mask of shape {tuple(attention_mask.shape)} for a shard of a "
            f"sequence; expected none: the model builds a mask of its own"
        )
    refuse_unknown(module, options)
    dropout, probability = None, options.get("dropout", 0.0)
    if probability > 0 and running_trace() is None:
        dropout = _dropout(module, query, probability, batch)
    keep.called_by(module)
    query = _scaled(module, query, None if batch is None else batch.places if batch.columns is None else batch.columns)
    key, value, expand = latents_of(module, key, value)
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as for scaled_dot_product_attention: RoPE widens queries and keys
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    more: dict[str, Any] = {"expand": expand} if chunk is None else {}
    is_reproducible = batch is not None and batch.chunk_tokens is not None
    if is_reproducible and sequence.world_size > k.size(2):
        raise RefusedError(
            f"reproducible: {type(module).__name__} has {k.size(2)} heads of keys, some of which {sequence.world_size} "
            f"ranks would share; expected context_parallel_size of at most {k.size(2)}, so that nothing is added"
        )
    attend = ring_attention if chunk is None else chunk.attend
    out = attend(
        *(q, k, v, sequence),
        scale=options.get("scaling"),
        softcap=options.get("softcap") or 0.0,
        sinks=options.get("s_aux"),
        dropout=dropout,
        attention_kernel="ringtile" if is_reproducible else _KERNEL,
        **more,
    )
    return out, None


def _dropout(module: nn.Module, query: Tensor, probability: float, batch: ShardedBatch | None) -> AttentionDropout:
    """What a call in training drops, alike on all ranks: each layer by a stream of its own."""
    if batch is None or batch.dropout is None:
        raise RefusedError(
            f"{type(module).__name__} uses attention dropout {probability} outside of a forward pass of the Trainer's "
            f"steps in training; expected a rate of 0 there: set the module to eval()"
        )
    seed, step, first = batch.dropout
    rows = torch.arange(first, first + query.size(0), device=query.device)
    return AttentionDropout(probability, rows, seed, step, getattr(module, "layer_idx", None) or 0)


def _of_whole_rows(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """transformers' own attention. RefusedError: it would see too little of a shard, a chunk or a tree."""
    if attention_mask is not None and attention_mask.numel() == 0:
        raise RefusedError(
            f"{type(module).__name__} got a shard of a sequence outside of the forward pass of its batch; expected a "
            f"layer that the backward computes again to be checkpointed by the Trainer's {CHECKPOINTING}"
        )
    if running_chunk() is not None:
        got = "no mask" if attention_mask is None else f"a mask {tuple(attention_mask.shape)}"
        raise RefusedError(
            f"{type(module).__name__} got {got} in a streamed layer; expected one of transformers' masking_utils, "
            f"drawn from a mask (batch, tokens) or none: {WHOLE}"
        )
    if (tree := key_of_tree(options) or (MASK if options.get(MASK) is not None else None)) is not None:
        raise RefusedError(
            f"the batch holds {tree}, and its model is called outside of the Trainer's steps; expected train(), "
            f"evaluate() or predict()"
        )
    return transformers_attention(module, query, key, value, attention_mask, options)


def latents_of(module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Any]:
    """What an attention module has handed on, (B, G, N, ...): keys and values, or latents and what makes those."""
    if (held := getattr(value, LATENTS, None)) is None:
        return key, value, None
    if key is not held[0]:
        raise RefusedError(
            f"{type(module).__name__} changes the keys that its expand_kv returns, in whose place latents travel; "
            f"expected keys that are attended as they are: change them inside of expand_kv"
        )
    return cast("tuple[Tensor, Tensor, Any]", held)


def _sequence_of(
    module: nn.Module, attention_mask: Tensor | None, options: dict[str, Any], batch: ShardedBatch | None
) -> ShardedSequence | None:
    """The batch as this layer attends it: by a mask that was drawn, window included, or by its own window; None: there
    is no batch, and ringtile has drawn no mask."""
    drawn = cast("ShardedSequence | None", getattr(attention_mask, SEQUENCE, None))
    if batch is not None and not batch.draws_masks:
        return batch.narrowed(mask_of_layer(module, options))
    if batch is not None and drawn is None:
        raise RefusedError(
            f"{type(module).__name__} got no mask of those that its model has drawn; expected one for every layer"
        )
    offsets = options.get("cu_seq_lens_q")
    if batch is not None or drawn is None or offsets is None:
        return drawn
    if not hasattr(attention_mask, _PACKED):  # documents, which flash-attention keeps apart too
        setattr(attention_mask, _PACKED, drawn & IntervalMask.from_cu_seqlens(offsets, causal=False))
    return cast("ShardedSequence", getattr(attention_mask, _PACKED))


def attention_mask(**kwargs: Any) -> Tensor | None:
    """The mask of a batch that is not sharded, as transformers' own attention expects it; before a language model that
    will shard its batch, an empty one with the intervals."""
    batch = waiting_batch()
    if batch is not None and kwargs["q_length"] == kwargs["kv_length"] == batch.seq_len:
        drawn = intervals_of(kwargs["mask_function"], batch.seq_len, kwargs.get("attention_mask"))
        empty = empty_mask(kwargs["batch_size"], kwargs["device"])
        setattr(empty, _INTERVALS, (drawn,))
        return empty
    mask = eager_mask if _needs_eager(kwargs["config"]) else sdpa_mask
    return mask(**kwargs)


def _needs_eager(config: Any) -> bool:
    """Whether the model has softcap or sinks, which scaled_dot_product_attention cannot compute."""
    return getattr(config, "attn_logit_softcapping", None) is not None or config.model_type in EAGER_SINKS


def transformers_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    forward = sdpa_attention_forward
    if _needs_eager(module.config):
        forward = sys.modules[type(module).__module__].eager_attention_forward
    elif options.get("s_aux") is not None:
        raise RefusedError(
            f"{type(module).__name__} uses attention sinks (s_aux) on a batch that is not sharded, which transformers' "
            f"scaled_dot_product_attention leaves out; expected one of {', '.join(sorted(EAGER_SINKS))}"
        )
    return cast("tuple[Tensor, Tensor | None]", forward(module, query, key, value, attention_mask, **options))


def refuse_unknown(module: nn.Module, options: Mapping[str, Any]) -> None:
    """RefusedError: an option may change what an attention module computes."""
    for argument in unknown_arguments(options, _KNOWN):
        raise RefusedError(
            f"{type(module).__name__} hands its attention {argument}, which may change what it computes; expected only "
            f"{', '.join(sorted(_COMPUTED))}: leave it out, or set it to None"
        )


def unknown_arguments(options: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """The arguments that are set, of which ringtile does not know that it computes the same with them."""
    return [name for name, value in options.items() if name not in known and value is not None and value is not False]


# ---- the temperature of queries that attend by position without a rotary embedding (Llama 4; arXiv:2501.19399) -------

# Llama 4 multiplies a query by 1 + attn_scale log(1 + floor((i + 1) / floor_scale)), and takes for i the place of the
# token in the tensor that it was given. In a shard that is not its place in the row. So for a sharded batch the module
# leaves its queries alone, and the attention function multiplies them instead.


def leave_temperature(model: nn.Module, patches: Patches) -> None:
    """Turns the temperature of every module off while it runs on a sharded batch, or on a chunk."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            patches.wrap(module, "forward", _without_temperature)
            patches.set(module, "ringtile_temperature", True)


def _scaled(module: nn.Module, query: Tensor, places: Tensor | None) -> Tensor:
    """query (B, H, N, D), times its temperature if the module was to multiply it; with the rounding of transformers.

    places (N,): of the tokens in their row, of which a chunk has a part; None: they are those of whole rows.
    """
    if not getattr(module, "ringtile_temperature", False):
        return query
    chunk = running_chunk()
    if chunk is None and places is None:
        return query
    if chunk is not None:
        tokens = chunk.tokens
        places = torch.arange(tokens.start, tokens.stop) if places is None else places[tokens]
    assert places is not None
    settings: Any = module
    counts = places.to(query.device).float() + 1.0
    factor = torch.log1p(torch.floor(counts / settings.floor_scale)) * settings.attn_scale + 1.0
    product: Tensor = query * factor[:, None]
    return product.to(query.dtype)


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


# "ringtile" as an attention implementation of every transformers model: adds a name, replaces nothing. On import, which
# torch.load does of a model that torch.save stored while it was enabled: the hook above is in it.
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
