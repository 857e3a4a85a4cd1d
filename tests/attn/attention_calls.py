"""A call of attention on ranks for tests: its tensors, what each rank does, the whole put together, and bounds.

Shape letters: B batch, S global tokens, H query heads, G kv heads, D head dim, Dv value head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from oracle import Attention
from ringtile import IntervalMask, Layout, LoopbackWorld, ShardedSequence, ops, ring_attention
from torch import Tensor

SEQ_LEN = 48  # of the masks, and of problems unless they say otherwise
MASKS = {
    "full": IntervalMask.full(48),
    "causal": IntervalMask.causal(48),
    "documents": IntervalMask.documents([13, 1, 20, 14]),
    "documents-bidirectional": IntervalMask.documents([13, 1, 20, 14], causal=False),
    "window": IntervalMask.sliding_window(48, 7),
    "prefix": IntervalMask.prefix_lm(48, 11),
    "chunked": IntervalMask.chunked(48, 10),
    "padding": IntervalMask.from_padding(torch.tensor([[0] * 5 + [1] * 43])),
    "tree": IntervalMask.tree([-1, 0, 1, 1, 0, -1, 5, 5], [9, 7, 3, 6, 5, 8, 4, 4]).padded(2),
}


def uneven(seq_len: int, world_size: int) -> Layout:
    """Two tokens on each rank, in another order than memory's, and the rest on the last."""
    last = 2 * world_size - 2
    pairs = [[(2 * rank + 1, 1, 1, 1), (2 * rank, 1, 0, 1)] for rank in range(world_size - 1)]
    return Layout.from_runs([*pairs, [(last, 1, 0, seq_len - last)]])


def each_with_a_layout(names: Iterable[str]) -> list[Any]:
    """Rows (mask, layout): each mask with a layout, in turn; `long` with all others."""
    layouts = ("contiguous", "zigzag", "balanced", "uneven")
    every = itertools.product(enumerate(names), enumerate(layouts))
    return [
        pytest.param(mask, layout, marks=() if i % len(layouts) == j else pytest.mark.long)
        for (i, mask), (j, layout) in every
    ]


def layout_of(name: str, mask: IntervalMask, world_size: int) -> Layout:
    return uneven(mask.seq_len, world_size) if name == "uneven" else Layout.of_mask(name, mask, world_size)


class Problem(NamedTuple):
    """Global inputs and cotangents."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


def problem(
    batch: int = 1,
    seq_len: int = 48,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = (batch, seq_len)
    tensors = (
        normal(*tokens, num_heads, head_dim),
        normal(*tokens, num_kv_heads, head_dim),
        normal(*tokens, num_kv_heads, v_head_dim),
        normal(*tokens, num_heads, v_head_dim),
    )
    dlse = normal(batch, num_heads, seq_len).to(ops.state_dtype(dtype))
    return Problem(*(x.to(dtype) for x in tensors), dlse)


class Ran(NamedTuple):
    """What ranks got, put together; the bytes that each sent forward and backward; the gradient of sinks (H)."""

    results: Attention
    sent: list[tuple[int, int]]
    dsinks: Tensor | None


def forward_and_backward(
    p: Problem,
    sequence: ShardedSequence,
    *,
    return_lse: bool = True,
    of_lse: bool = True,
    in_views: bool = False,
    sinks: Tensor | None = None,
    **options: Any,
) -> tuple[Attention, tuple[int, int], Tensor | None]:
    """This rank's part of `Ran`. An lse that is not returned is 0 here. of_lse: with a gradient of lse.
    in_views: of (B, H, N, D) tensors transposed, as transformers hands them over."""
    local = [sequence.shard(x.detach(), 1) for x in (p.q, p.k, p.v, p.dout)]
    if in_views:
        local = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in local]
    *leaves, dout = (x.requires_grad_() for x in local)
    of_sinks = [] if sinks is None else [sinks.detach().clone().requires_grad_()]
    options |= dict(zip(["sinks"], of_sinks, strict=False))
    transport = sequence.transport
    begin = transport.bytes_sent
    out, *lse = (
        ring_attention(*leaves, sequence, return_lse=True, **options)
        if return_lse
        else [ring_attention(*leaves, sequence, **options)]
    )
    middle = transport.bytes_sent
    outputs = [out, *(lse if of_lse else [])]
    cotangents = [dout.detach(), sequence.shard(p.dlse, 2)][: len(outputs)]
    gradients = torch.autograd.grad(outputs, leaves + of_sinks, cotangents)
    sent = middle - begin, transport.bytes_sent - middle
    lse = lse[0].detach() if return_lse else torch.zeros_like(sequence.shard(p.dlse, 2))
    return Attention(out.detach(), lse, *gradients[:3]), sent, gradients[3] if of_sinks else None


def run(p: Problem, mask: IntervalMask, layout: Layout, scheme: str = "ring", **options: Any) -> Ran:
    """Forward and backward on W virtual ranks."""
    of_ranks = LoopbackWorld(layout.world_size).run(
        lambda group: forward_and_backward(p, ShardedSequence(mask, layout, group, scheme=scheme), **options)
    )
    return together(of_ranks, layout)


def run_ring(p: Problem, mask: IntervalMask, layout: Layout, **options: Any) -> Attention:
    return run(p, mask, layout, **options).results


def together(of_ranks: list[tuple[Attention, tuple[int, int], Tensor | None]], layout: Layout) -> Ran:
    results, sent, dsinks = zip(*of_ranks, strict=True)
    return Ran(assemble(list(results), layout), list(sent), None if dsinks[0] is None else sum(dsinks))


def assemble(of_ranks: list[Attention], layout: Layout) -> Attention:
    order = torch.argsort(torch.cat([layout.positions(rank) for rank in range(layout.world_size)]))
    return Attention(
        *(
            torch.cat(pieces, dim=2 if name == "lse" else 1).index_select(2 if name == "lse" else 1, order)
            for name, pieces in zip(Attention._fields, zip(*of_ranks, strict=True), strict=True)
        )
    )


# ---- bounds -------------------------------------------------------------------------------------

# float64 state: every number is a sum of at most S <= 48 keys (dk: S queries x H / G heads) of products of at most
# D <= 24 terms, so rounding stays below some S D eps = 1e-13 of the largest magnitude; exp and tanh of the kernel are
# good to a few eps of their argument.
FLOAT64_TOLERANCE = 1e-12


def same_bits(one: Attention, other: Attention) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(one, other, strict=True))


def assert_close(got: Attention, expected: Attention, tolerance: float) -> None:
    """Relative to the largest magnitude of each tensor; -inf only where expected."""
    for name, x, y in zip(Attention._fields, got, expected, strict=True):
        finite = y.isfinite()
        assert torch.equal(x.isfinite(), finite), name
        y, x = y[finite], x.double()[finite]
        error = (x - y).abs().max().item() if y.numel() else 0.0
        assert error <= tolerance * max(1.0, y.abs().max().item() if y.numel() else 0.0), (name, error)
