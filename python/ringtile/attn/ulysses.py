"""Attention by any scheme: the ring, and, where ranks share heads, all-to-alls around it (arXiv:2309.14509).

    out = to_tokens(ring(*to_heads(q, k, v)))

A rank of a group that shares heads gets all tokens of its group for its share of the heads; the ring is then one of
groups, over the ranks with the same share. With stages, each is a slice of the heads, and the tensors of the next one
travel while this one is computed.

Shape letters: B batch, N local tokens, Nq tokens of all ranks of a group, H query heads, G kv heads, D head dim,
Dv value head dim, h and g heads of a share.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ringtile import ops
from ringtile.attn import choose, ring
from ringtile.attn.backend import Final
from ringtile.attn.call import AttentionCall
from ringtile.scheme import Share
from ringtile.sequence.heads import HeadGroup
from ringtile.sequence.plan import Shape
from ringtile.transport.agreement import HeaderValue


class Stage(NamedTuple):
    """What the ring took and gave, for its backward: of all local heads, or of the share of a stage."""

    q: Tensor  # (B, Nq, h, D)
    k: Tensor  # (B, Nq, g, D)
    v: Tensor  # (B, Nq, g, Dv)
    out: Tensor  # (B, Nq, h, Dv)
    lse: Tensor  # (B, h, Nq) float64


def forward(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, *, keep: bool = True
) -> tuple[Tensor, Tensor, list[Stage]]:
    """q (B, N, H, D), k (B, N, G, D), v (B, N, G, Dv) -> out (B, N, H, Dv) of q's dtype, lse (B, H, N) in float64.

    And what the backward takes, if it is to be kept. lse is empty where ranks share heads and the call returns none.
    The call was checked, and the sequence's scheme is resolved.
    """
    shape = Shape.of(q, k, v)
    with _agreed("forward", call, (q, k, v), shape):
        heads = call.sequence.ring.heads
        if heads is None:
            out, lse = ring.forward(call, q, k, v)
            return out, lse, [Stage(q, k, v, out, lse)]
        out, lse = ring.empty_outputs(q, v, q.dtype)
        lse = lse if call.returns_lse else lse.new_empty(0)
        shares = call.sequence.shares(shape.num_heads, shape.num_kv_heads)
        stages: list[Stage] = []
        finish: Callable[[], None] | None = None
        for of_stage, (share, (of_q, of_k, of_v)) in zip(
            shares, _to_heads(call, heads, shares, (q,), (k, v)), strict=True
        ):
            of_out, of_lse = ring.empty_outputs(of_q, of_v, q.dtype)
            if share.heads:
                of_out, of_lse = ring.forward(call.of_heads(share.heads), of_q, *_repeated(share, of_k, of_v))
            if finish is not None:
                finish()
            back, into = ([of_out, of_lse.mT], [out, lse.mT]) if call.returns_lse else ([of_out], [out])
            finish = _to_tokens(call, heads, of_stage, back, into)
            if keep:
                stages.append(Stage(of_q, of_k, of_v, of_out, of_lse))
        assert finish is not None
        finish()
    return out, lse, stages


def backward(
    call: AttentionCall,
    stages: Sequence[Stage] | Stage,
    shape: Shape,
    dout: Tensor | None,
    dlse: Tensor | None,
    sinks: Tensor | None = None,
    forward_call: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dq, dk, dv and dsinks from the gradients of what `forward` gave: None where nothing depends on it.

    stages: from `forward`; or one of the local tokens and all heads, where what the ranks share was not kept. shape: of
    the local tokens and all heads. sinks: if their gradient is wanted, which is that by the queries and heads that this
    rank works on. forward_call: the number of the forward's call
    on the group, which must be the same on all ranks; 0: not known.
    """
    first = stages if isinstance(stages, Stage) else stages[0]
    with _agreed("backward", call, first[:3], shape, forward_call, takes_dlse=dlse is not None):
        heads = call.sequence.ring.heads
        if heads is None:
            final = Final.of(dout, dlse, first.out, first.lse)
            gradients = ring.backward(call, final, *first[:3])
            return *gradients, None if sinks is None else ring.sink_gradient(sinks, final)
        shares = call.sequence.shares(shape.num_heads, shape.num_kv_heads)
        if isinstance(stages, Stage):
            stages = _shared_again(call, heads, shares, stages)
        num_heads, num_kv_heads, dim, v_dim = shape[1:5]

        def zeros(heads: int, *dims: int, dtype: torch.dtype) -> Tensor:
            return first.q.new_zeros((shape.batch, call.sequence.local_len, heads, *dims), dtype=dtype)

        of_queries = [zeros(num_heads, v_dim, dtype=shape.dtype) if dout is None else dout]
        if call.returns_lse:  # all ranks send its gradient or none does
            of_queries.append(zeros(num_heads, dtype=torch.float64) if dlse is None else dlse.mT)
        # Where a kv head is in several shares, what they find is added before it is rounded.
        adds = sum(len(share.kv_heads) for of_stage in shares for share in of_stage) > num_kv_heads
        dtype = ops.state_dtype(shape.dtype) if adds else shape.dtype
        dk, dv = zeros(num_kv_heads, dim, dtype=dtype), zeros(num_kv_heads, v_dim, dtype=dtype)
        dq, dsinks = zeros(num_heads, dim, dtype=shape.dtype), None if sinks is None else torch.zeros_like(sinks)
        finish: Callable[[], None] | None = None
        for stage, of_stage, (share, of_upstream) in zip(
            stages, shares, _to_heads(call, heads, shares, of_queries), strict=True
        ):
            back = [stage.q, stage.k.to(dtype), stage.v.to(dtype)]  # of no heads
            if share.heads:
                of_dlse = of_upstream[1].mT if call.returns_lse else None
                final, of_heads = Final.of(of_upstream[0], of_dlse, stage.out, stage.lse), call.of_heads(share.heads)
                keys = _repeated(share, stage.k, stage.v)
                of_q, *of_keys = ring.backward(of_heads, final, stage.q, *keys, rounds_keys=not adds)
                back = [of_q, *_summed(share, *of_keys)]
                if sinks is not None and dsinks is not None:
                    own = slice(share.heads.start, share.heads.stop)
                    dsinks[own] = ring.sink_gradient(sinks[own], final)
            if finish is not None:
                finish()
            finish = _to_tokens(call, heads, of_stage, back, (dq, dk, dv), adds=adds)
        assert finish is not None
        finish()
    return dq, dk.to(shape.dtype), dv.to(shape.dtype), dsinks


