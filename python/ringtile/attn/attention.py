"""Exact attention over a sequence sharded over the ranks of a group: a ring (arXiv:2310.01889), or another scheme.

The public functions, and the op behind them with its autograd formula. What one rank does round by round is in
ring.py, what travels in exchange.py, who computes a block of keys in choose.py.

Shape letters: B batch, S global tokens, N local tokens, H query heads, G kv heads, D head dim, Dv value head dim,
R runs of all ranks.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor

from ringtile import arguments, derivatives, ops
from ringtile.attn import ring
from ringtile.attn.backend import Final
from ringtile.attn.choose import ATTENTION_KERNELS, AttentionCall, AttentionKernel
from ringtile.attn.dropout import AttentionDropout
from ringtile.errors import InputError, shown
from ringtile.sequence.given import check_given, tell_others
from ringtile.sequence.layout import Layout, check_types
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.groups import Group, group_name, is_traced, propagate_errors, transport_of
from ringtile.transport.transport import NOT_IN_CUDA_GRAPHS

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: ShardedSequence | None = None,
    *,
    mask: IntervalMask | None = None,
    layout: Layout | None = None,
    group: Group | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    attention_kernel: AttentionKernel = "ringtile",
    return_lse: bool = False,
) -> Any:
    """softmax(scale q k^T, masked) v over the whole sequence, where this rank holds the tokens its layout gives it.

    q (B, N, H, D), k (B, N, G, D), v (B, N, G, Dv): the local tokens; one dtype of float64, float32, bfloat16, float16;
    unit stride in the last dim, any other strides; H a multiple of G. sequence: the same on every rank; or mask, layout
    and group, from which one is made. scale: 1 / sqrt(D) if None. softcap c > 0 turns scores x into c tanh(x / c).
    sinks (H), of any float dtype: attention sinks, one more key of each query head, whose score is the sink whatever
    the query, and whose value is 0; they are the same on every rank, which is not compared, and their gradient is that
    by this rank's queries, as a parameter's. dropout: of the weights, after the softmax; it does not depend on ranks or
    layout. Every rank of the group makes the same calls in the same order, forward and backward; one group serves one
    thread. Differentiable once. attention_kernel: "aten" has aten's kernels compute it, and refuses what they cannot;
    "auto" is ringtile's kernels on a CPU, and on a GPU whichever measure faster (so that bits may differ from run to
    run).

    Returns out (B, N, H, Dv) of q's dtype. With return_lse, returns (out, lse): the log-sum-exp of the scores,
    (B, H, N) in float32 (float64 for float64), differentiable too; it counts the sink. A query that attends no key has
    out 0, lse -inf (or its sink) and gradient 0.

    Raises InputError before any key is sent, RingMismatch when ranks disagree or another refuses its arguments,
    PeerLost when one is gone.
    """
    out, lse = _attend(q, k, v, sequence, (mask, layout, group), scale, softcap, sinks, dropout, attention_kernel)
    return (out, lse.to(ops.state_dtype(q.dtype))) if return_lse else out


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: IntervalMask,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    return_lse: bool = False,
) -> Any:
    """`ring_attention` of one rank that holds the whole sequence: the same op, shapes and errors, with N = S."""
    check_types(mask)
    layout = _one_rank(mask.seq_len)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "dropout": dropout}
    return ring_attention(q, k, v, mask=mask, layout=layout, return_lse=return_lse, **options)


@functools.lru_cache(maxsize=64)
def _one_rank(seq_len: int) -> Layout:
    return Layout.contiguous(seq_len, 1)


# ---- into the ring: directly where it can be, else through the op -------------------------------

_Parts: TypeAlias = tuple[IntervalMask | None, Layout | None, Group | None]
_CheckedParts: TypeAlias = "tuple[IntervalMask, Layout, Group | None]"


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequence: ShardedSequence | None,
    parts: _Parts,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    dropout: AttentionDropout | None,
    attention_kernel: AttentionKernel,
) -> tuple[Tensor, Tensor]:
    """out of q's dtype, and lse in float64. Dispatching a Python op costs more than a small block of attention."""
    through_op = torch.compiler.is_compiling() or (isinstance(q, Tensor) and not is_plain(q))
    try:
        scale, softcap = _check(q, k, v, sequence, parts, scale, softcap, sinks, dropout, attention_kernel)
        if not through_op:
            dropout = None if dropout is None else dropout.checked(q)
            found = sequence or ShardedSequence.of(*cast(_CheckedParts, parts))
            call = AttentionCall(found, scale, softcap, attention_kernel, _fixed(sinks, q), dropout)
    except Exception as error:
        if not is_traced(q):
            tell_others("ring_attention", error, sequence, *parts[1:])
        raise
    if through_op:
        begin, end, layout, group, scheme = _tensors(sequence, parts)
        out, lse = torch.ops.ringtile.ring_attention(
            *(q, k, v, begin, end, layout, scale, softcap, group, attention_kernel, sinks),
            *_dropout_numbers(dropout),
            scheme,
        )
        return out, lse
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        out, lse = _RingAttention.apply(q, k, v, sinks, call)  # type: ignore[no-untyped-call]
        return out, lse
    return ring.forward(call, q, k, v)


