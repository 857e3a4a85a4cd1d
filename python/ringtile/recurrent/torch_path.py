"""Convolution and recurrences over the tokens of one device in torch operations, for devices without kernels.

A recurrence goes through each document in chunks. A chunk's tokens act on each other in pairs (i, j <= i), with the
decay between them, the exponent of a difference of sums: nothing is divided by a decay, so a strong one underflows to
the 0 that it is. The sums are in float64, because their differences decide.

Shape letters: B batch, Bm mask rows (B or 1), N tokens, C channels, W width of a convolution, H heads, G heads of q and
k (or groups of B and C), K key dim, V value dim, n tokens of a document or of a chunk.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ringtile import ops
from ringtile.sequence.device_mask import to_device

_CHUNK = 64
_CHUNK_OF_CHANNELS = 16  # with a decay per channel: a chunk makes n x n x K numbers of each head


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, seq_idx: Tensor, initial_state: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Convolve x (B, N, C) with weight (C, W), and add bias (C). initial_state (B, W - 1, C): the inputs before.

    Returns y (B, N, C) of x's dtype, and the last W - 1 inputs of the last document, zeros before its start.
    activation: "" or "silu".
    """
    batch, num_tokens, num_channels = x.shape
    before = weight.size(1) - 1
    dtype = ops.state_dtype(x.dtype)
    seq_idx = to_device(seq_idx, x.device)
    seq_idx = functional.pad(seq_idx, (before, 0)).expand(batch, -1)[..., None]  # before: document 0
    own = seq_idx[:, before:]
    inputs = torch.where(own >= 0, x.to(dtype), 0)
    if initial_state is None:
        initial_state = inputs.new_zeros(batch, before, num_channels)
    inputs = torch.cat([initial_state.to(dtype), inputs], dim=1)
    y = inputs.new_zeros(batch, num_tokens, num_channels)
    for back in range(before + 1):
        at = before - back
        tap = weight[:, at].to(dtype) * inputs[:, at : at + num_tokens]
        y = y + torch.where(seq_idx[:, at : at + num_tokens] == own, tap, 0)
    if bias is not None:
        y = y + bias.to(dtype)
    if activation:
        y = functional.silu(y)
    positions = torch.arange(before + num_tokens, device=x.device)[:, None]
    last = torch.where(seq_idx >= 0, positions, before - 1).amax(1)  # (B, 1), counting the tokens before
    recent = last + 1 - before + torch.arange(before, device=x.device)
    rows = torch.arange(batch, device=x.device)[:, None]
    final_state = torch.where(seq_idx[rows, recent] == seq_idx[rows, last], inputs[rows, recent], 0)
    return torch.where(own >= 0, y, 0).to(x.dtype), final_state


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    seq_idx: Tensor,
    initial_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute S_t = exp(g_t) S_{t-1}; S_t += k_t beta_t (v_t - k_t S_t)^T; out_t = scale q_t S_t (arXiv:2412.06464).

    q, k (B, N, G, K), v (B, N, H, V), beta (B, N, H), g (B, N, H), or (B, N, H, K) for a decay of each channel of K.
    Returns out (B, N, H, V) of v's dtype and the state (B, H, K, V).
    """
    (batch, _, num_heads, value_dim), dtype = v.shape, ops.state_dtype(v.dtype)

    def of_document(given: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = given
        out, state = _chunks(q, k, v.to(dtype), g, beta, state)
        return scale * out, state

    if initial_state is None:
        initial_state = v.new_zeros(batch, num_heads, k.size(3), value_dim, dtype=dtype)
    out, state = _each_document(of_document, [q, k, v, g, beta], seq_idx, initial_state.to(dtype))
    return out.to(v.dtype), state


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    seq_idx: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T; y_t = h_t C_t + D x_t: Mamba-2 (arXiv:2405.21060).

    x (B, N, H, V), dt (B, N, H), A (H), B, C (B, N, G, K), D (H). Returns y (B, N, H, V) of x's dtype and the state
    (B, H, V, K).
    """
    (batch, _, num_heads, value_dim), dtype = x.shape, ops.state_dtype(x.dtype)

    def of_document(given: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, B, C = given
        x, dt = x.to(dtype), dt.to(dtype)
        y, state = _chunks(C, B, x * dt[..., None], dt * A.to(dtype), None, state)
        return (y if D is None else y + D.to(dtype)[:, None] * x), state

    if initial_state is None:
        initial_state = x.new_zeros(batch, num_heads, value_dim, B.size(3), dtype=dtype)
    y, state = _each_document(of_document, [x, dt, B, C], seq_idx, initial_state.to(dtype).mT)
    return y.to(x.dtype), state.mT


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    seq_idx: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute h_t = exp(dt_t A) * h_{t-1} + dt_t x_t B_t of each channel; y_t = h_t C_t + D x_t (arXiv:2312.00752).

    x, dt (B, N, C), A (C, K), B, C (B, N, K), D (C). Returns y (B, N, C) of x's dtype and the state (B, C, K).
    """
    dtype = ops.state_dtype(x.dtype)
    of_channels = A.to(dtype)

    def of_document(given: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (y.to(dtype) for y in given)
        outs, state = [], state[..., 0]
        for begin in range(0, x.size(1), _CHUNK):
            tokens = slice(begin, begin + _CHUNK)
            of_chunk = (dt[:, tokens], (dt * x)[:, tokens], B[:, tokens], C[:, tokens])
            # A chunk makes log n states for each of its tokens: the backward makes them again.
            out, state = checkpoint(
                _selective_chunk, of_channels, *of_chunk, state, use_reentrant=False, preserve_rng_state=False
            )
            outs.append(out)
        y = torch.cat(outs, dim=1)
        return (y if D is None else y + D.to(dtype) * x)[..., None], state[..., None]

    if initial_state is None:
        initial_state = x.new_zeros(x.size(0), *A.shape, dtype=dtype)
    y, state = _each_document(of_document, [x, dt, B, C], seq_idx, initial_state.to(dtype)[..., None])
    return y[..., 0].to(x.dtype), state[..., 0]


def _selective_chunk(A: Tensor, dt: Tensor, u: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The scan of dt, u (B, n, C), B, C (B, n, K) from a state (B, C, K): each doubling of the reach joins the affine
    maps of two stretches, so that decays are only ever multiplied."""
    decay, moved = (dt[..., None] * A).exp(), u[..., None] * B[:, :, None]  # (B, n, C, K)
    moved = torch.cat([moved[:, :1] + decay[:, :1] * state[:, None], moved[:, 1:]], dim=1)
    reach = 1
    while reach < moved.size(1):
        before = functional.pad(moved, (0, 0, 0, 0, reach, 0))[:, : moved.size(1)]
        moved = moved + decay * before
        decay = decay * functional.pad(decay, (0, 0, 0, 0, reach, 0), value=1.0)[:, : moved.size(1)]
        reach *= 2
    return torch.einsum("bnck,bnk->bnc", moved, C), moved[:, -1]


def _each_document(
    compute: Callable[[list[Tensor], Tensor], tuple[Tensor, Tensor]],
    tensors: list[Tensor],
    seq_idx: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Join compute(tensors of a document's tokens, state) -> (out, state) over the documents of each row."""
    num_rows = seq_idx.size(0)
    rows = [slice(None)] if num_rows == 1 else [slice(row, row + 1) for row in range(num_rows)]
    outs, states, kind = [], [], state.device.type
    # It would compute products of float32 in bfloat16.
    off = torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()
    with off:
        for row, of_row in zip(rows, seq_idx, strict=True):
            state_, out_, document = state[row], [], 0
            for begin, end in itertools.pairwise(_bounds(of_row)):
                given = [x[row, begin:end] for x in tensors]
                if of_row[begin] < 0:
                    out_.append(state.new_zeros(*given[0].shape[:2], state.size(1), state.size(3)))
                    continue
                out, state_ = compute(given, state_ if of_row[begin] == document else torch.zeros_like(state_))
                document = int(of_row[begin])
                out_.append(out)
            outs.append(torch.cat(out_, dim=1))
            states.append(state_)
    return torch.cat(outs), torch.cat(states)


def _bounds(seq_idx: Tensor) -> list[int]:
    """Return where documents and stretches of padding begin in seq_idx (N,), and N."""
    changes = (seq_idx[1:] != seq_idx[:-1]).nonzero().flatten() + 1
    return sorted({0, *changes.tolist(), seq_idx.numel()})


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule for one document, in the dtype of v and state; without beta plain decay,
    S_t = exp(g_t) S_{t-1} + k_t v_t^T."""
    repeats, by_channel = v.size(2) // k.size(2), g.dim() == 4
    q, k = (x.to(v.dtype).repeat_interleave(repeats, dim=2).transpose(1, 2) for x in (q, k))  # (B, H, n, K)
    v = v.transpose(1, 2)
    g = (g if by_channel else g[..., None]).double().transpose(1, 2)  # (B, H, n, K or 1)
    beta = None if beta is None else beta.to(v.dtype).transpose(1, 2)[..., None]
    outs = []
    chunk = _CHUNK_OF_CHANNELS if by_channel else _CHUNK
    for begin in range(0, v.size(2), chunk):
        of_chunk = slice(begin, begin + chunk)
        q_, k_, v_ = q[:, :, of_chunk], k[:, :, of_chunk], v[:, :, of_chunk]
        total = g[:, :, of_chunk].cumsum(2)
        later = torch.ones(2 * (v_.size(2),), dtype=torch.bool, device=v.device).triu(1)
        own = torch.eye(v_.size(2), dtype=torch.bool, device=v.device)  # no decay, and so none of its gradient
        between = (total[:, :, :, None] - total[:, :, None]).masked_fill(own[..., None], 0)
        between = between.masked_fill(later[..., None], -torch.inf).exp().to(v.dtype)
        since = total.exp().to(v.dtype)  # what is left of the state
        if beta is not None:  # v_i less what the state before it holds for k_i, which is linear in those before
            beta_ = beta[:, :, of_chunk]
            system = (beta_ * _pairs(k_, k_, between)).tril(-1)  # and 1 on the diagonal
            v_ = torch.linalg.solve_triangular(
                system, beta_ * (v_ - (since * k_) @ state), upper=False, unitriangular=True
            )
        outs.append((since * q_) @ state + _pairs(q_, k_, between) @ v_)
        state = since[:, :, -1, :, None] * state + (between[:, :, -1] * k_).mT @ v_
    return torch.cat(outs, dim=2).transpose(1, 2), state


def _pairs(x: Tensor, k: Tensor, between: Tensor) -> Tensor:
    """x, k (B, H, n, K), between (B, H, n, n, K or 1) -> (B, H, n, n): x_i k_j, channel by channel times the decay."""
    if between.size(-1) == 1:
        return (x @ k.mT) * between[..., 0]
    return torch.einsum("bhik,bhjk,bhijk->bhij", x, k, between)
