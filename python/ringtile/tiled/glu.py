"""The tiled MLP's fast path: modules that compute exactly down(act(gate(x)) * up(x)) run on ringtile's GLU kernels.

Shape letters: T tokens, E hidden size, F intermediate size.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ringtile import ops
from ringtile.errors import InputError
from ringtile.tiled.module_state import ModuleState
from ringtile.tiled.tiles import compute_dtype, linear, tiles
from ringtile.tiled.weight_grad import add_linear_grads_, new_grad_sums

logger = logging.getLogger(__name__)
_with_effects: weakref.WeakSet[type[nn.Module]] = weakref.WeakSet()  # classes whose forward does more than compute
_LINEAR = torch._C._nn.linear  # torch.nn.functional.linear, whatever stands there now


@dataclass(frozen=True)
class Glu:
    """A gated linear unit (arXiv:2002.05202): (act(x gate^T + gate_bias) * (x up^T + up_bias)) down^T + down_bias."""

    kind: int  # a value of ops.GLU_KINDS
    gate_first: bool  # whether gate is the first F of the 2 F columns that weights_in produce, or the last
    weights_in: tuple[Tensor, ...]  # gate and up, (F, E) each, or both fused into one (2 F, E)
    down_weight: Tensor  # (E_out, F)
    biases_in: tuple[Tensor | None, ...]
    down_bias: Tensor | None

    @property
    def weights(self) -> tuple[Tensor | None, ...]:
        return (*self.weights_in, self.down_weight, *self.biases_in, self.down_bias)


class _Symbol:
    """A stand-in for a tensor in a module's forward; it records the torch function that produced it.

    Only torch functions, `*` and chunk(2, -1) are supported. Anything else (a shape, an index, an `if`) raises: a
    module that needs it is not a plain GLU.
    """

    def __init__(self, function: Callable[..., Any] | None, *arguments: Any, **options: Any) -> None:
        self.function, self.arguments, self.options = function, arguments, options

    def __mul__(self, other: Any) -> _Symbol:
        return _Symbol(operator.mul, self, other)

    def chunk(self, chunks: int, dim: int) -> tuple[_Symbol, _Symbol]:
        if (chunks, dim) != (2, -1):
            raise TypeError(f"chunk({chunks}, {dim}); a fused gate and up are the two halves of the last dimension")
        return _Symbol(_half, self, 0), _Symbol(_half, self, 1)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> _Symbol:
        return cls(operator.mul if function in (torch.mul, Tensor.mul) else function, *args, **(kwargs or {}))


def _half(both: _Symbol, index: int) -> None:
    """Marks a result of chunk: first or second half."""


def _linear_of(symbol: Any) -> tuple[Any, Tensor, Tensor | None] | None:
    """Return (input, weight, bias) if the symbol is the output of a linear layer with plain tensors as weights."""
    if not isinstance(symbol, _Symbol) or symbol.function is not _LINEAR:
        return None
    x, weight, bias = (*symbol.arguments, *symbol.options.values(), None)[:3]
    if type(weight) not in (Tensor, nn.Parameter) or type(bias) not in (Tensor, nn.Parameter, type(None)):
        return None  # sharded or quantized
    return x, weight, bias


def _activation_of(symbol: Any) -> tuple[Any, str] | None:
    """Return (input, key of ops.GLU_KINDS) if the symbol is the output of an activation that has a kernel."""
    if not isinstance(symbol, _Symbol) or not symbol.arguments:
        return None
    if symbol.function is nn.functional.gelu:
        kind = {"none": "gelu", "tanh": "gelu_tanh"}[symbol.options.get("approximate", "none")]
    elif symbol.function in (nn.functional.silu, nn.functional.relu):
        kind = symbol.function.__name__
    else:
        return None
    return symbol.arguments[0], kind


@contextlib.contextmanager
def _torchs_linear() -> Iterator[None]:
    """Puts torch's linear back inside, which DeepSpeed replaces under ZeRO-3 by one that takes only tensors."""
    before = nn.functional.linear
    if before.__module__ and before.__module__.startswith("deepspeed."):
        nn.functional.linear = _LINEAR
    try:
        yield
    finally:
        nn.functional.linear = before


