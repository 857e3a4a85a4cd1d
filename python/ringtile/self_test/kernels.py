"""What is wrong with a kernel of the GLU, the loss or the rows on a device: a small case against its definition,
which is the torch operations that would run instead (torch_ops.py), in float64.

Every test takes ringtile's ops, and returns "" if nothing is wrong. Bounds: u is half an eps of the tensors' dtype, for
the one rounding of a result; e an eps of the dtype that the kernel computes in, of which elementary functions take a
few and a sum of n terms n.

Shape letters: T tokens, F MLP intermediate size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ringtile import torch_ops

REPEATS = {"cpu": 1, "cuda": 500}  # of a case's few tokens
FEW = 32  # roundings of a GLU's elementary functions and products


def _normal(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)


def _roundings(dtype: torch.dtype) -> tuple[float, float, float]:
    """u, e and the least number above 0."""
    limits = torch.finfo(dtype)
    computed = torch.finfo(torch.promote_types(dtype, torch.float32))
    return limits.eps / 2, computed.eps, limits.tiny * limits.eps


def _differs(what: str, got: Tensor, expected: Tensor, bound: Tensor) -> str:
    off = (got.double() - expected).abs()
    if bool((off <= bound).all()):  # a nan is not
        return ""
    return f"gives another {what} than its definition, by {float((off - bound).max()):.1e} more than rounding explains"


def glu(ops: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Of every kind, for (T, F) matrices with a row stride."""
    gate, up, dprod = (_normal((3 * REPEATS[device.type], 150), device, dtype, seed)[:, :139] for seed in range(3))
    u, e, least = _roundings(dtype)
    for kind in torch_ops.ACTIVATIONS:
        g, up64, d64 = (x.double() for x in (gate, up, dprod))
        size, dgate, dup, product = 1 + g.abs(), gate.clone(), up.clone(), dprod.clone()
        ops.glu_bwd_(dgate, dup, product, kind)
        got = [ops.glu_fwd(gate, up, kind), dgate, dup, product]
        expected = [torch_ops.glu_fwd(g, up64, kind), g.clone(), up64.clone(), d64.clone()]
        torch_ops.glu_bwd_(expected[1], expected[2], expected[3], kind)
        terms = [size * up64.abs(), size * (d64 * up64).abs(), size * d64.abs(), size * up64.abs()]
        names = "product", "gradient of the gate", "gradient of up", "product"
        for name, x, y, magnitude in zip(names, got, expected, terms, strict=True):
            if reason := _differs(f"{name} (kind {kind})", x, y, u * y.abs() + FEW * e * magnitude + least):
                return reason
    return ""


def cross_entropy(ops: Any, device: torch.device, dtype: torch.dtype) -> str:
    """With and without label smoothing, softcap and z-loss; one token is ignored."""
    labels = torch.tensor([0, 300, -100, 17, 150], device="cpu").repeat(REPEATS[device.type]).to(device)
    logits = _normal((len(labels), 320), device, dtype, 0)[:, :301] * 3
    u, e, least = _roundings(dtype)
    vocab_size, largest = logits.size(1), float(logits.abs().max())
    is_label = functional.one_hot(labels.clamp(min=0), vocab_size)
    for smoothing, softcap, z_loss in ((0.0, 0.0, 0.0), (0.1, 5.0, 0.01)):
        got, gradient = logits.clone(), logits.double()
        numbers = (-100, smoothing, softcap, z_loss, True)
        loss = torch.empty(len(labels), device=device, dtype=torch.promote_types(dtype, torch.float32))
        expected, lse64 = (torch.empty_like(loss, dtype=torch.float64) for _ in "12")
        ops.cross_entropy_fwd_bwd_(got, labels, loss, torch.empty_like(loss), *numbers)
        torch_ops.cross_entropy_fwd_bwd_(gradient, labels, expected, lse64, *numbers)
        bound = 4 * e * (vocab_size + 8 * largest)  # of lse, and relative for a weight
        # A weight less the target, times a slope in 0..1: terms of at most the gradient and twice the target.
        target = (1 - smoothing) * is_label + smoothing / vocab_size
        near = u * gradient.abs() + bound * (gradient.abs() + 2 * target) + least
        of_loss = 2 * bound * (1 + 2 * z_loss * lse64)
        reason = _differs("loss", loss, expected, of_loss)
        if reason := reason or _differs("gradient of the logits", got, gradient, near):
            return reason
    return ""


