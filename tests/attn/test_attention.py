"""Attention on one rank: its kernels against torch's, through every instruction set and memory layout.

Shape letters: B batch, S tokens, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

import json
import os

import pytest
import torch
from attention_calls import Problem, problem
from oracle import dense_gradients
from pool import run_program
from ringtile import InputError, IntervalMask, attention, ops
from strategies import dense
from torch import Tensor


def run_attention(p: Problem, mask: IntervalMask) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    out, lse = attention(*leaves, mask=mask, return_lse=True)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, p.dout)


def test_is_causal_says_a_mask() -> None:
    p = problem(1, 9, 2, 1, 8)
    for is_causal, mask in ((True, IntervalMask.causal(9)), (False, IntervalMask.full(9))):
        assert torch.equal(attention(*p[:3], is_causal=is_causal), attention(*p[:3], mask=mask))
    for given in ({}, {"mask": IntervalMask.causal(9), "is_causal": False}):
        with pytest.raises(InputError, match="expected one of them"):
            attention(*p[:3], **given)


@pytest.mark.parametrize("num_queries", [1, 5, 23])
@pytest.mark.parametrize(
    "mask",
    [
        IntervalMask.full(24),
        IntervalMask.causal(24),
        IntervalMask.sliding_window(24, 7),
        IntervalMask.documents([[9, 15]]),
        IntervalMask.tree([-1, 0, 1, 0], [4, 5, 7, 8]),
    ],
)
def test_fewer_queries_than_keys_are_those_of_the_last_tokens(mask: IntervalMask, num_queries: int) -> None:
    """As in decoding, against the definition in float64; twice, as a plan is kept by all queries too."""
    p, last = problem(2, 24, 4, 2, 16, v_head_dim=8), slice(24 - num_queries, 24)
    attention(p.q, p.k, p.v, mask=mask)
    q, k, v = leaves = [x.detach().requires_grad_() for x in (p.q[:, last], p.k, p.v)]
    expected = dense_gradients(q, k, v, dense(mask)[:, last], p.dout[:, last], p.dlse[..., last])
    for _ in range(2):
        out, lse = attention(q, k, v, mask=mask, return_lse=True)
        gradients = torch.autograd.grad((out, lse), leaves, (p.dout[:, last], p.dlse[..., last]))
        for one, other in zip((out, lse, *gradients), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_cross_attention_is_full_and_errors_speak_of_q_and_mask() -> None:
    p = problem(1, 9, 2, 1, 8)
    q = p.q[:, :4]
    torch.testing.assert_close(
        attention(q, p.k, p.v, is_causal=False), attention(*p[:3], is_causal=False)[:, :4], rtol=0, atol=1e-14
    )
    for given, message in (
        ((q, p.k, p.v, {"is_causal": True}), r"q has 4 tokens and k has 9, .*IntervalMask.causal\(9\)"),
        ((p.q, q[:, :, :1], q[:, :, :1], {"is_causal": False}), "q has 9 tokens, k has 4 and the mask 4; expected a"),
        ((q, p.k, p.v, {"mask": IntervalMask.causal(4)}), "q has 4 tokens, k has 9 and the mask 4; expected a mask of"),
        ((p.q[0], p.k, p.v, {"is_causal": True}), "q has shape .*expected 4 dimensions"),
    ):
        *tensors, options = given
        with pytest.raises(InputError, match=message) as caught:
            attention(*tensors, **options)
        assert "rank" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_are_float32_ones_rounded_once(dtype: torch.dtype) -> None:
    """Bit by bit: the last call writes them in 16 bits itself."""
    p, mask = problem(2, 70, 4, 2, 24, 24, dtype), IntervalMask.sliding_window(70, 9)
    out, _, dq, *keys = run_attention(p, mask)
    block = (p.q, p.k, p.v, mask.begin, mask.end, ops.runs_tensor([(0, 1, 0, 70)]))
    state, lse = torch.empty(p.q.shape), torch.empty(2, 4, 70, dtype=torch.float64)
    ops.attn_fwd_(*block, state, lse, 24**-0.5, 0.0, fresh=True)
    gradients = torch.zeros(p.q.shape), torch.empty(p.k.shape), torch.empty(p.v.shape)
    delta = ops.attn_delta(p.dout, state.to(dtype))
    ops.attn_bwd_(*block, p.dout, lse, delta, *gradients, 24**-0.5, 0.0, fresh=True)
    for got, wanted in zip((out, dq, *keys), (state, *gradients), strict=True):
        assert torch.equal(got, wanted.to(dtype))


# ---- instruction sets ---------------------------------------------------------------------------

# Prints for each instruction set its name and the largest error of each result, or what is raised. A process chooses
# once, so each has its own. Odd sizes, several tiles of keys.
FORCED = """
import json, os, torch
from oracle import dense_gradients
from ringtile import IntervalMask, RingtileError, ops
from attention_calls import problem
from test_attention import run_attention
from strategies import dense
p, mask = problem(2, 203, 6, 2, 41, 41, torch.float32), IntervalMask.sliding_window(203, 150)
want = dense_gradients(p.q, p.k, p.v, dense(mask), p.dout)
for forced in (*ops.ISA_NAMES, "sse9"):
    if os.fork() == 0:
        break
    assert os.wait()[1] == 0
else:
    os._exit(0)
os.environ["RINGTILE_CPU_ISA"] = forced
try:
    found = {"isa": ops.cpu_isa()}
    found["errors"] = [(x.double() - y).abs().max().item() for x, y in zip(run_attention(p, mask), want)]
except RingtileError as error:
    found = {"refused": f"{type(error).__name__}: {error}"}
print(json.dumps({forced: found}))
"""


def test_every_instruction_set_computes_attention_and_others_are_refused() -> None:
    """Bound: scores and dP are sums of 41 products of size 1, dk and dv sums over 450 pairs: some 600 roundings of
    numbers up to 10, of which random signs leave the root."""
    run = run_program(FORCED, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr
    results = {isa: found for line in run.stdout.splitlines() for isa, found in json.loads(line).items()}
    assert results.pop("sse9") == {
        "refused": "BuildError: ringtile.cpu_isa: RINGTILE_CPU_ISA must be generic, avx2, avx512, avx512_bf16 "
        "or amx_bf16"
    }
    best = ops.ISA_NAMES.index(ops.cpu_isa()) if "RINGTILE_CPU_ISA" not in os.environ else 0
    for i, (isa, result) in enumerate(results.items()):
        if i > best and "refused" in result:
            assert "this build lacks what RINGTILE_CPU_ISA asks for" in result["refused"]
            continue
        assert result["isa"] == isa
        assert max(result["errors"]) <= 10 * 600**0.5 * torch.finfo(torch.float32).eps, isa


# ---- memory -------------------------------------------------------------------


def test_transposed_views_go_in_without_a_copy() -> None:
    """(B, H, S, D) tensors transposed, as transformers hands them over."""
    p, mask = problem(2, 50, 4, 2, 16), IntervalMask.causal(50)
    expected = attention(p.q, p.k, p.v, mask=mask)
    views = Problem(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in p))
    assert not any(x.is_contiguous() for x in views)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = attention(views.q, views.k, views.v, mask=mask)
    copies = {"aten::copy_", "aten::clone", "aten::contiguous"} & {event.key for event in profile.key_averages()}
    assert not copies
    assert torch.equal(out, expected)
