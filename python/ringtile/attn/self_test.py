"""Whether a backend computes attention: a small case, forward and backward, against the definition in float64.

A window over some keys more than a tile, in two blocks, has what a block can have: keys before a causal diagonal, keys
that drop out one by one, a state to merge into, gradients to add to. ringtile's kernels for GPUs, which only a child
process tests, get a window over several tiles. A mask with two sides hides earlier branches of a tree in that window.

The bounds follow one rounding after the other. u is half an eps of q's dtype, e an eps of the state.
- A score is off by a rounding e of |q| |k| a term, the log of a sum of N by N e, and exponentials may be as good as
  weights in q's dtype: that bounds the log-sum-exp. A weight is off by two such errors, and one u for its own rounding.
- out = P v is off by that times P |v|, and by u P |v| for the rounding of each block, and again for the last one. A
  rounded result is off by u of itself more.
- With dropout, P counts times Z, 0 or 1 / (1 - p), in out and dv, and dout v^T times Z; that adds two roundings e.
- dv = P^T dout is off as out is. dscores = P (dout v^T - delta) are off as P is, and by P times what dout v^T (a
  rounding e a term) and delta (|dout| times what out is off by) are. They may be rounded to q's dtype, and so are dq
  and dk, block by block: three u of the sum of their terms' magnitudes.
Where numbers may be subnormal, an absolute rounding comes to each weight and each dscore.

Shape letters: N queries and keys, H query heads, G kv heads, D head dim, Dv value head dim.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile import ops, self_test
from ringtile.attn.backend import Backend, Block, Final, Gradients, Ringtile, Running
from ringtile.attn.call import AttentionDropout
from ringtile.self_test.child_process import Question
from ringtile.sequence.rounds import Queries, Round
from ringtile.torch_ops import random_words


class Sizes(NamedTuple):
    """Of a case, in tokens."""

    num_tokens: int
    window: int
    cut: int  # the second block begins here
    is_low: bool = False  # some rows have a log-sum-exp of about -100, at whose exponential float32 has no number left


SMALL = Sizes(140, 133, 131)  # no multiples of any tile
ODD = Sizes(193, 193, 192, is_low=True)  # blocks of 64 keys more than a multiple of 128, and of one query
LARGE = Sizes(1500, 701, 761)  # every stage of a pipeline over tiles is used again, in both blocks; takes 1 GB
_DROPS = (0.25, 2**32 - 3, 12, 0xC0FFEE11)  # probability, seed, step, stream
_ROW = 7
_LOW = 100.0


def why_wrong(backend: Backend, q: Tensor, k: Tensor, v: Tensor, drops: bool = False, two_sides: bool = False) -> str:
    """Return why a backend is not used for such q (B, N, H, D), k (B, K, G, D) and v (B, K, G, Dv); "" if it is."""
    return failure(backend, q.device, _question(backend, q, k, v, drops, two_sides))


def mark_wrong(backend: Backend, q: Tensor, k: Tensor, v: Tensor, reason: str) -> None:
    """Say why a backend is not used for such q, k and v from now on, with dropout and two sides or without."""
    for options in itertools.product((False, True), repeat=2):
        self_test.failures[_key(backend, q.device, _question(backend, q, k, v, *options))] = reason


def _question(backend: Backend, q: Tensor, k: Tensor, v: Tensor, *options: bool) -> Question:
    return Question.of(backend.name, q.dtype, q.shape[3], v.shape[3], q.shape[2] != k.shape[2], *options)


def _key(backend: Backend, device: torch.device, question: Question) -> tuple[object, ...]:
    step = backend.head_dim_step
    head_dim, v_head_dim = (-(-dim // step) for dim in (question.head_dim, question.v_head_dim))
    return device, question._replace(head_dim=head_dim, v_head_dim=v_head_dim)


def failure(backend: Backend, device: torch.device, question: Question) -> str:
    """Return the same. Tested once for each question, head dims up to a multiple of the backend's step."""
    tests = functools.partial(run_cases, backend, device, question)
    return self_test.why_not(_key(backend, device, question), lambda: self_test.of_kernel(device, question, tests))


