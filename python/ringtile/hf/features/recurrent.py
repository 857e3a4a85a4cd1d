"""Recurrent layers of transformers' models: convolution, gated delta rule, Mamba and Mamba-2, lightning attention.

Their mixers (`families.MIXERS`) call functions of their file, which know nothing of documents or shards. Each of these
functions is replaced by one that computes on the active batch, and is the original where there is none.

Shape letters: B batch, S global tokens, N local tokens, C channels, W width, H heads, G groups, K key dim, V value dim.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ringtile import keep, ops
from ringtile.errors import PAGES, RefusedError
from ringtile.hf.attention import WITHOUT_EFFECT, unknown_arguments
from ringtile.hf.batch import (
    ShardedBatch,
    activate,
    check_not_recomputed,
    forget_checkpoints,
    keep_in_checkpoints,
    main_input,
    recurrent_batch,
)
from ringtile.hf.families import CACHES, MIXERS, SHORT_CUTS, UNKNOWN_RECURRENCES
from ringtile.hf.feature import Enabled, Feature
from ringtile.hf.layers import mixers
from ringtile.hf.masks import is_packed, mask_of_batch, read
from ringtile.hf.model import base_model, instead, text_modules
from ringtile.hf.patches import Patches
from ringtile.recurrent.choose import uses_libraries
from ringtile.recurrent.functions import causal_conv1d, gated_delta_rule, selective_scan, ssd
from ringtile.sequence.layout import named_layout
from ringtile.sequence.sharded import ShardedSequence

logger = logging.getLogger("ringtile")


def _refuse(run: Enabled) -> None:
    """Raises RefusedError for a recurrence that no op computes, and where recurrent layers would be compiled."""
    modules, name = text_modules(run.base), type(run.base).__name__
    if reason := unknown(modules):
        raise RefusedError(
            f"{reason}: no op of ringtile computes this recurrence; expected attention, a causal convolution, Mamba, "
            f"Mamba-2, lightning attention or a gated delta rule: {instead(run.base)}"
        )
    if run.trainer.args.torch_compile and mixers(modules):
        raise RefusedError(
            f"{name} has recurrent layers and {type(run.trainer).__name__} uses torch_compile; expected only one of "
            f"the two: the recurrent layers have not been shown to survive compilation"
        )


def unknown(modules: Iterable[tuple[str, nn.Module]]) -> str:
    """Return the first recurrence among modules that no op computes, in words; "" if there is none."""
    found = ((path, type(module).__name__) for path, module in modules)
    return next(
        (f"{path} ({name}) is {UNKNOWN_RECURRENCES[name]}" for path, name in found if name in UNKNOWN_RECURRENCES), ""
    )


def install(model: PreTrainedModel, patches: Patches) -> None:
    """Make the mixers of a model compute on shards, and each document alone. Raises RefusedError.

    The functions that mix tokens are those of the model's file, so other models of that type call the replacements too:
    without an active batch these are the originals.
    """
    for path, mixer in mixers(model.named_modules()).items():
        if whole := _WHOLE.get(type(mixer).__name__):
            patches.wrap(mixer, "forward", functools.partial(_forward_of_mixer, whole))
        file = sys.modules[type(mixer).__module__]
        for name in MIXERS[type(mixer).__name__]:
            if not hasattr(file, name):
                raise RefusedError(
                    f"{path} ({type(mixer).__name__}): its module has no function {name}; expected the layer of "
                    f"transformers >= 5.17, whose functions ringtile replaces"
                )
            patches.share(file, name, functools.partial(_either, functools.partial(_of_batch, name)))
        enter = functools.partial(_enter, f"{path} ({type(mixer).__name__})")
        patches.on_restore(mixer.register_forward_pre_hook(enter, with_kwargs=True).remove)


# ---- a model that is not sharded ----------------------------------------------------------------


def keep_documents_apart(run: Enabled, patches: Patches) -> None:
    """Make recurrent layers start anew with each document of a packed row, on one rank; in transformers they do not.

    Says so where they would not: the recurrence is not known, or compiled.
    """
    models = [run.wrapped, *(getattr(run.trainer, name, None) for name in ("ref_model", "teacher_model"))]
    for wrapped in (each for each in models if isinstance(each, nn.Module) and recurs(each)):
        base = base_model(wrapped)
        if run.trainer.args.torch_compile or unknown(text_modules(base)):
            warn_of_joined_documents(wrapped)
            continue
        install(base, patches)
        patches.on_restore(wrapped.register_forward_pre_hook(_begin_whole, with_kwargs=True).remove)
        patches.on_restore(wrapped.register_forward_hook(lambda *_: activate(None), always_call=True).remove)
        patches.on_restore(functools.partial(forget_checkpoints, wrapped))


def recurs(model: nn.Module) -> bool:
    """Whether a model has recurrent layers."""
    return bool(mixers(model.named_modules()) or unknown(model.named_modules()))


def warn_of_joined_documents(model: nn.Module) -> None:
    logger.warning(
        f"ringtile: recurrent layers of {type(model).__name__} go on from one document of a packed row to the next, as "
        f"in transformers alone; expected rows of one document, or a key by which ringtile computes such layers, such "
        f"as tiled_loss or context_parallel_size ({PAGES}docs/guide/hybrid.md)"
    )


def _begin_whole(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Forward pre-hook of a model: its recurrent layers know the documents of this batch, if its rows are packed."""
    keep_in_checkpoints(module)
    main = main_input(args, kwargs)
    if main is None or not is_packed(kwargs):
        return None
    rows, seq_len = main.shape[:2]
    sequence = ShardedSequence.of(mask_of_batch(read(kwargs)[0], rows, seq_len), named_layout("contiguous", seq_len, 1))
    places = torch.arange(seq_len, device=main.device)
    activate(ShardedBatch(sequence, seq_len, seq_len - 1, None, places, only_recurrences=True))
    return args, {**kwargs, "use_cache": False}  # with a cache, transformers' attention would join them


