"""What is wrong with a recurrence or a convolution, ringtile's or a library's: a small case against its definition,
token by token in float64. A document that goes on from a state, two that do not, and padding; more than two chunks.

A kernel of ringtile's may be off as self_test.rounding says. A library rounds what it multiplies to 16 bits, or to TF32
(as coarse as float16) where that is float32: of each result the error may be 8 units of rounding, in norm. A
convolution multiplies no matrices, but takes a GPU's fast exponentials, good to 2^-16 and better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringtile import self_test

_SEQ_IDX = torch.tensor([[-1 if t in (4, 66) else (t >= 3) + (t >= 72) for t in range(76)]], dtype=torch.int32)
_UNITS, _FAST_EXPONENTIAL = 8, 2.0**-16


def failure(
    function: Callable[..., tuple[Tensor, Tensor]],
    op: str,
    dtype: torch.dtype,
    device: torch.device,
    dims: tuple[int, int],
    by_channel: bool = False,
    is_library: bool = True,
) -> str:
    """Return what is wrong with a function `op` of kernels.py; "" if nothing is. dims: K and V, or W and anything."""
    given, options = _inputs(op, dtype, *dims, by_channel)
    leaves = {name: x.to(device).requires_grad_(name != "A" or op != "ssd") for name, x in given.items()}
    outputs = function(**leaves, **options, seq_idx=_SEQ_IDX)
    incoming = [self_test.normal(8, *x.shape, dtype=x.dtype, device=x.device) for x in outputs]
    got = *outputs, *torch.autograd.grad(outputs, _with_gradients(leaves), incoming)
    wide = {name: x.detach().double().cpu().requires_grad_(x.requires_grad) for name, x in leaves.items()}
    right_outputs = _defined(op, wide, **options)
    exact = (
        *right_outputs,
        *torch.autograd.grad(right_outputs, _with_gradients(wide), [x.double().cpu() for x in incoming]),
    )
    names = *("output", "final state"), *(f"gradient of {name}" for name, x in leaves.items() if x.requires_grad)
    unit = torch.finfo(torch.float16 if dtype == torch.float32 else dtype).eps / 2
    if op == "causal_conv1d" and dtype == torch.float32:
        unit = _FAST_EXPONENTIAL
    for name, x, right in zip(names, got, exact, strict=True):
        x, right = x.detach().cpu(), right.detach()
        if not is_library:
            num_terms = _SEQ_IDX.numel() + sum(right.shape)
            reason = self_test.difference(name, x, right, self_test.rounding(x, right, num_terms))
        else:
            off = float((x.double() - right).norm() / right.norm())
            is_right = off <= _UNITS * unit  # a NaN is not
            reason = "" if is_right else f"gives another {name} than its definition, by {off:.1e} of its norm"
        if reason:
            return reason
    return ""


def _with_gradients(leaves: dict[str, Tensor]) -> list[Tensor]:
    return [x for x in leaves.values() if x.requires_grad]


def _inputs(
    op: str, dtype: torch.dtype, key_dim: int, value_dim: int, by_channel: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Two heads share keys. The gradient of ssd's A, of each head a sum whose terms cancel, is not compared."""
    state, normal, unit = torch.promote_types(dtype, torch.float32), self_test.normal, torch.nn.functional.normalize

    def rows(seed: int, *sizes: int) -> Tensor:
        return normal(seed, 1, _SEQ_IDX.size(1), *sizes)

    if op == "causal_conv1d":
        x, before = rows(0, 20).to(dtype), normal(3, 1, key_dim - 1, 20).to(dtype)
        weights = {"weight": normal(1, 20, key_dim).to(state), "bias": normal(2, 20).to(state)}
        return {"x": x, **weights, "initial_state": before.to(state)}, {"activation": "silu"}
    width = [70] if op == "selective_scan" else [2, value_dim]  # channels: more than one task (csrc/scan/chunks.h)
    heads = [1] * (op != "selective_scan")
    q, k = rows(0, *heads, key_dim).to(dtype), unit(rows(1, *heads, key_dim), dim=-1).to(dtype)
    x, factor, before = rows(2, *width).to(dtype), rows(4, width[0]).sigmoid().to(state), normal(5, 1, *width, key_dim)
    if op == "gated_delta_rule":
        g = (-rows(3, 2, *[key_dim] * by_channel).abs() / 8).to(state)
        return {"q": q, "k": k, "v": x, "g": g, "beta": factor, "initial_state": before.mT.to(state)}, {"scale": 0.5}
    A = (-normal(6, *width[:1], *[key_dim] * (op == "selective_scan")).abs() / 8).to(state)
    given = {"x": x, "dt": factor, "A": A, "B": k, "C": q, "D": normal(7, width[0]).to(state)}
    return {**given, "initial_state": before.to(state)}, {}


def _defined(op: str, of: dict[str, Tensor], scale: float = 1.0, activation: str = "") -> tuple[Tensor, Tensor]:
    """Return the output and the final state, as kernels.py defines them."""

    def step(t: int, S: Tensor) -> tuple[Tensor, Tensor]:
        now = {name: x[0, t] for name, x in of.items() if x.dim() > 2 and name != "initial_state"}
        if op == "causal_conv1d":
            window = torch.cat([S, now["x"][None]])
            return torch.nn.functional.silu((window * of["weight"].mT).sum(0) + of["bias"]), window[1:]
        if op == "gated_delta_rule":
            S = now["g"].view(S.size(0), -1, 1).exp() * S
            u = now["beta"][:, None] * (now["v"] - (now["k"][..., None] * S).sum(1))
            S = S + now["k"][..., None] * u[:, None]
            return scale * (now["q"][..., None] * S).sum(1), S
        x, dt = now["x"], now["dt"].view(-1, *[1] * (now["x"].dim() - 1))
        decay = (dt[..., None] * of["A"].view(S.size(0), -1).view(-1, *[1] * (S.dim() - 2), of["A"][0].numel())).exp()
        S = decay * S + (dt * x)[..., None] * now["B"].view(*[1] * (S.dim() - 1), -1)
        return (S * now["C"].view(*[1] * (S.dim() - 1), -1)).sum(-1) + of["D"].view(dt.shape) * x, S

    S, before, outputs = of["initial_state"][0], 0, list[Tensor]()
    for t, document in enumerate(_SEQ_IDX[0].tolist()):
        if document < 0:
            outputs.append(torch.zeros_like(outputs[-1]))
            continue
        y, S = step(t, S if document == before else torch.zeros_like(S))
        outputs, before = [*outputs, y], document
    return torch.stack(outputs)[None], S[None]
