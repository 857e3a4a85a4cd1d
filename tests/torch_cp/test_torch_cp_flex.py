"""FlexAttention over a sharded sequence, against PyTorch's attention of the whole sequence on one rank.

Shape letters: B batch, S global tokens, H query heads, G kv heads, D head dim, Dv value head dim, W ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from oracle import dense_attention
from pool import run_ranks
from ringtile import (
    ContextParallel,
    ContextParallelPlan,
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    MaskNotExpressibleError,
    RefusedError,
    context_parallel,
    context_parallel_shard,
    create_cp_block_mask,
    flex_attention,
    plan_attention,
)
from ringtile.torch_context_parallel.flex import interval_mask_of
from ringtile.torch_context_parallel.group_layouts import sequence_of
from ringtile.transport.loopback import LoopbackGroup
from strategies import any_masks, dense
from test_torch_cp_context import assert_equal, expected, inputs
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask


def mask_mod_of(mask: IntervalMask) -> Callable[..., Tensor]:
    begin, end, *of_keys = mask.tensors
    if of_keys:
        key_begin, key_end = of_keys
        return lambda b, h, q, k: (begin[b, q] <= k) & (k < end[b, q]) & (key_begin[b, k] <= q) & (q < key_end[b, k])
    return lambda b, h, q, k: (begin[b, q] <= k) & (k < end[b, q])


def two_intervals(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A window, and every other token before it, which are others for every other query."""
    return (k <= q) & ((q - k < 9) | ((q + k) % 2 == 0))


def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - (h + 1) * (q - k).abs() * 0.1


def everything(seq_len: int) -> tuple[Tensor, Tensor]:
    return torch.arange(seq_len)[:, None], torch.arange(seq_len)[None]


SINKS = two_intervals(torch.tensor(0), torch.tensor(0), *everything(300))
DOCUMENTS = IntervalMask.documents([[7, 130, 100, 63], [290, 1, 5, 4]])
TREE = IntervalMask.tree([-1, 0, 1, 1, 0], [100, 60, 40, 50, 50])

LAYOUTS = {
    "contiguous": lambda seq_len, world_size: "contiguous",
    "zigzag": lambda seq_len, world_size: "zigzag",
    "per document": lambda seq_len, world_size: Layout.per_document([7, 130, 100, 63], world_size),
    "balanced": lambda seq_len, world_size: Layout.balanced(DOCUMENTS, world_size, chunk=16),
}


class Attention(torch.nn.Module):
    """Calls the attention function it is given, as a model's innermost attention module does."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **arguments: Any) -> Tensor:
        return self.function(*args, **arguments)


def styled(style: ContextParallel, function: Callable[..., Tensor], group: Any) -> torch.nn.Module:
    return style._apply(Attention(function), group)


FLEX = ContextParallel.AttentionType.FLEX


def order_of(layout: Layout) -> Tensor:
    return torch.cat([layout.positions(rank) for rank in range(layout.world_size)]).argsort()


def run(layout: Layout, on_rank: Callable[[LoopbackGroup], list[Tensor]]) -> list[Tensor]:
    """Tensors (B, H, N, ...) of all ranks in global order."""
    ranks = LoopbackWorld(layout.world_size).run(on_rank)
    return [torch.cat(shards, 2).index_select(2, order_of(layout)) for shards in zip(*ranks, strict=True)]


MASKS = {"causal": IntervalMask.causal(300), "documents": DOCUMENTS, "tree": TREE}
EVERY_RUN = {("causal", "contiguous"), ("documents", "zigzag"), ("tree", "per document"), ("documents", "balanced")}


@pytest.mark.parametrize(
    ("name", "balancer"),
    [pytest.param(*cell, marks=[pytest.mark.long] * (cell not in EVERY_RUN)) for cell in product(MASKS, LAYOUTS)],
)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 4])
def test_interval_masks_run_as_a_ring_with_gradients(name: str, balancer: str, world_size: int) -> None:
    """300 is no multiple of 128, nor of 2 x 4 ranks; PyTorch's own function raises for such lengths."""
    x, mask, load_balancer = inputs(300), MASKS[name], LAYOUTS[balancer](300, world_size)
    layout = Layout.named(load_balancer, 300, world_size) if isinstance(load_balancer, str) else load_balancer

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        block_mask = create_cp_block_mask(
            mask_mod_of(mask), mask.begin.size(0), None, 300, 300, group, load_balancer=load_balancer
        )
        leaves = [layout.shard(t, 2, group.transport.rank).requires_grad_() for t in x[:3]]
        sent = group.transport.bytes_sent
        out = flex_attention(*leaves, block_mask=block_mask)
        assert group.transport.bytes_sent - sent < 2 * 4 * layout.local_len(group.transport.rank) * 24 * 8 * world_size
        return [out.detach(), *torch.autograd.grad(out, leaves, layout.shard(x.dout, 2, group.transport.rank))]

    assert_equal(run(layout, on_rank), expected(x, attn_mask=dense(mask)[:, None]))