def _check(
    q: Any,
    k: Any,
    v: Any,
    sequence: Any,
    parts: _Parts,
    scale: Any,
    softcap: Any,
    sinks: Any,
    dropout: Any,
    attention_kernel: str,
) -> tuple[float, float]:
    """scale and softcap as floats. InputError, Refused: whatever is wrong apart from shapes, which ring.py checks."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        arguments.check_tensor(name, x)
    if sinks is not None:
        arguments.check_tensor("sinks", sinks)
    if dropout is not None and not isinstance(dropout, AttentionDropout):
        raise InputError(f"dropout is a {type(dropout).__name__}; expected a ringtile.AttentionDropout")
    check_given("ring_attention", sequence, *parts)
    if attention_kernel not in ATTENTION_KERNELS:
        raise InputError(
            f"attention_kernel is {shown(attention_kernel)}; expected one of {', '.join(ATTENTION_KERNELS)}"
        )
    derivatives.check_once("ring_attention", q, k, v, sinks)
    if scale is None:
        head_dim = q.size(-1) if q.dim() else 0
        if head_dim == 0:
            raise InputError(f"q has shape {tuple(q.shape)}, and so head dim 0; expected 1..{ops.MAX_HEAD_DIM}")
        scale = head_dim**-0.5
    return arguments.check_number("scale", scale), arguments.check_number("softcap", softcap)


_DropoutNumbers: TypeAlias = "tuple[float, int, int, int, Tensor | None]"


def _dropout_numbers(dropout: AttentionDropout | None) -> _DropoutNumbers:
    """Dropout as the op takes it."""
    if dropout is None:
        return 0.0, 0, 0, 0, None
    return dropout.probability, dropout.seed, dropout.step, dropout.stream, dropout.rows


def _dropout_of(
    q: Tensor, probability: float, seed: int, step: int, stream: int, rows: Tensor | None
) -> AttentionDropout | None:
    """Dropout as a call holds it. InputError."""
    if rows is None:
        return None
    return AttentionDropout(probability, rows, seed, step, stream).checked(q)


def _fixed(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """The sinks as a call holds them. InputError where they do not fit q, before they are read."""
    if sinks is None:
        return None
    ops.check_sinks(sinks, q)
    return sinks.detach().to(ops.state_dtype(q.dtype))


def is_plain(q: Tensor) -> bool:
    """Whether nothing but autograd looks at the call: no fake or other tensor, no dispatch mode, no function transform.

    Tracing, selective checkpointing and vmap see ops only.
    """
    return (
        type(q) in (Tensor, torch.nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
        and not torch._C._is_tracing()
    )


def _tensors(sequence: ShardedSequence | None, parts: _Parts) -> tuple[Tensor, Tensor, Tensor, str, str]:
    """begin, end, layout, the group's name and the scheme, as the op takes them; makes no sequence: none is traced."""
    if sequence is not None:
        return sequence.begin, sequence.end, sequence.layout_tensor, sequence.group_name, sequence.scheme
    mask, layout, group = cast(_CheckedParts, parts)
    return mask.begin, mask.end, layout.tensor, group_name(group), "ring"


