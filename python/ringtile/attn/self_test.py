"""Whether a backend computes attention: a small case, forward and backward, against the definition in float64.

A window over some keys more than a tile, in two blocks, has what a block can have: keys before a causal diagonal, keys
that drop out one by one, a state to merge into, gradients to add to; the second block's results are rounded. A mask
with two sides hides earlier branches of a tree in that window.

A result may be off eight times as far as the definition itself in those dtypes, which is measured: products in the
state's, and out, weights and what follows from them rounded to q's. Besides, all weights of a row may be off alike, by
what the exponential and the log of a sum of N terms are: 4 roundings of q's dtype, and N of the state's.

Shape letters: N queries and keys, H query heads, G kv heads, D head dim, Dv value head dim.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile import ops, self_test
from ringtile.attn.backend import Backend, Block, Final, Gradients, Ringtile, Running
from ringtile.attn.call import AttentionDropout, Options
from ringtile.sequence.plan import DeviceTensors, Round
from ringtile.torch_ops import random_words


class Case(NamedTuple):
    """What the kernel of a block depends on."""

    dtype: str  # without "torch."
    head_dim: int
    v_head_dim: int
    grouped: bool = False  # several query heads share a kv head
    drops: bool = False
    two_sides: bool = False  # of the mask


class Sizes(NamedTuple):
    """Of a case, in tokens."""

    num_tokens: int
    window: int
    cut: int  # the second block begins here
    is_low: bool = False  # some rows have a log-sum-exp of about -100, at whose exponential float32 has no number left


SMALL = Sizes(140, 133, 131)  # no multiples of any tile
ODD = Sizes(193, 193, 192, is_low=True)  # blocks of 64 keys more than a multiple of 128, and of one query
PIPELINE = Sizes(700, 333, 389)  # every stage of a pipeline over tiles is used again; takes 100 MB
_DROPS = (0.25, 2**32 - 3, 12, 0xC0FFEE11)  # probability, seed, step, stream
_ROW = 7
_LOW = 100.0


def why_wrong(backend: Backend, q: Tensor, k: Tensor, v: Tensor, drops: bool = False, two_sides: bool = False) -> str:
    """Return why a backend is not used for such q (B, N, H, D), k (B, K, G, D) and v (B, K, G, Dv); "" if it is."""
    return failure(backend, q.device, _case(q, k, v, drops, two_sides))


def failure(backend: Backend, device: torch.device, case: Case) -> str:
    """Return the same. Tested once for each case, head dims up to a multiple of the backend's step."""
    return self_test.why_not(_key(backend, device, case), lambda: run_cases(backend, device, case))


def mark_wrong(backend: Backend, q: Tensor, k: Tensor, v: Tensor, reason: str) -> None:
    """Say why a backend is not used for such q, k and v from now on, with dropout and two sides or without."""
    for options in itertools.product((False, True), repeat=2):
        self_test.failures[_key(backend, q.device, _case(q, k, v, *options))] = reason


def _case(q: Tensor, k: Tensor, v: Tensor, *options: bool) -> Case:
    dtype = str(q.dtype).removeprefix("torch.")
    return Case(dtype, q.shape[3], v.shape[3], q.shape[2] != k.shape[2], *options)


