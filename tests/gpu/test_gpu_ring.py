"""The ring over virtual ranks of one GPU, against float64 and against torch's attention.

Each rank is a thread; a round's keys are copied between threads on the device, on the threads' streams.
"""

from __future__ import annotations

import contextlib

import nccl
import pytest
import torch
from attention_calls import assemble
from device import DEVICE, ON_GPU
from oracle import Attention
from pool import run_ranks
from ringtile import Layout, LoopbackWorld, ring_attention
from ringtile.attn import self_test as attn_self_test
from ringtile.attn.aten import ATEN
from ringtile.transport.loopback import LoopbackGroup
from test_gpu_kernels import MASKS, RESULTS, Problem, assert_not_less_exact_than_torch, problem


def run_ring(p: Problem, mask: str, layout: Layout, own_streams: bool = False) -> Attention:
    def on_rank(group: LoopbackGroup) -> Attention:
        rank = group.transport.rank
        stream = torch.cuda.stream(torch.cuda.Stream(DEVICE)) if own_streams else contextlib.nullcontext()
        with stream:
            leaves = [layout.shard(x.detach(), 1, rank).requires_grad_() for x in (p.q, p.k, p.v)]
            out, lse = ring_attention(
                *leaves, mask=MASKS[mask], layout=layout, group=group, attention_kernel="ringtile", return_lse=True
            )
            gradients = torch.autograd.grad(out, leaves, layout.shard(p.dout, 1, rank))
            return Attention(*(x.detach().cpu() for x in (out, lse, *gradients)))

    if DEVICE.type == "cuda":
        torch.cuda.synchronize()  # the inputs were created on another stream
    return assemble(LoopbackWorld(layout.world_size).run(on_rank), layout)


@pytest.mark.parametrize("world_size", [2, 3, 8, 16] if DEVICE.type == "cuda" else [3])
@pytest.mark.parametrize("mask", MASKS)
def test_ring_obeys_the_accuracy_rule(world_size: int, mask: str) -> None:
    p = problem(torch.bfloat16, 64, 64, num_kv_heads=2)
    for name in ("zigzag", "striped") if mask == "causal" else ("zigzag",):
        ring = run_ring(p, mask, Layout.named(name, 256, world_size))
        assert_not_less_exact_than_torch(p, MASKS[mask], [getattr(ring, result).to(DEVICE) for result in RESULTS])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="torchrun runs it: tests/gpu/nccl.py")
def test_the_check_over_nccl_rehearsed_over_gloo() -> None:
    for done in run_ranks(2, nccl.check, ("documents",), ("ring", "ulysses")):
        assert done == [f"documents, {scheme}, {kernel}" for scheme in ("ring", "ulysses") for kernel in nccl.KERNELS]


@ON_GPU
@pytest.mark.parametrize("world_size", [2, 8])
def test_ranks_on_separate_streams_give_the_same_bits(world_size: int) -> None:
    p, layout = problem(torch.bfloat16, 64, 64), Layout.zigzag(256, world_size)
    expected = run_ring(p, "causal", layout)
    for _ in range(5):
        again = run_ring(p, "causal", layout, own_streams=True)
        assert all(torch.equal(x, y) for x, y in zip(again, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_aten_kernels_return_what_ringtile_expects(head_dim: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    shapes = [torch.empty(1, 1, heads, head_dim, dtype=dtype, device=DEVICE) for heads in (4, *[num_kv_heads] * 2)]
    reasons = {backend.name: attn_self_test.why_wrong(backend, *shapes) for backend in ATEN[DEVICE.type]}
    print(reasons)
    assert "" in reasons.values()
    assert not any("gives another" in reason for reason in reasons.values())


@pytest.mark.parametrize("kernel", ["aten", "auto"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_attention_by_aten_kernels_obeys_the_accuracy_rule(mask: str, kernel: str) -> None:
    p = problem(torch.bfloat16, 128, 128, num_kv_heads=2)
    leaves = [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
    out = ring_attention(*leaves, mask=MASKS[mask], layout=Layout.contiguous(256, 1), attention_kernel=kernel)
    assert_not_less_exact_than_torch(p, MASKS[mask], [out.detach(), *torch.autograd.grad(out, leaves, p.dout)])
