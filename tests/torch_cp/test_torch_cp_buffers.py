"""`context_parallel_shard` and `context_parallel_unshard`: global buffers to local ones and back, by function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ringtile import (
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RefusedError,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
)
from ringtile.transport.loopback import LoopbackGroup
from test_torch_cp_context import assert_equal, expected, inputs
from test_torch_cp_flex import LAYOUTS, mask_mod_of, refuses
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask


@pytest.mark.parametrize("balancer", LAYOUTS)
def test_shard_and_unshard_are_inverse(balancer: str) -> None:
    x = {"a": torch.randn(2, 300), "b": torch.arange(300 * 3).view(300, 3)}
    load_balancer = LAYOUTS[balancer](300, 4)

    def on_rank(group: LoopbackGroup) -> None:
        parts = context_parallel_shard(group, x, {"a": 1, "b": 0}, load_balancer)
        as_list = context_parallel_shard(group, list(x.values()), [1, 0], load_balancer)
        assert all(part.equal(other) for part, other in zip(parts.values(), as_list, strict=True))
        full = context_parallel_unshard(group, as_list, [1, 0], load_balancer or "contiguous")
        assert all(a.equal(b) for a, b in zip(full, x.values(), strict=True))

    LoopbackWorld(4).run(on_rank)


def test_pytorchs_load_balancers_are_understood() -> None:
    from torch.distributed.tensor.experimental._context_parallel import _load_balancer as theirs

    x = torch.arange(256)
    block_mask = create_block_mask(mask_mod_of(IntervalMask.causal(1024)), None, None, 1024, 1024, device="cpu")
    balancers = [
        (theirs._HeadTailLoadBalancer(256, 4, "cpu"), x),
        (theirs._PerDocumentHeadTailLoadBalancer([[64, 192]], 4, "cpu"), x),
        (theirs._PTRRLoadBalancer(block_mask, 4), torch.arange(1024)),
    ]
    for balancer, tokens in balancers:
        order = balancer._generate_indices()[0].chunk(4)

        def on_rank(group: LoopbackGroup, balancer: Any = balancer, tokens: Tensor = tokens) -> Any:
            (part,) = context_parallel_shard(group, [tokens], [0], balancer)
            assert context_parallel_unshard(group, [part], [0], balancer)[0].equal(tokens)
            return part

        assert all(a.equal(b) for a, b in zip(LoopbackWorld(4).run(on_rank), order, strict=True))
    per_row = theirs._PerDocumentHeadTailLoadBalancer([[64, 192], [128, 128]], 4, "cpu")
    with pytest.raises(RefusedError, match="order of its own for every batch row"):
        context_parallel_shard(LoopbackWorld(4).groups[0], [x[None].expand(2, 256)], [1], per_row)


def test_unshard_by_name_of_a_length_that_the_ranks_do_not_divide() -> None:
    """33 tokens in zigzag: rank 0 holds 17, rank 1 holds 16, so no rank can tell S from N."""
    x = torch.randn(2, 33, 3)

    def on_rank(group: LoopbackGroup) -> None:
        (local,) = context_parallel_shard(group, [x], [1], "zigzag")
        assert context_parallel_unshard(group, [local], [1], "zigzag")[0].equal(x)
        by_hand = Layout.zigzag(35, 2).shard(torch.arange(35), 0, group.transport.rank)
        assert context_parallel_unshard(group, [by_hand], [-1], "zigzag")[0].equal(torch.arange(35))

    LoopbackWorld(2).run(on_rank)


def test_unshard_in_the_block_around() -> None:
    x = inputs()

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        tensors = [t.clone() for t in x[:3]]
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[2] * 3):
            out = torch.nn.functional.scaled_dot_product_attention(*tensors)
            inside = context_parallel_unshard(group, [out], [2])
        assert context_parallel_unshard(group, [out], [2], "zigzag")[0].equal(inside[0])
        return inside

    for rank in LoopbackWorld(2).run(on_rank):
        assert_equal(rank, expected(x)[:1])


def test_unshard_that_does_not_know_the_layout_names_the_argument() -> None:
    """Also right after the block or the call that sharded to that size, which may not be what it is about."""

    def on_rank(group: LoopbackGroup) -> None:
        context_parallel_shard(group, buffers=[torch.zeros(8)], seq_dims=[0])
        with context_parallel(group, buffers=[torch.zeros(8)], buffer_seq_dims=[0]):
            pass
        context_parallel_unshard(group, [torch.zeros(4)], [0])

    refuses(InputError, r"unknown layout.*context_parallel_unshard\(..., load_balancer='zigzag'\)", on_rank)
