"""Recurrent layers of transformers' models: convolution, gated delta rule, Mamba and Mamba-2, lightning attention.

Their mixers call functions of their module by name, which know nothing of documents or shards. A mixer gets a forward
whose names mean ringtile's functions; the module, and so every other model of its kind, keeps its own. The forward
finds the `ShardedBatch` in the keyword arguments that layers hand down, also under activation checkpointing.

Shape letters: B batch, S global tokens, N local tokens, C channels, W width, H heads, G groups, K key dim, V value dim.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations.accelerate import force_accelerate_hooks

from ringtile import ops
from ringtile.errors import Refused
from ringtile.hf.batch import BATCH_ARGUMENT, ShardedBatch, main_input
from ringtile.hf.masks import mask_of_batch
from ringtile.hf.model import switch_attention
from ringtile.hf.packing import positions_separate
from ringtile.hf.patches import Patches
from ringtile.recurrent.functions import causal_conv1d, gated_delta_rule, selective_scan, ssd
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence

_CONV = frozenset({"causal_conv1d_fn"})
_DELTA = _CONV | {"torch_chunk_gated_delta_rule"}
_MAMBA = _CONV | {"mamba_selective_scan"}
_MAMBA2 = _CONV | {"mamba2_split_conv1d_scan_combined", "mamba2_chunk_scan"}
# The mixers whose forward was read and tested, by class, with the functions that mix their tokens.
_MIXERS = {
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv"), _CONV),
    **dict.fromkeys(("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), _DELTA),
    "OlmoHybridGatedDeltaNet": _DELTA,
    "KimiLinearDeltaAttention": _CONV | {"chunk_kimi_delta_attention"},
    **dict.fromkeys(("BambaMixer", "GraniteMoeHybridMambaLayer", "FalconH1Mixer"), _MAMBA2),
    **dict.fromkeys(("NemotronHMamba2Mixer", "Zamba2MambaMixer", "Mamba2Mixer"), _MAMBA2),
    **dict.fromkeys(("JambaMambaMixer", "ZambaMambaMixer"), _MAMBA),
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer"), _MAMBA | {"mamba_inner_fn"}),
    # It calls none: its forward is replaced, as long as it has these tables of its decays.
    "MiniMaxLightningAttention": frozenset({"slope_rate", "query_decay", "key_decay", "diagonal_decay"}),
}
# Fused functions, of which mixers try one in training only, and go on without.
_SHORT_CUTS = {"mamba_inner_fn", "mamba2_split_conv1d_scan_combined"}
_CACHES = ("cache_params", "past_key_values")  # the names under which mixers take one
# Modules that hand no keyword arguments down to their mixers, but this one. The models get the batch from outside.
_HANDED_DOWN = {
    **dict.fromkeys(("Lfm2DecoderLayer", "Lfm2MoeDecoderLayer"), "seq_idx"),
    **dict.fromkeys(("JambaMambaDecoderLayer", "MambaModel", "FalconMambaModel"), "attention_mask"),
    "Mamba2Model": BATCH_ARGUMENT,
}
# Recurrences that no op of ringtile computes, by the class of the module that has them.
_UNKNOWN = {
    "RecurrentGemmaRglru": "the RG-LRU (real-gated linear recurrent unit)",
    "RwkvSelfAttention": "RWKV's WKV recurrence and token shift",
    "xLSTMBlock": "xLSTM's mLSTM, with its running maximum",
}


def mixers(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Those of _MIXERS, by path."""
    return {path: module for path, module in modules if type(module).__name__ in _MIXERS}


def unknown(modules: Iterable[tuple[str, nn.Module]]) -> str:
    """The first recurrence among them that no op computes, in words; "" if there is none."""
    found = ((path, type(module).__name__) for path, module in modules)
    return next((f"{path} ({name}) is {_UNKNOWN[name]}" for path, name in found if name in _UNKNOWN), "")


