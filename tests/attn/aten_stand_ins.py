"""What aten's attention kernels for CUDA do, by the arguments of their schemas, on the CPU in float64.

Shape letters: H query heads, M queries, D head dim.
"""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor
from torch.nn.attention import _fa3, _fa4


def in_a_sequence(num_queries: int, num_keys: int, left: int, right: int) -> Tensor:
    """bool (M, K): which keys a query attends in flash attention with a window; -1 is no bound."""
    last = torch.arange(num_queries)[:, None] + num_keys - num_queries
    key = torch.arange(num_keys)
    return ((key >= last - left) | (left < 0)) & ((key <= last + right) | (right < 0))


def _attend(q: Tensor, k: Tensor, v: Tensor, attend: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """q (H, M, D): out, lse and weights."""
    k, v = (x.repeat_interleave(q.size(0) // x.size(0), 0) for x in (k, v))
    scores = (scale * q @ k.mT).masked_fill(~attend, -torch.inf)
    weights = scores.softmax(-1)
    return weights @ v, scores.logsumexp(-1), weights


def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, attend: Tensor, scale: float
):
    repeats = q.size(0) // k.size(0)
    k, v = (x.repeat_interleave(repeats, 0) for x in (k, v))
    weights = ((scale * q @ k.mT) - lse[..., None]).exp() * attend
    dscores = weights * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    dk, dv = (x.unflatten(0, (-1, repeats)).sum(1) for x in (scale * dscores.mT @ q, weights.mT @ dout))
    return scale * dscores @ k, dk, dv


def flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, **options,
):  # fmt: skip
    """aten._flash_attention_forward of packed sequences (total, H, D)."""
    assert dropout_p == 0
    assert is_causal == (window_size_left < 0 and window_size_right == 0)
    out, lse = torch.empty_like(query), query.new_empty(query.size(1), query.size(0))
    for q, k in zip(_spans(cum_seq_q), _spans(cum_seq_k), strict=True):
        attend = in_a_sequence(q.stop - q.start, k.stop - k.start, window_size_left, window_size_right)
        given = (x.transpose(0, 1) for x in (query[q], key[k], value[k]))
        one, lse[:, q], _ = _attend(*given, attend, scale)
        out[q] = one.transpose(0, 1)
    return out, lse, query.new_empty(2).to(torch.uint64), query.new_empty(0), query.new_empty(0)


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    grads = [torch.full_like(x, torch.nan) for x in (query, key, value)]
    for q, k in zip(_spans(cum_seq_q), _spans(cum_seq_k), strict=True):
        attend = in_a_sequence(q.stop - q.start, k.stop - k.start, window_size_left, window_size_right)
        given = [x.transpose(0, 1) for x in (grad_out[q], query[q], key[k], value[k], out[q])]
        found = _attend_backward(*given, logsumexp[:, q], attend, scale)
        for grad, rows, one in zip(grads, (q, k, k), found, strict=True):
            grad[rows] = one.transpose(0, 1)
    return tuple(grads)


def _spans(offsets: Tensor) -> list[slice]:
    return [slice(begin, end) for begin, end in zip(offsets.tolist(), offsets[1:].tolist(), strict=False)]


def cudnn_forward(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
    scale=None,
):  # fmt: skip
    """aten._scaled_dot_product_cudnn_attention: (B, H, M, D), and lse (B, H, M, 1)."""
    assert compute_log_sumexp
    assert dropout_p == 0
    assert attn_bias is None
    attend = torch.ones(query.size(2), key.size(2), dtype=torch.bool)
    attend = attend.tril() if is_causal else attend
    found = [_attend(*each, attend, scale) for each in zip(query, key, value, strict=True)]
    seed = torch.zeros((), dtype=torch.int64)
    out, lse = (torch.stack([each[i] for each in found]) for i in range(2))
    return out, lse[..., None], seed, seed, query.size(2), key.size(2), seed, seed, seed


def cudnn_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q,
    max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    assert (max_q, max_k) == (query.size(2), key.size(2))
    assert attn_bias is None
    attend = torch.ones(max_q, max_k, dtype=torch.bool)
    attend = attend.tril() if is_causal else attend
    given = zip(grad_out, query, key, value, out, logsumexp[..., 0], strict=True)
    found = [_attend_backward(*each, attend, scale) for each in given]
    return tuple(torch.stack(x) for x in zip(*found, strict=True))


STAND_INS = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}


# ---- FlashAttention 4 and 3, as torch's adapters call them --------------------------------------


def flash_4_forward(
    query, key, value, *, softmax_scale, causal, window_size_left, window_size_right, return_lse, cu_seqlens_q,
    cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, page_table, num_splits, out,
):  # fmt: skip
    assert return_lse
    assert (seqused_k, page_table, out) == (None, None, None)
    left, right = (-1 if size is None else size for size in (window_size_left, window_size_right))
    given = (query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False)
    return flash_forward(*given, scale=softmax_scale, window_size_left=left, window_size_right=right)[:2]


def flash_4_backward(
    query, key, value, out, grad_out, logsumexp, *, softmax_scale, causal, window_size_left, window_size_right,
    cu_seqlens_q, cu_seqlens_k, deterministic,
):  # fmt: skip
    left, right = (-1 if size is None else size for size in (window_size_left, window_size_right))
    given = (grad_out, query, key, value, out, logsumexp, cu_seqlens_q, cu_seqlens_k, 0, 0, 0.0, causal, None, None)
    return flash_backward(*given, scale=softmax_scale, window_size_left=left, window_size_right=right)


def flash_3_forward(*given):
    (q, k, v), (cu_q, cu_k, _, _, _, max_q, max_k), (scale, causal, left, right) = given[:3], given[7:14], given[23:27]
    found = flash_forward(
        *(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False),
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return (*found[:2], None, None)


def flash_3_backward(dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, *given):
    max_q, max_k, scale, causal, left, right = given[2:8]
    found = flash_backward(
        *(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, None, None),
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    for target, x in zip((dq, dk, dv), found, strict=True):
        target.copy_(x)


def install_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both, for CPU tensors of float64, behind torch's adapters."""
    module = types.ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd, module._flash_attn_bwd = flash_4_forward, flash_4_backward
    monkeypatch.setattr(_fa4, "_fa4_import_module", lambda path: module)
    monkeypatch.setattr(_fa4, "_FA4_MODULE_PATH", None)
    monkeypatch.setattr(_fa3, "_fa3_import_module", lambda path: None)
    monkeypatch.setattr(_fa3, "_FA3_CUDA_FWD", flash_3_forward)
    monkeypatch.setattr(_fa3, "_FA3_CUDA_BWD", flash_3_backward)
    for adapter, name in ((_fa4, "_fa4"), (_fa3, "_fa3")):  # which ask for a GPU and 16 bits
        monkeypatch.setattr(adapter, f"{name}_forward_support_error", lambda *given: None)
        monkeypatch.setattr(adapter, f"{name}_backward_support_error", lambda *given: None)
