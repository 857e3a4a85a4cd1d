"""The simulator: its bytes against the transport's, its seconds against what follows by hand."""

from __future__ import annotations

import collections
import re
from typing import Any

import pytest
import torch
from attention_calls import problem
from ringtile import IntervalMask, Layout, LoopbackWorld, ShardedSequence, ring_attention
from ringtile.planner.layer import flops_of_pair
from ringtile.planner.simulate import simulate
from ringtile.planner.sizes import Rates
from ringtile.scheme import Scheme
from ringtile.sequence.plan import Counts, Shape
from ringtile.transport.loopback import LoopbackGroup
from ringtile.transport.transport import Exchange, Transport

WORLD, SEQ_LEN = 8, 96
BYTES = Rates(1e30, 1.0, 1.0)  # a second is a byte
DOCUMENTS = IntervalMask.documents([40, 3, 29, 11, 13])


def counts_of(mask: IntervalMask, layout: Layout, scheme: str, heads: tuple[int, int], dtype: torch.dtype) -> Counts:
    return Counts(mask, layout, Shape(1, *heads, 8, 8, dtype), Scheme.parse(scheme))


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "usp:2", "usp:4", "ulysses"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_simulated_bytes_are_those_that_the_ranks_send(
    scheme: str, layout: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rank over all messages, and by round of the ring; and as many as the transport counts."""
    dealt = Layout.of_mask(layout, DOCUMENTS, WORLD)
    sent, received, by_round = collections.Counter[int](), collections.Counter[int](), collections.Counter[Any]()
    exchange = Transport.exchange

    def counting(self: Transport, sends: dict[int, Any], receives: dict[int, Any], what: str) -> Exchange:
        out, into = (sum(x.nbytes for x in side.values()) for side in (sends, receives))
        sent[self.rank] += out
        received[self.rank] += into
        if found := re.fullmatch(r"(the gradients of )?round (\d+)", what):
            if scheme == "all_gather":
                out = into = max(out, into)
            by_round[int(found[2]), self.rank] += out if found[1] else into
        return exchange(self, sends, receives, what)

    monkeypatch.setattr(Transport, "exchange", counting)
    p = problem(1, SEQ_LEN, *heads, 8, 8)

    def on_rank(group: LoopbackGroup) -> int:
        sequence = ShardedSequence(DOCUMENTS, dealt, group, scheme=scheme)
        leaves = [sequence.shard(x, 1).requires_grad_() for x in (p.q, p.k, p.v)]
        ring_attention(*leaves, sequence).sum().backward()
        return group.transport.bytes_sent

    assert LoopbackWorld(WORLD).run(on_rank) == [sent[rank] for rank in range(WORLD)]
    seconds = simulate(counts_of(DOCUMENTS, dealt, scheme, heads, p.q.dtype), BYTES, (0,) * WORLD)
    assert seconds.sending == max([*sent.values(), *received.values()]) > 0
    expected = [max(by_round[i, rank] for rank in range(WORLD)) for i in range(len(seconds.rounds))]
    assert [each.sending for each in seconds.rounds] == expected
    assert sum(expected) > 0 or scheme == "ulysses"


@pytest.mark.parametrize("link", [1e3, 1e6])
def test_two_ranks_take_what_follows_by_hand(link: float) -> None:
    """Full attention: keys of the other rank travel behind the first round; their gradients, after the second."""
    counts = counts_of(IntervalMask.full(64), Layout.contiguous(64, 2), "ring", (2, 2), torch.bfloat16)
    flops = 1e6
    forward, backward = (32 * 32 * 2 * each / flops for each in flops_of_pair(counts.shape))
    keys = 32 * 2 * 16 * 2 / link
    seconds = simulate(counts, Rates(flops, 1e30, link), (0, 1))
    expected = max(forward, keys) + forward + max(backward, keys) + backward + 2 * keys
    assert seconds.together == pytest.approx(expected)
    assert seconds.computing == pytest.approx(seconds.mean) == pytest.approx(2 * (forward + backward))
    assert seconds.rounds[1].waiting == pytest.approx(max(0, keys - forward) + max(0, keys - backward))
    assert simulate(counts, Rates(flops, 1e30, link), (0, 0)).exposed == pytest.approx(0)  # on one host
    only = simulate(counts, Rates(flops, 1e30, link), (0, 1), backwards=0)
    assert only.together == pytest.approx(max(forward, keys) + forward)


def test_a_slow_rank_is_waited_for() -> None:
    """Causal, contiguous: rank 1 has three quarters of the work; rank 0 computes and sends, and ends early."""
    counts = counts_of(IntervalMask.causal(64), Layout.contiguous(64, 2), "ring", (2, 2), torch.bfloat16)
    seconds = simulate(counts, Rates(1e6, 1e30, 1e30), (0, 0))
    assert seconds.together == pytest.approx(seconds.computing)
    assert seconds.computing / seconds.mean == pytest.approx((64 * 65 - 32 * 33) / (64 * 65 / 2))


def test_heads_hide_behind_nothing() -> None:
    counts = counts_of(IntervalMask.full(64), Layout.contiguous(64, 4), "ulysses", (4, 4), torch.bfloat16)
    seconds = simulate(counts, Rates(1e6, 1e3, 1e3), (0,) * 4)
    one_way = 16 * 3 * 8 * 2  # tokens, ranks, head dim, bytes of q; the same of k, of v, and of out
    assert seconds.sending == pytest.approx(8 * one_way / 1e3)
    assert seconds.exposed == pytest.approx(seconds.sending)
