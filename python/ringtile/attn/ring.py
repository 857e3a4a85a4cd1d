"""One rank's part of attention, forward and backward, by any plan: the ring and every other scheme.

In each round a rank merges a block of keys into the running state of the queries that it works on, while the keys of
the next round travel. In the backward the keys travel again, and the partial dk, dv of a round travel straight back to
their owners while the next round computes; owners add them in the order of rounds, then ranks. Where ranks share heads,
queries travel to the ranks that work on them, and their results back. Running outputs and all gradients stay in float32
(float64 for float64 inputs) until the last round, and the running log-sum-exp in float64.

Shape letters: B batch, N local tokens, Nq tokens of all ranks of a group, H query heads, G kv heads, D head dim,
Dv value head dim.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ringtile import arguments, ops
from ringtile.attn import choose
from ringtile.attn.backend import Final
from ringtile.attn.choose import AttentionCall
from ringtile.attn.exchange import ReturningKeys, ReturningQueries, Work, of_heads
from ringtile.errors import InputError
from ringtile.sequence.price import Shape
from ringtile.transport.agreement import HeaderValue


def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, N, H, D), k (B, N, G, D), v (B, N, G, Dv) -> out (B, N, H, Dv) of q's dtype, lse (B, H, N) in float64."""
    state = ops.state_dtype(q.dtype)
    with _open("forward", call, q, k, v) as (call, work):
        is_whole = work.plan.is_whole
        returning: ReturningQueries | None = None
        if not is_whole:
            out, lse = empty_outputs(q, v, q.dtype)
        for block in work.blocks(q):
            if block.i == 0:
                (queries,) = block.queries
                pieces = [(piece, of_heads(queries, piece.heads)) for piece in block.share.pieces]
                states = [empty_outputs(of_piece, v, state) for _, of_piece in pieces]
                if call.sinks is not None:  # as if a block of one key with that score and value 0 had come before
                    sinks = of_heads(call.sinks[None, :, None], block.share.heads)
                    for (piece, _), (out_state, lse_state) in zip(pieces, states, strict=True):
                        out_state.zero_()
                        lse_state.copy_(of_heads(sinks, piece.heads))
            rounds = block.is_last and state != q.dtype
            rounded = [torch.empty_like(running, dtype=q.dtype) if rounds else None for running, _ in states]
            for (piece, of_piece), running, result in zip(pieces, states, rounded, strict=True):
                choose.attn_fwd_(call, block.i, of_piece, *block.keys_of(piece), *running, result)
            if not block.is_last:
                continue
            results = [
                (out_state if result is None else result, lse_state)
                for (out_state, lse_state), result in zip(states, rounded, strict=True)
            ]
            if is_whole:
                return results[0]
            results = results or [empty_outputs(queries, v, q.dtype)]  # of no heads
            out_share, lse_share = (_joined(x, dim) for x, dim in zip(zip(*results, strict=True), (2, 1), strict=True))
            if returning is not None:
                returning.write_to(lse, out)
            returning = work.give_back_queries(block.stage, (lse_share, out_share))
        assert returning is not None
        returning.write_to(lse, out)
    return out, lse


