"""axolotl-ringmaster's ring leaves out the sinks and softcap that a model hands it: `torchrun --nproc-per-node 2`.

The outputs with and without them are the same numbers. ringmaster 0.2.7, torch 2.13.
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
layer = SimpleNamespace(config=SimpleNamespace(layer_types=["full_attention"]), layer_idx=0, is_causal=True)
q, k, v = (torch.randn(1, 4, 16, 8) for _ in range(3))  # this rank's tokens
plain = attention(layer, q, k, v, None)[0]
for name, value in (("s_aux", torch.full((4,), 3.0)), ("softcap", 0.1)):
    difference = float((attention(layer, q, k, v, None, **{name: value})[0] - plain).abs().max())
    print(f"{name} changes the output of rank {dist.get_rank()} by {difference}; it must change it")
dist.destroy_process_group()
