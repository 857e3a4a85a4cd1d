"""QLoRA on fake tensors: linear layers as bitsandbytes holds and multiplies them, and PEFT's adapters on these.

The sources are bitsandbytes 0.50.2 (`functional.quantize_4bit`, `autograd/_functions.MatMul4Bit`, `nn.Linear4bit`),
transformers' `replace_with_bnb_linear` and PEFT's `tuners/lora/bnb.py`.

Shape letters: F output size, E input size, B = ceil(F E / 64) blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from ringtile.errors import RefusedError

_BLOCK, _OUTER_BLOCK, _LEVELS = 64, 256, 16


class _Linear4bit(nn.Linear):
    """bfloat16, or whatever the model's dtype is, computes; the weight is nf4 with double quantization."""

    # The blocks' maxima (B,), a byte each; in float32 theirs (ceil(B / 256),), their mean, and the levels.
    state: list[Tensor]
    compute_dtype: torch.dtype

    def quantize(self, storage: torch.dtype) -> None:
        """Replaces the weight (F, E) by two numbers in a byte, ceil(F E / 2) bytes in all."""
        blocks = -(-self.weight.numel() // _BLOCK)
        packed = torch.empty((-(-self.weight.numel() // (2 * storage.itemsize)), 1), dtype=storage)
        self.compute_dtype = self.weight.dtype
        self.state = [torch.empty(blocks, dtype=torch.uint8)]
        self.state += [torch.empty(count) for count in (-(-blocks // _OUTER_BLOCK), 1, _LEVELS)]
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.requires_grad_(False)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """(F, E)"""
        maxima = torch.empty(self.state[0].numel())  # float32, until the weights are there
        whole = torch.empty((self.out_features, self.in_features), dtype=self.compute_dtype)
        del maxima
        return whole.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            out: Any = _Product.apply(x.to(self.compute_dtype), self.weight, self)  # type: ignore[no-untyped-call]
        out = out.to(x.dtype)
        return out.clone()  # type: ignore[no-any-return]  # as PEFT does


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: _Linear4bit) -> Tensor:
        ctx.weight, ctx.layer = weight, layer
        return nn.functional.linear(x, layer.dequantized(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return torch.matmul(dout, ctx.layer.dequantized(dout.dtype)), None, None


class _Adapted(lora.Linear):  # type: ignore[misc]
    """PEFT's adapter on a layer in 4 bits: unlike that on others, it leaves x as it is under autocast."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = self.base_layer(x, *args, **kwargs)
        (name,) = self.active_adapters
        down, up = self.lora_A[name], self.lora_B[name]
        converts = not torch.is_autocast_enabled("cpu")
        out = up(down(self._cast_input_dtype(x, down.weight.dtype) if converts else x)) * self.scaling[name]
        return result + (out.to(result.dtype) if converts else out)  # type: ignore[no-any-return]


def quantize(model: PreTrainedModel, storage: torch.dtype) -> int:
    """Put the linear layers that transformers would into 4 bits, in place; return how many numbers are not counted by
    the model's parameters any more.

    storage: of the packed weights, bnb_4bit_quant_storage. RefusedError: a model with a Conv1D.
    """
    kept, missing = get_keys_to_not_convert(model), 0
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            raise RefusedError(
                f"{type(model).__name__} has a Conv1D, which is not planned in 4 bits; expected linear layers"
            )
        if type(module) is nn.Linear and should_convert_module(name, kept):
            module.__class__ = _Linear4bit
            missing += module.weight.numel()
            module.quantize(storage)  # type: ignore[operator]
            missing -= module.weight.numel()
    return missing


def adapt(model: nn.Module) -> None:
    """Adapters that PEFT has put on layers in 4 bits become those that it has for them."""
    for module in model.modules():
        if type(module) is lora.Linear and isinstance(module.base_layer, _Linear4bit):
            module.__class__ = _Adapted


def states(model: nn.Module) -> list[Tensor]:
    """What is held beside the packed weights: under FSDP2 whole on each rank."""
    return [x for module in model.modules() if isinstance(module, _Linear4bit) for x in module.state]