GATHERED = {  # name: mask_mod, score_mod
    "sinks": (two_intervals, None),
    "score mod": (None, alibi),
    "score mod and documents": (mask_mod_of(DOCUMENTS), alibi),
    "score mod and sinks": (two_intervals, alibi),
}


def gathered_cases() -> dict[str, list[Tensor]]:
    """Return by case this rank's outputs of a direct call and of ContextParallel with arguments and with keywords;
    and of a score_mod that the module sets itself."""
    group, rank, names = dist.group.WORLD, dist.get_rank(), ("query", "key", "value")
    x = [t.float() for t in inputs(300)[:3]]
    results = {}
    for case, (mask_mod, score_mod) in GATHERED.items():
        local = context_parallel_shard(group, x, [2] * 3, "zigzag")
        block_mask = mask_mod and create_cp_block_mask(mask_mod, 2, None, 300, 300, group, load_balancer="zigzag")
        mods = {"block_mask": block_mask, "score_mod": score_mod}
        with torch.no_grad():
            style, plan = ContextParallel(2, FLEX), ContextParallelPlan(group, seq_len=300)
            with plan.attention():
                outs = [flex_attention(*local, **mods)]
                if case == "score mod and sinks":  # every call compiles anew
                    module = styled(style, functools.partial(flex_attention, score_mod=alibi), group)
                    outs.append(module(*local, block_mask=block_mask))
                elif case == "score mod and documents":
                    outs.append(styled(style, flex_attention, group)(*local, alibi, block_mask))
                elif case == "sinks":
                    module = styled(style, flex_attention, group)
                    outs.append(module(**dict(zip(names, local, strict=True)), **mods))
        assert len({t.size(2) for t in outs}) == 1, rank
        results[case] = outs
    return results


def test_other_masks_run_on_gathered_keys() -> None:
    """Forward only: PyTorch's flex_attention has no backward on the CPU. Sums of 300 weights in float32: 2e-6."""
    q, k, v = (t.double() for t in inputs(300)[:3])
    bias = alibi(torch.zeros(()), torch.tensor(0), torch.arange(4)[:, None, None], *everything(300)).double()
    attend = {
        "sinks": SINKS,
        "score mod": bias,
        "score mod and documents": bias.masked_fill(~dense(DOCUMENTS)[:, None], -torch.inf),
        "score mod and sinks": bias.masked_fill(~SINKS, -torch.inf),
    }
    ranks = run_ranks(2, gathered_cases)
    for case in GATHERED:
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attend[case])
        for shards in zip(*(rank[case] for rank in ranks), strict=True):
            got = torch.cat(shards, 2).index_select(2, order_of(Layout.zigzag(300, 2)))
            torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=2e-6)


def calls_of_pytorchs_function() -> list[str]:
    """Return what PyTorch's own function is refused for: a score_mod in a ring, and a mask of rows with gaps."""
    messages = []
    local = context_parallel_shard(dist.group.WORLD, [t.float() for t in inputs(300)[:3]], [2] * 3, "zigzag")
    for mask_mod, score_mod in ((mask_mod_of(IntervalMask.causal(300)), alibi), (two_intervals, None)):
        block_mask = create_cp_block_mask(mask_mod, 1, None, 300, 300, dist.group.WORLD, load_balancer="zigzag")
        own = functools.partial(torch_flex.flex_attention, score_mod=score_mod)
        with torch.no_grad(), pytest.raises((Unsupported, ValueError)) as refused:
            styled(ContextParallel(2, FLEX), own, dist.group.WORLD)(*local, block_mask=block_mask)
        messages.append(str(refused.value))
    return messages


