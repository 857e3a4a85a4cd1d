"""Attention from its definition, in float64, over the whole sequence: knows nothing of ranks, rounds or tiles.

Shape letters: B batch, S tokens, H query heads, G kv heads, D head dim, Dv value head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from ringtile import AttentionDropout
from torch import Tensor

WORD = 0xFFFFFFFF


class Attention(NamedTuple):
    """What attention computes, and its gradients for given dout (and dlse)."""

    out: Tensor  # (B, S, H, Dv)
    lse: Tensor  # (B, H, S)
    dq: Tensor
    dk: Tensor
    dv: Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, S, H, Dv), lse (B, H, S) in float64, for q (B, S, H, D), k (B, S, G, D), v (B, S, G, Dv).

    attend: bool (B or 1, S, S), [query, key]. A query that attends no key has out 0 and lse -inf, and so
    has one whose scores are all -inf. sinks (H): the score
    of one more key, which every query attends and whose value is 0. factors (B, H, S, S): of the weights, after the
    softmax.
    """
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * (q.size(3) ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    attend = attend[:, None]
    if sinks is not None:
        of_sinks = sinks.double()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, of_sinks], dim=-1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
        attend = torch.nn.functional.pad(attend, (0, 1), value=True)
    some = (attend & (scores != -torch.inf)).any(-1, keepdim=True)
    # Rows without keys, or with scores of -inf alone, go through the softmax with every score 0, and are dropped after.
    scores = scores.masked_fill(~attend & some, -torch.inf).masked_fill(~some, 0.0)
    weights = scores.softmax(-1)
    if factors is not None:
        weights = torch.cat([weights[..., : factors.size(3)] * factors, weights[..., factors.size(3) :]], dim=-1)
    out = (weights @ v).masked_fill(~some, 0.0)
    lse = scores.logsumexp(-1).masked_fill(~some[..., 0], -torch.inf)
    return out.transpose(1, 2), lse


def dense_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    factors: Tensor | None = None,
) -> Attention:
    """Forward and, by autograd in float64, backward; dlse (B, H, S) may be None for no gradient through lse."""
    return gradients_with_sinks(q, k, v, attend, dout, dlse, None, scale=scale, softcap=softcap, factors=factors)[0]


def gradients_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    sinks: Tensor | None,
    **options: Any,
) -> tuple[Attention, Tensor | None]:
    """`dense_gradients`, and the gradient of sinks (H); options: those of `dense_attention`."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    out, lse = dense_attention(*leaves[:3], attend, sinks=None if sinks is None else leaves[3], **options)
    outputs, cotangents = [out], [dout.double()]
    if dlse is not None:
        outputs.append(lse)
        cotangents.append(dlse.double())
    gradients = torch.autograd.grad(outputs, leaves, cotangents)
    return Attention(out.detach(), lse.detach(), *gradients[:3]), None if sinks is None else gradients[3]


def kept(drop: AttentionDropout, num_heads: int, seq_len: int) -> Tensor:
    """Whether each weight stays: bool (B, H, S, S). Philox4x32-10 in int64; 32 bits times 32 bits in two steps."""
    rows, heads = drop.rows.view(-1, 1, 1, 1), torch.arange(num_heads).view(-1, 1, 1)
    query, key = torch.arange(seq_len).view(-1, 1), torch.arange(seq_len)
    shape = (rows.size(0), num_heads, seq_len, seq_len)
    words = [(key // 4).expand(shape), query.expand(shape), (rows + heads * 2**20 & WORD).expand(shape)]
    words.append(torch.full(shape, drop.stream))
    keys = [drop.seed, drop.step]
    for _ in range(10):
        (high_0, low_0), (high_1, low_1) = (_product(words[0], 0xD2511F53), _product(words[2], 0xCD9E8D57))
        words = [high_1 ^ words[1] ^ keys[0], low_1, high_0 ^ words[3] ^ keys[1], low_0]
        keys = [(keys[0] + 0x9E3779B9) & WORD, (keys[1] + 0xBB67AE85) & WORD]
    chosen = torch.stack(words, dim=-1).gather(-1, (key % 4).expand(shape)[..., None])[..., 0]
    return chosen < round((1 - drop.probability) * 2**32)


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    lower, upper = (x & 0xFFFF) * factor, (x >> 16) * factor
    upper = upper + (lower >> 16)
    return upper >> 16, (upper & 0xFFFF) << 16 | lower & 0xFFFF
