"""The kernels' work in torch operations, for a device that has no kernels, or a wrong one; and their definition.

Each function takes the arguments of the op of its name (ops.py), and computes in the state dtype: float64 for float64,
else float32. In float64 it is what the kernels are compared with (self_test.py). All run on any device, never
wait for it, and hold copies of a few rows at a time.

Shape letters as in ops.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_NUMBERS = 1 << 22  # of which copies in the state dtype are held at once: 16 MiB each
Tensors: TypeAlias = "Sequence[Tensor]"
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise RuntimeError(f"ringtile.{text}")


def _check(op: str, first_name: str, first: Tensor, dim: int, **others: Tensor) -> None:
    """RuntimeError: no floats of so many dims, or others of another shape, dtype or device."""
    _require(first.dtype in FLOAT_DTYPES, f"{op}: dtype {first.dtype} is not supported, expected one of {FLOAT_DTYPES}")
    _require(first.dim() == dim, f"{op}: {first_name} has shape {tuple(first.shape)}, expected {dim} dimensions")
    for name, x in others.items():
        _check_one(op, name, x, first.shape, first.dtype, first.device)


def _check_one(op: str, name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    _require(isinstance(x, Tensor), f"{op}: {name} is a {type(x).__name__}, expected a tensor")
    _require(x.dtype == dtype, f"{op}: {name} has dtype {x.dtype}, expected {dtype}")
    _require(x.shape == shape, f"{op}: {name} has shape {tuple(x.shape)}, expected {tuple(shape)}")
    _require(x.device == device, f"{op}: {name} is on {x.device}, expected {device}; move all tensors to one device")


def _check_written(op: str, *outputs: Tensor) -> None:
    for x in outputs:
        overlaps = any(size > 1 and step == 0 for size, step in zip(x.shape, x.stride(), strict=True))
        _require(not overlaps, f"{op}: an output must not overlap itself: it needs strides above 0")


def _state(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _blocks(*arrays: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return the same few rows of each array; the first has the largest rows."""
    num_rows = max(1, BLOCK_NUMBERS // max(1, arrays[0][:1].numel()))
    return zip(*(torch.split(x, num_rows) for x in arrays), strict=True)


# ---- attention ----------------------------------------------------------------------------------


@torch.no_grad()
def attn_delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    _check("attn_delta", "dout", dout, 4, out=out)
    (B, N, H, _), state = dout.shape, _state(dout)
    delta = dout.new_empty((B, H, N), dtype=state)
    if dlse is None:
        dlse = dout.new_zeros((), dtype=torch.float64).expand(B, H, N)
    _check_one("attn_delta", "dlse", dlse, (B, H, N), torch.float64, dout.device)
    tokens = (x.transpose(0, 1) for x in (dout, out))  # (N, B, H, Dv)
    for x, y, minus, result in _blocks(*tokens, dlse.permute(2, 0, 1), delta.permute(2, 0, 1)):
        result.copy_((x.to(state) * y.to(state)).sum(-1, dtype=torch.float64) - minus)
    return delta


@torch.no_grad()
def attn_merge_(
    part: Tensor,
    part_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    fresh: bool,
    first_row: int = 0,
    rows: Tensor | None = None,
    rounded: Tensor | None = None,
) -> None:
    op, state, device = "attn_merge_", _state(part), part.device
    _check(op, "part", part, 4)
    _require(out.dim() == 4, f"{op}: out has shape {tuple(out.shape)}, expected 4 dimensions")
    (P, M, H, Dv), (B, N) = part.shape, out.shape[:2]
    _check_one(op, "part_lse", part_lse, (P, H, M), state, device)
    _check_one(op, "out", out, (B, N, H, Dv), state, device)
    _check_one(op, "lse", lse, (B, H, N), torch.float64, device)
    if rounded is not None:
        _check_one(op, "rounded", rounded, out.shape, part.dtype, device)
    if rows is None:
        rows = (first_row + N * torch.arange(P, device=device)[:, None] + torch.arange(M, device=device)).flatten()
    _check_one(op, "rows", rows, (P * M,), torch.int64, device)
    if device.type == "cpu" and rows.numel():  # a GPU is not waited for
        known = bool((rows[0] >= 0) & (rows[-1] < B * N) & (rows.diff() > 0).all())
        _require(known, f"{op}: rows must rise, and lie in the {B * N} of out")
    written = out if rounded is None else rounded
    for of_batch, of_lse, at_batch in zip(part, part_lse, rows.view(P, M), strict=True):
        for x, x_lse, at in _blocks(of_batch, of_lse.mT, at_batch):
            batch, token = at // N, at % N
            y = torch.zeros_like(x, dtype=state) if fresh else out[batch, token]
            before = torch.full_like(x_lse, -torch.inf, dtype=torch.float64) if fresh else lse[batch, :, token]
            new = x_lse.double().masked_fill(x_lse == torch.inf, -torch.inf)
            share = torch.sigmoid(new - before).masked_fill(new == -torch.inf, 0)  # 1 where no key came before
            written[batch, token] = y.lerp_(x.to(state), share[..., None].to(state)).to(written.dtype)
            lse[batch, :, token] = torch.logaddexp(before, new)


# ---- sequence -----------------------------------------------------------------------------------


@torch.no_grad()
def rows_pack_(xs: Tensors, runs: Tensor, dim: int, ys: Tensors, table: Tensor | None = None) -> None:
    for of_x, of_y in _of_runs("rows_pack_", xs, ys, runs, dim, ys):
        of_y.copy_(of_x)


@torch.no_grad()
def rows_unpack_(xs: Tensors, runs: Tensor, dim: int, ys: Tensors, table: Tensor | None = None) -> None:
    for of_x, of_y in _of_runs("rows_unpack_", xs, ys, runs, dim, xs):
        of_x.copy_(of_y)


@torch.no_grad()
def rows_add_(xs: Tensors, runs: Tensor, dim: int, ys: Tensors, table: Tensor | None = None) -> None:
    known = all(x.dtype in (torch.float32, torch.float64) for x in xs)
    _require(known, f"rows_add_: dtypes {[x.dtype for x in xs]}; expected float32 or float64")
    for of_x, of_y in _of_runs("rows_add_", xs, ys, runs, dim, xs):
        of_x.add_(of_y)


def _of_runs(
    op: str, xs: Tensors, ys: Tensors, runs: Tensor, dim: int, written: Tensors
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the tokens of each run in both tensors. RuntimeError: they do not fit."""
    _require(len(xs) == len(ys), f"{op}: {len(xs)} tensors and {len(ys)} of their rows, expected as many")
    _check_written(op, *written)
    for whole, local in zip(xs, ys, strict=True):
        for name, x in (("global tensor", whole), ("local tensor", local)):
            _require(isinstance(x, Tensor), f"{op}: {name} is a {type(x).__name__}, expected a tensor")
        known = isinstance(dim, int) and 0 <= dim < whole.dim()
        _require(known, f"{op}: dim {dim} is not a dimension of shape {tuple(whole.shape)}")
        shape = (*whole.shape[:dim], *local.shape[dim : dim + 1], *whole.shape[dim + 1 :])
        _check_one(op, "local tensor", local, shape, whole.dtype, whole.device)
        # The core checks the runs, against tensors that hold nothing.
        nothing = [torch.empty(x.size(dim), 0, device="cpu") for x in (whole, local)]
        torch.ops.ringtile.rows_pack_(nothing[:1], runs, 0, nothing[1:])
    if type(runs) is not Tensor:  # a fake one, as is what is copied
        return
    spans = runs.tolist()
    for whole, local in zip(xs, ys, strict=True):
        for begin, stride, local_begin, length in spans:
            tokens = whole.narrow(dim, begin, (length - 1) * stride + 1)
            every = tokens[(slice(None),) * dim + (slice(None, None, stride),)]
            yield every, local.narrow(dim, local_begin, length)


# ---- MLP and loss -------------------------------------------------------------------------------

_Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
# By kind: act(x), and dact * act'(x) of (dact, x). aten's own, since autograd has hooks, which belong to the caller.
ACTIVATIONS: dict[int, _Activation] = {
    0: (functional.silu, torch.ops.aten.silu_backward),
    1: (functional.gelu, torch.ops.aten.gelu_backward),
    2: (
        functools.partial(functional.gelu, approximate="tanh"),
        functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
    3: (functional.relu, functools.partial(torch.ops.aten.threshold_backward, threshold=0)),
}


def _activation(op: str, kind: int) -> _Activation:
    _require(kind in ACTIVATIONS, f"{op}: {kind} is no GLU kind; expected one of {[*ACTIVATIONS]}")
    return ACTIVATIONS[kind]


@torch.no_grad()
def glu_fwd(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    _check("glu_fwd", "gate", gate, 2, up=up)
    act, _ = _activation("glu_fwd", kind)
    state, result = _state(gate), gate.new_empty(gate.shape)
    for g, u, prod in _blocks(gate, up, result):
        prod.copy_(act(g.to(state)) * u.to(state))
    return result


@torch.no_grad()
def glu_bwd_(gate: Tensor, up: Tensor, dprod: Tensor, kind: int) -> None:
    _check("glu_bwd_", "gate", gate, 2, up=up, dprod=dprod)
    _check_written("glu_bwd_", gate, up, dprod)
    act, act_backward = _activation("glu_bwd_", kind)
    state = _state(gate)
    for arrays in _blocks(gate, up, dprod):
        g, u, d = (x.to(state) for x in arrays)
        value = act(g)
        results = act_backward(d * u, g), d * value, value * u
        for x, result in zip(arrays, results, strict=True):
            x.copy_(result)


@torch.no_grad()
def cross_entropy_fwd_bwd_(
    logits: Tensor,
    labels: Tensor,
    loss: Tensor,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    want_grad: bool,
) -> None:
    op, state, device = "cross_entropy_fwd_bwd_", _state(logits), logits.device
    _check(op, "logits", logits, 2)
    num_tokens, V = logits.shape
    for name, x, dtype in (("labels", labels, torch.int64), ("loss", loss, state), ("lse", lse, state)):
        _check_one(op, name, x, (num_tokens,), dtype, device)
    _check_written(op, loss, lse, *[logits] * want_grad)
    ignored = labels == ignore_index
    usable = ~ignored & (labels >= 0) & (labels < V)
    if device.type == "cpu":  # a GPU is not waited for
        text = f"ringtile.{op}: a label is neither ignore_index nor in [0, vocab_size)"
        torch._assert_async((usable | ignored).all(), text)
    otherwise = torch.zeros_like(loss).masked_fill(~(usable | ignored), torch.nan)
    columns = labels.clamp(0, V - 1)
    for x, label, usable_here, other, *results in _blocks(logits, columns, usable, otherwise, loss, lse):
        capped, slope = _capped(x.to(state), softcap, want_grad)
        rows = torch.arange(x.size(0), device=device)
        largest = capped.amax(1)
        shift = largest.masked_fill(largest == -torch.inf, 0)  # -inf - -inf would be nan
        weights = (capped - shift[:, None]).exp_()
        total, shift64 = weights.sum(1, dtype=torch.float64), shift.double()
        # Differences from the largest come first, so that logits far from 0 lose no precision.
        z = shift64 + (log_sum := total.log())
        per_token = (1 - label_smoothing) * (log_sum + (shift64 - capped[rows, label])) + z_loss * z**2
        if label_smoothing:
            per_token += label_smoothing * (log_sum + (shift64 - capped.mean(1, dtype=torch.float64)))
        for result, value in zip(results, (per_token, z), strict=True):
            result.copy_(torch.where(usable_here, value.to(state), other))
        if want_grad:
            # d loss / d x' = p (1 + 2 z_loss lse) - smoothing / V - (1 - smoothing) [label], p = exp(x' - lse)
            gradient = weights.mul_(((1 + 2 * z_loss * z) / total).to(state)[:, None]).sub_(label_smoothing / V)
            gradient[rows, label] -= 1 - label_smoothing
            if slope is not None:
                gradient *= slope
            x.copy_(torch.where(usable_here[:, None], gradient, other[:, None]))


def _capped(x: Tensor, softcap: float, want_slope: bool) -> tuple[Tensor, Tensor | None]:
    """x' and, where it is not 1 everywhere, dx' / dx = 1 - tanh^2."""
    if not softcap:
        return x, None
    tanh = (x * (1 / softcap)).tanh_()
    slope = 1 - tanh * tanh if want_slope else None
    return tanh.mul_(softcap), slope


# ---- random numbers ------------------------------------------------------------------------------


def random_words(counter: Tensor, position: Tensor, row: Tensor, stream: int, key: tuple[int, int]) -> Tensor:
    """Philox4x32-10 of counters in int64, broadcast against each other: (..., 4), of which word i is for feature
    4 counter + i."""
    shape = (counter + position + row).shape
    words = [x.expand(shape) for x in (counter, position, row, torch.full_like(row, stream))]
    for i in range(10):
        k0, k1 = ((k + i * weyl) % 2**32 for k, weyl in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        (high_0, low_0), (high_1, low_1) = (_halves(f, words[j]) for f, j in ((0xD2511F53, 0), (0xCD9E8D57, 2)))
        words = [high_1 ^ words[1] ^ k0, low_1, high_0 ^ words[3] ^ k1, low_0]
    return torch.stack(words, dim=-1)


def _halves(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of factor * x, for x (int64) in 0..2^32 - 1, without an overflow."""
    low, high = factor * (x & 0xFFFF), factor * (x >> 16)
    high += low >> 16
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


@torch.no_grad()
def weight_grad_add_(dout: Tensor, x: Tensor, total: Tensor) -> None:
    _check("weight_grad_add_", "dout", dout, 2)
    _check_one("weight_grad_add_", "x", x, (dout.size(0), *x.shape[1:2]), dout.dtype, dout.device)
    _check_one("weight_grad_add_", "sum", total, (dout.size(1), x.size(1)), _state(dout), dout.device)
    _check_written("weight_grad_add_", total)
    total.addmm_(dout.t().to(total.dtype), x.to(total.dtype))