def find_glu(module: nn.Module, forward: Callable[..., Any]) -> Glu | None:
    """Return the projections of a module whose forward(module, x) is exactly down(act(gate(x)) * up(x)), otherwise
    None.

    Traces forward once on a symbol, so the decision rests on what it computes from its present weights and not on
    names: an adapter, a scale factor, dropout or a hook makes the result None. So does a forward that writes into its
    module or draws random numbers: what it did to the symbol is put back, and its class is not traced again.
    """
    if type(module) in _with_effects or any(
        child._forward_hooks or child._forward_pre_hooks or child._backward_hooks or child._backward_pre_hooks
        for child in module.modules()
        if child is not module
    ):
        return None
    x, before = _Symbol(None), ModuleState(module)
    root: Any = None
    try:
        with _torchs_linear():
            root = forward(module, x)
    except Exception as error:  # a forward can fail on a symbol in any way, and each way means it is not a plain GLU
        logger.debug("%s runs its own forward: on a symbol it raises %r", type(module).__name__, error)
    if before.put_back():
        _with_effects.add(type(module))
        return None
    down = _linear_of(root)
    if down is None or not isinstance(down[0], _Symbol) or down[0].function is not operator.mul:
        return None
    if len(down[0].arguments) != 2 or down[0].options:
        return None
    for left, up in (down[0].arguments, down[0].arguments[::-1]):
        activation = _activation_of(left)
        into = None if activation is None else _inputs_of(activation[0], up, x)
        if activation is None or into is None:
            continue
        gate_first, linears = into
        weights_in, biases_in = zip(*linears, strict=True)
        glu = Glu(ops.GLU_KINDS[activation[1]], gate_first, weights_in, down[1], biases_in, down[2])
        one_dtype = len({weight.dtype for weight in glu.weights if weight is not None}) == 1
        width = 2 * down[1].size(1) // len(weights_in)
        if one_dtype and all(weight.size(0) == width for weight in weights_in):
            return glu
    return None


def _inputs_of(gate: Any, up: Any, x: _Symbol) -> tuple[bool, list[tuple[Tensor, Tensor | None]]] | None:
    """Return (gate_first, [(weight, bias), ...]) if gate and up are linear layers of x, two of them or one fused."""
    outputs, gate_first = [gate, up], True
    if all(isinstance(symbol, _Symbol) and symbol.function is _half for symbol in outputs):
        (both, gate_index), (other, up_index) = gate.arguments, up.arguments
        if both is not other or gate_index == up_index:
            return None
        outputs, gate_first = [both], gate_index == 0
    linears = [_linear_of(symbol) for symbol in outputs]
    found = [linear[1:] for linear in linears if linear is not None and linear[0] is x]
    return (gate_first, found) if len(found) == len(linears) else None