def backward(
    call: AttentionCall, final: Final, q: Tensor, k: Tensor, v: Tensor, forward_call: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """What `forward` took and gave, and the gradients of what it gave -> dq, dk, dv of the inputs' dtype.

    forward_call: the number of the forward's call on the group, which must be the same on all ranks; 0: not known.
    """
    state = ops.state_dtype(q.dtype)
    with _open("backward", call, q, k, v, forward_call, final.dlse) as (call, work):
        is_whole, first = work.plan.is_whole, work.plan.rounds[0]
        fresh = is_whole and first.in_place and first.num_keys == k.size(1)  # round 0 writes all of dk and dv
        dk, dv = ((x.new_empty if fresh else x.new_zeros)(x.shape, dtype=state) for x in (k, v))
        rounded: tuple[Tensor, Tensor] | None = None
        if fresh and len(work.plan.busy_rounds) == 1 and state != k.dtype:
            rounded = k.new_empty(k.shape), v.new_empty(v.shape)
        if not is_whole:
            dq = torch.empty_like(q)
        returning: ReturningKeys | None = None
        returning_queries: ReturningQueries | None = None
        for block in work.blocks(*((q,) if is_whole else (final.lse, final.delta, q, final.dout))):
            if block.i == 0:
                queries = block.queries[0] if is_whole else block.queries[2]
                dq_share = queries.new_zeros(queries.shape, dtype=state)
                pieces = [
                    (
                        piece,
                        of_heads(queries, piece.heads),
                        final if is_whole else _final(*(of_heads(x, piece.heads) for x in block.queries)),
                        of_heads(dq_share, piece.heads),
                    )
                    for piece in block.share.pieces
                ]
            own = block.share.kv_heads
            partial = None if block.round.in_place else work.keys(block.round.num_keys, own, state)
            block_dk, block_dv = (of_heads(dk, own), of_heads(dv, own)) if partial is None else partial.parts
            for piece, of_piece, final_of_piece, dq_of_piece in pieces:
                gradients = dq_of_piece, of_heads(block_dk, piece.kv_heads), of_heads(block_dv, piece.kv_heads)
                keys, is_fresh = block.keys_of(piece), fresh or partial is not None
                choose.attn_bwd_(call, block.i, of_piece, *keys, final_of_piece, *gradients, is_fresh, rounded)
            if returning is not None:
                returning.add_to(dk, dv)
            returning = None if partial is None else work.give_back(block, partial)
            if block.is_last and not is_whole:
                if returning_queries is not None:
                    returning_queries.write_to(dq)
                returning_queries = work.give_back_queries(block.stage, (dq_share.to(q.dtype),))
        if returning is not None:
            returning.add_to(dk, dv)
        if returning_queries is not None:
            returning_queries.write_to(dq)
        else:
            dq = dq_share.to(q.dtype)
    return dq, *(rounded or (dk.to(k.dtype), dv.to(v.dtype)))


def _final(lse: Tensor, delta: Tensor, q: Tensor, dout: Tensor) -> Final:
    """Of queries of several ranks, as they traveled."""
    return Final.of_delta(dout, lse.contiguous(), delta.contiguous())


def _joined(pieces: tuple[Tensor, ...], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


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
) -> Iterator[tuple[AttentionCall, Work]]:
    """Checks the arguments of this rank, then agrees with the others on all that must be the same.

    The call that it gives has a scheme that is not open.
    """
    transport = call.sequence.transport
    op = f"ring_attention {direction}"
    with transport.propagate_errors(op):
        if direction == "forward":  # whose arguments the backward has too
            _check(call, q, k, v)
        sequence = call.sequence
        if not sequence.is_settled:
            whole = call.attention_kernel == "aten" or call.dropout is not None
            sequence = sequence.settled(Shape.of(q, k, v), q.device.type, whole=whole)
            call = replace(call, sequence=sequence)
        choose.check(call, q, k, v, dlse)
        work = Work.of(q, k, v, sequence.plan, transport)
        layout_digest, mask_digest = sequence.digests if transport.world_size > 1 else (0, 0)
    if transport.world_size == 1:
        yield call, work
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
        "scheme": sequence.scheme,
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
    with transport.agree(op, fields, q.device, forward_call=forward_call, data=data, step=step):
        yield call, work


def _check(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> None:
    """InputError where the arguments of this rank do not fit each other or the sequence."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        arguments.check_storage(name, x)
    ops.check_attention(q, k, v, call.scale, call.softcap)
    sequence = call.sequence
    if q.device.type == "meta" and sequence.world_size > 1:
        raise InputError("q, k and v are on meta, which holds no data for the other ranks; expected a real device")
    sequence.check_unchanged()
    sequence.transport.check_device(q.device)
    if q.size(1) != sequence.local_len or k.size(1) != sequence.local_len:
        raise InputError(
            f"q has {q.size(1)} tokens, k and v have {k.size(1)}; the layout gives rank {sequence.rank} "
            f"{sequence.local_len} of {sequence.seq_len} tokens"
        )
    if sequence.begin.size(0) not in (1, q.size(0)):
        raise InputError(
            f"the mask has {sequence.begin.size(0)} rows, the batch {q.size(0)}; expected the same number, or 1"
        )
