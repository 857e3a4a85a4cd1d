"""Attention by any scheme: the ring, and, where ranks share heads, all-to-alls around it (arXiv:2309.14509).

    out = to_tokens(ring(*to_heads(q, k, v)))

A rank of a group that shares heads gets all tokens of its group for its share of the heads; the ring is then one of
groups, over the ranks with the same share.

Shape letters: B batch, N local tokens, Nq tokens of all ranks of a group, H query heads, G kv heads, D head dim,
Dv value head dim, h and g heads of a share.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ringtile.attn import choose, ring
from ringtile.attn.backend import Final
from ringtile.attn.call import Call
from ringtile.scheme import Share
from ringtile.sequence.heads import HeadGroup
from ringtile.transport.transport import ALONE, Transport


class Saved(NamedTuple):
    """What a backward takes of a forward: inputs and results of the ring, of all local heads or this rank's share."""

    q: Tensor  # (B, Nq, h, D)
    k: Tensor  # (B, Nq, g, D), or, in a ring alone, latents
    v: Tensor  # (B, Nq, g, Dv), or latents
    out: Tensor  # (B, Nq, h, Dv)
    lse: Tensor  # (B, h, Nq) float64
    number: int = 0  # of the forward's call on the group; 0: not known
    is_local: bool = False  # of the local tokens and all heads, though ranks share heads: what these hold was not kept


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
    """q (B, N, H, D), k (B, N, G, D), v (B, N, G, Dv) -> out (B, N, H, Dv) of q's dtype, lse (B, H, N) in float64.

    And what the backward takes. lse is empty where ranks share heads and the call returns none. The call was checked,
    and the sequence's scheme is resolved.
    """
    with agreed("forward", call, q) as number:
        if call.plan.heads is None:
            out, lse = ring.forward(call, q, k, v)
            return out, lse, Saved(q, k, v, out, lse, number)
        heads = _Heads.of(call)
        out, lse = ring.empty_outputs(q, v.size(3), q.dtype)
        q, k, v = heads.of_all_tokens((q,), (k, v))
        if heads.own.heads:
            of_share = ring.forward(call.of_heads(heads.own.heads), q, *_repeated(heads.own, k, v))
        else:
            of_share = ring.empty_outputs(q, v.size(3), q.dtype)
        saved = Saved(q, k, v, *of_share, number)
        if call.options.returns_lse:
            heads.to_tokens((saved.out, saved.lse.mT), into=(out, lse.mT))
            return out, lse, saved
        heads.to_tokens((saved.out,), into=(out,))
    return out, lse.new_empty(0), saved


