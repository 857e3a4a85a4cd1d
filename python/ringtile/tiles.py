"""What the tiled MLP and the tiled loss share: cutting tokens into tiles, and sums over tiles that lose nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .errors import InputError
from .ops import state_dtype


def tiles(num_tokens: int, tile_tokens: int) -> Iterator[slice]:
    """Ranges of at most tile_tokens tokens, the last one shorter; of 0 tokens, one empty range."""
    for begin in range(0, max(num_tokens, 1), tile_tokens):
        yield slice(begin, min(begin + tile_tokens, num_tokens))


def check_tile_tokens(tile_tokens: int) -> None:
    """InputError unless tile_tokens is a whole number of at least 1."""
    if isinstance(tile_tokens, bool) or not isinstance(tile_tokens, int) or tile_tokens < 1:
        raise InputError(f"tile_tokens is {tile_tokens!r}, expected a whole number of tokens, at least 1")


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which a linear layer multiplies x and weight here: autocast's, which leaves float64 alone.

    InputError: the dtypes differ and autocast does not make them one.
    """
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight.dtype):
        return torch.get_autocast_dtype(x.device.type)
    if x.dtype != weight.dtype:
        raise InputError(f"x has dtype {x.dtype} but the weight {weight.dtype}; cast one, or use torch.autocast")
    return x.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """out = x weight^T + bias, for x (T, E), weight (F, E), bias (F), out (T, F)."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def new_totals(weights: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Zeros to sum the gradients of the needed weights in, float32 (float64 for float64 weights)."""
    return [
        torch.zeros_like(weight, dtype=state_dtype(weight.dtype)) if need and weight is not None else None
        for weight, need in zip(weights, needed, strict=True)
    ]


def as_gradients(totals: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Every total, rounded once to the dtype of what it is the gradient of."""
    return [None if total is None or x is None else total.to(x.dtype) for total, x in zip(totals, inputs, strict=True)]


def add_products_(weight_total: Tensor | None, bias_total: Tensor | None, dout: Tensor, x: Tensor) -> None:
    """Adds one tile's gradients of a linear layer: dout^T x and the column sums of dout.

    dout (T, F), x (T, E), weight_total (F, E), bias_total (F) or None. In the dtype of the totals: a product of
    two bfloat16 tiles is not rounded before it is added, so the error does not grow with the number of tiles.
    """
    if weight_total is not None:
        weight_total.addmm_(dout.t().to(weight_total.dtype), x.to(weight_total.dtype))
    if bias_total is not None:
        bias_total += dout.sum(0, dtype=bias_total.dtype)
