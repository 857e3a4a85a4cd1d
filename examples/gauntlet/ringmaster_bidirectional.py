"""axolotl-ringmaster's ring is causal for an encoder, whose attention layers say is_causal = False: `torchrun
--nproc-per-node 2`. A change of the last token must change all outputs. ringmaster 0.2.7, torch 2.13.
"""

from types import SimpleNamespace

import ringmaster
import torch
import torch.distributed as dist
from ringmaster.config import RotateMethod
from ringmaster.strategies.ring import make_ring_attention

dist.init_process_group("gloo")
config = ringmaster.RingmasterConfig(size=2, ulysses_size=1, ring_size=2)
ringmaster.setup(config, num_kv_heads=4, device_type="cpu", inner_attn="sdpa")
attention = make_ring_attention("math", "math", RotateMethod.ALLGATHER)
layer = SimpleNamespace(config=SimpleNamespace(layer_types=["full_attention"]), layer_idx=0, is_causal=False)
torch.manual_seed(dist.get_rank())
q, k, v = (torch.randn(1, 4, 16, 8) for _ in range(3))  # this rank's tokens
before = attention(layer, q, k, v, None)[0]
if dist.get_rank() == 1:
    v[:, :, -1] += 1
changed = (attention(layer, q, k, v, None)[0] != before).any(-1).any(-1).sum()
print(f"{changed} of 16 outputs of rank {dist.get_rank()} change; 16 must")
dist.destroy_process_group()