def install(model: PreTrainedModel, patches: Patches, active_batch: Callable[[], ShardedBatch | None]) -> None:
    """Makes the mixers of a model compute on shards, and each document alone. Raises Refused.

    active_batch: the batch that is inside the model now; a mixer that does not get it would mix a shard's tokens only.
    """
    for path, module in model.named_modules():
        if type(module).__name__ in _MIXERS:
            patches.set(module, "forward", _forward_of(path, module, active_batch))
        if argument := _HANDED_DOWN.get(type(module).__name__):  # which FSDP2 renames later
            hand_down = functools.partial(_hand_down_batch, argument, active_batch)
            patches.on_restore(module.register_forward_pre_hook(hand_down, with_kwargs=True).remove)


def install_alone(wrapped: nn.Module, model: PreTrainedModel, patches: Patches) -> None:
    """The same where no sequence is sharded: packed documents and padding stay apart in the mixers too.

    wrapped: the model with its adapters, whose batches are whole sequences. Attention is transformers' own where its
    masks tell documents apart, and else ringtile's.
    """
    own = bool(positions_separate(model))
    inside: list[ShardedBatch] = []  # the model now: at most one

    def add_batch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if module.training:
            kwargs = {**kwargs, "use_cache": False}  # which nothing reads in training
        use_cache = kwargs.get("use_cache")
        if model.config.get_text_config().use_cache if use_cache is None else use_cache:
            return args, kwargs  # generation: one document in a row
        main = main_input(args, kwargs)
        if main is None:
            return args, kwargs
        mask = mask_of_batch(kwargs, main.size(0), main.size(1))
        if own and "flash" not in str(model.config._attn_implementation):
            _refuse_unseen(kwargs, main, mask)
        sequence = ShardedSequence.of(mask, Layout.contiguous(main.size(1), 1), None)
        places = torch.arange(main.size(1), device=main.device)
        batch = ShardedBatch(sequence, main.size(1), max_position=0, num_targets=None, places=places)
        inside[:] = [batch]
        return args, {**kwargs, BATCH_ARGUMENT: batch}

    patches.on_restore(wrapped.register_forward_pre_hook(add_batch, with_kwargs=True).remove)
    leave = wrapped.register_forward_hook(lambda module, args, out: inside.clear(), always_call=True)
    patches.on_restore(leave.remove)
    install(model, patches, lambda: inside[0] if inside else None)
    if not own:
        switch_attention(wrapped, patches)