def _key(backend: Backend, device: torch.device, case: Case) -> tuple[object, ...]:
    head_dim, v_head_dim = (-(-dim // backend.head_dim_step) for dim in (case.head_dim, case.v_head_dim))
    return backend.name, device, case._replace(head_dim=head_dim, v_head_dim=v_head_dim)


def run_cases(backend: Backend, device: torch.device, case: Case) -> str:
    """Return what is wrong with a backend, in cases with lengths that it takes; "" if nothing is."""
    step = backend.length_step
    sizes: tuple[Sizes, ...] = (PIPELINE if device.type == "cuda" and isinstance(backend, Ringtile) else SMALL, ODD)
    if step > 1:
        sizes = (Sizes(4 * step, 4 * step, 2 * step, is_low=True),)
    return next(filter(None, (run_case(backend, device, case, each) for each in sizes)), "")


def run_case(backend: Backend, device: torch.device, case: Case, sizes: Sizes = SMALL) -> str:
    """Return what is wrong with a backend; "" if nothing is."""
    (n, window, cut, is_low), dtype = sizes, getattr(torch, case.dtype)
    shapes = [(4 if case.grouped else 2, case.head_dim), (2, case.head_dim), (2, case.v_head_dim)]
    shapes.append((shapes[0][0], case.v_head_dim))
    q, k, v, dout = (self_test.normal(i, 1, n, *each, dtype=dtype, device=device) for i, each in enumerate(shapes))
    if is_low:  # a constant in all keys shifts the scores of such a query alike
        shift = (_LOW / case.head_dim**0.5) ** 0.5
        q[:, ::3] += shift
        k -= shift
    at, parts, state = torch.arange(n, device=device), (slice(0, cut), slice(cut, n)), ops.state_dtype(dtype)
    begin, end, until = (at - (window - 1)).clamp(min=0), at + 1, _ends_of_branches(at)
    attend = (at >= begin[:, None]) & (at < end[:, None]) & ((at[:, None] < until) | (not case.two_sides))
    z = _factors(n, shapes[0][0], device) if case.drops else torch.ones((), device=device)
    coarse = (torch.float32,) * 2 if dtype == torch.float64 else (state, dtype)  # float64 is off as float32 is
    exact, near = (_defined((q, k, v), dout, attend, z.to(x), x, y) for x, y in ((torch.float64,) * 2, coarse))
    scale = torch.finfo(dtype).eps / torch.finfo(coarse[1]).eps

    dropped = AttentionDropout(_DROPS[0], torch.tensor([_ROW], device=device), *_DROPS[1:]) if case.drops else None
    queries = DeviceTensors(device, begin.int()[None].cpu(), end.int()[None].cpu()), DeviceTensors(device, at.cpu())
    blocks = []
    for part in parts:
        of_keys = DeviceTensors(device, *(x.int()[None, part].cpu() for x in (0 * at, until)))
        runs = ops.runs_tensor([(part.start, 1, 0, part.stop - part.start)])
        round = Round(*queries, runs, of_keys if case.two_sides else None)
        blocks.append(Block(q, k[:, part], v[:, part], round, Options(case.head_dim**-0.5, dropout=dropped)))
    lse = torch.empty(1, q.size(2), n, dtype=torch.float64, device=device)
    out, rounded = (torch.empty(dout.shape, dtype=x, device=device) for x in (state, dtype))
    backend.forward(blocks[0], Running(out, lse, fresh=True))
    backend.forward(blocks[1], Running(out, lse, False, rounded))
    final, (dq, dk, dv) = Final(dout, rounded, lse, None), (torch.zeros_like(x, dtype=state) for x in (q, k, v))
    of_first, of_second = (Gradients(dq, dk[:, part], dv[:, part], fresh=False) for part in parts)
    backend.backward(blocks[0], final, of_first)
    keys = k[:, parts[1]].clone(), v[:, parts[1]].clone()
    backend.backward(blocks[1], final, of_second._replace(fresh=True, rounded=keys))

    got = {"out": rounded, "lse": lse, "dv": dv[:, parts[0]], "dq": dq, "dk": dk[:, parts[0]]}
    got |= {"rounded dk": keys[0], "rounded dv": keys[1]}
    for name, x in got.items():
        part = slice(None) if x.size(1) == n or name == "lse" else parts["rounded" in name]
        right, measured = (each[name.removeprefix("rounded ")].double() for each in (exact, near))
        alike = 4 * torch.finfo(dtype).eps + n * torch.finfo(state).eps
        bound = 8 * scale * (measured - right).abs().amax() + alike * right.abs().amax().clamp(min=1)
        bound, right = bound + self_test.rounding(x, right[:, part], 0), right[:, part]
        if reason := self_test.difference(name, x, right, bound):
            return reason
    return ""


def _defined(
    leaves: tuple[Tensor, ...], dout: Tensor, attend: Tensor, z: Tensor, wide: torch.dtype, narrow: torch.dtype
) -> dict[str, Tensor]:
    """Attention and its gradients, computed in wide; out, weights and their gradients are rounded to narrow."""
    q, k, v, dout = (x[0].transpose(0, 1).to(wide) for x in (*leaves, dout))  # (H, N, D)
    groups, scale = q.size(0) // k.size(0), q.size(2) ** -0.5
    k, v = (x.repeat_interleave(groups, 0) for x in (k, v))
    scores = (scale * q @ k.mT).masked_fill(~attend, -torch.inf)
    weights = scores.softmax(-1)
    kept = (z * weights).to(narrow).to(wide)
    out = (kept @ v).to(narrow).to(wide)
    dscores = (weights * (z * (dout @ v.mT) - (dout * out).sum(-1, keepdim=True))).to(narrow).to(wide)
    found = {"out": out, "dq": scale * dscores @ k, "dk": scale * dscores.mT @ q, "dv": kept.mT @ dout}
    found |= {name: found[name].unflatten(0, (-1, groups)).sum(1) for name in ("dk", "dv")}
    return {name: x.transpose(0, 1)[None] for name, x in found.items()} | {"lse": scores.logsumexp(-1)[None]}


def _ends_of_branches(at: Tensor) -> Tensor:
    """Return the position behind the last query that attends each key: of two branches, and of one more in the
    second."""
    n = at.size(0)
    in_first, in_second = ((n * i // 20 <= at) & (at < end) for i, end in ((5, n // 2), (12, n * 4 // 5)))
    return torch.where(in_first, n // 2, torch.where(in_second, n * 4 // 5, n))


def _factors(n: int, num_heads: int, device: torch.device) -> Tensor:
    """Return what dropout multiplies each weight by, (H, N, N)."""
    p, seed, step, stream = _DROPS
    positions, heads = torch.arange(n, device="cpu"), torch.arange(num_heads, device="cpu")
    counters = torch.arange(-(-n // 4), device="cpu")
    words = random_words(counters, positions[:, None], _ROW + (heads[:, None, None] << 20), stream, (seed, step))
    return (words.flatten(2)[:, :, :n] < (1 - p) * 2**32).to(device, torch.float64) / (1 - p)