class GluTiles:
    """A GLU, tile by tile; the backward recomputes gate and up only."""

    def __init__(self, glu: Glu, x: Tensor, tile_tokens: int) -> None:
        hidden_size = glu.weights_in[0].size(1)
        if x.size(-1) != hidden_size:
            raise InputError(f"x has hidden size {x.size(-1)}, the gate projection takes {hidden_size}")
        self.kind, self.gate_first, self.tile_tokens = glu.kind, glu.gate_first, tile_tokens
        self.dtype = compute_dtype(x, glu.down_weight)
        self.weights = glu.weights
        self.width = glu.down_weight.size(1)  # F
        num_in = len(glu.weights_in)
        step = 2 * self.width // num_in
        self.columns = [slice(step * index, step * (index + 1)) for index in range(num_in)]

    def _by_role(self, tensors: Sequence[Any]) -> tuple[list[tuple[Any, Any, slice]], Any, Any]:
        """Splits tensors ordered like Glu.weights: [(weight, bias, output columns), ...], down weight, down bias."""
        num_in = len(self.columns)
        into = zip(tensors[:num_in], tensors[num_in + 1 : -1], self.columns, strict=True)
        return list(into), tensors[num_in], tensors[-1]

    def _cast(self, weights: Sequence[Tensor | None]) -> list[Any]:
        return [None if weight is None else weight.to(self.dtype) for weight in weights]

    def _buffer(self, x_rows: Tensor, width: int) -> Tensor:
        """Return (tile, width), reused by every tile."""
        return x_rows.new_empty((min(self.tile_tokens, x_rows.size(0)), width), dtype=self.dtype)

    def _gate_and_up(self, x_tile: Tensor, into: Sequence[tuple[Any, Any, slice]], both: Tensor) -> list[Tensor]:
        """Computes gate and up of one tile (t, F), as views of both (t, 2 F)."""
        for weight, bias, columns in into:
            linear(x_tile, weight, bias, both[:, columns])
        halves = [both[:, : self.width], both[:, self.width :]]
        return halves if self.gate_first else halves[::-1]

    def forward(self, x: Tensor, *weights: Tensor | None) -> Tensor:
        into, down_weight, down_bias = self._by_role(self._cast(weights))
        x_rows = x.flatten(0, -2)  # (T, E)
        out = x.new_empty((*x.shape[:-1], down_weight.size(0)), dtype=self.dtype)  # not a view, see ModuleTiles
        out_rows = out.flatten(0, -2)
        buffer = self._buffer(x_rows, 2 * self.width)
        with torch.autocast(x.device.type, enabled=False):
            for tile in tiles(x_rows.size(0), self.tile_tokens):
                x_tile = x_rows[tile].to(self.dtype)
                gate, up = self._gate_and_up(x_tile, into, buffer[: x_tile.size(0)])
                linear(ops.glu_fwd(gate, up, self.kind), down_weight, down_bias, out_rows[tile])
        return out

    def backward(
        self, douts: Sequence[Tensor | None], needed: Sequence[bool], x: Tensor, *weights: Tensor | None
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        (dout,) = douts
        assert dout is not None
        into, down_weight, _ = self._by_role(self._cast(weights))
        x_rows, dout_rows = x.flatten(0, -2), dout.flatten(0, -2)  # (T, E) each
        sums = new_grad_sums(weights, needed[1:])
        into_sums, down_sum, down_bias_sum = self._by_role(sums)
        dx = x.new_empty(x_rows.shape) if needed[0] else None
        buffer, dprod_buffer = self._buffer(x_rows, 2 * self.width), self._buffer(x_rows, self.width)
        with torch.autocast(x.device.type, enabled=False):
            for tile in tiles(x_rows.size(0), self.tile_tokens):
                x_tile, dout_tile = x_rows[tile].to(self.dtype), dout_rows[tile]
                both = buffer[: x_tile.size(0)]
                gate, up = self._gate_and_up(x_tile, into, both)
                # forward: out = prod down^T, prod = act(gate) * up
                dprod = torch.mm(dout_tile, down_weight, out=dprod_buffer[: x_tile.size(0)])
                ops.glu_bwd_(gate, up, dprod, self.kind)
                dboth, prod = both, dprod  # the kernel has overwritten its inputs
                add_linear_grads_(down_sum, down_bias_sum, dout_tile, prod)
                # forward: both[:, columns] = x weight^T
                for weight_sum, bias_sum, columns in into_sums:
                    add_linear_grads_(weight_sum, bias_sum, dboth[:, columns], x_tile)
                if dx is not None:
                    (weight, _, columns), *rest = into
                    dx_tile = dx[tile] if dx.dtype == self.dtype else torch.empty_like(x_tile)
                    torch.mm(dboth[:, columns], weight, out=dx_tile)
                    for weight, _, columns in rest:
                        dx_tile.addmm_(dboth[:, columns], weight)
                    if dx.dtype != self.dtype:
                        dx[tile] = dx_tile
        return None if dx is None else dx.view(x.shape), sums
