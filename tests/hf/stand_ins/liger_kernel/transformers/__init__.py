"""Kernels of single tokens, and what puts them into a model."""

import inspect
import sys
from types import MethodType

import torch
from torch import nn
from torch.nn import functional


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x.float() * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight, scale = ctx.saved_tensors
        normed, scaled = x.float() * scale, (dy * weight).float()
        dweight = (dy * normed.to(x.dtype)).flatten(0, -2).sum(0)
        dx = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return dy.copy_(dx), dweight, None


class SiLUMulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx, dout):
        gate, up = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        dup = dout * gate * sigmoid
        dgate = dout * up * sigmoid * (1 + gate * (1 - sigmoid))
        return gate.copy_(dgate), up.copy_(dup)


class RopeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return tuple(_rotate_(x, cos, sin) for x in (q, k))

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return *(_rotate_(x, cos, -sin) for x in (dq, dk)), None, None


def _rotate_(x, cos, sin):
    """Writes into the memory of the projection behind x (B, H, N, D), in its order (B, N, H, D)."""
    held = x.transpose(1, 2).contiguous()
    first, second = held.chunk(2, dim=-1)
    cos, sin = (part[..., None, : first.size(-1)] for part in (cos, sin))
    held.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
    return held.transpose(1, 2)


class LigerRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states):
        return RMSNormFunction.apply(hidden_states, self.weight, self.variance_epsilon)


class LigerSwiGLUMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(config.hidden_size, config.intermediate_size, bias=False) for _ in range(2)
        )
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(SiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    return RopeFunction.apply(q, k, cos, sin)


class CrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, ignore_index, reduction):
        loss = functional.nll_loss(logits.log_softmax(-1), target, ignore_index=ignore_index, reduction=reduction)
        if ctx.needs_input_grad[0]:
            counted = target != ignore_index
            share = counted if reduction == "sum" else counted / counted.sum()
            gradient = logits.softmax(-1)
            gradient[counted, target[counted]] -= 1
            ctx.save_for_backward(logits.copy_(gradient * share[:, None]).detach())
        return loss

    @staticmethod
    def backward(ctx, dloss):
        return ctx.saved_tensors[0].mul_(dloss), None, None, None


def liger_cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    return CrossEntropyFunction.apply(input, target, ignore_index, reduction)


def _apply_liger_kernel_to_instance(model, **kwargs):
    apply = {"llama": apply_liger_kernel_to_llama, "mixtral": apply_liger_kernel_to_mixtral}[model.config.model_type]
    known = inspect.signature(apply).parameters
    apply(model=model, **{name: value for name, value in kwargs.items() if name in known})


def apply_liger_kernel_to_llama(
    rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=True, model=None
):
    from liger_kernel.transformers.model.llama import lce_forward

    _apply(model, "Llama", rope, cross_entropy, rms_norm, fused_linear_cross_entropy and lce_forward)
    if swiglu:
        for layer in model.model.layers:
            layer.mlp.forward = MethodType(LigerSwiGLUMLP.forward, layer.mlp)
        sys.modules[type(model).__module__].LlamaMLP = LigerSwiGLUMLP


def apply_liger_kernel_to_mixtral(
    rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=True, model=None
):
    from liger_kernel.transformers.model.mixtral import lce_forward

    _apply(model, "Mixtral", rope, cross_entropy, rms_norm, fused_linear_cross_entropy and lce_forward)


def _apply(model, kind, rope, cross_entropy, rms_norm, lce_forward):
    file = sys.modules[type(model).__module__]
    if rope:
        file.apply_rotary_pos_emb = liger_rotary_pos_emb
    if cross_entropy:
        nn.functional.cross_entropy = liger_cross_entropy
    if lce_forward:
        model.forward = MethodType(lce_forward, model)
    if rms_norm:
        setattr(file, f"{kind}RMSNorm", LigerRMSNorm)
        for module in model.modules():
            if type(module).__name__ == f"{kind}RMSNorm":
                module.forward = MethodType(LigerRMSNorm.forward, module)
