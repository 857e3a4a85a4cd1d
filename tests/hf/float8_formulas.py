"""torchao.float8.float8_linear by its formulas: the layer, and the names in its module that ringtile replaces.

For tests where torchao is not installed: transformers imports it in every process, a fifth of the time of a start.
"""

import enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

MODULE = "torchao.float8.float8_linear"
INPUTS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


class LinearMMConfig(NamedTuple):
    output: bool = True
    grad_input: bool = True
    grad_weight: bool = True


class GemmInputRole(enum.Enum):
    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


def hp_tensor_to_float8_dynamic(
    x: Tensor,
    dtype: torch.dtype,
    linear_mm_config: LinearMMConfig,
    reduce_amax: bool = False,
    gemm_input_role: GemmInputRole = GemmInputRole.INPUT,
    device_mesh: Any = None,
    axiswise_dim: int | None = None,
) -> Tensor:
    """x rounded to dtype, by a scale of the tensor, or of all along a dim, which is then a power of two."""
    amax = x.abs().amax() if axiswise_dim is None else x.abs().amax(axiswise_dim, keepdim=True)
    if reduce_amax:
        dist.all_reduce(amax, dist.ReduceOp.MAX, device_mesh.get_group())
    largest = torch.finfo(dtype).max
    scale = largest / amax.clamp(min=1e-12)
    if axiswise_dim is not None:
        scale = scale.log2().floor().exp2()
    return (x * scale).clamp(-largest, largest).to(dtype).to(x.dtype) / scale


class Product(torch.autograd.Function):
    """x (..., K), weight (N, K) -> (..., N)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, config: LinearMMConfig, recipe: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.config, ctx.recipe, ctx.by_row = config, recipe, None if recipe == "tensorwise" else -1
        role = {"gemm_input_role": GemmInputRole.WEIGHT}
        rounded = hp_tensor_to_float8_dynamic(weight, INPUTS, config, **role, axiswise_dim=ctx.by_row)
        return hp_tensor_to_float8_dynamic(x, INPUTS, config, axiswise_dim=ctx.by_row) @ rounded.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x, weight), config = ctx.saved_tensors, ctx.config
        gradient, x, shape = gradients[0].flatten(0, -2), x.flatten(0, -2), x.shape
        dtype = GRADIENTS if ctx.by_row is None else INPUTS

        def of_gradient(dim: int | None) -> Tensor:
            role = {"gemm_input_role": GemmInputRole.GRAD_OUTPUT, "axiswise_dim": dim}
            return hp_tensor_to_float8_dynamic(gradient, dtype, config, **role)

        role = {"gemm_input_role": GemmInputRole.WEIGHT}
        by_column = None if ctx.by_row is None else 0
        of_x = of_gradient(ctx.by_row) @ hp_tensor_to_float8_dynamic(
            weight, INPUTS, config, **role, axiswise_dim=by_column
        )
        if ctx.recipe == "rowwise_with_gw_hp":
            return of_x.view(shape), gradient.T @ x, None, None
        rounded = hp_tensor_to_float8_dynamic(x, INPUTS, config, axiswise_dim=by_column)
        return of_x.view(shape), of_gradient(by_column).T @ rounded, None, None


class Float8Linear(nn.Linear):
    __module__ = MODULE
    recipe = ""
    linear_mm_config = LinearMMConfig()

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight, self.linear_mm_config, self.recipe)


def convert(model: nn.Module, recipe: str) -> nn.Module:
    for name, module in model.named_modules():
        if type(module) is nn.Linear and "lm_head" not in name:
            module.__class__, module.recipe, module.linear_mm_config = Float8Linear, recipe, LinearMMConfig()
    return model