def backward(
    call: Call, saved: Saved, dout: Tensor | None, dlse: Tensor | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dq, dk, dv and dsinks from the gradients of what `forward` gave: None where nothing depends on it.

    sinks: if their gradient is wanted, which is that by the queries and heads that this rank works on.
    """
    shape = call.shape
    with agreed("backward", call, saved.q, saved.number, takes_dlse=dlse is not None):
        if call.plan.heads is None:
            final = Final.of(dout, dlse, saved.out, saved.lse)
            dq = ring.zeros(saved.q, dtype=call.state_dtype)
            of_keys = ring.backward(call, final, *saved[:3], dq)
            return dq.to(shape.dtype), *of_keys, None if sinks is None else ring.sink_gradient(sinks, final)
        heads = _Heads.of(call)
        if saved.is_local:
            q, out, lse, k, v = heads.of_all_tokens((saved.q, saved.out, saved.lse.mT), (saved.k, saved.v))
            saved = Saved(q, k, v, out, lse.mT.contiguous())
        num_heads, num_kv_heads, dim, v_dim = shape[1:5]

        def zeros(heads: int, *dims: int, dtype: torch.dtype) -> Tensor:
            return saved.q.new_zeros((shape.batch, call.local_len, heads, *dims), dtype=dtype)

        upstream = [zeros(num_heads, v_dim, dtype=shape.dtype) if dout is None else dout]
        if call.options.returns_lse:  # all ranks send its gradient or none does
            upstream.append(zeros(num_heads, dtype=torch.float64) if dlse is None else dlse.mT)
        # Where a kv head is in several shares, what they find is added before it is rounded.
        adds = sum(len(share.kv_heads) for share in heads.shares) > num_kv_heads
        dtype = call.state_dtype if adds else shape.dtype
        dk, dv = zeros(num_kv_heads, dim, dtype=dtype), zeros(num_kv_heads, v_dim, dtype=dtype)
        dq, dsinks = zeros(num_heads, dim, dtype=shape.dtype), None if sinks is None else torch.zeros_like(sinks)
        of_dout, *of_dlse = heads.of_all_tokens(upstream)
        of_q, of_share = saved.q, [saved.k.to(dtype), saved.v.to(dtype)]  # of no heads
        share = heads.own
        if share.heads:
            final = Final.of(of_dout, of_dlse[0].mT if of_dlse else None, saved.out, saved.lse)
            k, v = _repeated(share, saved.k, saved.v)
            of_q = ring.zeros(saved.q, dtype=call.state_dtype)
            of_heads = call.of_heads(share.heads)
            of_repeated = ring.backward(of_heads, final, saved.q, k, v, of_q, rounds_keys=not adds)
            of_share = _summed(share, *of_repeated)
            of_q = of_q.to(shape.dtype)
            if sinks is not None and dsinks is not None:
                own = slice(share.heads.start, share.heads.stop)
                dsinks[own] = ring.sink_gradient(sinks[own], final)
        heads.to_tokens((of_q,), of_share, into=(dq, dk, dv), adds=adds)
    return dq, dk.to(shape.dtype), dv.to(shape.dtype), dsinks


# ---- between tokens and heads -------------------------------------------------------------------


@dataclass(frozen=True)
class _Heads:
    """The way between a rank's own tokens of all heads, and all tokens of its group for its share of the heads."""

    group: HeadGroup
    transport: Transport
    shares: tuple[Share, ...]  # by rank of the group

    @classmethod
    def of(cls, call: Call) -> _Heads:
        assert call.plan.heads is not None
        return cls(call.plan.heads, call.transport, call.shares)

    @property
    def own(self) -> Share:
        return self.shares[self.group.place]

    def of_all_tokens(self, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor] = ()) -> list[Tensor]:
        """of_queries (B, N, H, ...), of_keys (B, N, G, ...) -> (B, Nq, h, ...), (B, Nq, g, ...)."""
        return self.group.to_heads(self.transport, self._by_rank(of_queries, of_keys), "the heads")

    def to_tokens(
        self,
        of_queries: Sequence[Tensor],
        of_keys: Sequence[Tensor] = (),
        *,
        into: Sequence[Tensor],
        adds: bool = False,
    ) -> None:
        """Write the other way, into tensors of the local tokens and all heads; or with adds, add keys to them."""
        there = self._by_rank(into[: len(of_queries)], into[len(of_queries) :])
        shares, added = [*of_queries, *of_keys], len(of_keys) if adds else 0
        self.group.to_tokens(self.transport, shares, there, "heads on their way back", added)

    def _by_rank(self, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> list[list[Tensor]]:
        """View, for each rank, the heads that it works on."""
        return [
            [x[:, :, share.heads.start : share.heads.stop] for x in of_queries]
            + [x[:, :, share.kv_heads.start : share.kv_heads.stop] for x in of_keys]
            for share in self.shares
        ]


def _repeated(share: Share, *keys: Tensor) -> Sequence[Tensor]:
    """Give each query head a kv head of its own, where they do not come out even."""
    if share.kv_of_heads is None:
        return keys
    return [torch.cat([x[:, :, head : head + 1] for head in share.kv_of_heads], 2) for x in keys]


def _summed(share: Share, *gradients: Tensor) -> list[Tensor]:
    """Add the gradients of repeated kv heads; the adjoint of `_repeated`."""
    if share.kv_of_heads is None:
        return [*gradients]
    sums = [x.new_zeros((*x.shape[:2], len(share.kv_heads), x.size(3))) for x in gradients]
    for total, x in zip(sums, gradients, strict=True):
        for i, head in enumerate(share.kv_of_heads):  # in order: index_add_ has none on a GPU
            total[:, :, head].add_(x[:, :, i])
    return sums


# ---- before anything is sent --------------------------------------------------------------------


def agreed(
    direction: Literal["forward", "backward"],
    call: Call,
    q: Tensor,
    forward_call: int = 0,
    takes_dlse: bool = False,
) -> AbstractContextManager[int]:
    """Agree with the other ranks, if there are any and this rank can compute, on all that must be the same.

    The context is the number of the call.
    """
    transport = call.transport
    if transport.world_size == 1:
        return ALONE
    choose.check(call, q, takes_dlse=takes_dlse, backward=direction == "backward")
    step = data = 0
    if (drop := call.options.dropout) is not None:
        step = drop.step  # not among the terms, which would be new in every step
        if drop.rows.is_cpu:
            data = zlib.crc32(str(drop.rows.tolist()).encode())
    terms = f"ring_attention {direction}", call.terms
    return transport.agree(*terms, q.device, forward_call=forward_call, data=data, step=step)
