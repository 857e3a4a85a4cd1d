"""The ring of ring-flash-attn (and of yunchang, the same loop) computes another window: `torchrun --nproc-per-node 2`.
flash_attn's forward in torch stands in for its kernel. ring-flash-attn 0.1.8, torch 2.13."""

import sys
from unittest import mock

import torch
import torch.distributed as dist


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, **options
):
    far = torch.arange(q.size(1))[:, None] + k.size(1) - q.size(1) - torch.arange(k.size(1))  # aligned at the end
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
    scores = scores.masked_fill((causal & (far < 0)) | (far > window_size_left), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(0), v), scores.logsumexp(-1), None, None


sys.modules |= dict.fromkeys(("flash_attn", "flash_attn.flash_attn_interface", "ring_flash_attn.adapters"), mock.Mock())
sys.modules["flash_attn.flash_attn_interface"]._flash_attn_forward = _flash_attn_forward
from ring_flash_attn import ring_flash_attn_func  # noqa: E402

dist.init_process_group("gloo")
torch.manual_seed(0)
q, k, v = (torch.randn(1, 32, 2, 8) for _ in range(3))  # whole, on both ranks
whole = _flash_attn_forward(q, k, v, 0.0, 8**-0.5, True, window_size_left=5)[0]
shards = [x.chunk(2, dim=1)[dist.get_rank()] for x in (q, k, v, whole)]
out = ring_flash_attn_func(*shards[:3], causal=True, window_size=(5, 0), group=dist.group.WORLD)
print(f"rank {dist.get_rank()} differs from one process by {float((out - shards[3]).abs().max())}")
