"""Attention for what sees ops only: torch.compile, torch.export, make_fx, selective checkpointing, torch.func.

An op takes a sequence by its tensors: the bounds of the mask and the runs of the layout. Most calls make or look up
their sequence inside the graph, and torch has no other argument for that: an object of a registered type must be an
input of the graph (torch/_dynamo/variables/script_object.py: "Opaque objects cannot be created inside the torch.compile
region"), and an int keeps nothing alive until the backward. Eager calls know nothing of this file.

Shape letters: B batch, S global tokens, N local tokens, H query heads, G kv heads, D head dim, Dv value head dim,
R runs of all ranks.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ringtile import arguments, derivatives, ops
from ringtile.attn import ring, ulysses
from ringtile.attn.call import AttentionDropout, Call, Options, check_tensors
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence, check_given, living_sequences, refuse
from ringtile.transport.groups import Group, group_name, is_traced, propagate_errors, transport_of
from ringtile.transport.transport import NOT_IN_CUDA_GRAPHS

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from ringtile.attn.latents import Latents


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

    @classmethod
    def of_one_rank(cls, seq_len: int, mask: IntervalMask | None, is_causal: bool) -> SequenceTensors:
        """Return one rank under the mask; None: seq_len tokens, which may be a symbol of torch.compile's."""
        end = torch.arange(1, seq_len + 1, dtype=torch.int32, device="cpu")[None]
        bounds = (0 * end, end if is_causal else 0 * end + seq_len) if mask is None else mask.bounds
        runs = torch.tensor([[[0, 0, 1, 0, 0]], [[0, 0, 0, 0, 1]]], dtype=torch.int64, device="cpu")
        return cls(*bounds, runs[0] + runs[1] * bounds[0].size(-1))


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: ShardedSequence | None,
    parts: Any,
    options: Options,
    expand: Latents | None = None,
) -> Any:
    """Do `attention.ring_attention`. parts: mask, layout, group."""
    try:
        check_given("ring_attention", sequence, *parts)
        options = options.checked(q, k, v)
        if expand is not None:
            k, v = expand(k, v)
        return attend(q, k, v, sequence or SequenceTensors.of(*parts), options)
    except Exception as error:
        if not is_traced(q):
            refuse("ring_attention", error, sequence, *parts[1:])
        raise


def attention(q: Tensor, k: Tensor, v: Tensor, mask: IntervalMask | None, is_causal: bool, options: Options) -> Any:
    """Do `attention.attention`, without making a mask or a layout."""
    sequence = SequenceTensors.of_one_rank(q.shape[1] if q.dim() > 1 else 1, mask, is_causal)
    return attend(q, k, v, sequence, options.checked(q, k, v))


def attend(q: Tensor, k: Tensor, v: Tensor, sequence: ShardedSequence | SequenceTensors, options: Options) -> Any:
    """Return out, or out and lse, through the op, which takes no objects; `_call` is the way back. options: checked."""
    scale, softcap, kernel, sinks, dropout, returns_lse = options
    drop = (0.0, 0, 0, 0) if dropout is None else (dropout.probability, dropout.seed, dropout.step, dropout.stream)
    rows = None if dropout is None else dropout.rows
    out, lse = torch.ops.ringtile.ring_attention(
        *(q, k, v, sequence.begin, sequence.end, sequence.layout_tensor, sinks, rows),
        *([scale, softcap, drop[0]], [*drop[1:]], sequence.group_name, kernel, sequence.scheme),
    )
    return (out, lse.to(ops.state_dtype(q.dtype))) if returns_lse else out


def sequence_of_tensors(
    begin: Tensor, end: Tensor, layout: Tensor, group_name: str, scheme: str = "ring"
) -> ShardedSequence:
    """Return the sequence whose `begin`, `end` and `layout_tensor` these are, as an op receives them.

    Look a living one up by tensor identity, then by value; make one otherwise. Raise InputError or LayoutError.
    """
    given, transport = (begin, end, layout), transport_of(group_name)
    living = {
        sequence: (sequence.begin, sequence.end, sequence.layout_tensor)
        for reference in reversed(living_sequences.valuerefs())
        if (sequence := reference()) is not None
        and sequence.weak_transport() is transport
        and sequence.scheme == scheme
    }
    for sequence, own in living.items():
        if all(map(operator.is_, own, given)):
            return sequence
    for name, x in zip(("begin", "end", "layout"), given, strict=True):
        arguments.check_on_cpu(name, x)
    for sequence, own in living.items():
        if sequence.is_unchanged() and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(own, given)):  # noqa: B905
            return sequence
    return ShardedSequence.of(IntervalMask.of_bounds(begin, end), Layout.from_tensor(layout), group_name, scheme=scheme)


# ---- the op -------------------------------------------------------------------------------------

# Numbers travel in two lists: scale, softcap and the probability of dropout; seed, step and stream of dropout. The
# backward gets the local tensors; ranks that share heads exchange them again.


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
    saved, sinks = ulysses.Saved(q, k, v, out, lse, is_local=True), given[3]
    with transport_of(given[-3]).propagate_errors("ring_attention backward"):
        call = _call(q, k, v, *given)
        dq, dk, dv, dsinks = ulysses.backward(call, saved, dout, dlse, sinks)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


def _call(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Call:
    """Return the call that `attend` wrote down in numbers and tensors."""
    begin, end, layout, sinks, rows, (scale, softcap, probability), counters, group_name, kernel, scheme = given
    sequence = sequence_of_tensors(begin, end, layout, group_name, scheme)
    dropout = None if rows is None else AttentionDropout(probability, rows, *counters)
    return Call.of(sequence, q, k, v, Options(scale, softcap, kernel, sinks, dropout))


@_ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    sinks, rows, (scale, softcap, probability), counters = given[3:7]
    dropout = None if rows is None else AttentionDropout(probability, rows, *counters)
    check_tensors(q, k, v, Options(scale, softcap, sinks=sinks, dropout=dropout))
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
