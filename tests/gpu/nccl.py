"""The schemes over NCCL, each rank with a GPU of its own, against float64 and against torch's attention.

torchrun --standalone --nproc-per-node gpu tests/gpu/nccl.py: two GPUs or more. On a CPU, over gloo, a rehearsal.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path += [str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(__file__).parents[1] / "attn")]
    if torch.cuda.is_available():  # before the tests' numbers are made
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

from attention_calls import assemble
from device import DEVICE
from oracle import Attention
from ringtile import Layout, ShardedSequence, ring_attention
from ringtile.transport.groups import transport_of
from test_gpu_kernels import MASKS, RESULTS, assert_not_less_exact_than_torch, problem

SCHEMES = ("ring", "all_gather", "ulysses", "auto")
# How many times torch's squares of errors, as far as draws agree. "auto" may take aten, which rounds each block of a
# ring to bfloat16: 1.22 to 1.60 times torch's squares, measured over 8 rounds on CPUs.
KERNELS = {"ringtile": 1.0, "auto": 3.0}


def check(masks: tuple[str, ...] = tuple(MASKS), schemes: tuple[str, ...] = SCHEMES) -> list[str]:
    """Every rank compares what all have computed. Returns what was compared. AssertionError: something is wrong."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    p, layout = problem(torch.bfloat16, 64, 64, num_kv_heads=2), Layout.zigzag(256, dist.get_world_size())
    done = []
    for mask in masks:
        for scheme in schemes:
            for kernel, factor in KERNELS.items():
                sequence = ShardedSequence(MASKS[mask], layout, dist.group.WORLD, scheme=scheme)
                leaves = [layout.shard(x.detach(), 1, rank).requires_grad_() for x in (p.q, p.k, p.v)]
                sent = transport_of(dist.group.WORLD).bytes_sent
                out, lse = ring_attention(*leaves, sequence, attention_kernel=kernel, return_lse=True)
                gradients = torch.autograd.grad(out, leaves, layout.shard(p.dout, 1, rank))
                mine = Attention(*(x.detach().cpu() for x in (out, lse, *gradients)))
                of_ranks: list[Any] = [None] * world_size
                dist.all_gather_object(of_ranks, mine)
                ours = assemble(of_ranks, layout)
                results = [getattr(ours, name).to(DEVICE) for name in RESULTS]
                assert_not_less_exact_than_torch(p, MASKS[mask], results, factor)
                assert mask != "full" or transport_of(dist.group.WORLD).bytes_sent > sent, "nothing was sent"
                done.append(f"{mask}, {scheme}, {kernel}")
    return done


def main() -> None:
    if int(os.environ["WORLD_SIZE"]) < 2:
        print("one GPU: nobody to send to")
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo")
    done = check() if DEVICE.type == "cuda" else check(("documents",), ("ring", "ulysses"))
    if dist.get_rank() == 0:
        print(f"{len(done)} cases over {dist.get_world_size()} ranks on {DEVICE.type} are right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