# ---- a mixer ------------------------------------------------------------------------------------


def _enter(place: str, mixer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of a mixer: padding belongs to no document of the batch."""
    if recurrent_batch() is None:
        check_not_recomputed(place)
        return args, kwargs
    if any(kwargs.get(cache) is not None for cache in CACHES):
        raise RefusedError(f"{place} got a cache; expected none: its states are those of whole sequences")
    keep.called_by(mixer)
    return args, {**kwargs, "attention_mask": None}


def _either(of_batch: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return (original if recurrent_batch() is None else of_batch)(*args, **kwargs)


def _forward_of_mixer(whole: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """original: the mixer's own method."""
    mixer = original.__self__  # type: ignore[attr-defined]
    return _either(functools.partial(whole, mixer), original, *args, **kwargs)


def _of_batch(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call ringtile's equal of one of transformers' functions."""
    if name in SHORT_CUTS:  # it would mix documents, and the tokens of a shard only; the mixer goes on without it
        return None
    known = _PARAMETERS[name]
    if ignored := unknown_arguments(kwargs, known | _WITHOUT_EFFECT):
        raise RefusedError(
            f"{name} got {', '.join(ignored)}, which may change what it computes; expected only "
            f"{', '.join(sorted(known))}: leave it out, or set it to None"
        )
    return _FUNCTIONS[name](*args, **{key: value for key, value in kwargs.items() if key in known})


# ---- what stands in for transformers' functions -------------------------------------------------


# A state to begin with or to return is no parameter, and so refused: it belongs to whole sequences.


def _sequence() -> ShardedSequence:
    batch = recurrent_batch()
    assert batch is not None
    return batch.sequence


def _scheme(sequence: ShardedSequence, num_head_groups: int) -> str | None:
    """Return the scheme whose bits are those of any number of ranks, if the batch's shall be. RefusedError: ranks would
    share heads, whose gradients they then add."""
    batch, ranks = recurrent_batch(), sequence.world_size
    if batch is None or batch.chunk_tokens is None or ranks == 1:
        return None
    if ranks > num_head_groups:
        raise RefusedError(
            f"reproducible: a recurrence of {num_head_groups} heads or groups of heads, some of which {ranks} ranks "
            f"would share; expected context_parallel_size of at most {num_head_groups}, so that nothing is added"
        )
    return "heads"


def _wide(x: Tensor) -> Tensor:
    return x.to(ops.state_dtype(x.dtype))


def _multiplied(x: Tensor) -> Tensor:
    """Return what is multiplied in matrix products: as wide as sums where that costs nothing, which is not on a GPU.

    There the libraries would multiply float32 as TF32, no better than float16 and much slower, or not at all.
    """
    return x if uses_libraries(x.device) else _wide(x)


def _causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """hidden_states (B, C, N) -> (B, C, N)."""
    known = "silu" if activation in ("silu", "swish") else ""
    x = hidden_states.transpose(1, 2)
    sequence = _sequence()
    scheme = _scheme(sequence, x.size(2))
    y: Tensor = causal_conv1d(x, weight, sequence, bias=bias, activation=known, scheme=scheme).transpose(1, 2)
    return y if known or activation is None else ACT2FN[activation](y)


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, None]:
    """query, key (B, N, H, K), value (B, N, H, V), g (B, N, H) or (B, N, H, K), beta (B, N, H) -> (B, N, H, V)."""
    sequence = _sequence()
    q, k, v = (_multiplied(x) for x in (query, key, value))
    if use_qk_l2norm_in_kernel:  # with an epsilon under the root, as in fla, and not as functional.normalize
        q, k = (_normalized(x).to(x.dtype) for x in (q, k))
    out = gated_delta_rule(q, k, v, _wide(g), _wide(beta), sequence, scheme=_scheme(sequence, q.size(2)))
    return out.to(value.dtype), None


def _normalized(x: Tensor) -> Tensor:
    x = _wide(x)
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """hidden_states (B, N, H, V), dt (B, N, H), A (H), B, C (B, N, G, K) -> (B, N, H, V), in float32 on a CPU."""
    sequence = _sequence()
    dt = _wide(dt)
    dt = dt if dt_bias is None else dt + _wide(dt_bias)
    dt = (functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    x, B, C = (_multiplied(x) for x in (hidden_states, B, C))
    scheme = _scheme(sequence, B.size(2))
    y: Tensor = ssd(x, dt, _wide(A), B, C, sequence, D=None if D is None else _wide(D), scheme=scheme)
    return y


def _mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
) -> Tensor:
    """hidden_states, dt, z (B, C, N), A (C, K), B, C (B, K, N), D, delta_bias (C) -> (B, C, N)."""
    sequence = _sequence()
    scheme = _scheme(sequence, 1)  # all channels share B and C
    x, dt, B, C = (_wide(y).transpose(1, 2) for y in (hidden_states, dt, B, C))
    dt = dt if delta_bias is None else dt + _wide(delta_bias)
    dt = functional.softplus(dt) if delta_softplus else dt
    D = None if D is None else _wide(D)
    y: Tensor = selective_scan(x, dt, _wide(A), B, C, sequence, D=D, scheme=scheme).transpose(1, 2)
    return (y if z is None else y * functional.silu(_wide(z))).to(hidden_states.dtype)


def _lightning_attention(mixer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """hidden_states (B, N, E) -> (B, N, E): plain decay (arXiv:2501.08313), which is Mamba-2's with a step of 1."""
    num_heads, dim = mixer.num_attention_heads, mixer.head_dim
    qkv = mixer.act_fn(mixer.qkv_proj(hidden_states)).unflatten(-1, (num_heads, 3 * dim))
    q, k, v = (_multiplied(x) for x in qkv.split(dim, dim=3))
    scheme = _scheme(sequence := _sequence(), k.size(2))
    out = ssd(v, torch.ones_like(v[..., 0]), -_wide(mixer.slope_rate).flatten(), k, q, sequence, scheme=scheme)
    out = mixer.norm(out.flatten(2).to(hidden_states.dtype))
    return mixer.out_proj(functional.sigmoid(mixer.output_gate(hidden_states)) * out), None


_WHOLE: dict[str, Callable[..., Any]] = {"MiniMaxLightningAttention": _lightning_attention}


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba_selective_scan": _mamba_selective_scan,
    "mamba2_chunk_scan": _mamba2_chunk_scan,
}
_PARAMETERS = {name: frozenset(inspect.signature(function).parameters) for name, function in _FUNCTIONS.items()}
# Documents, which are the batch's, and ways to compute the same.
_WITHOUT_EFFECT = WITHOUT_EFFECT | {"cu_seqlens", "chunk_size", "use_mambapy", "use_associative_scan"}
_WITHOUT_EFFECT |= {"position_embeddings"}  # of the attention layers beside them (Bailing); no recurrence takes them

_TOUCHES = frozenset({"_forward_pre_hooks", "forward", *_FUNCTIONS, *SHORT_CUTS})
FEATURE = Feature(_TOUCHES, lambda run, patches: install(run.base, patches), _refuse)
