"""Rare cases against float64: many runs, any scale and softcap, arrays of more than 2^31 numbers.

Shape letters: B batch, N queries, K keys, H query heads, G kv heads, D head dim, S tokens, T tokens, F, V columns.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable

import pytest
import torch
from device import DEVICE, ON_GPU, attention
from oracle import dense_gradients
from ringtile import IntervalMask, ops
from strategies import dense
from test_gpu_kernels import FLOATS, normal
from torch import Tensor


def assert_close(got: Iterable[Tensor], expected: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Compares norms. Bound: weights, dS and results are rounded to a 16-bit dtype, and so are two of their inputs; in
    float32 a hundred roundings."""
    bound = (100 if dtype == torch.float32 else 2.5) * torch.finfo(dtype).eps
    for mine, right in zip(got, expected, strict=True):
        assert bool(mine.isfinite().all())
        assert (mine.double() - right).norm() <= bound * right.norm()


def shuffled_runs(num_runs: int) -> tuple[Tensor, Tensor]:
    """Runs of 1 to 9 keys, 1 to 3 positions apart, in random order; and the position of each row, int64 (K,)."""
    generator = torch.Generator().manual_seed(num_runs)
    lengths, strides = (torch.randint(1, most, (num_runs,), generator=generator) for most in (10, 4))
    begins = (lengths * strides).cumsum(0) - lengths * strides
    runs, positions, row = [], [], 0
    for i in torch.randperm(num_runs, generator=generator).tolist():
        begin, stride, length = int(begins[i]), int(strides[i]), int(lengths[i])
        runs.append((begin, stride, row, length))
        positions += range(begin, begin + stride * length, stride)
        row += length
    return ops.runs_tensor(runs), torch.tensor(positions)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_runs", [1, 5, 65, 150])