# ---- between tokens and heads -------------------------------------------------------------------


def _to_heads(
    call: AttentionCall,
    group: HeadGroup,
    shares: Sequence[Sequence[Share]],
    of_queries: Sequence[Tensor],
    of_keys: Sequence[Tensor] = (),
) -> Iterator[tuple[Share, list[Tensor]]]:
    """Give each stage's share and its tensors (B, Nq, h, ...), while those of the next one travel.

    of_queries (B, N, H, ...), of_keys (B, N, G, ...).
    """
    transport = call.sequence.transport

    def start(stage: int) -> Callable[[], list[Tensor]]:
        parts = [
            [_of(x, share.heads) for x in of_queries] + [_of(x, share.kv_heads) for x in of_keys]
            for share in shares[stage]
        ]
        return group.to_heads(transport, parts, f"the heads of stage {stage}")

    waits = [start(0)]
    for stage, of_ranks in enumerate(shares):
        tensors = waits.pop()()  # and nothing holds its messages
        if stage + 1 < len(shares):
            waits.append(start(stage + 1))
        yield of_ranks[group.place], tensors


def _to_tokens(
    call: AttentionCall,
    group: HeadGroup,
    shares: Sequence[Share],
    tensors: Sequence[Tensor],
    into: Sequence[Tensor],
    adds: bool = False,
) -> Callable[[], None]:
    """Start the way back of a share's tensors (B, Nq, h, ...): the first like q, and lse; two after it like k and v.

    Returns a function that waits, and writes them into the tensors of all heads, or with adds, adds keys.
    """
    num_like_q = 1 if len(tensors) == 3 else len(tensors)

    def heads_of(share: Share) -> list[range]:
        return [share.heads if i < num_like_q else share.kv_heads for i in range(len(tensors))]

    shapes = [
        [(*x.shape[:2], len(heads), *x.shape[3:]) for x, heads in zip(into, heads_of(share), strict=True)]
        for share in shares
    ]
    wait = group.to_tokens(call.sequence.transport, tensors, shapes, "heads on their way back")

    def finish() -> None:
        for share, parts in zip(shares, wait(), strict=True):
            for i, (x, heads, part) in enumerate(zip(into, heads_of(share), parts, strict=True)):
                if adds and i >= num_like_q:
                    _of(x, heads).add_(part)
                else:
                    _of(x, heads).copy_(part)

    return finish