def test_what_pytorchs_own_function_cannot_do_on_local_tokens_is_refused() -> None:
    for score_mod, gaps in run_ranks(2, calls_of_pytorchs_function):
        assert "torch's flex_attention with a score_mod" in score_mod
        assert "block_mask" in gaps


def test_gathered_keys_get_the_sum_of_all_ranks_gradients() -> None:
    """The gradient of the gather before flex_attention, which PyTorch calls flex_cp_allgather."""
    x, layout = inputs(), Layout.zigzag(50, 2)

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        local = layout.shard(x.k, 2, group.transport.rank).requires_grad_()
        full = layout.unshard(local, 2, group)
        return [torch.autograd.grad(full, local, x.k * (group.transport.rank + 1))[0]]

    assert_equal(run(layout, on_rank), [3 * x.k])


def test_auxiliary_outputs_and_grouped_heads() -> None:
    x = inputs(num_kv_heads=2)
    mask = IntervalMask.causal(50)
    _, lse = dense_attention(*(t.transpose(1, 2) for t in x[:3]), dense(mask))
    layout = Layout.contiguous(50, 2)

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        block_mask = create_cp_block_mask(mask_mod_of(mask), None, None, 50, 50, group)
        local = [layout.shard(t, 2, group.transport.rank) for t in x[:3]]
        out, aux = flex_attention(*local, block_mask=block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        assert aux.lse.equal(flex_attention(*local, block_mask=block_mask, enable_gqa=True, return_lse=True)[1])
        return [out, aux.lse]

    out, got = run(layout, on_rank)
    assert_equal([out], expected(x, is_causal=True, enable_gqa=True)[:1])
    assert_equal([got], [lse])


# ---- inside context_parallel --------------------------------------------------------------------


@pytest.mark.parametrize("flex", [flex_attention, torch_flex.flex_attention], ids=["ringtile", "torch"])
def test_flex_attention_in_the_context_follows_its_mask(flex: Any) -> None:
    """PyTorch's own function too: it returns the ring's output and log-sum-exp."""
    x, mask = inputs(), IntervalMask.documents([20, 30])
    layout = Layout.zigzag(50, 2)
    _, lse = dense_attention(*(t.transpose(1, 2) for t in x[:3]), dense(mask))

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        tensors = [t.clone() for t in x[:3]]
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[2] * 3, mask=mask), torch.no_grad():
            out, aux = flex(*tensors, return_aux=AuxRequest(lse=True))
        return [out, aux.lse]

    if flex is torch_flex.flex_attention:  # dynamo compiles it, in one thread at a time: one rank
        layout = Layout.contiguous(50, 1)
    got = run(layout, on_rank)
    assert_equal(got, [expected(x, attn_mask=dense(mask))[0], lse])


def test_refusal_inside_a_compiled_call_is_told_by_dynamo() -> None:
    """PyTorch's own function compiles itself."""
    x, group = inputs(16), LoopbackWorld(1).groups[0]
    with (
        pytest.raises(
            torch._dynamo.exc.Unsupported, match=r"RefusedError\(.*flex_attention with a score_mod.*same arg"
        ),
        context_parallel(group, mask=IntervalMask.causal(16)),
        torch.no_grad(),
    ):
        torch_flex.flex_attention(*x[:3], alibi)


def test_block_mask_of_the_global_sequence_is_sharded_once() -> None:
    x = inputs(300)
    block_mask = create_block_mask(mask_mod_of(DOCUMENTS), 2, None, 300, 300, device="cpu")
    layout = Layout.zigzag(300, 2)

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        tensors = [t.clone() for t in x[:3]]
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[2] * 3):
            first = flex_attention(*tensors, block_mask=block_mask)
            return [first, flex_attention(*tensors, block_mask=block_mask)]

    once, again = run(layout, on_rank)
    assert once.equal(again)
    assert len(block_mask.ringtile_parts) == 2  # type: ignore[attr-defined]  # one per rank
    assert_equal([once], expected(x, attn_mask=dense(DOCUMENTS)[:, None])[:1])


# ---- which masks are intervals ------------------------------------------------------------------


