"""Rings of more ranks than a test machine has cores: 64 threads, or 256, of a few tokens each."""

from __future__ import annotations

import pytest
import torch
from attention_calls import assert_close, problem, run
from oracle import dense_gradients
from ringtile import IntervalMask, Layout
from strategies import dense


@pytest.mark.parametrize(
    ("world_size", "scheme"),
    [
        (64, "usp:8"),  # both ways to share: rings of 8 ranks, and heads
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((64, "ring"), (64, "all_gather"), (256, "usp:8"))),
    ],
)
def test_many_ranks_compute_what_one_does(world_size: int, scheme: str) -> None:
    """Half of the row is one document, the rest short ones. A sum has up to S terms of up to D: S D eps each way."""
    seq_len = 4 * world_size
    short = [1, 2, 3, 7, 11] * (seq_len // 96)
    mask = IntervalMask.documents([seq_len // 2, *short, seq_len // 2 - sum(short)])
    p = problem(1, seq_len, num_heads=8, num_kv_heads=2, head_dim=8, v_head_dim=4)
    ran = run(p, mask, Layout.of_mask("auto", mask, world_size), scheme=scheme)
    expected = dense_gradients(p.q, p.k, p.v, dense(mask), p.dout, p.dlse)
    assert_close(ran.results, expected, seq_len * 8 * torch.finfo(torch.float64).eps)
