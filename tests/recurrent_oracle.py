"""Recurrent layers token by token, one document at a time, in float64: the definition, with no ranks and no chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """x (B, N, C) of one document, weight (C, W)."""
    padded = functional.pad(x.mT, (weight.size(1) - 1, 0))
    y = functional.conv1d(padded, weight[:, None], bias, groups=weight.size(0)).mT
    return functional.silu(y) if activation else y


def delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float) -> Tensor:
    """As ringtile.gated_delta_rule, for one document."""
    repeats = v.size(2) // k.size(2)
    q, k = (x.repeat_interleave(repeats, 2) for x in (q, k))
    g = g if g.dim() == 4 else g[..., None]
    state, outs = v.new_zeros(v.size(0), v.size(2), k.size(3), v.size(3)), []
    for t in range(v.size(1)):
        state = g[:, t, :, :, None].exp() * state
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        outs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outs, 1)


def ssd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> Tensor:
    """As ringtile.ssd, for one document."""
    repeats = x.size(2) // B.size(2)
    B, C = (z.repeat_interleave(repeats, 2) for z in (B, C))
    state, ys = x.new_zeros(*x.shape[::2], x.size(3), B.size(3)), []
    for t in range(x.size(1)):
        state = (dt[:, t] * A).exp()[..., None, None] * state
        state = state + torch.einsum("bhv,bhs->bhvs", dt[:, t, :, None] * x[:, t], B[:, t])
        ys.append(torch.einsum("bhvs,bhs->bhv", state, C[:, t]))
    y = torch.stack(ys, 1)
    return y if D is None else y + D[:, None] * x


def of_documents(compute: object, rows: Sequence[Sequence[int]], padding: int, *tensors: Tensor | None) -> Tensor:
    """compute(row of each tensor with tokens) for each document of each row, joined; 0 for the padding after them.

    rows: the lengths of the documents of each row. tensors: (B, N, ...); compute gets (1, n, ...).
    """
    assert callable(compute)
    outs = []
    for row, lengths in enumerate(rows):
        begin, of_row = 0, []
        for length in lengths:
            given = [None if x is None else x[row : row + 1, begin : begin + length] for x in tensors]
            of_row.append(compute(*given))
            begin += length
        joined = torch.cat(of_row, dim=1)
        outs.append(functional.pad(joined, (0, 0) * (joined.dim() - 2) + (0, padding)))
    return torch.cat(outs)
