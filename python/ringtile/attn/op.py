"""The op behind attention, for what sees ops only: torch.compile, selective checkpointing, function transforms.

What tensors do not say travels in lists, in this order:

    numbers   scale, softcap, probability of dropout
    counters  seed, step and stream of dropout
    names     JSON: the group's name, attention_kernel, the scheme

The backward gets the local tensors; ranks that share heads exchange them again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ringtile import derivatives, ops
from ringtile.attn import ring, ulysses
from ringtile.attn.auto import resolved
from ringtile.attn.choose import AttentionCall
from ringtile.attn.dropout import AttentionDropout
from ringtile.sequence.plan import Shape
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.groups import telling, transport_of
from ringtile.transport.transport import NOT_IN_CUDA_GRAPHS

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class SequenceTensors(NamedTuple):
    """A ShardedSequence as an op takes it."""

    tensors: tuple[Tensor, Tensor, Tensor]  # begin, end, layout_tensor
    group_name: str = ""
    scheme: str = "ring"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: SequenceTensors,
    scale: float,
    softcap: float = 0.0,
    *,
    sinks: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    attention_kernel: str = "ringtile",
) -> tuple[Tensor, Tensor]:
    """Return out and lse, through the op; arguments as in `ring_attention`."""
    drop = (0.0, 0, 0, 0) if dropout is None else (dropout.probability, dropout.seed, dropout.step, dropout.stream)
    rows = None if dropout is None else dropout.rows
    names = json.dumps([sequence.group_name, attention_kernel, sequence.scheme])
    out, lse = torch.ops.ringtile.ring_attention(
        q, k, v, sinks, rows, [*sequence.tensors], [scale, softcap, drop[0]], [*drop[1:]], names
    )
    return out, lse


# Nor where it does not communicate: a graph of torch.compile's would go on with the mask that it was captured with.
@torch.library.custom_op("ringtile::ring_attention", mutates_args=(), tags=NOT_IN_CUDA_GRAPHS)
def _ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    rows: Tensor | None,
    sequence: list[Tensor],
    numbers: list[float],
    counters: list[int],
    names: str,
) -> tuple[Tensor, Tensor]:
    call = _call("forward", q, (sinks, rows), sequence, numbers, counters, names)
    return ulysses.forward(resolved(call, q, k, v), q, k, v, keep=False)[:2]


@torch.library.custom_op("ringtile::ring_attention_backward", mutates_args=(), tags=NOT_IN_CUDA_GRAPHS)
def _ring_attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: list[Tensor],  # q, k, v, out, lse
    sinks: Tensor | None,
    rows: Tensor | None,
    sequence: list[Tensor],
    numbers: list[float],
    counters: list[int],
    names: str,
) -> list[Tensor]:  # dq, dk, dv, and dsinks where there are sinks
    q, k, v = saved[:3]
    call = _call("backward", q, (sinks, rows), sequence, numbers, counters, names)
    shape = Shape.of(q, k, v)
    grads = ulysses.backward(resolved(call, q, k, v), ulysses.Stage(*saved), shape, dout, dlse, sinks)
    return [x for x in grads if x is not None]


def _call(
    direction: str,
    q: Tensor,
    optional: tuple[Tensor | None, Tensor | None],
    sequence: list[Tensor],
    numbers: list[float],
    counters: list[int],
    names: str,
) -> AttentionCall:
    (group, kernel, scheme), (sinks, rows) = json.loads(names), optional
    with transport_of(group).telling(f"ring_attention {direction}"):
        begin, end, layout = sequence
        found = ShardedSequence.of_tensors(begin, end, layout, group, scheme)
        dropout = None if rows is None else AttentionDropout(numbers[2], rows, *counters).checked(q)
        of_heads = None if sinks is None else fixed_sinks(sinks, q)
    return AttentionCall(found, numbers[0], numbers[1], kernel, of_heads, dropout)


def fixed_sinks(sinks: Tensor, q: Tensor) -> Tensor:
    """Return the sinks as a call holds them. InputError where they do not fit q, before they are read."""
    ops.check_sinks(sinks, q)
    return sinks.detach().to(ops.state_dtype(q.dtype))


@_ring_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    rows: Tensor | None,
    sequence: list[Tensor],
    numbers: list[float],
    *unused: Any,
) -> tuple[Tensor, Tensor]:
    ops.check_attention(q, k, v, *numbers[:2])
    if sinks is not None:
        ops.check_sinks(sinks, q)
    return ring.empty_outputs(q, v, q.dtype)


@_ring_attention_backward.register_fake
def _(dout: Tensor, dlse: Tensor | None, saved: list[Tensor], sinks: Tensor | None, *unused: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*saved[:3], *([] if sinks is None else [sinks]))]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, sinks, rows, sequence, ctx.numbers, ctx.counters, ctx.names = inputs
    ctx.save_for_backward(*qkv, *output, sinks, rows, *sequence)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *saved, sinks, rows, begin, end, layout = ctx.saved_tensors
    with telling(json.loads(ctx.names)[0], "ring_attention backward", saved[0]):
        derivatives.check_once("the backward of ring_attention", dout, dlse)
        if dout is None:
            dout = torch.zeros_like(saved[3])
        given = [begin, end, layout], ctx.numbers, ctx.counters, ctx.names
        dq, dk, dv, *dsinks = _ring_attention_backward(dout, dlse, saved, sinks, rows, *given)
    return dq, dk, dv, dsinks[0] if dsinks else None, None, [None] * 3, None, None, None


def _keep_group(ctx: FunctionCtx, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.group_name = json.loads(inputs[-1])[0]  # type: ignore[attr-defined]


def _refuse_backward(ctx: FunctionCtx, gradients: list[Tensor]) -> None:
    with telling(ctx.group_name, "the second derivative of ring_attention", gradients[0]):  # type: ignore[attr-defined]
        raise derivatives.differentiated_again("ring_attention")


_ring_attention.register_autograd(_backward, setup_context=_setup_context)
_ring_attention_backward.register_autograd(_refuse_backward, setup_context=_keep_group)
