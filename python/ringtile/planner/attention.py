"""Attention of a planned step: the ring's calls on fake tensors, whose messages never travel, and a record of them.

Shape letters: B batch, N local tokens (all of them where no ranks share), H query heads, G kv heads, D, Dv head dims.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ringtile import keep
from ringtile.attn.attention import RingAttention
from ringtile.attn.call import Call, Options
from ringtile.errors import RefusedError
from ringtile.hf.attention import empty_mask, latents_of
from ringtile.hf.batch import ShardedBatch
from ringtile.hf.layers import mask_of_layer
from ringtile.hf.model import instead
from ringtile.planner.images import attend_as_loaded
from ringtile.planner.live import Live
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import Shape
from ringtile.sequence.sharded import ShardedSequence
from ringtile.stream.attend import CausalChunk, running_chunk
from ringtile.transport.loopback import LoopbackState, LoopbackTransport
from ringtile.transport.transport import Exchange

_NAME = "ringtile_plan"  # of the attention implementation


class PlannedCall(NamedTuple):
    """One call of attention that computes, where ranks share a sequence or not."""

    shape: Shape
    mask: IntervalMask
    is_again: bool  # computed again in a backward


class PlannedAttention:
    """What a model that `switch_attention` has changed attends by, while the step is `running`.

    batch: of the step; None: whole sequences, which torch attends. calls: those that computed, in order.
    """

    def __init__(self, live: Live) -> None:
        self.live = live
        self.draws_masks = False  # images attend both ways
        self.batch: ShardedBatch | None = None
        self.calls: list[PlannedCall] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        _running.append(self)
        try:
            yield
        finally:
            _running.pop()

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """q (B, H, N, D), k, v (B, G, N, D) -> (B, N, H, Dv): ringtile's ring, or on whole sequences torch's."""
        batch = self.batch
        k, v, expand = latents_of(module, k, v)
        if torch.is_autocast_enabled("cpu"):
            q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
        if batch is None:
            with self.live.making("attention"):
                return sdpa_attention_forward(module, q, k, v, mask, **{**options, "dropout": 0.0})
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with _disable_current_modes():  # plans are real
            sequence = batch.narrowed(mask_of_layer(module, options))
        if (chunk := running_chunk()) is not None:
            given = {"scale": options.get("scaling"), "softcap": options.get("softcap") or 0.0}
            keep.called_by(module)
            if expand is not None:
                k, v = expand(k, v)
            if isinstance(chunk, CausalChunk) and chunk.tokens.start == 0 and chunk.what != "keys":
                # Of all chunks, as if none were kept.
                self.calls.append(PlannedCall(Shape.of(q, k, v), sequence.mask, self.live.in_backward))
            with self.live.making("attention"):
                return chunk.attend(q, k, v, sequence, sinks=options.get("s_aux"), **given), None
        with _disable_current_modes():
            shape = Shape.of(q, k, v) if expand is None else expand.shape_of(q, k, v)
            of_call = PlannedCall(shape, sequence.mask, self.live.in_backward)
        if sequence.world_size == 1:
            self.calls.append(of_call)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with self.live.making("attention"):
                return sdpa_attention_forward(module, q, k, v, mask, **{**options, "dropout": 0.0})
        keep.called_by(module)
        about: dict[str, Any] = {"scale": options.get("scaling"), "softcap": options.get("softcap") or 0.0}
        about |= {"sinks": options.get("s_aux"), "expand": expand}
        return self._ring(q, k, v, sequence, of_call, **about), None

    def _ring(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequence: ShardedSequence,
        of_call: PlannedCall,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        expand: Any = None,
    ) -> Tensor:
        """`ring_attention` over ranks; its out."""
        with self.live.making("attention"):
            about = Options(scale or q.size(-1) ** -0.5, softcap, sinks=sinks, returns_lse=False)
            call = Call.kept(sequence, of_call.shape, q.device, about)
            if expand is not None:
                call, k, v = expand.travel(call, q, k, v)
            weights = () if call.blocks is None else call.blocks.weights
            before = sequence.transport.num_calls
            out: Tensor
            out, _ = _Attention.apply(q, k, v, sinks, call, *weights)  # type: ignore[no-untyped-call]
            if sequence.transport.num_calls > before:
                self.calls.append(of_call)
        return out

    def attend_whole(self, name: str, function: Callable[..., Any], call: Call, *given: Any) -> Any:
        """`forward` or `backward` of all tokens of a streamed layer."""
        before = call.transport.num_calls
        with self.live.making("attention"):
            result = function(call, *given)
        if name == "forward" and call.transport.num_calls > before:
            self.calls.append(PlannedCall(call.shape, call.plan.mask, self.live.in_backward))
        return result


def switch_attention(model: PreTrainedModel) -> None:
    """Let a model attend by the `PlannedAttention` that is running. RefusedError: it would not."""
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(attend_as_loaded(model, _NAME))
    if model.config.get_text_config()._attn_implementation != _NAME:
        raise RefusedError(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface; expected a "
            f"model that does: {instead(model)}"
        )


_running: list[PlannedAttention] = []  # that of the step that runs


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    return _running[-1].attend(module, query, key, value, attention_mask, options)


def _mask(**options: Any) -> Tensor | None:
    """On whole sequences, transformers makes a mask where a window is shorter than the sequence, where prompts of
    several rows that are generated are padded, or where images attend both ways."""
    attention, window = _running[-1], options.get("local_size")
    if attention.batch is None and options["batch_size"] > 1:
        return sdpa_mask(**{**options, "allow_is_causal_skip": False})
    is_sharded = attention.batch is not None and attention.batch.sequence.world_size > 1
    if attention.draws_masks and not is_sharded:
        return sdpa_mask(**{**options, "allow_is_causal_skip": False})
    if is_sharded:
        return empty_mask(options["batch_size"], options["device"])
    if window is None or options["kv_length"] <= window:
        return None
    return sdpa_mask(**options)


class _Attention(RingAttention):
    """Counts the gradients as the attention's."""

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        with _running[-1].live.making("attention"):
            return RingAttention.backward(ctx, dout, dlse)


class SilentTransport(LoopbackTransport):
    """Rank 0 of a group whose messages are allocated and never travel."""

    def __init__(self, world_size: int) -> None:
        super().__init__(0, world_size, LoopbackState(1, 0.0))

    @contextlib.contextmanager
    def agree(self, *terms: Any, **more: Any) -> Iterator[int]:
        self.num_calls += 1
        yield self.num_calls

    def exchange(self, sends: Any, receives: Any, what: str) -> Exchange:
        return Exchange([], [*sends.values(), *receives.values()], self, what)
