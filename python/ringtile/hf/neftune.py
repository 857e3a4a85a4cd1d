"""NEFTune's noise on embeddings (arXiv:2310.05914), drawn from counters like dropout: docs/design/dropout.md.

In torch's own operations: it is drawn once a forward pass, where a kernel would save nothing that is seen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringtile.torch_ops import random_numbers


def noise(
    places: Tensor, num_features: int, largest: float, dtype: torch.dtype, key: tuple[int, int], stream: int
) -> Tensor:
    """Uniform in [-largest, largest], (T, F) of dtype, for the tokens at places (T, 2): row and position."""
    parts = [
        ((words - 2**31).to(torch.float32) * (largest * 2.0**-31)).to(dtype)
        for _, words in random_numbers(places, num_features, key, stream)
    ]
    return torch.cat(parts) if parts else places.new_empty((0, num_features), dtype=dtype)


def largest_of(alpha: float, seq_len: int, num_features: int) -> float:
    """For rows of seq_len tokens, padding included, as transformers counts them."""
    return alpha / math.sqrt(seq_len * num_features)