def dropout(ops: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Of tokens with a row stride, at places of 32 bits; every feature must stay or go as Philox4x32-10 says."""
    places = torch.tensor([[0, 0], [2**32 - 1, 5], [7, 2**31 + 3]], device="cpu").repeat(REPEATS[device.type], 1)
    x = _normal((len(places), 150), device, dtype, 0)[:, :139]
    numbers = (places.to(device), 0.25, 2**32 - 3, 12, 0xC0FFEE11)
    u, e, least = _roundings(dtype)
    expected, got = torch_ops.dropout(x.double(), *numbers), ops.dropout(x, *numbers)
    return _differs("result", got, expected, (u + 4 * e) * expected.abs() + least)


def rows(ops: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Bit by bit, of strided rows and of strided tensors, two of which have other rows."""
    n = REPEATS[device.type]
    runs, positions = [[8 * n, 1, 0, 3 * n], [1, 2, 3 * n, 4 * n]], [*range(8 * n, 11 * n), *range(1, 8 * n, 2)]
    generator, of_runs = torch.Generator("cpu").manual_seed(0), torch.tensor(runs, device="cpu")
    all_bits, wholes, locals, backs = [], [], [], []
    for width in (3, 4):
        size = 13 * n, 2, width * dtype.itemsize
        bits = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8, device="cpu")
        all_bits.append(bits & 1 if dtype == torch.bool else bits)
        wholes.append(all_bits[-1].to(device).view(dtype).transpose(0, 1))
        locals.append(torch.empty(2, len(positions), width, dtype=dtype, device=device))
        backs.append(torch.zeros(13 * n, 2, width, dtype=dtype, device=device).transpose(0, 1))
    ops.rows_pack_(wholes, of_runs, 1, locals)
    ops.rows_unpack_(backs, of_runs, 1, locals)
    for bits, local, back in zip(all_bits, locals, backs, strict=True):
        kept = torch.zeros_like(bits)
        kept[positions] = bits[positions]
        for what, got, expected in (("message", local.transpose(0, 1), bits[positions]), ("tensor", back, kept)):
            got = got.transpose(0, 1) if what == "tensor" else got
            if not torch.equal(got.contiguous().view(torch.uint8).cpu(), expected):
                return f"gives another {what} than its definition"
    if dtype not in (torch.float32, torch.float64):
        return ""
    sums, terms = ([_normal(x.shape, device, dtype, seed) for x in each] for seed, each in enumerate((backs, locals)))
    at = torch.tensor(positions, device="cpu")
    exact = [x.cpu().index_add(1, at, y.cpu()) for x, y in zip(sums, terms, strict=True)]
    ops.rows_add_(sums, of_runs, 1, terms)
    same = all(torch.equal(x.cpu(), y) for x, y in zip(sums, exact, strict=True))
    return "" if same else "gives another sum than its definition"


def delta(ops: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Of one gradient for two heads. A product is rounded once, and so is each sum."""
    num_tokens = 9 * REPEATS[device.type]
    dout, out = (_normal((2, num_tokens, heads, 70), device, dtype, heads) for heads in (1, 2))
    dout, dlse = dout.expand_as(out), _normal((2, 2, num_tokens), device, torch.float64, 0)
    x, y, minus = dout.double(), out.double(), dlse
    expected, terms = torch_ops.attn_delta(x, y, minus), torch_ops.attn_delta(x.abs(), y.abs(), -minus.abs())
    return _differs("delta", ops.attn_delta(dout, out, dlse), expected, _roundings(dtype)[1] * 72 * terms)


def merge(ops: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Of some rows, rounded or not, into others' sums or none; one has no weight, and one no key before.

    A sum is 3 roundings of numbers as large as both; a log-sum-exp 4 in float64, of numbers below 100.
    """
    num_tokens, (u, e, least) = 9 * REPEATS[device.type], _roundings(dtype)
    state, at = torch.promote_types(dtype, torch.float32), torch.arange(1, 2 * num_tokens, 2, device="cpu").to(device)
    part = _normal((1, num_tokens, 2, 83), device, dtype, 0)[..., :70]
    out = _normal((2, num_tokens, 2, 70), device, state, 1)
    part_lse, lse = _normal((1, 2, num_tokens), device, state, 2), _normal((2, 2, num_tokens), device, torch.float64, 3)
    part_lse[..., 0], lse[0, :, 3] = torch.inf, -torch.inf
    for fresh, rows, is_rounded in ((False, at, False), (False, None, True), (True, None, False)):
        got, got_lse, exact, exact_lse = out.clone(), lse.clone(), out.double(), lse.clone()
        rounded = torch.zeros_like(out, dtype=dtype) if is_rounded else None
        exact_rounded = torch.zeros_like(exact) if is_rounded else None
        ops.attn_merge_(part, part_lse, got, got_lse, fresh, 1, rows, rounded)
        torch_ops.attn_merge_(part.double(), part_lse.double(), exact, exact_lse, fresh, 1, rows, exact_rounded)
        x, y = (got, exact) if rounded is None or exact_rounded is None else (rounded, exact_rounded)
        bound = (u if is_rounded else 0) * y.abs() + 3 * e * (out.abs().amax() + part.abs().amax()).double() + least
        reason = _differs("output", x, y, bound) or _differs(
            "log-sum-exp", got_lse.nan_to_num(), exact_lse.nan_to_num(), torch.full_like(exact_lse, 1e-13)
        )
        if reason:
            return reason
    return ""
