"""Schemes beside the table of test_attention_table.py: shares of the heads, the op, what is refused.

Shape letters: H query heads, G kv heads, W ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_calls import MASKS, SEQ_LEN, problem, run
from hypothesis import given
from hypothesis import strategies as st
from ringtile import (
    Config,
    ConfigError,
    InputError,
    Layout,
    LoopbackWorld,
    RefusedError,
    ShardedSequence,
    plan_attention,
    ring_attention,
)
from ringtile.attn import choose
from ringtile.attn.call import Options
from ringtile.attn.traced import attend
from ringtile.scheme import Scheme, share
from ringtile.transport.loopback import LoopbackGroup
from torch import Tensor

# ---- shares -------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 12))
def test_shares_hold_each_head_once_and_know_its_kv_head(kv_heads: int, repeats: int, num_parts: int) -> None:
    heads: list[int] = []
    sizes = []
    for part in range(num_parts):
        of_part = share(kv_heads * repeats, kv_heads, num_parts, part)
        heads += of_part.heads
        sizes.append(len(of_part.heads))
        expected = [head // repeats for head in of_part.heads]
        each = len(of_part.heads) // max(1, len(of_part.kv_heads))  # query heads of a kernel call for a kv head
        index = of_part.kv_of_heads or [i // each for i in range(len(of_part.heads))]
        assert [of_part.kv_heads[i] for i in index] == expected
    assert heads == [*range(kv_heads * repeats)]
    assert max(sizes) - min(sizes) <= (repeats if kv_heads >= num_parts else 1)


def test_kv_heads_enough_for_all_ranks_travel_to_one_each() -> None:
    kv_heads = [head for part in range(4) for head in share(24, 6, 4, part).kv_heads]
    assert kv_heads == [*range(6)]


def test_op_takes_a_scheme() -> None:
    """Under torch.compile and vmap the op finds the sequence by its tensors: the same tensors, another scheme."""
    p = problem(1, SEQ_LEN, 4, 2)
    layout = Layout.zigzag(SEQ_LEN, 2)

    def on_rank(group: LoopbackGroup) -> None:
        sequences = [ShardedSequence(MASKS["causal"], layout, group, scheme=scheme) for scheme in ("ulysses", "ring")]
        for sequence in sequences:
            leaves = [sequence.shard(x, 1).requires_grad_() for x in (p.q, p.k, p.v)]
            begin = group.transport.bytes_sent
            out = ring_attention(*leaves, sequence)
            gradients = torch.autograd.grad(out.sum(), leaves)
            middle = group.transport.bytes_sent
            through_op, _ = attend(*leaves, sequence, Options(0.25))
            of_op = torch.autograd.grad(through_op.sum(), leaves)
            sent = group.transport.bytes_sent - middle  # heads a second time in the backward, because none were kept
            assert (sent == middle - begin) == (sequence.scheme == "ring")
            assert all(torch.equal(x, y) for x, y in zip((out, *gradients), (through_op, *of_op), strict=True))

    LoopbackWorld(2).run(on_rank)


def test_gradients_of_a_kv_head_of_two_ranks_are_added_before_they_are_rounded() -> None:
    """Equal queries whose dout are d, d / 1024, -d / 2 and -d / 2: half an ulp, in bfloat16, of what a rank adds up is
    more than the sum. Each is rounded once: an ulp, 2^-7. Float32 loses 2^-18 of a rank's part, 2^10 times the sum."""
    p, scales = problem(1, SEQ_LEN, 4, 1, dtype=torch.bfloat16), torch.tensor([1, 2.0**-10, -0.5, -0.5]).bfloat16()
    q, dout = p.q[:, :, :1].expand_as(p.q).contiguous(), p.dout[:, :, :1] * scales[:, None]
    p = p._replace(q=q, dout=dout, dlse=torch.zeros_like(p.dlse))
    of = MASKS["causal"], Layout.zigzag(SEQ_LEN, 2), "ulysses"
    alone, found = run(p, of[0], Layout.zigzag(SEQ_LEN, 1), "ring").results, run(p, *of).results
    for x, y in ((alone.dk, found.dk), (alone.dv, found.dv)):
        torch.testing.assert_close(y, x, rtol=2.0**-7, atol=2.0**-8 * float(x.abs().max()))


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "Ring", "auto:2", "usp:0", "usp:-1", "staged:2", "ulysses:2", "ring ", None, 2])
def test_unknown_schemes_are_refused_by_name(text: Any) -> None:
    with pytest.raises(InputError, match=r"the scheme is .*; expected ring, all_gather, ulysses, usp:M"):
        Scheme.parse(text)


def test_groups_that_do_not_come_out_even_are_refused() -> None:
    message = "the scheme is usp:2, but the group has 3 ranks; expected a number that divides it"

    def on_rank(group: LoopbackGroup) -> None:
        with pytest.raises(InputError, match=message):
            ShardedSequence(MASKS["causal"], Layout.zigzag(SEQ_LEN, 3), group, scheme="usp:2")

    LoopbackWorld(3).run(on_rank)
    with pytest.raises(InputError, match=message):
        plan_attention(
            *(MASKS["causal"], Layout.zigzag(SEQ_LEN, 3)),
            **{"num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "scheme": "usp:2"},
            dtype=torch.float32,
        )
    with pytest.raises(ConfigError, match="context_parallel_scheme: the scheme is usp:2, but the group has 3 ranks"):
        Config(context_parallel_size=3, context_parallel_scheme="usp:2")
    with pytest.raises(ConfigError, match=r"context_parallel_scheme: the scheme is 'ulises'; expected ring"):
        Config(context_parallel_size=3, context_parallel_scheme="ulises")


def test_a_wrong_kernel_of_single_heads_is_refused_before_any_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 query heads share a kv head, but over 4 ranks each has a single one, for which another kernel runs."""

    def of_single_heads(backend: Any, q: Tensor, k: Tensor, v: Tensor, *kind: bool) -> str:
        return "is wrong for single heads" if q.size(2) == k.size(2) else ""

    monkeypatch.setattr(choose, "why_wrong", of_single_heads)
    p = problem(1, SEQ_LEN, 4, 1)

    def on_rank(group: LoopbackGroup) -> None:
        sequence = ShardedSequence(MASKS["causal"], Layout.zigzag(SEQ_LEN, 4), group, scheme="ulysses")
        with pytest.raises(RefusedError, match="is wrong for single heads"):
            ring_attention(*(sequence.shard(x, 1) for x in (p.q, p.k, p.v)), sequence)
        assert group.transport.bytes_sent == 0
        whole = ShardedSequence(MASKS["causal"], Layout.zigzag(SEQ_LEN, 4), group, scheme="ring")
        ring_attention(*(whole.shard(x, 1) for x in (p.q, p.k, p.v)), whole)

    LoopbackWorld(4).run(on_rank)