@given(st.integers(1, 140), st.data())
def test_interval_masks_are_recognized_exactly(seq_len: int, data: st.DataObject) -> None:
    mask = data.draw(any_masks(2, seq_len))
    rows = mask.begin.size(0)
    assert interval_mask_of(mask_mod_of(mask), rows, None, seq_len) == mask
    row, query, hole = data.draw(st.integers(0, rows - 1)), *(data.draw(st.integers(0, seq_len - 1)) for _ in range(2))
    holed = dense(mask).clone()
    holed[row, query, hole] ^= True
    still = interval_mask_of(lambda b, h, q, k: holed[b, q, k], rows, None, seq_len)
    try:
        assert still == IntervalMask.from_bool(holed)
    except MaskNotExpressibleError:
        assert still is None


def test_heads_that_differ_are_no_interval_mask() -> None:
    assert interval_mask_of(lambda b, h, q, k: k <= q + h, 1, 2, 9) is None
    assert interval_mask_of(lambda b, h, q, k: k <= q, 1, 2, 9) == IntervalMask.causal(9)


def test_blocks_of_a_block_mask_count_besides_its_mask_mod() -> None:
    """Most key blocks are not listed, while mask_mod would attend them."""
    blocks = (
        torch.tensor([[[1, 1, 1]]], dtype=torch.int32),
        torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]], dtype=torch.int32),
    )
    diagonal = torch_flex.BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=128, seq_lengths=(384, 384))
    (part,) = context_parallel_shard(LoopbackWorld(1).groups[0], [diagonal], [0])
    assert part.ringtile_origin.sequence.end.equal(IntervalMask.documents([128] * 3, causal=False).end)  # type: ignore[union-attr]


# ---- ContextParallel ----------------------------------------------------------------------------


def sharded_block_mask_of_gaps() -> Tensor:
    """One row of blocks that serves two batch rows and four heads, on gathered keys."""
    group = dist.group.WORLD
    full = create_block_mask(two_intervals, None, None, 300, 300, device="cpu")
    *local, part = context_parallel_shard(group, [*(t.float() for t in inputs(300)[:3]), full], [2] * 4, "zigzag")
    with torch.no_grad():
        return styled(ContextParallel(2, FLEX), flex_attention, group)(*local, block_mask=part)


def test_one_row_of_blocks_serves_all() -> None:
    got = torch.cat(run_ranks(2, sharded_block_mask_of_gaps), 2).index_select(2, order_of(Layout.zigzag(300, 2)))
    (wanted, *_) = expected(inputs(300), attn_mask=SINKS)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("mask", [IntervalMask.causal(300), DOCUMENTS, None], ids=["causal", "documents", "full"])
def test_style_of_flex_attention_runs_the_ring(mask: IntervalMask | None) -> None:
    x, layout = inputs(300), Layout.balanced(DOCUMENTS, 2, chunk=16)
    block_mask = mask and create_block_mask(
        mask_mod_of(mask), mask.begin.size(0), None, 300, 300, device="cpu"
    )  # fmt: skip

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        module = styled(ContextParallel(2, FLEX), flex_attention, group)
        buffers = [*x] if block_mask is None else [*x, block_mask]
        q, k, v, dout, *part = context_parallel_shard(group, buffers, [2] * len(buffers), layout)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        sent = group.transport.bytes_sent
        with ContextParallelPlan(group, layout=layout).attention() if mask is None else contextlib.nullcontext():
            out = module(*leaves, **({"block_mask": part[0]} if part else {}))
        assert group.transport.bytes_sent > sent
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    assert_equal(run(layout, on_rank), expected(x, attn_mask=None if mask is None else dense(mask)[:, None]))


# ---- refusals ----------------------------------------------------------------------------------


def refuses(error: type[Exception], message: str, on_rank: Callable[[LoopbackGroup], Any]) -> None:
    with pytest.raises(error, match=message):
        LoopbackWorld(2).run(on_rank)