def run_cases(backend: Backend, device: torch.device, question: Question) -> str:
    """Return what is wrong with the backend of a question, in cases with lengths that it takes; "" if nothing is."""
    step = backend.length_step
    sizes: tuple[Sizes, ...] = (LARGE if device.type == "cuda" and isinstance(backend, Ringtile) else SMALL, ODD)
    if step > 1:
        sizes = (Sizes(4 * step, 4 * step, 2 * step, is_low=True),)
    return next(filter(None, (run_case(backend, device, question, each) for each in sizes)), "")


def run_case(backend: Backend, device: torch.device, question: Question, sizes: Sizes = SMALL) -> str:
    """Return what is wrong with a backend; "" if nothing is."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(heads: int, dim: int) -> Tensor:
        x = torch.randn(1, sizes.num_tokens, heads, dim, generator=generator, dtype=torch.float32, device="cpu")
        return x.to(device, getattr(torch, question.dtype))

    head_dim, num_heads = question.head_dim, 4 if question.grouped else 2
    q, dout = normal(num_heads, head_dim), normal(num_heads, question.v_head_dim)
    k, v = normal(2, head_dim), normal(2, question.v_head_dim)
    if sizes.is_low:  # a constant in all keys shifts the scores of such a query alike
        shift = (_LOW / head_dim**0.5) ** 0.5
        q[:, ::3] += shift
        k -= shift
    for what, got, expected, bound in _compared(backend, q, k, v, dout, question, sizes):
        difference = (got.double() - expected).abs()
        if not bool((difference <= bound).all()):  # nor a nan
            worst = (difference / bound).nan_to_num(torch.inf).argmax()
            off, most = float(difference.flatten()[worst]), float(bound.flatten()[worst])
            return f"gives another {what} than its definition: off by {off:.1e}, rounding explains {most:.1e}"
    return ""


def _compared(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, question: Question, sizes: Sizes
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Name, what the backend computes, what it should, and by how much it may be off."""
    state, scale = ops.state_dtype(q.dtype), q.size(3) ** -0.5
    u, e = torch.finfo(q.dtype).eps / 2, torch.finfo(state).eps
    least = torch.finfo(q.dtype).tiny * 2 * u  # the least subnormal number
    # (1, N, H, D) to (H, N, D), kv heads repeated.
    heads = [x[0].transpose(0, 1).double() for x in (q, k, v, dout)]
    repeats = q.size(2) // k.size(2)
    q64, k64, v64, dout64 = (x if x.size(0) == q.size(2) else x.repeat_interleave(repeats, 0) for x in heads)

    def summed(x: Tensor) -> Tensor:
        """(H, N, D), of which the query heads of a kv head are summed, to (1, N, G, D)."""
        return x.view(-1, repeats, *x.shape[1:]).sum(1).transpose(0, 1)[None]

    def back(x: Tensor) -> Tensor:
        return x.transpose(0, 1)[None]

    num_tokens, window, cut, _ = sizes
    at = torch.arange(num_tokens, device=q.device)
    attend = (at <= at[:, None]) & (at > at[:, None] - window)
    if question.two_sides:
        seen_until = _ends_of_branches(at)
        attend &= at[:, None] < seen_until
    scores = (scale * q64 @ k64.mT).masked_fill(~attend, -torch.inf)
    lse64 = scores.logsumexp(-1)
    weights = (scores - lse64[..., None]).exp()
    largest = scale * q64.norm(dim=-1).amax() * k64.norm(dim=-1).amax()
    lse_bound = float(2 * e * (q.size(3) * largest + num_tokens)) + u
    rounded = 2 * lse_bound + u
    of_weights = rounded * weights + least * attend
    dropped = _dropped(q) if question.drops else None
    z = _factors(num_tokens, q.size(2), q.device) if question.drops else 1.0
    out64, out_bound = (z * weights) @ v64, (z * (of_weights + 2 * (u + e) * weights)) @ v64.abs() + least

    begin = (at - (window - 1)).clamp(min=0).to(torch.int32)[None]
    end = (at + 1).to(torch.int32)[None]
    out = torch.empty_like(q, dtype=state).resize_(*q.shape[:3], v.size(3))
    lse = torch.empty(1, q.size(2), num_tokens, dtype=torch.float64, device=q.device)
    parts = (slice(0, cut), slice(cut, num_tokens))
    blocks, queries = [], Queries(q.device, begin.cpu(), end.cpu(), at.cpu())
    for part in parts:
        k_runs = ops.runs_tensor([(part.start, 1, 0, part.stop - part.start)])
        bounds = [x.to(torch.int32)[None, part].cpu() for x in ((0 * at, seen_until) if question.two_sides else ())]
        blocks.append(Block(q, k[:, part], v[:, part], Round(queries, k_runs, tuple(bounds)), scale, 0.0, dropped))
    rounded_out = torch.empty_like(out, dtype=q.dtype)
    first, second = blocks
    backend.forward(first, Running(out, lse, fresh=True))
    backend.forward(second, Running(out.clone(), lse.clone(), False, rounded_out))
    backend.forward(second, Running(out, lse, fresh=False))
    yield "out", out, back(out64), back(out_bound)
    yield "rounded out", rounded_out, back(out64), back(out_bound + u * (out64.abs() + out_bound) + least)
    yield "lse", lse, lse64[None], torch.full_like(lse, lse_bound)

    final = Final(dout, out.to(q.dtype), lse, None)
    dq = torch.zeros_like(q, dtype=state)
    dk, dv = (torch.zeros_like(x, dtype=state) for x in (k, v))
    of_first, of_second = (Gradients(dq, dk[:, part], dv[:, part], fresh=False) for part in parts)
    backend.backward(first, final, of_first)
    rounded_keys = k.new_empty(second.k.shape), v.new_empty(second.v.shape)
    unused = of_second._replace(dq=dq.clone(), dk=of_second.dk.clone(), dv=of_second.dv.clone())
    backend.backward(second, final, unused._replace(fresh=True, rounded=rounded_keys))
    backend.backward(second, final, of_second)
    dweights, delta = z * (dout64 @ v64.mT), (dout64 * out64).sum(-1, keepdim=True)
    dscores = weights * (dweights - delta)
    delta_bound = (dout64.abs() * (out_bound + u * out64.abs())).sum(-1, keepdim=True)
    dweights_bound = 2 * e * (v.size(3) + 1) * z * (dout64.abs() @ v64.abs().mT)
    of_dscores = of_weights * (dweights - delta).abs() + weights * (delta_bound + dweights_bound)
    of_dv = z * (of_weights + 2 * (u + e) * weights)
    terms = scale * (of_dscores + 3 * u * dscores.abs() + least * attend)
    dk64, dk_bound = summed(scale * dscores.mT @ q64), summed(terms.mT @ q64.abs() + least)
    dv64, dv_bound = summed((z * weights).mT @ dout64), summed(of_dv.mT @ dout64.abs() + least)
    yield "dv", dv, dv64, dv_bound
    yield "dq", dq, back(scale * dscores @ k64), back(terms @ k64.abs() + least)
    yield "dk", dk, dk64, dk_bound
    for name, got, x, bound in zip(("dk", "dv"), rounded_keys, (dk64, dv64), (dk_bound, dv_bound), strict=True):
        x, bound = x[:, parts[-1]], bound[:, parts[-1]]
        yield f"rounded {name}", got, x, bound + u * (x.abs() + bound) + least


