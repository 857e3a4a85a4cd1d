"""What the host does for a sequence grows with its runs and documents, and not with their pairs.

Each case is timed at one size and at eight times that: linear work takes 8 times as long, quadratic work 64 times.
Where other processes take cache and memory, linear work was seen to take 2.6 times as long.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import pytest
import torch
from ringtile import IntervalMask, Layout, ops
from ringtile.sequence.pieces import pieces_of
from ringtile.sequence.plan import RankPlan


def seconds(call: Callable[[], object]) -> float:
    """Of this thread alone, and the least of five: other processes share the cores."""
    found = []
    for _ in range(5):
        began = time.thread_time()
        call()
        found.append(time.thread_time() - began)
    return min(found)


def attention_over_interleaving_runs(num_runs: int) -> Callable[[], object]:
    """As striped layouts and documents make them, where a block has the keys of all ranks."""
    number = torch.arange(num_runs)
    runs = torch.stack((number, torch.full_like(number, num_runs), 2 * number, torch.full_like(number, 2)), 1)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 2 * num_runs, 1, 8)
    bounds = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1), 2 * num_runs, dtype=torch.int32)
    out, lse = torch.zeros(1, 1, 1, 8), torch.full((1, 1, 1), -torch.inf, dtype=torch.float64)
    return lambda: ops.attn_fwd_(q, k, k, *bounds, runs, out, lse, scale=1.0, softcap=0.0)


def attention_over_striped_documents(count: int) -> Callable[[], object]:
    """The first of 8 ranks, with the keys of all: 8 runs of 8 tokens in each document."""
    document, rank = torch.arange(count).repeat(8), torch.arange(8).repeat_interleave(count)
    eight = torch.full_like(rank, 8)
    runs = torch.stack((64 * document + rank, eight, 8 * (count * rank + document), eight), 1)
    q, k = torch.randn(1, 8 * count, 1, 8), torch.randn(1, 64 * count, 1, 8)
    begin = (torch.arange(8 * count, dtype=torch.int32) // 8 * 64)[None]
    out, lse = torch.zeros(q.shape), torch.full((1, 1, 8 * count), -torch.inf, dtype=torch.float64)
    return lambda: ops.attn_fwd_(q, k, k, begin, begin + 64, runs, out, lse, scale=1.0, softcap=0.0)


def batch_of_documents(count: int) -> Callable[[], object]:
    """Its mask, and the layout, the rounds and their pieces on one of 4 ranks."""

    def make() -> None:
        mask = IntervalMask.documents([100] * count)
        plan = RankPlan.of(mask, Layout.of_mask("per_document", mask, 4), 1)
        for each in plan.rounds:
            assert pieces_of(each)

    return make


LINEAR: dict[str, tuple[Callable[[int], Callable[[], object]], int]] = {
    "Layout.per_document": (lambda n: lambda: Layout.per_document([100] * n, 4), 500),
    "an attention call over runs that interleave": (attention_over_interleaving_runs, 2000),
    "an attention call over documents that are striped": (attention_over_striped_documents, 200),
    "a batch of documents": (batch_of_documents, 250),
    "Layout.balanced": (lambda n: lambda: Layout.balanced(IntervalMask.causal(16 * n), 8, chunk=16), 512),
    "a layout in any local order": (
        lambda n: lambda: Layout.from_runs([[(2 * i, 1, 2 * (n - 1 - i), 2) for i in range(n)]]),
        8000,
    ),
}


@pytest.mark.parametrize("name", LINEAR)
def test_the_host_takes_time_for_runs_and_not_for_their_pairs(name: str) -> None:
    make, size = LINEAR[name]
    small, large = (seconds(make(n)) for n in (size, 8 * size))
    assert large < 24 * small, (small, large)  # three times that of linear work


def test_a_layout_of_10000_documents_takes_milliseconds() -> None:
    """160,000 runs over 8 ranks: a second where each was made in Python."""
    lengths = [100] * 10_000
    assert seconds(lambda: Layout.per_document(lengths, 8)) < 0.5


def test_a_batch_of_packed_documents_is_planned_in_milliseconds() -> None:
    """8, 100 and 400 documents of 128k tokens over 8 ranks: 24, 6 and 5 ms where each trade was made in Python."""
    for count in (8, 100, 400):
        cuts = [0, *sorted(random.Random(count).sample(range(1, 2**17), count - 1)), 2**17]
        mask = IntervalMask.documents([after - before for before, after in itertools.pairwise(cuts)])
        assert seconds(lambda mask=mask: Layout.of_mask("auto", mask, 8)) < 0.005


def test_balanced_by_default_deals_8_to_64_chunks_a_rank() -> None:
    for seq_len, chunk in ((4096, 128), (2**17, 512), (2**20, 4096)):
        mask = IntervalMask.documents([seq_len // 2 + 17, seq_len // 2 - 17])
        assert Layout.balanced(mask, 4) == Layout.balanced(mask, 4, chunk)
