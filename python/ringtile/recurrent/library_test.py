"""What is wrong with a library's recurrence or convolution: a small case against its definition, as in self_test.py.

A document of two chunks that goes on from a state, one that does not, and padding. Of each result the error may be 8
units of rounding, in norm: a library rounds what it multiplies to 16 bits, or to TF32 (as coarse as float16) where that
is float32. A convolution multiplies no matrices, but takes a GPU's fast exponentials, good to 2^-16 and better.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from ringtile.recurrent.self_test import Row, defined_convolution, defined_recurrence, normal

_ROW = Row(150, frozenset({70}))
_UNITS = 8
_FAST_EXPONENTIAL = 2.0**-16
_SUMS_OF_TERMS = ("gradient of A of heads",)  # a number of each head and token, most of which cancel

_Named = dict[str, Tensor]


def failure(
    function: Callable[..., tuple[Tensor, Tensor]],
    op: str,
    dtype: torch.dtype,
    device: torch.device,
    dims: tuple[int, int],
    by_channel: bool,
) -> str:
    """Return what is wrong with a library's function `op`, "" if nothing is. dims: K and V, or W and anything."""
    found: list[str] = []
    errors: list[Exception] = []

    def test() -> None:
        try:
            given, options, expected = _CASES[op](dtype, dims, by_channel)
            found.append(_difference(op, dtype, _results(function, given, options, expected, device), expected))
        except Exception as error:  # such as a Triton compiler's, which is no RuntimeError
            errors.append(error)

    # Autograd has none of the caller's hooks, modes and autocast in a thread of its own.
    thread = threading.Thread(target=test)
    thread.start()
    thread.join()
    for error in errors:
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        return f"raises {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return found[0]


def _results(
    function: Callable[..., tuple[Tensor, Tensor]],
    given: _Named,
    options: dict[str, object],
    expected: _Named,
    device: torch.device,
) -> list[Tensor]:
    leaves = [x.to(device).requires_grad_() for x in given.values()]
    outputs = function(**dict(zip(given, leaves, strict=True)), **options, seq_idx=_ROW.seq_idx())
    incoming = [expected.pop(name).to(x) for name, x in zip(("dout", "dfinal"), outputs, strict=True)]
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, incoming))]


def _difference(op: str, dtype: torch.dtype, got: list[Tensor], expected: _Named) -> str:
    unit = torch.finfo(torch.float16 if dtype == torch.float32 else dtype).eps / 2
    if op == "causal_conv1d" and dtype == torch.float32:
        unit = _FAST_EXPONENTIAL
    for (name, right), x in zip(expected.items(), got, strict=True):
        of_terms = name in _SUMS_OF_TERMS
        size = (right.abs().sum(0) if of_terms else right).norm()
        off = float((x.cpu().double() - (right.sum(0) if of_terms else right)).norm() / size)
        if not off <= _UNITS * unit:  # a nan is not
            return f"gives another {name} than its definition, by {off:.1e} of its norm"
    return ""


# ---- cases: inputs, options, and what the definition says, after the gradients of both results --------------------


def _gradients(names: tuple[str, ...]) -> tuple[str, ...]:
    return ("output", "final state", *(f"gradient of {name}" for name in names))


def _delta(dtype: torch.dtype, dims: tuple[int, int], by_channel: bool) -> tuple[_Named, dict[str, object], _Named]:
    x = _of_heads(dtype, *dims, by_channel)
    incoming = {"dout": x.pop("dout"), "dfinal": x.pop("dfinal")}
    names = {"q": "q", "k": "k", "v": "v", "g": "g", "beta": "factor", "initial_state": "before"}
    wide = {name: y.double() for name, y in (x | incoming).items()} | {"D": torch.zeros(2, dtype=torch.float64)}
    expected = defined_recurrence(_ROW, "kda" if by_channel else "delta", wide)
    given = {name: x[of] for name, of in names.items()}
    return given, {"scale": 0.5}, incoming | dict(zip(_gradients((*names,)), expected, strict=True))


def _ssd(dtype: torch.dtype, dims: tuple[int, int], by_channel: bool) -> tuple[_Named, dict[str, object], _Named]:
    x = _of_heads(dtype, *dims, by_channel)
    dt, generator = x["factor"], torch.Generator("cpu").manual_seed(1)
    A, D = -normal(generator, 2).abs().float() / 8, normal(generator, 2).float()
    wide = {name: y.double() for name, y in x.items()} | {"D": D.double(), "g": (dt.double() * A.double())}
    wide["q"] = wide["q"] * 2  # the definition's scale is 0.5
    out, final, dC, dB, dx, dg, ddt, dinitial = defined_recurrence(_ROW, "ssd", wide)
    held = (_ROW.seq_idx() >= 0)[..., None]
    dD = torch.where(held, (wide["dout"] * wide["v"]).sum(-1), 0).sum((0, 1))
    results = (out, final.mT, dx, ddt + dg * A, (dg * dt).flatten(0, 1), dB, 2 * dC, dD, dinitial.mT)
    given = {"x": x["v"], "dt": dt, "A": A, "B": x["k"], "C": x["q"], "D": D, "initial_state": x["before"].mT}
    incoming = {"dout": x["dout"], "dfinal": x["dfinal"].mT}
    names = _gradients(("x", "dt", "A of heads", "B", "C", "D", "initial_state"))
    return given, {}, incoming | dict(zip(names, results, strict=True))


def _of_heads(dtype: torch.dtype, key_dim: int, value_dim: int, by_channel: bool) -> _Named:
    """Inputs of two heads, which share keys."""
    generator, n = torch.Generator("cpu").manual_seed(0), _ROW.num_tokens
    q, k = (normal(generator, 1, n, 1, key_dim) for _ in range(2))
    v, dout = (normal(generator, 1, n, 2, value_dim).to(dtype) for _ in range(2))
    g = -normal(generator, 1, n, 2, *([key_dim] if by_channel else [])).abs().float() / 8
    before, dfinal = (normal(generator, 1, 2, key_dim, value_dim).float() for _ in range(2))
    k = (k / k.norm(dim=-1, keepdim=True)).to(dtype)
    x = {"q": q.to(dtype), "k": k, "v": v, "g": g, "factor": normal(generator, 1, n, 2).sigmoid().float()}
    return x | {"before": before, "dout": dout, "dfinal": dfinal}


def _convolution(
    dtype: torch.dtype, dims: tuple[int, int], by_channel: bool
) -> tuple[_Named, dict[str, object], _Named]:
    generator, channels, width = torch.Generator("cpu").manual_seed(0), 20, dims[0]
    x, dy = (normal(generator, 1, _ROW.num_tokens, channels).to(dtype) for _ in range(2))
    weight, bias = normal(generator, channels, width).float(), normal(generator, channels).float()
    before, dafter = (normal(generator, 1, width - 1, channels).to(dtype).float() for _ in range(2))
    results = defined_convolution(_ROW, *(y.double() for y in (x, weight, bias, before, dy, dafter)))
    given = {"x": x, "weight": weight, "bias": bias, "initial_state": before}
    expected = {"dout": dy, "dfinal": dafter} | dict(zip(_gradients((*given,)), results, strict=True))
    return given, {"activation": "silu"}, expected


_CASES = {
    "gated_delta_rule": _delta,
    "ssd": _ssd,
    "causal_conv1d": _convolution,
}