def refuse_packed(wrapped: nn.Module, reason: str, patches: Patches) -> None:
    """Where no sequence is sharded, a recurrence of which nothing here keeps documents apart takes no packed batch.

    reason: what `unknown` said of the model. wrapped: as in `install_alone`.
    """

    def check(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        main = main_input(args, kwargs)
        if main is None:
            return
        mask = mask_of_batch(kwargs, main.size(0), main.size(1), True)
        attends = mask.end > mask.begin
        first = mask.begin.where(attends, main.size(1)).amin(1)
        if (mask.begin.where(attends, -1).amax(1) > first).any():
            raise Refused(
                f"{reason}: it would carry its state from each document of a packed row into the next; expected rows "
                "of one document: set packing to false"
            )

    patches.on_restore(wrapped.register_forward_pre_hook(check, with_kwargs=True).remove)


def _refuse_unseen(inputs: dict[str, Any], main: Tensor, mask: IntervalMask) -> None:
    """Raises Refused for a batch whose documents, by `mask`, the model's own attention would not separate."""
    seen = {name: value for name, value in inputs.items() if name in ("attention_mask", "position_ids")}
    if seen.get("attention_mask") is not None:
        seen["attention_mask"] = seen["attention_mask"].ne(0).to(torch.int64)
    if mask_of_batch(seen, main.size(0), main.size(1)) != mask:
        raise Refused(
            "documents are told apart by seq_idx, cu_seq_lens or numbers in attention_mask, at none of which "
            "transformers' attention looks: its layers would mix what the recurrent layers keep apart. Pack without "
            "attention_mask and with position_ids that start again, or set context_parallel_size above 1"
        )


def _hand_down_batch(
    argument: str,
    active_batch: Callable[[], ShardedBatch | None],
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Of a layer, which may run again in the backward of an earlier batch, from its keyword arguments alone."""
    batch = kwargs.get(BATCH_ARGUMENT)
    if batch is None and isinstance(module, PreTrainedModel):
        batch = active_batch()
    return args, kwargs if batch is None else {**kwargs, argument: batch}


# ---- a mixer ------------------------------------------------------------------------------------


def _forward_of(path: str, mixer: nn.Module, active_batch: Callable[[], ShardedBatch | None]) -> Callable[..., Any]:
    """The mixer's forward, on ringtile's functions for a batch with documents, and as it was without."""
    name, expected = type(mixer).__name__, _MIXERS[type(mixer).__name__]
    plain = inspect.unwrap(type(mixer).forward)
    missing = expected - set(plain.__code__.co_names)
    if missing or "forward" in vars(mixer):
        raise Refused(
            f"{path} ({name}) has a forward that is not transformers 5.17's: "
            + (f"it does not call {', '.join(sorted(missing))}" if missing else "something has replaced it")
            + "; expected transformers' own, whose functions ringtile replaces"
        )
    original = mixer.forward
    called: list[str] = []
    inside: list[ShardedBatch] = []  # this forward, which hands it to some of its functions only

    def counting(function: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(function)
            return _FUNCTIONS[function](*args, **{**kwargs, BATCH_ARGUMENT: inside[-1]})

        return call

    whole = _WHOLE.get(name)
    replaced = {} if whole else {function: counting(function) for function in expected}
    ours = types.FunctionType(
        plain.__code__, {**plain.__globals__, **replaced}, name, plain.__defaults__, plain.__closure__
    )
    ours.__kwdefaults__ = plain.__kwdefaults__
    # Children whose weights it reads without calling them.
    read = [child for child, module in mixer.named_children() if isinstance(module, nn.Conv1d) or child == "dt_proj"]
    with_hooks = force_accelerate_hooks(read)(ours)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        batch, kwargs = _batch_of(kwargs)
        if batch is None:
            if active_batch() is not None:
                raise Refused(
                    f"{path} ({name}) got a shard of a sequence without the keyword argument {BATCH_ARGUMENT!r}; "
                    f"expected layers that hand their keyword arguments down to it"
                )
            return original(*args, **kwargs)
        if any(kwargs.get(cache) is not None for cache in _CACHES):
            raise Refused(f"{path} ({name}) got a cache; expected none: its states are those of whole sequences")
        batch.recurrent_calls += 1
        if whole:
            return whole(mixer, *args, **{**kwargs, BATCH_ARGUMENT: batch})
        called.clear()
        inside[:] = [batch]
        try:
            out = with_hooks(mixer, *args, **kwargs)
        finally:
            inside.clear()
        if set(called) | _SHORT_CUTS & expected != expected:
            raise Refused(
                f"{path} ({name}) called {', '.join(called) or 'none'} of the functions that mix its tokens; expected "
                f"{', '.join(sorted(expected))}: ringtile knows no other way of mixing them"
            )
        return out

    return forward


def _batch_of(kwargs: dict[str, Any]) -> tuple[ShardedBatch | None, dict[str, Any]]:
    """The batch, and the arguments without it."""
    found = [value for value in kwargs.values() if isinstance(value, ShardedBatch)]
    others = {name: value for name, value in kwargs.items() if not isinstance(value, ShardedBatch)}
    return (found[0] if found else None), others


# ---- what stands in for transformers' functions -------------------------------------------------


def _sequence_of(kwargs: dict[str, Any]) -> ShardedSequence:
    batch = kwargs[BATCH_ARGUMENT]
    if kwargs.get("initial_state") is not None or kwargs.get("initial_states") is not None:
        raise Refused("a recurrent layer with a cache; expected use_cache false: a state belongs to whole sequences")
    sequence: ShardedSequence = batch.sequence
    return sequence


def _wide(x: Tensor) -> Tensor:
    return x.to(ops.state_dtype(x.dtype))


def _causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """hidden_states (B, C, N) -> (B, C, N)."""
    known = "silu" if activation in ("silu", "swish") else ""
    x = hidden_states.transpose(1, 2)
    y: Tensor = causal_conv1d(x, weight, _sequence_of(kwargs), bias=bias, activation=known).transpose(1, 2)
    return y if known or activation is None else ACT2FN[activation](y)


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query, key (B, N, H, K), value (B, N, H, V), g (B, N, H) or (B, N, H, K), beta (B, N, H) -> (B, N, H, V)."""
    sequence = _sequence_of({**kwargs, "initial_state": output_final_state or kwargs.get("initial_state")})
    q, k, v, decay, strength = (_wide(x) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:  # with an epsilon under the root, as in fla, and not as functional.normalize
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return gated_delta_rule(q, k, v, decay, strength, sequence).to(value.dtype), None


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
    return_final_states: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """hidden_states (B, N, H, V), dt (B, N, H), A (H), B, C (B, N, G, K) -> (B, N, H, V), in float32."""
    sequence = _sequence_of({**kwargs, "initial_state": return_final_states or kwargs.get("initial_states")})
    if z is not None:
        raise Refused("mamba2_chunk_scan with a gate z; expected none: transformers 5.17 gates outside of it")
    dt = _wide(dt)
    dt = dt if dt_bias is None else dt + _wide(dt_bias)
    dt = (functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    x, A, B, C = (_wide(x) for x in (hidden_states, A, B, C))
    y: Tensor = ssd(x, dt, A, B, C, sequence, D=None if D is None else _wide(D))
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
    return_last_state: bool = False,
    **kwargs: Any,
) -> Tensor:
    """hidden_states, dt, z (B, C, N), A (C, K), B, C (B, K, N), D, delta_bias (C) -> (B, C, N)."""
    sequence = _sequence_of({**kwargs, "initial_state": return_last_state or None})
    x, dt, B, C = (_wide(y).transpose(1, 2) for y in (hidden_states, dt, B, C))
    dt = dt if delta_bias is None else dt + _wide(delta_bias)
    dt = functional.softplus(dt) if delta_softplus else dt
    y: Tensor = selective_scan(x, dt, _wide(A), B, C, sequence, D=None if D is None else _wide(D)).transpose(1, 2)
    return (y if z is None else y * functional.silu(_wide(z))).to(hidden_states.dtype)


def _lightning_attention(mixer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """hidden_states (B, N, E) -> (B, N, E): plain decay (arXiv:2501.08313), which is Mamba-2's with a step of 1."""
    sequence = _sequence_of(kwargs)
    num_heads, dim = mixer.num_attention_heads, mixer.head_dim
    qkv = mixer.act_fn(mixer.qkv_proj(hidden_states)).unflatten(-1, (num_heads, 3 * dim))
    q, k, v = (_wide(x) for x in qkv.split(dim, dim=3))
    out = ssd(v, torch.ones_like(v[..., 0]), -_wide(mixer.slope_rate).flatten(), k, q, sequence)
    out = mixer.norm(out.flatten(2).to(hidden_states.dtype))
    return mixer.out_proj(functional.sigmoid(mixer.output_gate(hidden_states)) * out), None


_WHOLE: dict[str, Callable[..., Any]] = {"MiniMaxLightningAttention": _lightning_attention}


def _no_short_cut(*args: Any, **kwargs: Any) -> None:
    """A fused kernel would mix documents, and the tokens of a shard only; the mixer goes on without it."""


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba_selective_scan": _mamba_selective_scan,
    "mamba_inner_fn": _no_short_cut,
    "mamba2_split_conv1d_scan_combined": _no_short_cut,
    "mamba2_chunk_scan": _mamba2_chunk_scan,
}
