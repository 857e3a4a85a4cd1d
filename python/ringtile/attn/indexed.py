"""Attention over chosen keys (learned sparse attention), and the choice, over a sequence sharded over a group.

An indexer scores every key for every query, and each query attends the keys of the highest scores: DeepSeek sparse
attention (DSA), arXiv:2512.02556. Indices are positions in the whole sequence. No array here is S x S: scores exist for
a few queries at a time, and of each query nothing stays but its indices.

Shape letters: B batch, S global tokens, N local tokens, H query heads (or those of the indexer), G kv heads, D head
dim, Dv value head dim, I indices of a query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringtile import arguments, derivatives, ops, torch_ops
from ringtile.attn.call import check_options, check_tensors
from ringtile.errors import InputError
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.collectives import all_gather_seq, unshard_op

_KEYS_AT_ONCE = 8192  # that are scored for a few queries
_LAST = 0x7FFFFFFF  # above every position


def indexed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    sequence: ShardedSequence,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of each query over the keys that its indices name, and no others; the mask is not asked.

    - q (B, N, H, D), k (B, N, G, D), v (B, N, G, Dv): the local tokens, as in `ring_attention`.
    - indices int32 (B, N, I): positions in the sequence, as `choose_keys` returns them. One outside of it, such as -1,
      is no key; one that comes twice is two keys.
    - scale, sinks (H): as in `ring_attention`.

    The keys and values of all ranks are gathered, in the forward and again in the backward; between the two each rank
    keeps those of its own tokens. Every rank of the group makes the same calls. Differentiable once.

    Returns out (B, N, H, Dv) of q's dtype, 0 for a query without a key. Raises InputError, RingMismatchError,
    PeerLostError.
    """
    op = "indexed_attention"
    with sequence.transport.propagate_errors(op):
        scale, _ = check_options(q, k, v, scale, 0.0, sinks, None, "auto")
        check_tensors(q, k, v, scale, 0.0, sinks)
        sequence.check_call("q", q)
        arguments.check_tensor("indices", indices)
        arguments.check_devices("q", q, indices=indices)
        expected = (q.size(0), sequence.local_len)
        if q.shape[:2] != expected or k.shape[:2] != expected:
            raise InputError(f"q is {tuple(q.shape)} and k {tuple(k.shape)}; expected {expected} rows and local tokens")
        if indices.dtype != torch.int32 or indices.dim() != 3 or indices.shape[:2] != expected:
            raise InputError(
                f"indices are {indices.dtype} {tuple(indices.shape)}; expected int32 ({expected[0]}, {expected[1]}, I)"
            )
    out, lse = _IndexedAttention.apply(q, k, v, indices.contiguous(), scale, sequence)  # type: ignore[no-untyped-call]
    if sinks is not None:  # one more key of each head, with value 0
        share = torch.sigmoid(lse - sinks.double()[:, None]).transpose(1, 2)[..., None]
        out = (out * share.to(ops.state_dtype(out.dtype))).to(out.dtype)
    return out  # type: ignore[no-any-return]


class _IndexedAttention(torch.autograd.Function):
    """Returns out and lse (B, H, N), in float64."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float, sequence: ShardedSequence
    ) -> tuple[Tensor, Tensor]:
        q = q.contiguous()
        out, lse = ops.indexed_attn(q, *_gathered(sequence, k, v), indices, scale)
        ctx.save_for_backward(q, k, v, indices, out, lse)
        ctx.scale, ctx.sequence = scale, sequence
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, indices, out, lse = saved = ctx.saved_tensors
        sequence: ShardedSequence = ctx.sequence

        def compute() -> tuple[Tensor, ...]:
            given = q, *_gathered(sequence, k, v), indices, ctx.scale
            dq, dk, dv = ops.indexed_attn_backward(dout.contiguous(), dlse.contiguous(), out, lse, *given)
            return dq, *(_own(sequence, grad).to(x.dtype) for grad, x in ((dk, k), (dv, v)))

        errors = sequence.transport.propagate_errors
        grads = derivatives.gradients("indexed_attention", compute, dout, dlse, *saved, propagate_errors=errors)
        return *grads, None, None, None


def _gathered(sequence: ShardedSequence, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(B, N, G, D) of each rank -> (B, S, G, D) in global order, the keys of a head together. A collective."""
    args = sequence.layout_tensor, 2, sequence.seq_len, sequence.group_name
    k, v = (all_gather_seq(x.detach().transpose(1, 2), *args).transpose(1, 2) for x in (k, v))
    return k, v


