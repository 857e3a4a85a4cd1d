"""Ring attention: exact attention over a sequence cut over the ranks of a group (arXiv:2310.01889).

In round i, rank r works on the keys of rank (r - i) mod W while the keys of round i + 1 travel. Keys travel straight
from their owner, and only those that some local query attends. In the backward the keys travel again, and the partial
dk, dv of round i travel straight back to the owner while round i + 1 computes; the owner adds them in round order.
Running outputs and all gradients stay in float32 (float64 for float64 inputs) until the last round, and the running
log-sum-exp in float64.

Shape letters: B batch, Bm mask rows (B or 1), S global tokens, N local tokens, H query heads, G kv heads, D head dim,
Dv value head dim, W ranks, R runs, n keys of one message.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

import torch
from torch import Tensor

from . import block, ops
from .block import BlockKernel
from .errors import InputError, RingtileError
from .layout import Layout
from .mask import IntervalMask
from .plan import RankPlan, Round, rounds_of
from .transport import Exchange, Group, HeaderValue, Transport, group_name, transport_of

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: IntervalMask,
    layout: Layout,
    group: Group | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    block_kernel: BlockKernel = "ringtile",
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: IntervalMask,
    layout: Layout,
    group: Group | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    block_kernel: BlockKernel = "ringtile",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: IntervalMask,
    layout: Layout,
    group: Group | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    block_kernel: BlockKernel = "ringtile",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T, masked) v over the whole sequence, where this rank holds the tokens `layout` gives it.

    q (B, N, H, D), k (B, N, G, D), v (B, N, G, Dv): the local tokens; one dtype of float64, float32, bfloat16,
    float16; unit stride in the last dim, any other strides; H a multiple of G. mask and layout speak of the global
    sequence and are the same on every rank. scale: 1 / sqrt(D) if None. softcap c > 0 turns scores x into
    c tanh(x / c). Every rank of the group makes the same calls in the same order, forward and backward; one group
    serves one thread. Differentiable once. block_kernel: "aten" lets aten's kernels compute what they can of the
    forward, "auto" where it is measured to be faster (so that bits may differ from run to run).

    Returns out (B, N, H, Dv) of q's dtype, and with return_lse the log-sum-exp of the scores, (B, H, N) in float32
    (float64 for float64), differentiable too. A query that attends no key has out 0, lse -inf and gradient 0.

    Raises InputError before any key is sent, RingMismatch when ranks disagree or another refuses its arguments,
    PeerLost when one is gone.
    """
    if block_kernel not in block.BLOCK_KERNELS:
        raise InputError(f"block_kernel is {block_kernel!r}; expected one of {', '.join(block.BLOCK_KERNELS)}")
    scale = q.size(-1) ** -0.5 if scale is None else float(scale)
    out, lse = torch.ops.ringtile.ring_attention(
        q, k, v, mask.begin, mask.end, layout.tensor, scale, float(softcap), group_name(group), block_kernel
    )
    return (out, lse.to(ops.state_dtype(q.dtype))) if return_lse else out


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: IntervalMask,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: IntervalMask,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: IntervalMask,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`ring_attention` of one rank that holds the whole sequence: the same op, shapes and errors, with N = S."""
    layout = _whole(mask.seq_len)
    if return_lse:
        return ring_attention(q, k, v, mask=mask, layout=layout, scale=scale, softcap=softcap, return_lse=True)
    return ring_attention(q, k, v, mask=mask, layout=layout, scale=scale, softcap=softcap)


@functools.lru_cache(maxsize=64)
def _whole(seq_len: int) -> Layout:
    return Layout.contiguous(seq_len, 1)


# ---- one rank's part of the ring ----------------------------------------------------------------


@dataclass(frozen=True)
class _Message:
    """Keys and values of n tokens, or their gradients: k (B, n, G, D), then v (B, n, G, Dv) in one flat buffer."""

    flat: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class _Ring:
    """What one rank needs for one pass: local k (B, N, G, D) and v (B, N, G, Dv), its rounds, the way to its peers."""

    k: Tensor
    v: Tensor
    plan: RankPlan
    transport: Transport

    def rounds(self) -> Iterator[tuple[Round, Tensor, Tensor]]:
        """Each round with its keys and values; those of the next round travel until it is asked for."""
        k, v = self.k, self.v
        for i, round in enumerate(self.plan.rounds):
            last = i + 1 == len(self.plan.rounds)
            if not last:
                arriving, keys = self._fetch(i + 1)
            yield round, k, v
            if not last:
                arriving.wait()
                k, v = keys.k, keys.v

    def _fetch(self, i: int) -> tuple[Exchange, _Message]:
        """Starts the key exchange of round i."""
        round = self.plan.rounds[i]
        sent, received = self.message(round.num_sent, self.k.dtype), self.message(round.num_keys, self.k.dtype)
        ops.shard_seq_(self.k, round.send_runs, 1, sent.k)
        ops.shard_seq_(self.v, round.send_runs, 1, sent.v)
        exchange = self.transport.start({round.query_rank: sent.flat}, {round.key_rank: received.flat}, f"round {i}")
        return exchange, received

    def give_back(self, i: int, partial: _Message) -> _Returning:
        """Starts the way home of round i's partial gradients, and of those for the keys that were sent in round i."""
        round = self.plan.rounds[i]
        received = self.message(round.num_sent, partial.flat.dtype)
        exchange = self.transport.start(
            {round.key_rank: partial.flat}, {round.query_rank: received.flat}, f"the gradients of round {i}"
        )
        return _Returning(exchange, received, round.send_runs)

    def message(self, num_keys: int, dtype: torch.dtype) -> _Message:
        """A message of that many keys, not filled."""
        k_shape, v_shape = ((x.size(0), num_keys, x.size(2), x.size(3)) for x in (self.k, self.v))
        k_numel, v_numel = math.prod(k_shape), math.prod(v_shape)
        flat = self.k.new_empty(k_numel + v_numel, dtype=dtype)
        return _Message(flat, flat[:k_numel].view(k_shape), flat[k_numel:].view(v_shape))


