"""Convolution and recurrences over the tokens of one GPU by the Triton kernels of flash-linear-attention.

The functions take and return what those of kernels.py do. Each document becomes a sequence of one row (packed.py). fla
multiplies numbers of the dtype of q, k and v (B, C and x), as models do without ringtile, and adds in float32; states
are float32. Its decays are sums of a chunk's g in float32, so that g must be finite, and a decay is off by about
2^-24 of the sum of |g| over 64 tokens.

Shape letters: as in kernels.py; n sequences.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringtile.precision import float32_rounding
from ringtile.recurrent.packed import Sequences, sequences_of, take

INSTALL = "pip install flash-linear-attention"
_MAX_KEY_DIM = 256
_HALVES = (torch.bfloat16, torch.float16)

_MODULES = {
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_kda": "fla.ops.kda",
    "chunk_simple_gla": "fla.ops.simple_gla",
    "causal_conv1d": "fla.modules.causal_conv1d",
}


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(_MODULES[name]), name)
    return function


@functools.cache
def _why_no_fla() -> str:
    try:
        for name in _MODULES:
            _function(name)
    except ModuleNotFoundError as error:
        return f"flash-linear-attention is not installed (no module {error.name}): {INSTALL}"
    except Exception as error:  # of its own imports, such as of a Triton without a driver
        return f"flash-linear-attention cannot be imported ({type(error).__name__}: {error}): {INSTALL}"
    return ""


def why_not(op: str, x: Tensor, key_dim: int) -> str:
    """Return why fla cannot compute a function of kernels.py, "" if it can. x: its first tensor, (B, N, H, V)."""
    if op == "selective_scan":
        return "it has no scan of Mamba's first version with states and documents; train this model on one device"
    if x.dtype == torch.float64:
        return "flash-linear-attention does not compute in float64: pass float32, bfloat16 or float16"
    if op != "causal_conv1d":
        if key_dim > _MAX_KEY_DIM:
            return f"flash-linear-attention takes q and k (B and C) of 1..{_MAX_KEY_DIM} numbers, not {key_dim}"
        if op == "ssd" and x.dtype in _HALVES and (key_dim % 2 or x.size(3) % 2):
            return f"flash-linear-attention takes even head dims in 16 bits, not {key_dim} and {x.size(3)}"
        if x.is_cuda and x.dtype == torch.float32 and float32_rounding(x.device) == 0.0:
            return (
                "flash-linear-attention multiplies float32 as TF32: train in bfloat16, or allow TF32 by "
                "torch.set_float32_matmul_precision('high')"
            )
    return _why_no_fla()


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, seq_idx: Tensor, initial_state: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """See kernels.causal_conv1d. The initial state holds inputs of x's dtype, and goes before the tokens."""
    before = weight.size(1) - 1
    s = sequences_of(seq_idx, x.size(0), x.device, before, has_state=initial_state is not None)
    rows = x.flatten(0, 1)
    if initial_state is not None:
        rows = torch.cat([rows, initial_state.to(x.dtype).flatten(0, 1)])
    state_dtype = torch.promote_types(x.dtype, torch.float32)
    final = x.new_zeros(x.size(0), before, x.size(2), dtype=state_dtype)
    if rows.size(0):
        recent = rows.index_select(0, s.recent.clamp(min=0).flatten()).view_as(final).to(state_dtype)
        final = torch.where(s.recent[..., None] >= 0, recent, final)
    if not s.num_sequences:
        return x.new_zeros(x.shape), final
    y, _ = _function("causal_conv1d")(
        take(rows, s.taken)[None],
        weight=weight,
        bias=bias,
        activation=activation or None,
        cu_seqlens=s.cu_seqlens,
        cu_seqlens_cpu=s.cu_seqlens_cpu,
        chunk_indices=s.chunk_indices,
    )
    return s.unpack(y), final


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
    """See kernels.gated_delta_rule."""
    s = sequences_of(seq_idx, v.size(0), v.device)
    if not s.num_sequences:
        return _without_tokens(v, initial_state, (v.size(2), k.size(3), v.size(3)))
    q, k, v, g, beta = s.pack(q, k, v, g.float(), beta.float())
    state = None if initial_state is None else initial_state.float()
    options: dict[str, Any] = {} if g.dim() == 4 else {"chunk_indices": s.chunk_indices}
    out, states = _function("chunk_kda" if g.dim() == 4 else "chunk_gated_delta_rule")(
        *(q, k, v, g, beta), scale=scale, initial_state=s.initial(state), **_of_sequences(s), **options
    )
    return s.unpack(out), s.final(states, state)


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
    """See kernels.ssd. Plain decay of q = C, k = B and v = dt x, which is rounded to x's dtype."""
    s = sequences_of(seq_idx, x.size(0), x.device)
    if not s.num_sequences:
        return _without_tokens(x, initial_state, (x.size(2), x.size(3), B.size(3)))
    repeats = x.size(2) // B.size(2)
    x, dt, B, C = s.pack(x, dt.float(), B, C)
    B, C = (y.repeat_interleave(repeats, dim=2) if repeats > 1 else y for y in (B, C))  # fla has no groups here
    state = None if initial_state is None else initial_state.float().mT
    y, states = _function("chunk_simple_gla")(
        *(C, B, (dt[..., None] * x).to(x.dtype)),
        g=dt * A.float(),
        scale=1.0,
        initial_state=s.initial(state),
        **_of_sequences(s),
    )
    y = y if D is None else (y.float() + D.float()[:, None] * x).to(x.dtype)
    return s.unpack(y), s.final(states, state).mT


def _of_sequences(s: Sequences) -> dict[str, Any]:
    return {"output_final_state": True, "cu_seqlens": s.cu_seqlens, "cu_seqlens_cpu": s.cu_seqlens_cpu}


def _without_tokens(x: Tensor, initial_state: Tensor | None, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the results for padding only."""
    state = x.new_zeros(x.size(0), *size, dtype=torch.float32) if initial_state is None else initial_state.float()
    return x.new_zeros(x.shape), state
