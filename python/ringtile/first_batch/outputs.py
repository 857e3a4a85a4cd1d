"""One number that depends on all outputs of a model, where the loss is computed by code that a proof does not run.

Shape letters: B rows, S tokens, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_TOKENS = 64  # that are multiplied at once: logits would fill memory as float64


def sum_of_outputs(outputs: Mapping[str, Any], counted: Tensor) -> Tensor | None:
    """(): the loss that a model returns; without one, a mean over tokens of its outputs that have a gradient,
    each number times a random sign.

    counted: bool (B, S), tokens that are no padding. None: the model returns neither.
    """
    loss = outputs.get("loss")
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    parts = [_signed_sum(x, counted) for x in _tensors(outputs)]
    return torch.stack(parts).sum().float() if parts else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.requires_grad and value.dim() >= 2 and value.numel():
            yield value
    elif isinstance(value, Mapping | tuple | list):
        for held in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(held)


def _signed_sum(x: Tensor, counted: Tensor) -> Tensor:
    """x (..., B, S, ...), (B, S - 1, ...), (B S, ...) or with no dimension of tokens -> float64 ()."""
    rows, tokens = counted.shape
    dim = next((i for i in range(x.dim() - 1) if x.shape[i : i + 2] == counted.shape), 0)
    x = x.movedim((dim, dim + 1), (0, 1))
    counted = counted.to(x.device)
    if x.shape[:2] in ((rows, tokens), (rows, tokens - 1)):  # the latter of a token and the next one
        count = x.size(1)
        weights = (counted[:, :count] & counted[:, tokens - count :]).flatten()
    elif x.size(0) == rows * tokens:
        weights = counted.flatten()
    else:
        weights = counted.new_ones(x.size(0))
    x = x.reshape(len(weights), -1)
    generator = torch.Generator().manual_seed(0)  # of the CPU, for every device draws others
    of_rows, of_features = (2.0 * torch.randint(0, 2, (n,), generator=generator) - 1.0 for n in x.shape)
    of_features = of_features.to(x.device, torch.float64) / x.size(1) ** 0.5
    weights = weights * of_rows.to(x.device, torch.float64) / x.size(0)
    parts = zip(torch.split(x, _TOKENS), torch.split(weights, _TOKENS), strict=True)
    return torch.stack([(part.double() @ of_features) @ weight for part, weight in parts]).sum()