def _own(sequence: ShardedSequence, grad: Tensor) -> Tensor:
    """(B, S, G, D), a part of the sum of each rank -> (B, N, G, D), summed in rank order. A collective."""
    args = sequence.layout_tensor, 2, sequence.local_len, True, sequence.group_name
    total: Tensor = unshard_op(grad.transpose(1, 2), *args)
    return total.transpose(1, 2)


@torch.no_grad()
def choose_keys(
    q: Tensor, k: Tensor, weights: Tensor, sequence: ShardedSequence, num_keys: int, scale: float = 1.0
) -> Tensor:
    """Choose for each query, of the keys that the mask lets it attend, those of the highest scores.

    The score of a key is the sum over heads of weights * relu(scale * q . k), in float32. Of equal scores, the key that
    comes first is chosen, as in a stable descending sort: ranks, layout and packing do not change the choice.

    q (B, N, H, D), k (B, N, D), weights (B, N, H): the indexer's, of the local tokens; k of all ranks is gathered. The
    mask of the sequence has one side. Returns int32 (B, N, I) with I = min(num_keys, S): positions in the sequence,
    ascending, then -1 where the query attends fewer keys. A collective; no gradients.
    """
    (B, N, H, _), S = q.shape, sequence.seq_len
    with sequence.transport.propagate_errors("choose_keys"):
        sequence.check_call("q", q)
        if sequence.mask.key_begin is not None:
            raise InputError("the mask has two sides, as a tree's has; expected one interval of keys for each query")
    whole = sequence.unshard(k, dim=1)
    bounds = [sequence.shard(x, dim=-1).expand(B, N) for x in (sequence.begin, sequence.end)]  # on the host
    chosen = torch.full((B, N, min(num_keys, S)), -1, dtype=torch.int32, device=q.device)
    num_queries = max(1, 4 * torch_ops.BLOCK_NUMBERS // (H * min(S, _KEYS_AT_ONCE)))
    for b in range(B):
        for first in range(0, N, num_queries):
            rows = slice(first, first + num_queries)
            begin, end = (x[b, rows] for x in bounds)
            found = (begin, end, q[b, rows], whole[b], weights[b, rows], scale)
            chosen[b, rows] = _highest(*found, chosen.size(2))
    return chosen


def _highest(begin: Tensor, end: Tensor, q: Tensor, k: Tensor, weights: Tensor, scale: float, count: int) -> Tensor:
    """int32 (n, count) of n queries. begin, end (n), on the host; q (n, H, D), k (S, D), weights (n, H)."""
    device = q.device
    low, high, longest = int(begin.min()), int(end.max()), int((end - begin).max())
    begin, end = (x.to(device)[:, None] for x in (begin, end))
    if longest <= count:  # all are chosen, whatever their scores
        places = begin + torch.arange(count, dtype=torch.int32, device=device)
        return places.masked_fill_(places >= end, -1)
    least = torch.iinfo(torch.int64).min
    best = torch.empty((q.size(0), 0), dtype=torch.int64, device=device)
    heads = q.float().flatten(0, 1)
    for first in range(low, high, _KEYS_AT_ONCE):
        places = torch.arange(first, min(first + _KEYS_AT_ONCE, high), device=device)
        scores = (heads @ k[first : first + places.numel()].float().T).view(*q.shape[:2], -1).mul_(scale).relu_()
        # Under autocast the products are of 16 bits, as the indexer's own. -0.0 equals 0.0.
        totals = (weights.float()[:, None] @ scores).squeeze(1).float() + 0.0
        # One int64 sorts by score, then the first place first: bits of a float rise as it does, or fall below 0.
        bits = totals.view(torch.int32)
        ranked = ((bits ^ (bits >> 31 & _LAST)).long() << 32) + (_LAST - places)
        ranked.masked_fill_((places < begin) | (places >= end), least)
        best = torch.cat([best, ranked], dim=1)
        best = best.topk(min(count, best.size(1)), dim=1).values
    found = torch.where(best == least, _LAST, _LAST - (best & 0xFFFFFFFF)).int().sort(dim=1).values
    return torch.nn.functional.pad(found.masked_fill_(found == _LAST, -1), (0, count - found.size(1)), value=-1)
