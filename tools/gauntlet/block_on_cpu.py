"""Attention of one block for packages that call a kernel of the GPU: flash_attn's, and aten's flash attention.

A package whose ring calls these runs on a CPU with them, and is judged for its ring. They follow flash-attn 2.8: causal
masks and windows are aligned at the bottom right, scores are float32, the backward takes the out and lse of all blocks.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import sys
import types
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_NO_WINDOW = -1


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int, softcap: float) -> Tensor:
    """q (B, N, H, D), k (B, K, G, D) -> (B, H, N, K), float32."""
    k = k.repeat_interleave(q.size(2) // k.size(2), dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * scale
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    distance = torch.arange(q.size(1))[:, None] + k.size(1) - q.size(1) - torch.arange(k.size(1))
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    if left != _NO_WINDOW:
        seen &= distance <= left
    if right != _NO_WINDOW:
        seen &= -distance <= right
    return scores.masked_fill(~seen, -torch.inf)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, right: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """(B, N, H, V) in q's dtype, and lse (B, H, N) in float32."""
    scores = _scores(q, k, scale, causal, left, right, softcap)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    v = v.repeat_interleave(q.size(2) // v.size(2), dim=2)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v.float()).to(q.dtype), lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool,
    left: int, right: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of the block whose share of the softmax is exp(scores - lse)."""
    groups = q.size(2) // k.size(2)
    wide_k, wide_v = (x.float().repeat_interleave(groups, dim=2) for x in (k, v))
    scores = _scores(q, k, scale, causal, left, right, softcap)
    weights = (scores - lse.float()[..., None]).exp().nan_to_num(0.0)
    dweights = torch.einsum("bqhd,bkhd->bhqk", dout.float(), wide_v)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    dscores = weights * (dweights - delta[..., None])
    if softcap:
        dscores *= (1 - (scores / softcap) ** 2).nan_to_num(0.0, neginf=0.0)
    dscores = dscores.masked_fill(scores == -torch.inf, 0.0) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", dscores, wide_k)
    dk, dv = torch.einsum("bhqk,bqhd->bkhd", dscores, q.float()), torch.einsum("bhqk,bqhd->bkhd", weights, dout.float())
    dk, dv = (x.reshape(*x.shape[:2], k.size(2), groups, -1).sum(3) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# ---- flash_attn ---------------------------------------------------------------------------------


def _flash_attn_forward(
    q: Any, k: Any, v: Any, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Any = None, return_softmax: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    out, lse = forward(q, k, v, softmax_scale, causal, window_size_left, window_size_right, softcap)
    return out, lse, None, None


def _flash_attn_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, dropout_p: float,
    softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Any = None, deterministic: bool = False, rng_state: Any = None,
) -> Any:  # fmt: skip
    parts = (softmax_scale, causal, window_size_left, window_size_right, softcap)
    for buffer, gradient in zip((dq, dk, dv), backward(dout, q, k, v, out, softmax_lse, *parts), strict=True):
        buffer.copy_(gradient)
    return softmax_lse


def _flash_attn_varlen_forward(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, alibi_slopes: Any = None, return_softmax: bool = False, block_table: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    out, lse = q.new_zeros(*q.shape[:2], v.size(2)), q.new_zeros(q.size(1), q.size(0), dtype=torch.float32)
    for a, b in _documents(cu_seqlens_q, cu_seqlens_k):
        parts = (softmax_scale, causal, window_size_left, window_size_right, softcap)
        one, its_lse = forward(q[None, a], k[None, b], v[None, b], *parts)
        out[a], lse[:, a] = one[0], its_lse[0]
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, cu_seqlens_q: Any,
    cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, rng_state: Any = None,
) -> Any:  # fmt: skip
    for a, b in _documents(cu_seqlens_q, cu_seqlens_k):
        parts = (softmax_scale, causal, window_size_left, window_size_right, softcap)
        of_one = (dout[None, a], q[None, a], k[None, b], v[None, b], out[None, a], softmax_lse[None, :, a])
        for buffer, rows, gradient in zip((dq, dk, dv), (a, b, b), backward(*of_one, *parts), strict=True):
            buffer[rows] = gradient[0]
    return softmax_lse


def _documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    queries, keys = (itertools.pairwise(bounds.tolist()) for bounds in (cu_seqlens_q, cu_seqlens_k))
    return [(slice(*q), slice(*k)) for q, k in zip(queries, keys, strict=True)]


def install_flash_attn() -> None:
    """Makes `import flash_attn` find these functions, in this process."""
    functions = (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward)
    modules = {name: types.ModuleType(name) for name in ("flash_attn", "flash_attn.flash_attn_interface")}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for function in functions:
            setattr(module, function.__name__, function)
    flash_attn: Any = modules["flash_attn"]
    flash_attn.__version__, flash_attn.flash_attn_func = "2.8.3", None
    flash_attn.flash_attn_interface = modules["flash_attn.flash_attn_interface"]
    sys.modules.update(modules)


# ---- aten ---------------------------------------------------------------------------------------

_library: Any = None  # its registrations last as long as it does


def install_aten_flash_attention() -> None:
    """Registers aten's flash attention of CUDA for the CPU, and makes scaled_dot_product_attention choose as on CUDA:
    flash attention, or memory-efficient attention where there is a mask."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _library.impl("_scaled_dot_product_flash_attention", _aten_forward, "CPU")
    _library.impl("_scaled_dot_product_flash_attention_backward", _aten_backward, "CPU")
    _chosen_as_on_cuda.__name__ = "scaled_dot_product_attention"  # by which torch replaces it
    functional.scaled_dot_product_attention = _chosen_as_on_cuda


def _chosen_as_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    aten: Any = torch.ops.aten
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
        out: Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )[0]
        return out
    if query.size(1) != key.size(1) and not enable_gqa:
        raise RuntimeError("scaled_dot_product_attention got fewer kv heads without enable_gqa")
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out


def _aten_forward(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = forward(q, k, v, scale or query.size(-1) ** -0.5, is_causal, _NO_WINDOW, _NO_WINDOW, 0.0)
    none, seed = query.new_empty(0), torch.zeros((), dtype=torch.int64)
    return out.transpose(1, 2), lse, None, None, query.size(2), key.size(2), seed, seed, none


def _aten_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any, cum_seq_k: Any,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Any, philox_offset: Any,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    dout, q, k, v, its_out = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    parts = (scale or query.size(-1) ** -0.5, is_causal, _NO_WINDOW, _NO_WINDOW, 0.0)
    return tuple(x.transpose(1, 2) for x in backward(dout, q, k, v, its_out, logsumexp, *parts))
