"""What is wrong with a kernel of the recurrences or of their convolution: a small case against its definition.

Every test returns "" if nothing is. The definitions go token by token in float64, forward and backward, without
autograd, whose hooks belong to the caller. Bounds: half an eps of the result's dtype for its one rounding, and an eps
of the dtype that the kernel computes in for each term of a sum, relative to the largest result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    """Documents and padding of the tokens of a case."""

    num_tokens: int
    begin: frozenset[int]
    padding: frozenset[int] = frozenset({4, 66})

    def seq_idx(self) -> Tensor:
        of_tokens = [-1 if t in self.padding else sum(b <= t for b in self.begin) for t in range(self.num_tokens)]
        return torch.tensor([of_tokens], dtype=torch.int32, device="cpu")


ROW = Row(67, frozenset({1}))  # more than a chunk (csrc/scan/chunks.h)
H, K, V, C, WIDTH = 2, 5, 3, 20, 4  # heads that share keys
CHANNELS = 70  # of the selective scan: more than one task (csrc/scan/chunks.h)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def recurrence(forward: Callable[..., Any], backward: Callable[..., Any], kind: str, dtype: torch.dtype) -> str:
    """kind: "delta", "kda" or "ssd"."""
    generator, state = torch.Generator("cpu").manual_seed(0), torch.promote_types(dtype, torch.float32)
    N = ROW.num_tokens
    q, k, v, dout = (normal(generator, 1, N, heads, dim).to(dtype) for heads, dim in ((1, K), (1, K), (H, V), (H, V)))
    k /= 4
    g = -normal(generator, 1, N, H, *([K] if kind == "kda" else [])).abs().to(state) / 8
    factor = normal(generator, 1, N, H).sigmoid().to(state)
    D = normal(generator, H).to(state) if kind == "ssd" else None
    before, dfinal = (normal(generator, 1, H, K, V).to(state) for _ in range(2))
    beta, dt = (None, factor) if kind == "ssd" else (factor, None)
    given = (q, k, v, g, beta, dt, D, ROW.seq_idx(), before)
    out, final, states = forward(*given, 0.5, True)
    gradients = backward(dout, dfinal, *given, states, 0.5)
    names = ("output", "final state", *(f"gradient of {name}" for name in ("q", "k", "v", "g", "beta or dt")))
    inputs = {"q": q, "k": k, "v": v, "g": g, "factor": factor, "before": before}
    inputs |= {"dout": dout, "dfinal": dfinal, "D": torch.zeros(H) if D is None else D}
    expected = defined_recurrence(ROW, kind, {name: x.double() for name, x in inputs.items()})
    got = (out, final, *gradients[:5], gradients[6])
    return _first_difference((*names, "gradient of the state"), got, expected, N + K + V)


def defined_recurrence(row: Row, kind: str, of: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """out, the final state, dq, dk, dv, dg, dfactor and the gradient of the initial state."""
    q, k, v, g, factor, before, dout, dfinal, D = (
        of[name] for name in ("q", "k", "v", "g", "factor", "before", "dout", "dfinal", "D")
    )
    delta = kind != "ssd"
    keeps = g.exp() if kind == "kda" else g.exp()[..., None].expand(*g.shape, k.size(3))
    out, dq, dk, dv = (torch.zeros_like(x) for x in (v, q, k, v))
    dkeeps, dfactor, now, kept = torch.zeros_like(keeps), torch.zeros_like(factor), before[0], {}
    for t in range(row.num_tokens):
        now = torch.zeros_like(now) if t in row.begin else now
        if t in row.padding:
            continue
        decayed = keeps[0, t, :, :, None] * now
        surprise = v[0, t] - (k[0, t] @ decayed)[:, 0] if delta else v[0, t]
        after = decayed + k[0, t, 0, :, None] * (factor[0, t, :, None] * surprise)[:, None]
        out[0, t] = 0.5 * (q[0, t] @ after)[:, 0] + D[:, None] * v[0, t]
        kept[t], now = (now, decayed, surprise, after), after
    final, dnow = now, dfinal[0]
    for t in reversed(range(row.num_tokens)):
        if t not in row.padding:
            earlier, decayed, surprise, after = kept[t]
            dnow = dnow + 0.5 * q[0, t, 0, :, None] * dout[0, t, :, None]
            dq[0, t, 0] = 0.5 * torch.einsum("hkv,hv->k", after, dout[0, t])
            u, du = factor[0, t, :, None] * surprise, (k[0, t] @ dnow)[:, 0]
            dk[0, t, 0] = torch.einsum("hkv,hv->k", dnow, u)
            dfactor[0, t], dv[0, t] = (du * surprise).sum(-1), factor[0, t, :, None] * du
            if delta:
                dk[0, t, 0] -= torch.einsum("hkv,hv->k", decayed, dv[0, t])
                dnow = dnow - k[0, t, 0, :, None] * dv[0, t, :, None]
            dv[0, t] += D[:, None] * dout[0, t]
            dkeeps[0, t] = (dnow * earlier).sum(-1)
            dnow = keeps[0, t, :, :, None] * dnow
        dnow = torch.zeros_like(dnow) if t in row.begin else dnow
    dg = dkeeps * keeps
    return out, final[None], dq, dk, dv, dg if kind == "kda" else dg.sum(-1), dfactor, dnow[None]


def selective(forward: Callable[..., Any], backward: Callable[..., Any], dtype: torch.dtype) -> str:
    generator, state = torch.Generator("cpu").manual_seed(0), torch.promote_types(dtype, torch.float32)
    N = ROW.num_tokens
    x, dout, B, C = (normal(generator, 1, N, size).to(dtype) for size in (CHANNELS, CHANNELS, K, K))
    B, C = B / 4, C / 16  # gradients of the states and of B are sums over C and over the channels
    dt = normal(generator, 1, N, CHANNELS).sigmoid().to(state)
    A, D = -normal(generator, K, CHANNELS).abs().to(state), normal(generator, CHANNELS).to(state)
    before, dfinal = (normal(generator, 1, K, CHANNELS).to(state) for _ in range(2))
    given = (x, dt, A, B, C, D, ROW.seq_idx(), before)
    out, final, states = forward(*given, True)
    got = (out, final, *backward(dout, dfinal, *given, states))
    names = ("x", "dt", "A", "B", "C", "D", "the state")
    expected = defined_selective(ROW, *(x.double() for x in (x, dt, A, B, C, D, before, dout, dfinal)))
    return _first_difference(
        ("output", "final state", *(f"gradient of {name}" for name in names)), got, expected, N + K + CHANNELS
    )


def defined_selective(
    row: Row,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    before: Tensor,
    dout: Tensor,
    dfinal: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """out, the final state, and the gradients of x, dt, A, B, C, D and the initial state."""
    out, dx, ddt, dA, dB, dC, dD = (torch.zeros_like(y) for y in (x, x, dt, A, B, C, D))
    now, kept = before[0], {}
    for t in range(row.num_tokens):
        now = torch.zeros_like(now) if t in row.begin else now
        if t not in row.padding:
            decayed = (dt[0, t] * A).exp() * now
            after = decayed + B[0, t, :, None] * (dt[0, t] * x[0, t])
            out[0, t] = C[0, t] @ after + D * x[0, t]
            kept[t], now = (decayed, after), after
    final, dnow = now, dfinal[0]
    for t in reversed(range(row.num_tokens)):
        if t not in row.padding:
            decayed, after = kept[t]
            dnow = dnow + C[0, t, :, None] * dout[0, t]
            dC[0, t], dB[0, t] = after @ dout[0, t], dnow @ (dt[0, t] * x[0, t])
            du, moved = B[0, t] @ dnow, dnow * decayed
            dx[0, t], ddt[0, t] = du * dt[0, t] + D * dout[0, t], du * x[0, t] + (moved * A).sum(0)
            dA, dD = dA + moved * dt[0, t], dD + dout[0, t] * x[0, t]
            dnow = (dt[0, t] * A).exp() * dnow
        dnow = torch.zeros_like(dnow) if t in row.begin else dnow
    return out, final[None], dx, ddt, dA, dB, dC, dD, dnow[None]


def convolution(forward: Callable[..., Any], backward: Callable[..., Any], dtype: torch.dtype) -> str:
    generator, state = torch.Generator("cpu").manual_seed(0), torch.promote_types(dtype, torch.float32)
    N = ROW.num_tokens
    x, dy = (normal(generator, 1, N, C).to(dtype) for _ in range(2))
    weight, bias = normal(generator, C, WIDTH).to(state), normal(generator, C).to(state)
    before, dafter = (normal(generator, 1, WIDTH - 1, C).to(state) for _ in range(2))
    y, after = forward(x, weight, bias, ROW.seq_idx(), before, True)
    got = (y, after, *backward(dy, dafter, x, weight, bias, ROW.seq_idx(), before, True))
    names = ("output", "final state", *(f"gradient of {name}" for name in ("x", "the weight", "the bias", "the state")))
    expected = defined_convolution(ROW, *(x.double() for x in (x, weight, bias, before, dy, dafter)))
    return _first_difference(names, got, expected, N)


def defined_convolution(
    row: Row, x: Tensor, weight: Tensor, bias: Tensor, before: Tensor, dy: Tensor, dafter: Tensor
) -> tuple[Tensor, ...]:
    """y, the final state, dx, dweight, dbias and the gradient of the initial state; rows of `all` are those of both."""
    everything = torch.cat([before[0], x[0]])
    y, dx, dweight, dbias = (torch.zeros_like(x) for x in (x[0], everything, weight, bias))
    before_first = weight.size(1) - 1
    window: list[int | None] = list(range(before_first))  # rows of everything; None: 0
    for t in range(row.num_tokens):
        window = [None] * before_first if t in row.begin else window
        if t in row.padding:
            continue
        window = [*window, t + before_first]
        taps = [(i, at) for i, at in enumerate(window) if at is not None]
        z = bias + sum(weight[:, i] * everything[at] for i, at in taps)
        y[t] = z * z.sigmoid()
        dz = dy[0, t] * z.sigmoid() * (1 + z * (1 - z.sigmoid()))
        dbias += dz
        for i, at in taps:
            dx[at] += weight[:, i] * dz
            dweight[:, i] += everything[at] * dz
        window = window[1:]
    final = torch.zeros_like(before[0])
    for i, last in enumerate(window):
        if last is not None:
            final[i] = everything[last]
            dx[last] += dafter[0, i]
    return y[None], final[None], dx[None, before_first:], dweight, dbias, dx[None, :before_first]


def _first_difference(
    names: tuple[str, ...], got: tuple[Tensor, ...], expected: tuple[Tensor, ...], num_terms: int
) -> str:
    for name, x, right in zip(names, got, expected, strict=True):
        limits, sums = torch.finfo(x.dtype), torch.finfo(torch.promote_types(x.dtype, torch.float32))
        off = (x.double() - right).abs()
        bound = limits.eps / 2 * right.abs() + num_terms * sums.eps * (1 + right.abs().max()) + limits.tiny
        if not bool((off <= bound).all()):  # a nan is not
            return f"gives another {name} than its definition, by up to {float(off.max()):.1e}"
    return ""


def of(ops: Any) -> Mapping[str, Callable[[torch.dtype], str]]:
    """The tests of all kernels, by name."""
    tests: dict[str, Callable[[torch.dtype], str]] = {
        kind: lambda dtype, kind=kind: recurrence(ops.scan, ops.scan_backward, kind, dtype)  # type: ignore[misc]
        for kind in ("delta", "kda", "ssd")
    }
    return tests | {
        "selective": lambda dtype: selective(ops.selective_scan, ops.selective_scan_backward, dtype),
        "convolution": lambda dtype: convolution(ops.causal_conv1d, ops.causal_conv1d_backward, dtype),
    }
