"""Label smoothing under the Trainer's context parallelism shifts the labels within each shard. One process.

The Trainer cuts labels and logits of a row like this (head-tail, 2 ranks), and LabelSmoother shifts what it is given.
Smoothing is 0, so that the mean over both ranks must be the cross entropy. transformers 5.17.
"""

import torch
from torch.nn import functional
from transformers.trainer_pt_utils import LabelSmoother

torch.manual_seed(0)
logits, labels = torch.randn(1, 16, 96), torch.randint(96, (1, 16))
smoother = LabelSmoother(epsilon=0.0)
whole = smoother({"logits": logits}, labels, shift_labels=True)
print(f"one process: {whole:.6f}; cross entropy {functional.cross_entropy(logits[0, :-1], labels[0, 1:]):.6f}")
shards = [[*range(0, 4), *range(12, 16)], list(range(4, 12))]  # the tokens of ranks 0 and 1
parts = [smoother({"logits": logits[:, tokens]}, labels[:, tokens], shift_labels=True) for tokens in shards]
print(f"two ranks: {torch.stack(parts).mean():.6f}; targets counted {sum(len(tokens) - 1 for tokens in shards)} of 15")