class _RingAttention(torch.autograd.Function):
    """The op's forward and backward, on a sequence that need not be found by its tensors."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        out, lse = ring.forward(call, q, k, v)
        rows = None if call.dropout is None else call.dropout.rows  # saved so that a write to them is noticed
        ctx.save_for_backward(q, k, v, out, lse, sinks, rows)
        ctx.call = call
        ctx.number = call.sequence.transport.num_calls
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        transport = ctx.call.sequence.transport
        with transport.propagate_errors("ring_attention backward"):
            q, k, v, out, lse, sinks, _ = saved = ctx.saved_tensors

            def compute() -> tuple[Tensor | None, ...]:
                final = Final.of(dout, dlse, out, lse)
                dq, dk, dv = ring.backward(ctx.call, final, q, k, v, ctx.number)
                dsinks = ring.sink_gradient(sinks, final) if ctx.needs_input_grad[3] else None
                return dq, dk, dv, dsinks

            gradients = derivatives.gradients(
                "ring_attention", compute, dout, dlse, *saved, propagate_errors=transport.propagate_errors
            )
        return *gradients, None


# ---- the op -------------------------------------------------------------------------------------


# Nor where it does not communicate: a graph of torch.compile's would go on with the mask that it was captured with.
@torch.library.custom_op("ringtile::ring_attention", mutates_args=(), tags=NOT_IN_CUDA_GRAPHS)
def _ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begin: Tensor,
    end: Tensor,
    layout: Tensor,
    scale: float,
    softcap: float,
    group_name: str,
    attention_kernel: str = "ringtile",
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    step: int = 0,
    stream: int = 0,
    rows: Tensor | None = None,
    scheme: str = "ring",
) -> tuple[Tensor, Tensor]:
    sequence = _sequence_of_tensors("forward", begin, end, layout, group_name, scheme)
    with sequence.transport.propagate_errors("ring_attention forward"):
        drop = _dropout_of(q, dropout, seed, step, stream, rows)
        call = AttentionCall(sequence, scale, softcap, attention_kernel, _fixed(sinks, q), drop)
    return ring.forward(call, q, k, v)


@torch.library.custom_op("ringtile::ring_attention_backward", mutates_args=(), tags=NOT_IN_CUDA_GRAPHS)
def _ring_attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    begin: Tensor,
    end: Tensor,
    layout: Tensor,
    scale: float,
    softcap: float,
    group_name: str,
    attention_kernel: str = "ringtile",
    dropout: float = 0.0,
    seed: int = 0,
    step: int = 0,
    stream: int = 0,
    rows: Tensor | None = None,
    scheme: str = "ring",
) -> tuple[Tensor, Tensor, Tensor]:
    sequence = _sequence_of_tensors("backward", begin, end, layout, group_name, scheme)
    drop = _dropout_of(q, dropout, seed, step, stream, rows)
    call = AttentionCall(sequence, scale, softcap, attention_kernel, dropout=drop)
    return ring.backward(call, Final.of(dout, dlse, out, lse), q, k, v)


def _sequence_of_tensors(
    direction: str, begin: Tensor, end: Tensor, layout: Tensor, group_name: str, scheme: str
) -> ShardedSequence:
    with transport_of(group_name).propagate_errors(f"ring_attention {direction}"):
        return ShardedSequence.of_tensors(begin, end, layout, group_name, scheme)


@_ring_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begin: Tensor,
    end: Tensor,
    layout: Tensor,
    scale: float,
    softcap: float,
    group_name: str,
    attention_kernel: str = "ringtile",
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    step: int = 0,
    stream: int = 0,
    rows: Tensor | None = None,
    scheme: str = "ring",
) -> tuple[Tensor, Tensor]:
    ops.check_attention(q, k, v, scale, softcap)
    if sinks is not None:
        ops.check_sinks(sinks, q)
    return ring.empty_outputs(q, v, q.dtype)


@_ring_attention_backward.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *arguments: Tensor | float | str | None
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, numbers, (sinks, *drop, rows, scheme) = inputs[:6], inputs[6:10], inputs[10:]
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:], sinks, rows)
    ctx.numbers, ctx.drop, ctx.scheme = numbers, drop, scheme  # type: ignore[attr-defined]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, sinks, rows = ctx.saved_tensors
    with propagate_errors(ctx.numbers[2], "ring_attention backward", tensors[0]):
        derivatives.check_once("the backward of ring_attention", dout, dlse)
        if dout is None:
            dout = torch.zeros_like(tensors[3])
        dq, dk, dv = _ring_attention_backward(dout, dlse, *tensors, *ctx.numbers, *ctx.drop, rows, ctx.scheme)
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[10]:
            of_sinks = ring.sink_gradient(sinks, Final.of(dout, dlse, *tensors[3:5]))
    return dq, dk, dv, *[None] * 7, of_sinks, *[None] * 6


def _keep_group(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.group_name = inputs[12]  # type: ignore[attr-defined]


def _refuse_backward(ctx: FunctionCtx, *gradients: Tensor) -> None:
    with propagate_errors(ctx.group_name, "the second derivative of ring_attention", gradients[0]):  # type: ignore[attr-defined]
        raise derivatives.differentiated_again("ring_attention")


_ring_attention.register_autograd(_backward, setup_context=_setup_context)
_ring_attention_backward.register_autograd(_refuse_backward, setup_context=_keep_group)
