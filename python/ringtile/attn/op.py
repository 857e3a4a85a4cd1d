"""The op behind attention, for what sees ops only: torch.compile, selective checkpointing, function transforms.

Numbers travel in two lists: scale, softcap and the probability of dropout; seed, step and stream of dropout. The
backward gets the local tensors; ranks that share heads exchange them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ringtile import derivatives
from ringtile.attn import ring, ulysses
from ringtile.attn.call import AttentionCall, AttentionDropout, check_tensors
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.groups import Group, group_name, propagate_errors, transport_of
from ringtile.transport.transport import NOT_IN_CUDA_GRAPHS

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class SequenceTensors(NamedTuple):
    """A sequence as the op takes it, where none can be made because the call is traced. As in ShardedSequence."""

    begin: Tensor
    end: Tensor
    layout_tensor: Tensor
    group_name: str = ""
    scheme: str = "ring"

    @classmethod
    def of(cls, mask: IntervalMask, layout: Layout, group: Group | None) -> SequenceTensors:
        return cls(*mask.bounds, layout.tensor, group_name(group))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: ShardedSequence | SequenceTensors,
    scale: float,
    softcap: float = 0.0,
    attention_kernel: str = "auto",
    sinks: Tensor | None = None,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse, through the op, which takes no objects; `_call` is the way back. `check_options` was run."""
    drop = (0.0, 0, 0, 0) if dropout is None else (dropout.probability, dropout.seed, dropout.step, dropout.stream)
    rows = None if dropout is None else dropout.rows
    out, lse = torch.ops.ringtile.ring_attention(
        *(q, k, v, sequence.begin, sequence.end, sequence.layout_tensor, sinks, rows),
        *([scale, softcap, drop[0]], [*drop[1:]], sequence.group_name, attention_kernel, sequence.scheme),
    )
    return out, lse


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor begin, Tensor end, Tensor layout, Tensor? sinks, Tensor? rows, "
    "float[] numbers, SymInt[] counters, str group_name, str attention_kernel, str scheme"
)


# Nor where it does not communicate: a graph of torch.compile's would go on with the mask that it was captured with.
@torch.library.custom_op(
    "ringtile::ring_attention", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor)", tags=NOT_IN_CUDA_GRAPHS
)
def _ring_attention(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    with transport_of(given[-3]).propagate_errors("ring_attention forward"):
        return ulysses.forward(_call(q, k, v, *given), q, k, v)[:2]


@torch.library.custom_op(
    "ringtile::ring_attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=NOT_IN_CUDA_GRAPHS,
)
def _ring_attention_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dsinks (empty without sinks)."""
    saved, sinks = ulysses.Saved(q, k, v, out, lse), given[3]
    with transport_of(given[-3]).propagate_errors("ring_attention backward"):
        call = _call(q, k, v, *given)
        dq, dk, dv, dsinks = ulysses.backward(call, saved, dout, dlse, sinks, is_local=True)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


def _call(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> AttentionCall:
    """Return the call that `attend` wrote down in numbers and tensors."""
    begin, end, layout, sinks, rows, (scale, softcap, probability), counters, group_name, kernel, scheme = given
    sequence = ShardedSequence.of_tensors(begin, end, layout, group_name, scheme)
    dropout = None if rows is None else AttentionDropout(probability, rows, *counters)
    return AttentionCall.of(sequence, q, k, v, scale, softcap, kernel, sinks, dropout)


@_ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    sinks, rows, (scale, softcap, _) = given[3:6]
    check_tensors(q, k, v, scale, softcap, sinks, rows)
    return ring.empty_outputs(q, v.size(3), q.dtype)


@_ring_attention_backward.register_fake
def _(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    sinks = inputs[6]
    dsinks = out.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return *(x.new_empty(x.shape) for x in inputs[:3]), dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:8])
    ctx.given = inputs[8:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    with propagate_errors(ctx.given[2], "ring_attention backward", saved[0]):
        derivatives.check_once("the backward of ring_attention", dout, dlse)
        if dout is None:
            dout = torch.zeros_like(saved[0])
        dq, dk, dv, dsinks = _ring_attention_backward(dout, dlse, *saved, *ctx.given)
    return dq, dk, dv, None, None, None, None if saved[8] is None else dsinks, *[None] * 6


def _keep_group(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.group_name = inputs[-3]  # type: ignore[attr-defined]


def _refuse_backward(ctx: FunctionCtx, *gradients: Tensor) -> None:
    with propagate_errors(ctx.group_name, "the second derivative of ring_attention", gradients[0]):  # type: ignore[attr-defined]
        raise derivatives.differentiated_again("ring_attention")


_ring_attention.register_autograd(_backward, setup_context=_setup_context)
_ring_attention_backward.register_autograd(_refuse_backward, setup_context=_keep_group)
