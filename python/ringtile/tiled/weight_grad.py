"""Weight gradients, summed over tiles in float32 (float64 for float64 weights) and rounded once at the end.

Shape letters: T tokens, E input size, F output size of a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from ringtile import ops
from ringtile.ops import state_dtype
from ringtile.tiled.tiles import device_type, tiles

PRODUCT_BYTES = 64 * 2**20  # of a product that is then added to a sum
MIN_KERNEL_TOKENS = 32  # with fewer, to read and write the sum takes as long as torch's product, and is all that counts


def new_grad_sums(weights: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Zeros in which to sum the gradient of each needed weight; None for the others."""
    return [
        torch.zeros_like(weight, dtype=state_dtype(weight.dtype)) if need and weight is not None else None
        for weight, need in zip(weights, needed, strict=True)
    ]


def round_grad_sums(sums: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return each sum as a gradient of its input: rounded once, to that input's dtype."""
    return [None if total is None or x is None else total.to(x.dtype) for total, x in zip(sums, inputs, strict=True)]


def sums_16_bit_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether matrices of a 16-bit dtype are multiplied there with sums, and a result, of float32: by CUDA's
    tensor cores, and by a CPU's instructions for bfloat16."""
    if device_type(device) == "cpu":
        return dtype == torch.bfloat16 and ops.cpu_isa() in ("avx512_bf16", "amx_bf16")
    return device_type(device) == "cuda"


_tried: dict[tuple[torch.device, torch.dtype], bool] = {}


def _adds_in_place(x: Tensor) -> bool:
    """Return whether torch.addmm adds products of matrices like x to a float32 sum where it is, unrounded: tried once.

    So it does on CUDA since torch 2.10; else a product is written beside the sum, read again, and added.
    """
    if (known := _tried.get((x.device, x.dtype))) is not None:
        return known
    if type(x) is not Tensor or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False  # where no number can be read, such as on fake tensors
    numbers = torch.arange(64 * 40, device=x.device, dtype=torch.float64).sin()
    dout, some = (numbers[: 64 * size].view(64, size).to(x.dtype) for size in (40, 24))
    total, wide = torch.ones(40, 24, device=x.device), [dout.double(), some.double()]
    place, exact, largest = total.data_ptr(), 1 + wide[0].t() @ wide[1], 1 + wide[0].abs().t() @ wide[1].abs()
    try:
        torch.addmm(total, dout.t(), some, out_dtype=torch.float32, out=total)
        near = (total - exact).abs() <= 65 * torch.finfo(torch.float32).eps * largest  # 65 terms
        found = total.data_ptr() == place and bool(near.all())
    except Exception:  # of whatever kind: the other way always works
        found = False
    _tried[x.device, x.dtype] = found
    return found


def add_linear_grads_(weight_sum: Tensor | None, bias_sum: Tensor | None, dout: Tensor, x: Tensor) -> None:
    """Adds one tile's gradients of a linear layer: dout^T x for the weight, the column sums of dout for the bias.

    dout (T, F), x (T, E), weight_sum (F, E), bias_sum (F); a sum that is None is skipped. The product is computed in
    the dtype of the sum, so a bfloat16 tile's share is not rounded and the error does not grow with the number of
    tiles. Where `sums_16_bit_products`, factors of 16 bits stay so: in float32 the product of two of them is exact.
    """
    if weight_sum is not None:
        narrow = dout.dtype == x.dtype in (torch.bfloat16, torch.float16) and weight_sum.dtype == torch.float32
        narrow = narrow and sums_16_bit_products(x.device, x.dtype)
        on_cpu = device_type(x.device) == "cpu"  # whose kernel takes rows
        if not narrow or (on_cpu and (x.size(0) < MIN_KERNEL_TOKENS or weight_sum.stride(1) != 1)):
            weight_sum.addmm_(dout.t().to(weight_sum.dtype), x.to(weight_sum.dtype))
        elif on_cpu:
            dout, x = (each if each.stride(1) == 1 else each.contiguous() for each in (dout, x))
            ops.weight_grad_add_(dout, x, weight_sum)
        elif _adds_in_place(x):
            torch.addmm(weight_sum, dout.t(), x, out_dtype=torch.float32, out=weight_sum)
        else:
            num_rows = max(1, PRODUCT_BYTES // max(1, 4 * x.size(1)))
            for rows in tiles(dout.size(1), num_rows):
                weight_sum[rows].add_(torch.mm(dout[:, rows].t(), x, out_dtype=torch.float32))  # += would copy them
    if bias_sum is not None:
        bias_sum += dout.sum(0, dtype=bias_sum.dtype)


class WeightGradSums(TorchFunctionMode):
    """Sums the weight gradients of a module's linear layers over tiles, bypassing autograd's rounding.

    While the mode is active, the backward of torch.nn.functional.linear adds its product straight to the weight's
    sum instead of returning it in the weight's dtype. A sum is allocated when something is first added to it. Any
    other use of a weight goes through autograd as usual. So do layers inside a checkpoint, because its recomputation
    runs outside this mode.
    """

    def __init__(self, weights: Sequence[Tensor], sums: list[Tensor | None]) -> None:
        super().__init__()
        self.weights, self.sums = weights, sums
        self.index = {id(weight): index for index, weight in enumerate(weights)}

    def sum_of(self, index: int) -> Tensor:
        """Return the sum for the weight at that index, allocated on first use."""
        total = self.sums[index]
        if total is None:
            (total,) = new_grad_sums([self.weights[index]], [True])
            assert total is not None
            self.sums[index] = total
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
        sums: WeightGradSums,
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
            x_rows, dout_rows = x.flatten(0, -2).to(dout.dtype), dout.flatten(0, -2)  # x as the forward rounded it
            bias_sum = None if ctx.bias_index is None else ctx.sums.sum_of(ctx.bias_index)
            add_linear_grads_(ctx.sums.sum_of(ctx.weight_index), bias_sum, dout_rows, x_rows)
            dx = (dout @ weight.to(dout.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None