def test_small_attention_over_many_runs(num_runs: int, head_dim: int, dtype: torch.dtype) -> None:
    """More runs than one launch takes. Every query attends a random interval, which may be empty."""
    runs, positions = shuffled_runs(num_runs)
    num_queries, num_keys, last = 70, positions.numel(), int(positions.max()) + 1
    q, dout = (normal(2, num_queries, 4, head_dim, dtype=dtype, seed=i) for i in range(2))
    k, v = (normal(2, num_keys, 2, head_dim, dtype=dtype, seed=i) for i in (2, 3))
    begin = torch.randint(0, last, (2, num_queries), generator=torch.Generator().manual_seed(4))
    end = begin + torch.randint(0, 2 * last // 3 + 1, begin.shape, generator=torch.Generator().manual_seed(5))
    attend = (positions >= begin[:, :, None]) & (positions < end[:, :, None])
    begin, end = begin.int().to(DEVICE), end.int().to(DEVICE)

    state = ops.state_dtype(dtype)
    out = torch.zeros_like(q, dtype=state)
    lse = torch.full((2, 4, num_queries), -torch.inf, dtype=torch.float64, device=DEVICE)
    ops.attn_fwd_(q, k, v, begin, end, runs, out, lse, head_dim**-0.5, 0.0)
    delta = ops.attn_delta(dout, out.to(dtype))
    dq, dk, dv = (torch.zeros_like(x, dtype=state) for x in (q, k, v))
    ops.attn_bwd_(q, k, v, begin, end, runs, dout, lse, delta, dq, dk, dv, head_dim**-0.5, 0.0)
    exact = dense_gradients(q, k, v, attend.to(DEVICE), dout)
    assert torch.equal(lse == -torch.inf, exact.lse == -torch.inf)
    got, expected = (out, lse, dq, dk, dv), exact
    assert_close(*([x.nan_to_num(neginf=0) for x in results] for results in (got, expected)), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("scale", "softcap"), [(-0.2, 0.0), (0.0, 0.0), (0.3, 5.0), (-0.3, 2.0)])
def test_small_attention_of_any_scale_and_cap(scale: float, softcap: float, head_dim: int, dtype: torch.dtype) -> None:
    """With a gradient of the log-sum-exp too."""
    mask = IntervalMask.causal(130)
    leaves = [
        normal(2, 130, heads, head_dim, dtype=dtype, seed=i).requires_grad_() for i, heads in enumerate((4, 2, 2))
    ]
    dout, dlse = normal(2, 130, 4, head_dim, dtype=dtype, seed=3), normal(2, 4, 130, seed=4)
    out, lse = attention(*leaves, mask=mask, scale=scale, softcap=softcap, return_lse=True)
    gradients = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    exact = dense_gradients(*leaves, dense(mask).to(DEVICE), dout, dlse, scale, softcap)
    assert_close((out, lse, *gradients), exact, dtype)


# ---- errors -------------------------------------------------------------------------------------

LOST_DEVICE = """
import torch
from ringtile import ops
x = torch.ones(2, 8, device="cuda")
prod = ops.glu_fwd(x, x, 0)
del prod  # its memory is found again without asking the device
torch.arange(4, device="cuda")[torch.tensor([9], device="cuda")]
try:
    torch.cuda.synchronize()
except RuntimeError:
    ops.glu_fwd(x, x, 0)
"""


@ON_GPU
def test_a_kernel_that_cannot_start_is_named_with_the_reason() -> None:
    """In a process whose device an earlier kernel has broken."""
    done = subprocess.run([sys.executable, "-c", LOST_DEVICE], capture_output=True, text=True)
    reason = r"ringtile\.glu_fwd: the CUDA runtime refused to start a kernel: device-side assert.*"
    assert re.search(rf"{reason}; kernel .*at glu\.cu:\d+, grid \(1, 1, 1\)", done.stderr), done.stderr


# ---- more than 2^31 numbers ---------------------------------------------------------------------


@ON_GPU
@pytest.mark.parametrize("head_dim", [128, 256])
def test_attention_of_arrays_beyond_31_bits(head_dim: int) -> None:
    """Compares the last rows, which a window makes independent of the others."""
    heads, window, tail = 2048 // head_dim, 64, 256
    seq_len = 2**20 + tail
    leaves = [
        torch.empty(1, seq_len, n, head_dim, dtype=torch.bfloat16, device=DEVICE).normal_() for n in (heads, 1, 1)
    ]
    dout = torch.empty_like(leaves[0]).normal_()
    mask = IntervalMask.sliding_window(seq_len, window)
    out = attention(*(x.requires_grad_() for x in leaves), mask=mask)
    got = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    parts = [x.detach()[:, -tail:] for x in (*leaves, dout)]
    exact = dense_gradients(*parts[:3], dense(IntervalMask.sliding_window(tail, window)).to(DEVICE), parts[3])
    inner = slice(window, None)  # rows that attend, and are attended by, only the tail
    assert_close((x[:, -tail:][:, inner] for x in got), (y[:, inner] for y in (exact.out, *exact[2:])), torch.bfloat16)


@ON_GPU
def test_pointwise_kernels_of_arrays_beyond_31_bits() -> None:
    """The last rows equal the result of a separate call on them."""
    num_tokens, num_cols, tail = 70000, 32000, 3
    gate, up = (torch.empty(num_tokens, num_cols, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(2))
    prod = ops.glu_fwd(gate, up, ops.GLU_KINDS["silu"])
    assert torch.equal(prod[-tail:], ops.glu_fwd(gate[-tail:], up[-tail:], ops.GLU_KINDS["silu"]))
    small, dprod = [x[-tail:].clone() for x in (gate, up, prod)], prod
    ops.glu_bwd_(*small, ops.GLU_KINDS["silu"])
    ops.glu_bwd_(gate, up, dprod, ops.GLU_KINDS["silu"])
    assert all(torch.equal(x[-tail:], y) for x, y in zip((gate, up, dprod), small, strict=True))

    runs = [(1, 1, 0, num_tokens - 1)]
    local = ops.shard_seq(up, runs, 0)
    assert torch.equal(local[-tail:], up[-tail:])

    labels = torch.arange(num_tokens, device=DEVICE) % num_cols
    both = []
    for logits, at in ((up, labels), (up[-tail:].clone(), labels[-tail:].clone())):
        loss, lse = (torch.empty(at.numel(), dtype=torch.float32, device=DEVICE) for _ in range(2))
        ops.cross_entropy_fwd_bwd_(logits, at, loss, lse, -100, 0.0, 0.0, 0.0, True)
        both.append((loss[-tail:], lse[-tail:], logits[-tail:]))
    assert all(torch.equal(x, y) for x, y in zip(*both, strict=True))