def _shared_again(
    call: AttentionCall, group: HeadGroup, shares: Sequence[Sequence[Share]], local: Stage
) -> list[Stage]:
    q, k, v, out, lse = local
    return [
        Stage(of_q, of_k, of_v, of_out, of_lse.mT.contiguous())
        for _, (of_q, of_out, of_lse, of_k, of_v) in _to_heads(call, group, shares, (q, out, lse.mT), (k, v))
    ]


def _of(x: Tensor, heads: range) -> Tensor:
    """View some heads of (B, N, H, ...)."""
    return x[:, :, heads.start : heads.stop]


def _repeated(share: Share, *keys: Tensor) -> Sequence[Tensor]:
    """Give each query head a kv head of its own, where they do not come out even."""
    if share.kv_of_heads is None:
        return keys
    return [torch.cat([x[:, :, head : head + 1] for head in share.kv_of_heads], 2) for x in keys]


def _summed(share: Share, *gradients: Tensor) -> Sequence[Tensor]:
    """Add the gradients of repeated kv heads; the adjoint of `_repeated`."""
    if share.kv_of_heads is None:
        return gradients
    sums = [x.new_zeros((*x.shape[:2], len(share.kv_heads), x.size(3))) for x in gradients]
    for total, x in zip(sums, gradients, strict=True):
        for i, head in enumerate(share.kv_of_heads):  # in order: index_add_ has none on a GPU
            total[:, :, head].add_(x[:, :, i])
    return sums


# ---- before anything is sent --------------------------------------------------------------------


def _agreed(
    direction: Literal["forward", "backward"],
    call: AttentionCall,
    qkv: tuple[Tensor, Tensor, Tensor],
    shape: Shape,
    forward_call: int = 0,
    takes_dlse: bool = False,
) -> AbstractContextManager[None]:
    """Agree with the other ranks on all that must be the same, if there are others and this rank can compute.

    shape: of the local tokens.
    """
    sequence, transport = call.sequence, call.sequence.transport
    if transport.world_size == 1:
        return contextlib.nullcontext()
    op = f"ring_attention {direction}"
    with transport.propagate_errors(op):
        choose.check(call, *qkv, shape, takes_dlse)
        layout_digest, mask_digest = sequence.digests
    fields: dict[str, HeaderValue] = {
        "batch": shape.batch,
        "seq_len": sequence.seq_len,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "v_head_dim": shape.v_head_dim,
        "dtype": str(shape.dtype),
        "scale": call.scale,
        "softcap": call.softcap,
        "scheme": sequence.scheme,
        "layout digest": layout_digest,
        "mask digest": mask_digest,  # of the layout too, but that is compared first
    }
    if call.sinks is not None:
        fields["sinks"] = call.sinks.size(0)
    if sequence.ring.heads is not None:
        fields["return_lse"] = str(call.returns_lse)
    step = data = 0
    if (drop := call.dropout) is not None:
        fields |= {"dropout": drop.probability, "dropout seed": drop.seed, "dropout stream": drop.stream}
        step = drop.step  # not among the terms, which would be new in every step
        if drop.rows.is_cpu:
            data = zlib.crc32(str(drop.rows.tolist()).encode())
    return transport.agree(op, fields, qkv[0].device, forward_call=forward_call, data=data, step=step)
