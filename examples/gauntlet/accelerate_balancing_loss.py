"""A mixture's balancing loss, which transformers' models compute of the tokens that a rank has. One process.

It multiplies two means over tokens, so the mean over shards is not that of the row. The Trainer's context parallelism
leaves it to each rank. transformers 5.17.
"""

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

torch.manual_seed(0)
logits = torch.randn(16, 4) + torch.linspace(-2, 2, 16)[:, None] * torch.tensor([1.0, 0.0, 0.0, -1.0])  # of 4 experts
shards = [[*range(0, 4), *range(12, 16)], list(range(4, 12))]  # the tokens of ranks 0 and 1, head-tail
whole = load_balancing_loss_func((logits,), 4, 2)
parts = [load_balancing_loss_func((logits[tokens],), 4, 2) for tokens in shards]
print(f"one process: {whole:.6f}; two ranks, mean: {torch.stack(parts).mean():.6f}")
