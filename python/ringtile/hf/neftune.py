"""NEFTune's noise on embeddings (arXiv:2310.05914), drawn from counters like dropout: docs/design/dropout.md.

In torch's own operations: it is drawn once a forward pass, where a kernel would save nothing that is seen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringtile.self_test.kernels import random_words

_CHUNK = 1 << 18  # counters at once; their words take 16 times as many bytes


def noise(
    places: Tensor, num_features: int, largest: float, dtype: torch.dtype, key: tuple[int, int], stream: int
) -> Tensor:
    """Uniform in [-largest, largest], (T, F) of dtype, for the tokens at places (T, 2): row and position."""
    counters = torch.arange(-(-num_features // 4), device=places.device)
    parts, num_tokens = [], max(1, _CHUNK // counters.numel())
    for first in range(0, places.size(0), num_tokens):
        row, position = (places[first : first + num_tokens] & 0xFFFFFFFF).tensor_split(2, dim=1)
        words = random_words(counters, position, row, stream, key).flatten(1)[:, :num_features]
        parts.append(((words - 2**31).to(torch.float32) * (largest * 2.0**-31)).to(dtype))
    return torch.cat(parts) if parts else places.new_empty((0, num_features), dtype=dtype)


def largest_of(alpha: float, seq_len: int, num_features: int) -> float:
    """For rows of seq_len tokens, padding included, as transformers counts them."""
    return alpha / math.sqrt(seq_len * num_features)
