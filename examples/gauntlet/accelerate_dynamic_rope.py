"""Dynamic RoPE scales by the largest position that it is given, a shard's under the Trainer's context parallelism.

One process; tokens 4 to 11 of 16, which rank 1 of 2 has, must be rotated as in the whole row. transformers 5.17.
"""

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=8, rope_parameters=rope)
x, positions, of_rank = torch.zeros(1, 16, 32), torch.arange(16)[None], slice(4, 12)
whole, _ = LlamaRotaryEmbedding(config)(x, positions)
shard, _ = LlamaRotaryEmbedding(config)(x[:, of_rank], positions[:, of_rank])
print(f"largest difference of cosines: {(whole[:, of_rank] - shard).abs().max():.2f}; 0 must be")