def _ends_of_branches(at: Tensor) -> Tensor:
    """The position behind the last query that attends each key: of two branches, and of one more in the second."""
    num_tokens = at.size(0)
    first, second = num_tokens // 2, num_tokens * 4 // 5
    in_first, in_second = ((num_tokens * i // 20 <= at) & (at < end) for i, end in ((5, first), (12, second)))
    return torch.where(in_first, first, torch.where(in_second, second, num_tokens))


def _dropped(q: Tensor) -> AttentionDropout:
    probability, *numbers = _DROPS
    return AttentionDropout(probability, torch.tensor([_ROW], device=q.device), *numbers)


def _factors(num_tokens: int, num_heads: int, device: torch.device) -> Tensor:
    """Return what dropout multiplies each weight by, (H, N, N)."""
    p, seed, step, stream = _DROPS
    positions, heads = torch.arange(num_tokens, device="cpu"), torch.arange(num_heads, device="cpu")
    counters = torch.arange(-(-num_tokens // 4), device="cpu")
    rows = _ROW + (heads[:, None, None] << 20)
    words = random_words(counters, positions[:, None], rows, stream, (seed, step))
    kept = words.flatten(2)[:, :, :num_tokens] < (1 - p) * 2**32
    return kept.to(device, torch.float64) / (1 - p)