@dataclass(frozen=True)
class _Returning:
    """Partial gradients of local keys, on their way from the rank whose queries used the keys."""

    exchange: Exchange
    partial: _Message
    runs: Tensor  # int64 CPU (R, 4): row of the local k, 1, row of the message, length

    def add_to(self, dk: Tensor, dv: Tensor) -> None:
        self.exchange.wait()
        for row, _, packed, length in self.runs.tolist():
            dk[:, row : row + length] += self.partial.k[:, packed : packed + length]
            dv[:, row : row + length] += self.partial.v[:, packed : packed + length]


def _check(
    transport: Transport,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begin: Tensor,
    end: Tensor,
    layout: Tensor,
    scale: float,
    softcap: float,
) -> RankPlan:
    """The rounds of this rank. Raises InputError where its own arguments do not fit each other or the group."""
    ops.check_attention(q, k, v, scale, softcap)
    transport.check_device(q.device)
    world_size = int(layout[-1, 0]) + 1
    if world_size != transport.world_size:
        raise InputError(f"the layout is for {world_size} ranks, the group has {transport.world_size}; must agree")
    plan = rounds_of(begin, end, layout, transport.rank)
    if q.size(1) != plan.local_len or k.size(1) != plan.local_len:
        raise InputError(
            f"q has {q.size(1)} tokens, k and v have {k.size(1)}; the layout gives rank {transport.rank} "
            f"{plan.local_len} of {plan.seq_len} tokens"
        )
    if begin.size(0) not in (1, q.size(0)):
        raise InputError(f"the mask has {begin.size(0)} rows, the batch {q.size(0)}; expected as many, or 1")
    return plan


