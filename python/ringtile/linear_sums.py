"""Linear layers that add their weight's gradient to a total themselves, instead of handing it to autograd rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from .tiles import add_products_, new_totals


class LinearSums(TorchFunctionMode):
    """While it is on, backward through torch.nn.functional.linear with one of these weights adds to its total.

    The product of a tile is then neither rounded to the weight's dtype nor written down before it is added. Totals are
    made when they are first added to. What else is done with a weight goes through autograd as ever, and so do layers
    inside a checkpoint, whose recomputation this mode does not reach.
    """

    def __init__(self, weights: Sequence[Tensor], totals: list[Tensor | None]) -> None:
        super().__init__()
        self.weights, self.totals = weights, totals
        self.index = {id(weight): index for index, weight in enumerate(weights)}

    def total(self, index: int) -> Tensor:
        total = self.totals[index]
        if total is None:
            (total,) = new_totals([self.weights[index]], [True])
            assert total is not None
            self.totals[index] = total
        return total

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            return self._linear(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        index = self.index.get(id(weight))
        in_checkpoint = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if index is None or in_checkpoint or type(input) is not Tensor or input.dim() < 2:
            return nn.functional.linear(input, weight, bias)
        return _Linear.apply(input, weight, bias, self, index, self.index.get(id(bias)))  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sums: LinearSums,
        weight_index: int,
        bias_index: int | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sums, ctx.weight_index, ctx.bias_index = sums, weight_index, bias_index
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            x_rows, dout_rows = x.flatten(0, -2).to(dout.dtype), dout.flatten(0, -2)  # as the forward rounded x
            bias_total = None if ctx.bias_index is None else ctx.sums.total(ctx.bias_index)
            add_products_(ctx.sums.total(ctx.weight_index), bias_total, dout_rows, x_rows)
            dx = (dout @ weight.to(dout.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None
