"""What hypothesis draws for several test files: any layout, any interval mask, and the mask written out."""

from __future__ import annotations

import itertools
import os

import torch
from hypothesis import settings
from hypothesis import strategies as st
from ringtile.sequence.layout import CHUNKS_PER_RANK, Layout, Run
from ringtile.sequence.mask import IntervalMask
from torch import Tensor

# Two budgets. A busy machine makes single examples slow; pytest-timeout watches the whole test.
settings.register_profile("push", max_examples=25, deadline=None)
settings.register_profile("all", max_examples=200, deadline=None)
settings.load_profile("all" if os.environ.get("RINGTILE_TESTS") == "all" else "push")


def dense(mask: IntervalMask) -> Tensor:
    """bool (B or 1, S, S), [query, key]: the definition of an interval mask."""
    key = torch.arange(mask.seq_len)
    attend = (mask.begin[:, :, None] <= key) & (key < mask.end[:, :, None])
    if mask.key_begin is not None and mask.key_end is not None:
        attend &= (mask.key_begin[:, None] <= key[:, None]) & (key[:, None] < mask.key_end[:, None])
    return attend


@st.composite
def random_layouts(draw: st.DrawFn, seq_len: int, world_size: int) -> Layout:
    """Any layout that runs can say: the global sequence is cut at random, some pieces are combed into strides, and
    the pieces are dealt to the ranks in any local order."""
    cuts = (
        draw(st.sets(st.integers(1, seq_len - 1), min_size=world_size - 1, max_size=world_size + 4))
        if seq_len > 1
        else set()
    )
    bounds = [0, *sorted(cuts), seq_len]
    pieces = []  # (global_begin, stride, length)
    for begin, end in itertools.pairwise(bounds):
        stride = draw(st.integers(1, min(3, end - begin)))
        pieces += [(first, stride, len(range(first, end, stride))) for first in range(begin, begin + stride)]
    pieces = draw(st.permutations(pieces))
    ranks: list[list[Run]] = [[] for _ in range(world_size)]
    for i, (begin, stride, length) in enumerate(pieces):
        of_rank = ranks[i] if i < world_size else ranks[draw(st.integers(0, world_size - 1))]
        of_rank.append(Run(begin, stride, sum(run.length for run in of_rank), length))
    return Layout.from_runs([draw(st.permutations(of_rank)) for of_rank in ranks])


def layouts(seq_len: int, world_size: int) -> st.SearchStrategy[Layout]:
    """Every named layout that seq_len is long enough for, or a random one."""
    named = [name for name in CHUNKS_PER_RANK if Layout.multiple(name, world_size) <= seq_len]
    return st.one_of(
        st.sampled_from([Layout.named(name, seq_len, world_size) for name in named]),
        random_layouts(seq_len, world_size),
    )


@st.composite
def document_lengths(draw: st.DrawFn, seq_len: int) -> list[int]:
    cuts = draw(st.sets(st.integers(0, seq_len), max_size=5)) | {0, seq_len}
    bounds = sorted(cuts)
    return [end - begin for begin, end in itertools.pairwise(bounds)]


@st.composite
def masks(draw: st.DrawFn, batch: int, seq_len: int) -> IntervalMask:
    """Every constructor that takes numbers, intersections of two, and arbitrary intervals (rows without keys too)."""
    size = st.integers(1, seq_len)
    simple = st.one_of(
        st.just(IntervalMask.full(seq_len)),
        st.just(IntervalMask.causal(seq_len)),
        st.builds(IntervalMask.sliding_window, st.just(seq_len), size, causal=st.booleans()),
        st.builds(IntervalMask.prefix_lm, st.just(seq_len), st.integers(0, seq_len)),
        st.builds(IntervalMask.chunked, st.just(seq_len), size),
        st.builds(
            IntervalMask.documents,
            st.lists(document_lengths(seq_len), min_size=batch, max_size=batch),
            st.booleans(),
        ),
        _any_intervals(batch, seq_len),
    )
    mask = draw(simple)
    return mask & draw(simple) if draw(st.booleans()) else mask


@st.composite
def forests(draw: st.DrawFn, seq_len: int, max_nodes: int = 12) -> tuple[list[int], list[int]]:
    """parents and lengths of trees in one row, in depth-first order: chains, stars and all between, empty nodes too."""
    num_nodes = draw(st.integers(1, max_nodes))
    cuts = sorted(draw(st.lists(st.integers(0, seq_len), min_size=num_nodes - 1, max_size=num_nodes - 1)))
    parents: list[int] = []
    path: list[int] = []
    for node in range(num_nodes):
        del path[draw(st.integers(0, len(path))) :]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents, [end - begin for begin, end in itertools.pairwise([0, *cuts, seq_len])]


@st.composite
def two_sided_masks(draw: st.DrawFn, batch: int, seq_len: int) -> IntervalMask:
    """Trees, their intersections with any mask, and arbitrary intervals of queries and keys."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = [draw(forests(seq_len)) for _ in range(batch)]
    tree = IntervalMask.tree([row[0] for row in rows], [row[1] for row in rows], draw(st.booleans()))
    low, high = (
        torch.randint(0, seq_len + 1, (2, batch, seq_len), generator=generator, dtype=torch.int32).sort(0).values
    )
    keys = IntervalMask(torch.zeros_like(low), torch.full_like(low, seq_len), low, high)
    mask = draw(st.sampled_from([tree, keys]))
    return mask & draw(masks(batch, seq_len)) if draw(st.booleans()) else mask


def any_masks(batch: int, seq_len: int) -> st.SearchStrategy[IntervalMask]:
    """Of one side or two."""
    return st.one_of(masks(batch, seq_len), two_sided_masks(batch, seq_len))


@st.composite
def _any_intervals(draw: st.DrawFn, batch: int, seq_len: int) -> IntervalMask:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    bounds = torch.randint(0, seq_len + 1, (2, batch, seq_len), generator=generator, dtype=torch.int32)
    return IntervalMask(bounds[0], bounds[1])
