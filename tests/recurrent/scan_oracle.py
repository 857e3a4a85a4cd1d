"""Recurrences and their convolution from their definitions, token by token in float64: an oracle.

Each is a function of torch operations, so that autograd gives its gradients. Shape letters as in
python/ringtile/recurrent/kernels.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rows_of(seq_idx: Tensor, batch: int) -> list[list[int]]:
    rows: list[list[int]] = seq_idx.expand(batch, -1).tolist()
    return rows


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    seq_idx: Tensor,
    state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out (B, N, H, V) and the final state (B, H, K, V); without beta v is added as it is."""
    _, _, num_heads, dim = v.shape
    repeats = num_heads // q.size(2)
    q, k = (x.double().repeat_interleave(repeats, dim=2) for x in (q, k))
    v, decay = v.double(), decay.double()
    decay = decay if decay.dim() == 4 else decay[..., None]
    outs, finals = [], []
    for b, row in enumerate(rows_of(seq_idx, v.size(0))):
        zero = torch.zeros(num_heads, k.size(3), dim, dtype=torch.float64)
        now = zero if state is None else state[b].double()
        out, document = [], 0
        for t, number in enumerate(row):
            if number < 0:
                out.append(torch.zeros(num_heads, dim, dtype=torch.float64))
                continue
            if number != document:
                now, document = zero, number
            now = decay[b, t].exp()[..., None] * now
            u = v[b, t]
            if beta is not None:
                u = beta[b, t, :, None].double() * (u - torch.einsum("hkv,hk->hv", now, k[b, t]))
            now = now + k[b, t][:, :, None] * u[:, None]
            out.append(float(scale) * torch.einsum("hkv,hk->hv", now, q[b, t]))
        outs.append(torch.stack(out) if out else v[b])
        finals.append(now)
    return torch.stack(outs), torch.stack(finals)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    seq_idx: Tensor,
    initial_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return recurrence(q, k, v, g, beta, seq_idx, initial_state, scale)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    seq_idx: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    x, dt = x.double(), dt.double()
    held = (seq_idx >= 0).expand(dt.shape[:2])[..., None]
    dt, skipped = torch.where(held, dt, 0), torch.where(held[..., None], x, 0)
    before = None if initial_state is None else initial_state.mT
    y, final = recurrence(C, B, dt[..., None] * skipped, dt * A.double(), None, seq_idx, before, 1.0)
    return (y if D is None else y + D.double()[:, None] * skipped), final.mT


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    seq_idx: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C = (y.double() for y in (x, dt, A, B, C))
    skip = torch.zeros(x.size(2), dtype=torch.float64) if D is None else D.double()
    zero, outs, finals = torch.zeros_like(A), [], []
    for b, row in enumerate(rows_of(seq_idx, x.size(0))):
        now, out = zero if initial_state is None else initial_state[b].double(), []
        document = 0
        for t, number in enumerate(row):
            if number < 0:
                out.append(torch.zeros_like(skip))
                continue
            if number != document:
                now, document = zero, number
            now = (dt[b, t, :, None] * A).exp() * now + (dt[b, t] * x[b, t])[:, None] * B[b, t]
            out.append(now @ C[b, t] + skip * x[b, t])
        outs.append(torch.stack(out) if out else x[b])
        finals.append(now)
    return torch.stack(outs), torch.stack(finals)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor, initial_state: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    batch, _, num_channels = x.shape
    width, zero = weight.size(1), torch.zeros(num_channels, dtype=torch.float64)
    ys, finals = [], []
    for b, row in enumerate(rows_of(seq_idx, batch)):
        window = [zero] * (width - 1) if initial_state is None else list(initial_state[b].double())
        y, document = [], 0
        for t, number in enumerate(row):
            if number < 0:
                y.append(zero)
                continue
            if number != document:
                window, document = [zero] * (width - 1), number
            window.append(x[b, t].double())
            z = zero if bias is None else bias.double()
            for i in range(width):
                z = z + weight[:, i].double() * window[len(window) - width + i]
            window = window[len(window) - width + 1 :]
            y.append(torch.nn.functional.silu(z) if activation else z)
        ys.append(torch.stack(y) if y else x[b].double())
        finals.append(torch.stack(window) if window else x.new_zeros(0, num_channels).double())
    return torch.stack(ys), torch.stack(finals)
