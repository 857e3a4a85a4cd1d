"""The fast path of the tiled MLP: modules that are exactly down(act(gate(x)) * up(x)), on ringtile's GLU kernels.

Shape letters: T tokens, E hidden size, F intermediate size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .errors import InputError
from .tiles import add_products_, compute_dtype, linear, new_totals, tiles


@dataclass(frozen=True)
class Glu:
    """act(x gate^T + gate_bias) * (x up^T + up_bias), times down^T, plus down_bias (arXiv:2002.05202)."""

    kind: int  # a value of ops.GLU_KINDS
    gate_weight: Tensor  # (F, E)
    up_weight: Tensor  # (F, E)
    down_weight: Tensor  # (E_out, F)
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    @property
    def weights(self) -> tuple[Tensor | None, ...]:
        return (
            self.gate_weight,
            self.up_weight,
            self.down_weight,
            self.gate_bias,
            self.up_bias,
            self.down_bias,
        )


class _Symbol:
    """Stands for a tensor in a call of a module's forward, and writes down which torch function made it.

    Anything but a torch function or a product (a shape, an index, an `if`) raises, and so does a module that
    needs more than that: it is no plain GLU.
    """

    def __init__(self, function: Callable[..., Any] | None, *arguments: Any, **options: Any) -> None:
        self.function, self.arguments, self.options = function, arguments, options

    def __mul__(self, other: Any) -> _Symbol:
        return _Symbol(operator.mul, self, other)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> _Symbol:
        return cls(operator.mul if function in (torch.mul, Tensor.mul) else function, *args, **(kwargs or {}))


def _linear_of(symbol: Any) -> tuple[Any, Tensor, Tensor | None] | None:
    """(input, weight, bias) if the symbol is a linear layer of plain tensors."""
    if not isinstance(symbol, _Symbol) or symbol.function is not nn.functional.linear:
        return None
    x, weight, bias = (*symbol.arguments, *symbol.options.values(), None)[:3]
    if type(weight) not in (Tensor, nn.Parameter) or type(bias) not in (Tensor, nn.Parameter, type(None)):
        return None  # sharded or quantized
    return x, weight, bias


def _activation_of(symbol: Any) -> tuple[Any, str] | None:
    """(input, key of ops.GLU_KINDS) if the symbol is an activation that has a kernel."""
    if not isinstance(symbol, _Symbol) or not symbol.arguments:
        return None
    if symbol.function is nn.functional.gelu:
        kind = {"none": "gelu", "tanh": "gelu_tanh"}[symbol.options.get("approximate", "none")]
    elif symbol.function in (nn.functional.silu, nn.functional.relu):
        kind = symbol.function.__name__
    else:
        return None
    return symbol.arguments[0], kind


def find_glu(module: nn.Module, forward: Callable[..., Any]) -> Glu | None:
    """The projections of a module whose forward(module, x) is down(act(gate(x)) * up(x)) and nothing else.

    The forward is run once on a symbol instead of a tensor, so what counts is what it does with the weights it
    has now, not what it is called: an adapter, a scale factor, a dropout or a hook makes the answer None.
    """
    if any(
        child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks
        for child in module.modules()
        if child is not module
    ):
        return None
    x = _Symbol(None)
    try:
        root = forward(module, x)
    except Exception:  # a forward may fail on a symbol in any way; then it is not the one looked for
        return None
    down = _linear_of(root)
    if down is None or not isinstance(down[0], _Symbol) or down[0].function is not operator.mul:
        return None
    if len(down[0].arguments) != 2 or down[0].options:
        return None
    for left, right in (down[0].arguments, down[0].arguments[::-1]):
        activation, up = _activation_of(left), _linear_of(right)
        gate = None if activation is None else _linear_of(activation[0])
        if activation is None or gate is None or up is None or gate[0] is not x or up[0] is not x:
            continue
        weights = (gate[1], up[1], down[1], gate[2], up[2], down[2])
        one_dtype = len({weight.dtype for weight in weights if weight is not None}) == 1
        if one_dtype and gate[1].shape == up[1].shape and gate[1].size(0) == down[1].size(1):
            return Glu(ops.GLU_KINDS[activation[1]], *weights)
    return None


class GluTiles:
    """A GLU tile by tile; the backward computes gate and up again, nothing else."""

    def __init__(self, glu: Glu, x: Tensor, tile_tokens: int) -> None:
        if x.size(-1) != glu.gate_weight.size(1):
            raise InputError(f"x has hidden size {x.size(-1)}, the gate projection takes {glu.gate_weight.size(1)}")
        self.kind, self.tile_tokens = glu.kind, tile_tokens
        self.dtype = compute_dtype(x, glu.gate_weight)
        self.weights = glu.weights

    def _cast(self, weights: Sequence[Tensor | None]) -> list[Any]:
        return [None if weight is None else weight.to(self.dtype) for weight in weights]

    def _buffer(self, x_rows: Tensor, gate_weight: Tensor) -> Tensor:
        """(tile, F), used again by every tile."""
        num_rows = min(self.tile_tokens, x_rows.size(0))
        return x_rows.new_empty((num_rows, gate_weight.size(0)), dtype=self.dtype)

    def forward(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias = self._cast(weights)
        x_rows = x.flatten(0, -2)  # (T, E)
        out = x.new_empty((*x.shape[:-1], down_weight.size(0)), dtype=self.dtype)  # no view, see ModuleTiles
        out_rows = out.flatten(0, -2)
        gate_buffer, up_buffer = (self._buffer(x_rows, gate_weight) for _ in range(2))
        with torch.autocast(x.device.type, enabled=False):
            for tile in tiles(x_rows.size(0), self.tile_tokens):
                x_tile = x_rows[tile].to(self.dtype)
                gate = linear(x_tile, gate_weight, gate_bias, gate_buffer[: x_tile.size(0)])
                up = linear(x_tile, up_weight, up_bias, up_buffer[: x_tile.size(0)])
                linear(ops.glu_fwd(gate, up, self.kind), down_weight, down_bias, out_rows[tile])
        return out

    def backward(
        self, douts: Sequence[Tensor | None], needed: Sequence[bool], x: Tensor, *weights: Tensor | None
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        (dout,) = douts
        assert dout is not None
        gate_weight, up_weight, down_weight, gate_bias, up_bias, _ = self._cast(weights)
        x_rows, dout_rows = x.flatten(0, -2), dout.flatten(0, -2)  # (T, E) each
        totals = new_totals(weights, needed[1:])
        gate_total, up_total, down_total, gate_bias_total, up_bias_total, down_bias_total = totals
        dx = x.new_empty(x_rows.shape) if needed[0] else None
        gate_buffer, up_buffer, dprod_buffer = (self._buffer(x_rows, gate_weight) for _ in range(3))
        with torch.autocast(x.device.type, enabled=False):
            for tile in tiles(x_rows.size(0), self.tile_tokens):
                x_tile, dout_tile = x_rows[tile].to(self.dtype), dout_rows[tile]
                gate = linear(x_tile, gate_weight, gate_bias, gate_buffer[: x_tile.size(0)])
                up = linear(x_tile, up_weight, up_bias, up_buffer[: x_tile.size(0)])
                # forward: out = prod down^T, prod = act(gate) * up
                dprod = torch.mm(dout_tile, down_weight, out=dprod_buffer[: x_tile.size(0)])
                ops.glu_bwd_(gate, up, dprod, self.kind)
                dgate, dup, prod = gate, up, dprod  # what the kernel left in their place
                add_products_(down_total, down_bias_total, dout_tile, prod)
                # forward: gate = x gate_weight^T, up = x up_weight^T
                add_products_(gate_total, gate_bias_total, dgate, x_tile)
                add_products_(up_total, up_bias_total, dup, x_tile)
                if dx is not None:
                    dx[tile] = torch.mm(dgate, gate_weight).addmm_(dup, up_weight)
        return None if dx is None else dx.view(x.shape), totals
