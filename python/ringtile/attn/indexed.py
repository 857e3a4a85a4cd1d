"""The choice of keys (learned sparse attention) over a sequence sharded over a group: `indices` of ring_attention.

An indexer scores every key for every query, and each query attends the keys of the highest scores: DeepSeek sparse
attention (DSA), arXiv:2512.02556. Indices are positions in the whole sequence. No array here is S x S: scores exist for
a few queries at a time, and of each query nothing stays but its indices.

Shape letters: B batch, S global tokens, N local tokens, H heads of the indexer, D its head dim, I indices of a query.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor

from ringtile import torch_ops
from ringtile.errors import InputError
from ringtile.sequence.sharded import ShardedSequence

_KEYS_AT_ONCE = 8192  # that are scored for a few queries
_LAST = 0x7FFFFFFF  # above every position


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
    plan = sequence.with_all_heads().ring.plan
    bounds = [x.expand(B, N).tolist() for x in (plan.begin, plan.end)]  # on the host
    chosen = torch.full((B, N, min(num_keys, S)), -1, dtype=torch.int32, device=q.device)
    num_queries = max(1, 4 * torch_ops.BLOCK_NUMBERS // (H * min(S, _KEYS_AT_ONCE)))
    for b in range(B):
        for rows in tiles(N, num_queries):
            begin, end = (x[b][rows] for x in bounds)
            found = (begin, end, q[b, rows], whole[b], weights[b, rows], scale)
            chosen[b, rows] = _highest(*found, chosen.size(2))
    return chosen


def tiles(num_queries: int, at_once: int) -> Iterator[slice]:
    """Yield a few queries after the other. The planner leaves out those that are like others."""
    return (slice(first, min(num_queries, first + at_once)) for first in range(0, num_queries, at_once))


def _highest(
    begins: list[int], ends: list[int], q: Tensor, k: Tensor, weights: Tensor, scale: float, count: int
) -> Tensor:
    """int32 (n, count) of n queries. begins, ends (n); q (n, H, D), k (S, D), weights (n, H)."""
    device = q.device
    low, high, longest = min(begins), max(ends), max(map(operator.sub, ends, begins))
    begin, end = (torch.tensor(x, dtype=torch.int32, device=device)[:, None] for x in (begins, ends))
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
