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
    """What `at_most` says; None outside of it."""
    return _limit.get()


_device_type: contextvars.ContextVar[str | None] = contextvars.ContextVar("device_type", default=None)


def as_on(device_type: str) -> contextlib.AbstractContextManager[None]:
    """Inside, tiles are chosen and multiplied as on such a device: for fake tensors, which are on none."""
    return _set(_device_type, device_type)


def device_type(device: torch.device) -> str:
    """The type of the device whose tiles these are."""
    return _device_type.get() or device.type


class TileRun:
    """A module's run on one tile, or a layer's on a chunk, for code inside that must know which tokens these are."""

    def __init__(self, tokens: slice | Tensor, shape: tuple[int, int], repeats: bool = False) -> None:
        self.tokens = tokens  # of the flattened batch: a range, or int64 (T,)
        self.shape = shape  # rows, and tokens of each, as the module sees them
        self.repeats = repeats  # a part of what has run on these tokens already, in this pass
        self.calls: dict[str, int] = {}  # of whoever counts its calls in this run

    @property
    def start(self) -> int:
        """The first of the tokens."""
        return int(self.tokens.start if isinstance(self.tokens, slice) else self.tokens[0])

    def inner(self, tokens: slice) -> slice | Tensor:
        """The tokens of a tile of these."""
        if isinstance(self.tokens, Tensor):
            return self.tokens[tokens]
        return slice(self.tokens.start + tokens.start, self.tokens.start + tokens.stop)


_running: contextvars.ContextVar[TileRun | None] = contextvars.ContextVar("running", default=None)


def running_tile() -> TileRun | None:
    """The tile on which a module runs now, in this thread."""
    return _running.get()


def on_tile(tokens: slice) -> contextlib.AbstractContextManager[None]:
    """A module runs on one tile inside the context: of the tokens of the tile that runs already, if one does."""
    outer, shape = running_tile(), (1, tokens.stop - tokens.start)
    repeats = outer is not None and outer.repeats
    return _set(_running, TileRun(tokens if outer is None else outer.inner(tokens), shape, repeats))


def on_chunk(batch: int, num_tokens: int, tokens: slice, repeats: bool) -> contextlib.AbstractContextManager[None]:
    """A layer runs on a chunk of the tokens (batch, num_tokens) inside the context. repeats: as of TileRun."""
    places: slice | Tensor = tokens
    if batch > 1:
        places = (num_tokens * torch.arange(batch)[:, None] + torch.arange(tokens.start, tokens.stop)).flatten()
    return _set(_running, TileRun(places, (batch, tokens.stop - tokens.start), repeats))


def check_tile_tokens(tile_tokens: int) -> None:
    """InputError unless tile_tokens is a whole number of at least 1."""
    if isinstance(tile_tokens, bool) or not isinstance(tile_tokens, int) or tile_tokens < 1:
        raise InputError(f"tile_tokens is {shown(tile_tokens)}, expected a whole number of tokens, at least 1")


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which a linear layer multiplies x by weight here: autocast's, which never touches float64.

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
