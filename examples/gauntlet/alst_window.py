"""DeepSpeed's ALST attention around transformers' sdpa drops a model's sliding window: `torchrun --nproc-per-node 2`.

The outputs with a window of 4 tokens and without one are the same numbers. deepspeed 0.19.8, transformers 5.17.
"""

from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers.integrations.sdpa_attention import sdpa_attention_forward

deepspeed.init_distributed("gloo")
sizes = {"batch_size": 1, "attn_head_count": 4, "attn_head_size": 8, "kv_head_count": 4, "num_hidden_layers": 1}
attention = UlyssesSPAttentionHF(
    sdpa_attention_forward, process_group=dist.group.WORLD, seq_length_is_variable=True, **sizes
)
layer = SimpleNamespace(is_causal=True, num_key_value_groups=1, training=True)
positions = torch.arange(16)[None] + 16 * dist.get_rank()
q, k, v = (torch.randn(1, 4, 16, 8) for _ in range(3))  # this rank's tokens
options = {"position_ids": positions}
out = [attention(layer, q, k, v, None, sliding_window=window, **options)[0] for window in (None, 4)]
difference = float((out[0] - out[1]).abs().max())
print(f"a window changes the output of rank {dist.get_rank()} by {difference}; it must change it")
dist.destroy_process_group()
