"""What is wrong with a kernel of the GLU, the loss or the shards on a device: a small case against its definition.

Every test returns "" if nothing is. Bounds: u is half an eps of the tensors' dtype, for the one rounding of a result;
e an eps of the dtype that the kernel computes in, of which elementary functions take a few and a sum of n terms n.

Shape letters: T tokens, F MLP intermediate size, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

REPEATS = {"cpu": 1, "cuda": 500}  # of a case's few tokens
FEW = 32  # roundings of a GLU's elementary functions and products
# Without autograd, whose hooks belong to the caller.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (functional.silu, torch.ops.aten.silu_backward),
    "gelu": (functional.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (
        functools.partial(functional.gelu, approximate="tanh"),
        functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
    "relu": (functional.relu, lambda dout, x: dout * (x > 0)),
}


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


def glu(
    fwd: Callable[[Tensor, Tensor, int], Tensor],
    bwd_: Callable[[Tensor, Tensor, Tensor, int], None],
    kinds: dict[str, int],
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Of every kind, for (T, F) matrices with a row stride."""
    gate, up, dprod = (_normal((3 * REPEATS[device.type], 150), device, dtype, seed)[:, :139] for seed in range(3))
    u, e, least = _roundings(dtype)
    for name, kind in kinds.items():
        g, up64, d64 = (x.double() for x in (gate, up, dprod))
        activation, backward = ACTIVATIONS[name]
        act, slope, size = activation(g), backward(torch.ones_like(g), g), 1 + g.abs()
        dgate, dup, product = (x.clone() for x in (gate, up, dprod))
        got = [fwd(gate, up, kind), dgate, dup, product]
        bwd_(dgate, dup, product, kind)
        expected = [act * up64, d64 * up64 * slope, d64 * act, act * up64]
        terms = [size * up64.abs(), size * (d64 * up64).abs(), size * d64.abs(), size * up64.abs()]
        names = (f"product ({name})", f"gradient of the gate ({name})", f"gradient of up ({name})", f"product ({name})")
        for what, x, y, magnitude in zip(names, got, expected, terms, strict=True):
            if reason := _differs(what, x, y, u * y.abs() + FEW * e * magnitude + least):
                return reason
    return ""


def cross_entropy(
    fwd_bwd_: Callable[[Tensor, Tensor, Tensor, Tensor, int, float, float, float, bool], None],
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """With and without label smoothing, softcap and z-loss; one token is ignored."""
    labels = torch.tensor([0, 300, -100, 17, 150], device="cpu").repeat(REPEATS[device.type]).to(device)
    logits = _normal((len(labels), 320), device, dtype, 0)[:, :301] * 3
    counted = (labels != -100).double()[:, None]
    u, e, least = _roundings(dtype)
    for smoothing, softcap, z_loss in ((0.0, 0.0, 0.0), (0.1, 5.0, 0.01)):
        x, vocab_size = logits.double(), logits.size(1)
        x = softcap * torch.tanh(x / softcap) if softcap else x
        lse = x.logsumexp(1, keepdim=True)
        target = functional.one_hot(labels.clamp(min=0), vocab_size).double()
        target = (1 - smoothing) * target + smoothing / vocab_size
        weights, twice = (x - lse).exp(), 1 + 2 * z_loss * lse
        slope = 1 - (x / softcap) ** 2 if softcap else torch.ones_like(x)
        bound = 4 * e * (vocab_size + 8 * float(x.abs().max()))  # of lse, and relative for a weight
        got = logits.clone()
        loss = torch.empty(len(labels), device=device, dtype=torch.promote_types(dtype, torch.float32))
        got_lse = torch.empty_like(loss)
        fwd_bwd_(got, labels, loss, got_lse, -100, smoothing, softcap, z_loss, True)
        expected = counted * (lse - (target * x).sum(1, keepdim=True) + z_loss * lse**2)
        gradient = counted * slope * (weights * twice - target)
        near = u * gradient.abs() + bound * (weights * twice + target) + least
        reason = _differs("loss", loss, expected[:, 0], 2 * bound * twice[:, 0])
        if reason := reason or _differs("gradient of the logits", got, gradient, near):
            return reason
    return ""


def dropout(
    kernel: Callable[[Tensor, Tensor, float, int, int, int], Tensor], device: torch.device, dtype: torch.dtype
) -> str:
    """Of tokens with a row stride, at places of 32 bits; every feature must stay or go as Philox4x32-10 says."""
    places = torch.tensor([[0, 0], [2**32 - 1, 5], [7, 2**31 + 3]], device="cpu").repeat(REPEATS[device.type], 1)
    x = _normal((len(places), 150), device, dtype, 0)[:, :139]
    key, stream, p = (2**32 - 3, 12), 0xC0FFEE11, 0.25
    row, position = places[:, :1], places[:, 1:]
    words = random_words(torch.arange(35, device="cpu"), position, row, stream, key)
    kept = (words.flatten(1)[:, :139] < (1 - p) * 2**32).to(device)
    u, e, least = _roundings(dtype)
    expected = x.double() * kept / (1 - p)
    got = kernel(x, places.to(device), p, *key, stream)
    return _differs("result", got, expected, (u + 4 * e) * expected.abs() + least)


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
    """The high and the low 32 bits of factor * x, for x (int64) in 0..2^32 - 1, without an overflow."""
    low, high = factor * (x & 0xFFFF), factor * (x >> 16)
    high += low >> 16
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def shard(
    shard_: Callable[[Tensor, Tensor, int, Tensor], None],
    unshard_: Callable[[Tensor, Tensor, int, Tensor], None],
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    """Bit by bit, of strided tokens and of a strided tensor."""
    n = REPEATS[device.type]
    runs, positions = [[8 * n, 1, 0, 3 * n], [1, 2, 3 * n, 4 * n]], [*range(8 * n, 11 * n), *range(1, 8 * n, 2)]
    generator = torch.Generator("cpu").manual_seed(0)
    bits = torch.randint(0, 256, (13 * n, 2, 3 * dtype.itemsize), generator=generator, dtype=torch.uint8, device="cpu")
    if dtype == torch.bool:
        bits &= 1
    x, of_runs = bits.to(device).view(dtype).transpose(0, 1), torch.tensor(runs, device="cpu")
    local = torch.empty(2, len(positions), 3, dtype=dtype, device=device)
    shard_(x, of_runs, 1, local)
    back = torch.zeros(13 * n, 2, 3, dtype=dtype, device=device).transpose(0, 1)
    unshard_(local, of_runs, 1, back)
    kept = torch.zeros_like(bits)
    kept[positions] = bits[positions]
    for what, got, expected in (("shard", local, bits[positions].transpose(0, 1)), ("global tensor", back, kept)):
        got = got if what == "shard" else got.transpose(0, 1)
        if not torch.equal(got.contiguous().view(torch.uint8).cpu(), expected):
            return f"gives another {what} than its definition"
    return ""
