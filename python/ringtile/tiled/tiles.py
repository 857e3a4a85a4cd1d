"""Tiles of tokens, and the linear layer that the tiled MLP and the tiled loss run on each."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from ringtile.errors import InputError, shown


def tiles(num_tokens: int, tile_tokens: int) -> Iterator[slice]:
    """Consecutive ranges of tile_tokens tokens, the last one shorter; for 0 tokens, one empty range."""
    for begin in range(0, max(num_tokens, 1), tile_tokens):
        yield slice(begin, min(begin + tile_tokens, num_tokens))


Value = TypeVar("Value")


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar[Value], value: Value) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_limit: contextvars.ContextVar[int | None] = contextvars.ContextVar("limit", default=None)


def at_most(tile_tokens: int) -> contextlib.AbstractContextManager[None]:
    """Inside, modules and losses that are tiled run in tiles of at most so many tokens; 0: not in tiles."""
    return _set(_limit, tile_tokens)


def tile_limit() -> int | None:
    """Return the limit of `at_most`; None outside of it."""
    return _limit.get()


_device_type: contextvars.ContextVar[str | None] = contextvars.ContextVar("device_type", default=None)


def as_on(device_type: str) -> contextlib.AbstractContextManager[None]:
    """Inside, tiles are chosen and multiplied as on such a device: for fake tensors, which are on none."""
    return _set(_device_type, device_type)


def device_type(device: torch.device) -> str:
    """Return the type of the device whose tiles these are."""
    return _device_type.get() or device.type


def check_tile_tokens(tile_tokens: int) -> None:
    """InputError unless tile_tokens is a whole number of at least 1."""
    if isinstance(tile_tokens, bool) or not isinstance(tile_tokens, int) or tile_tokens < 1:
        raise InputError(f"tile_tokens is {shown(tile_tokens)}, expected a whole number of tokens, at least 1")


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer multiplies x by weight here: autocast's, which never touches float64.

    InputError: the dtypes differ and autocast does not unify them.
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