@contextlib.contextmanager
def _open_ring(
    direction: Literal["forward", "backward"],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begin: Tensor,
    end: Tensor,
    layout: Tensor,
    scale: float,
    softcap: float,
    group_name: str,
    block_kernel: str = "ringtile",
) -> Iterator[_Ring]:
    """Checks the arguments of this rank, then agrees with the others on all that must be the same."""
    op = f"ring_attention {direction}"
    transport = transport_of(group_name)
    try:
        plan = _check(transport, q, k, v, begin, end, layout, scale, softcap)
        block.check(block_kernel, plan, q, k, v, softcap)
    except RingtileError as error:
        transport.refuse(op, error)
        raise
    fields: dict[str, HeaderValue] = {}
    if transport.world_size > 1:
        fields = {
            "batch": q.size(0),
            "seq_len": plan.seq_len,
            "num_heads": q.size(2),
            "num_kv_heads": k.size(2),
            "head_dim": q.size(3),
            "v_head_dim": v.size(3),
            "dtype": str(q.dtype),
            "scale": scale,
            "softcap": softcap,
            "layout digest": ops.digest(layout, layout[:0], layout[:0]),
            "mask digest": plan.digest,  # of the layout too, but that is compared first
        }
    with transport.call(op, fields, q.device):
        yield _Ring(k, v, plan, transport)


# ---- the ops ------------------------------------------------------------------------------------


@torch.library.custom_op("ringtile::ring_attention", mutates_args=())
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
    block_kernel: str = "ringtile",
) -> tuple[Tensor, Tensor]:
    with _open_ring("forward", q, k, v, begin, end, layout, scale, softcap, group_name, block_kernel) as ring:
        out, lse = _empty_outputs(q, v, ops.state_dtype(q.dtype))
        for i, (_, round_k, round_v) in enumerate(ring.rounds()):
            block.attn_fwd_(block_kernel, ring.plan, i, q, round_k, round_v, out, lse, scale, softcap)
    return out.to(q.dtype), lse


@torch.library.custom_op("ringtile::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    dout: Tensor,
    dlse: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    with _open_ring("backward", q, k, v, begin, end, layout, scale, softcap, group_name) as ring:
        begin, end = ring.plan.mask_on(q.device)
        state = ops.state_dtype(q.dtype)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        delta = ops.attn_delta(dout, out, dlse.contiguous())
        dq = q.new_zeros(q.shape, dtype=state)
        fresh = ring.plan.rounds[0].num_keys == k.size(1)  # round 0 writes all of dk and dv
        dk, dv = ((x.new_empty if fresh else x.new_zeros)(x.shape, dtype=state) for x in (k, v))
        returning: _Returning | None = None
        for i, (round, round_k, round_v) in enumerate(ring.rounds()):
            if i == 0:
                round_dk, round_dv = dk, dv
            else:
                partial = ring.message(round.num_keys, state)
                round_dk, round_dv, fresh = partial.k, partial.v, True
            ops.attn_bwd_(
                q,
                round_k,
                round_v,
                begin,
                end,
                round.k_runs,
                dout,
                lse,
                delta,
                dq,
                round_dk,
                round_dv,
                scale,
                softcap,
                fresh,
            )
            if returning is not None:
                returning.add_to(dk, dv)
            if i > 0:
                returning = ring.give_back(i, partial)
        if returning is not None:
            returning.add_to(dk, dv)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _empty_outputs(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out (B, N, H, Dv) of dtype; lse (B, H, N) in float64, of which float32 would lose a few ulp of every weight."""
    batch, num_queries, num_heads, _ = q.shape
    return (
        q.new_empty((batch, num_queries, num_heads, v.size(3)), dtype=dtype),
        q.new_empty((batch, num_heads, num_queries), dtype=torch.float64),
    )


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
    block_kernel: str = "ringtile",
) -> tuple[Tensor, Tensor]:
    ops.check_attention(q, k, v, scale, softcap)
    return _empty_outputs(q, v, q.dtype)


@_ring_attention_backward.register_fake
def _(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Tensor | float | str
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_Inputs: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, float, str, str]"


def _setup_context(ctx: FunctionCtx, inputs: _Inputs, output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, softcap, group_name, _ = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.numbers = (scale, softcap, group_name)  # type: ignore[attr-defined]


def _backward(ctx: FunctionCtx, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = _ring_attention_backward(dout, dlse, *ctx.saved_tensors, *ctx.numbers)  # type: ignore[attr-defined]
    return dq, dk, dv, None, None, None, None, None, None, None


_ring_attention.register_autograd(_backward, setup_context=_setup_context)
