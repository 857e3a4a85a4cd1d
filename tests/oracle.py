"""Attention from its definition, in float64, over the whole sequence: knows nothing of ranks, rounds or tiles.

Shape letters: B batch, S tokens, H query heads, G kv heads, D head dim, Dv value head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, attend, scale, softcap, factors=factors)
    outputs, cotangents = [out], [dout.double()]
    if dlse is not None:
        outputs.append(lse)
        cotangents.append(dlse.double())
    return Attention(out.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, cotangents))
