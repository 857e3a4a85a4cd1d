"""One rank's part of the ring, forward and backward.

In round i, rank r works on the keys of rank (r - i) mod W while the keys of round i + 1 travel. Keys travel straight
from their owner, and only those that some local query attends. In the backward the keys travel again, and the partial
dk, dv of round i travel straight back to the owner while round i + 1 computes; the owner adds them in round order.
Running outputs and all gradients stay in float32 (float64 for float64 inputs) until the last round, and the running
log-sum-exp in float64.

Shape letters: B batch, N local tokens, H query heads, G kv heads, D head dim, Dv value head dim, W ranks, R runs,
n keys of one message.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ringtile import arguments, ops
from ringtile.errors import InputError
from ringtile.ring import block_kernel
from ringtile.ring.block_kernel import AttentionCall
from ringtile.ring.provider import Final
from ringtile.sequence.plan import RankPlan, Round
from ringtile.transport.agreement import HeaderValue
from ringtile.transport.transport import Exchange, Transport


def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, N, H, D), k (B, N, G, D), v (B, N, G, Dv) -> out (B, N, H, Dv) of q's dtype, lse (B, H, N) in float64."""
    with _open("forward", call, q, k, v) as ring:
        out, lse = empty_outputs(q, v, ops.state_dtype(q.dtype))
        if call.sinks is not None:  # as if a block of one key with that score and value 0 had come before
            out.zero_()
            lse.copy_(call.sinks[:, None])
        for i, (_, round_k, round_v) in enumerate(ring.rounds()):
            block_kernel.attn_fwd_(call, i, q, round_k, round_v, out, lse)
    return out.to(q.dtype), lse


def backward(
    call: AttentionCall, final: Final, q: Tensor, k: Tensor, v: Tensor, forward_call: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """What `forward` took and gave, and the gradients of what it gave -> dq, dk, dv of the inputs' dtype.

    forward_call: the number of the forward's call on the group, which must be the same on all ranks; 0: not known.
    """
    with _open("backward", call, q, k, v, forward_call, final.dlse) as ring:
        state = ops.state_dtype(q.dtype)
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
            block_kernel.attn_bwd_(call, i, q, round_k, round_v, final, dq, round_dk, round_dv, fresh)
            if returning is not None:
                returning.add_to(dk, dv)
            if i > 0:
                returning = ring.give_back(i, partial)
        if returning is not None:
            returning.add_to(dk, dv)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def sink_gradient(sinks: Tensor, final: Final) -> Tensor:
    """The gradient of sinks (H) by this rank's queries, in their dtype.

    A sink is a key with the same score for every query of its head and value 0, so that dscore = P (0 - delta).
    """
    delta = final.delta
    weights = (sinks.to(delta.dtype)[:, None] - final.lse).exp()
    unseen = sinks == -torch.inf  # a weight of 0, also where no key was attended and lse is -inf too
    return -(weights.masked_fill(unseen[:, None], 0) * delta).sum((0, 2)).to(sinks.dtype)


def empty_outputs(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out (B, N, H, Dv) of dtype; lse (B, H, N) in float64, because float32 would lose a few ulp of every weight."""
    batch, num_queries, num_heads, _ = q.shape
    return (
        q.new_empty((batch, num_queries, num_heads, v.size(3)), dtype=dtype),
        q.new_empty((batch, num_heads, num_queries), dtype=torch.float64),
    )


# ---- messages -----------------------------------------------------------------------------------


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
        """Each round with its keys and values; the keys of the next round travel until it is asked for."""
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
        """A message of that many keys, uninitialized."""
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


# ---- before the first round ---------------------------------------------------------------------


@contextlib.contextmanager
def _open(
    direction: Literal["forward", "backward"],
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward_call: int = 0,
    dlse: Tensor | None = None,
) -> Iterator[_Ring]:
    """Checks the arguments of this rank, then agrees with the others on all that must be the same."""
    sequence = call.sequence
    transport = sequence.transport
    op = f"ring_attention {direction}"
    with transport.telling(op):
        if direction == "forward":  # whose arguments the backward has too
            _check(call, q, k, v)
        block_kernel.check(call, q, k, v, dlse)
        ring = _Ring(k, v, sequence.plan, transport)
        layout_digest, mask_digest = sequence.digests if transport.world_size > 1 else (0, 0)
    if transport.world_size == 1:
        yield ring
        return
    fields: dict[str, HeaderValue] = {
        "batch": q.size(0),
        "seq_len": sequence.seq_len,
        "num_heads": q.size(2),
        "num_kv_heads": k.size(2),
        "head_dim": q.size(3),
        "v_head_dim": v.size(3),
        "dtype": str(q.dtype),
        "scale": call.scale,
        "softcap": call.softcap,
        "layout digest": layout_digest,
        "mask digest": mask_digest,  # of the layout too, but that is compared first
    }
    if call.sinks is not None:
        fields["sinks"] = call.sinks.size(0)
    step, data = 0, sequence.data_of(q, k, v) if direction == "forward" else 0
    if (drop := call.dropout) is not None:
        fields |= {"dropout": drop.probability, "dropout seed": drop.seed, "dropout stream": drop.stream}
        step = drop.step  # not among the terms, which would be new in every step
        if drop.rows.is_cpu:
            data = zlib.crc32(str(drop.rows.tolist()).encode(), data)
    with transport.call(op, fields, q.device, forward_call=forward_call, data=data, step=step):
        yield ring


def _check(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> None:
    """InputError where the arguments of this rank do not fit each other or the sequence."""
    ops.check_attention(q, k, v, call.scale, call.softcap)
    for name, x in (("q", q), ("k", k), ("v", v)):
        arguments.check_storage(name, x)
    sequence = call.sequence
    if q.device.type == "meta" and sequence.world_size > 1:
        raise InputError("q, k and v are on meta, which holds no data for the other ranks; expected a real device")
    sequence.check_unchanged()
    sequence.transport.check_device(q.device)
    plan = sequence.plan
    if q.size(1) != plan.local_len or k.size(1) != plan.local_len:
        raise InputError(
            f"q has {q.size(1)} tokens, k and v have {k.size(1)}; the layout gives rank {plan.rank} "
            f"{plan.local_len} of {plan.seq_len} tokens"
        )
    if plan.begin.size(0) not in (1, q.size(0)):
        raise InputError(
            f"the mask has {plan.begin.size(0)} rows, the batch {q.size(0)}; expected the same number, or 1"
        )