def test_block_mask_of_another_layout_is_refused() -> None:
    """create_cp_block_mask takes queries to be contiguous by default, and these tokens are in zigzag."""
    x = inputs(16)

    def through_style(group: LoopbackGroup) -> None:
        local = context_parallel_shard(group, [*x[:3]], [2] * 3, "zigzag")
        block_mask = create_cp_block_mask(mask_mod_of(IntervalMask.causal(16)), None, None, 16, 16, group)
        styled(ContextParallel(2, FLEX), flex_attention, group)(*local, block_mask=block_mask)

    def in_context(group: LoopbackGroup) -> None:
        tensors = [t.clone() for t in x[:3]]
        block_mask = create_cp_block_mask(mask_mod_of(IntervalMask.causal(16)), None, None, 16, 16, group)
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[2] * 3):
            flex_attention(*tensors, block_mask=block_mask)

    refuses(InputError, "made for another layout", through_style)
    refuses(InputError, "made for another layout", in_context)


def test_two_masks_are_refused() -> None:
    x, block_mask = inputs(16), create_block_mask(two_intervals, None, None, 16, 16, device="cpu")

    def attend(group: LoopbackGroup) -> None:
        tensors = [t.clone() for t in x[:3]]
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[2] * 3, mask=IntervalMask.causal(16)):
            flex_attention(*tensors, block_mask=block_mask)

    refuses(RefusedError, "block_mask inside context_parallel", attend)


def test_calls_of_flex_attention_that_cannot_be_honored_are_refused() -> None:
    x = inputs(16, num_kv_heads=2)

    def attend(group: LoopbackGroup, **arguments: Any) -> None:
        local = [Layout.contiguous(16, 2).shard(t, 2, group.transport.rank) for t in x[:3]]
        with context_parallel(group, layout=Layout.contiguous(16, 2)):
            flex_attention(*local, **arguments)

    refuses(InputError, "4 heads, key 2; pass enable_gqa=True", attend)
    aux = AuxRequest(max_scores=True)
    refuses(RefusedError, "max_scores", lambda group: attend(group, enable_gqa=True, return_aux=aux))
    aux = AuxRequest(lse=True)
    refuses(InputError, "return_lse and return_aux", lambda group: attend(group, return_lse=True, return_aux=aux))
    refuses(InputError, "score_mod is a int", lambda group: attend(group, score_mod=3))
    refuses(InputError, "block_mask is a str", lambda group: attend(group, enable_gqa=True, block_mask="causal"))
    refuses(InputError, "kernel_options is a str", lambda group: attend(group, kernel_options="BLOCK_M"))
    scale = torch.tensor(0.5, requires_grad=True)
    refuses(
        RefusedError, "scale is a tensor that requires grad", lambda group: attend(group, enable_gqa=True, scale=scale)
    )


def test_sequences_of_two_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="Q_LEN is 8, KV_LEN 16"):
        create_cp_block_mask(two_intervals, None, None, 8, 16, LoopbackWorld(1).groups[0])


def test_a_block_of_another_scheme_refuses_what_would_run_as_a_ring() -> None:
    """ContextParallel takes the block's scheme, except where it is compiled."""
    x = inputs(48)

    def on_rank(group: LoopbackGroup) -> None:
        mask_mod = mask_mod_of(IntervalMask.causal(48))
        block_mask = create_cp_block_mask(mask_mod, None, None, 48, 48, group, load_balancer="zigzag")
        tensors = [t.clone() for t in x[:3]]
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[2] * 3, scheme="ulysses"):
            with pytest.raises(
                RefusedError, match=r"flex_attention of local tokens runs as a ring, .*scheme ulysses; expected"
            ):
                flex_attention(*tensors, block_mask=block_mask)
            with pytest.raises(RefusedError, match="scheme ulysses"):
                styled(ContextParallel(attention_type=FLEX), flex_attention, group)(*tensors, block_mask=block_mask)
            with pytest.raises(RefusedError, match="a compiled call of attention under ContextParallel runs as a ring"):
                sequence_of(tensors[0], 24, False, group.group_name)
            sent = group.transport.bytes_sent
            attend = torch.nn.functional.scaled_dot_product_attention
            styled(ContextParallel(attention_type=ContextParallel.AttentionType.SDPA), attend, group)(*tensors)
            of_scheme = plan_attention(
                *(IntervalMask.full(48), Layout.zigzag(48, 2)),
                **{"num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "v_head_dim": 8, "batch": 2},
                dtype=torch.float64,
                scheme="ulysses",
            )
            assert group.transport.bytes_sent - sent == of_scheme.ranks[group.transport.rank].forward_bytes_sent

    LoopbackWorld(2).run(on_rank)
