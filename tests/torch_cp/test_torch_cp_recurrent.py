"""ringtile's recurrences inside `context_parallel` and `ContextParallel`: they take the sequence of the context.

Shape letters: B batch, S global tokens, N local tokens, H heads, K key dim, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ringtile
import torch
import torch.distributed as dist
from pool import run_ranks
from ringtile import InputError, IntervalMask, Layout, LoopbackWorld, RefusedError, ShardedSequence, context_parallel
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

S, H, K = 24, 4, 3
C = 3 * H * K
DOCUMENTS = IntervalMask.documents([5, 12, 7])
TREE = IntervalMask.tree([-1, 0, 1, 1, 0, -1], [5, 3, 4, 2, 3, 7])


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """x (B, S, C) of the whole sequence, the weight of a convolution (C, width), decays (H)."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, S, C), (C, 4), (H,))
    x, weight, decays = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, weight, -decays.abs()


def layer(x: Tensor, weight: Tensor, decays: Tensor, **sequence: Any) -> Tensor:
    """x (B, N, C) -> (B, N, H, K): a convolution, a gated delta rule, Mamba-2, and attention."""
    x = ringtile.causal_conv1d(x, weight, activation="silu", **sequence)
    q, k, v = x.unflatten(2, (3, H, K)).unbind(2)
    k = functional.normalize(k, dim=-1)
    beta = v.sum(-1).sigmoid()
    v = ringtile.gated_delta_rule(q, k, v, decays * beta, beta, **sequence)
    v = ringtile.ssd(v, beta, decays, k, q, **sequence)
    if sequence:  # attention of ours, of the whole sequence
        mask = sequence["sequence"].mask
        return ringtile.attention(q, k, v, mask=mask & IntervalMask.causal(S))
    heads_first = (y.transpose(1, 2) for y in (q, k, v))
    return functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def expected(mask: IntervalMask) -> list[Tensor]:
    """out, and the gradients of all inputs, by one process."""
    leaves = [x.requires_grad_() for x in inputs()]
    out = layer(*leaves, sequence=ShardedSequence(mask, Layout.contiguous(S, 1)))
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]


def in_context(
    world_size: int,
    mask: IntervalMask | None,
    function: Callable[..., Tensor] = layer,
    backward_inside: bool = True,
    **options: Any,
) -> list[Tensor]:
    """Compute the same in the block on every rank, add gradients of parameters and put the others together."""

    def rank(group: Any) -> list[Tensor]:
        x, weight, decays = inputs()
        with context_parallel(group, buffers=[x], buffer_seq_dims=[1], mask=mask, **options):
            local = x.clone().requires_grad_()
            weight.requires_grad_()
            decays.requires_grad_()
            out = function(local, weight, decays)
            if backward_inside:
                out.sin().sum().backward()
        if not backward_inside:
            out.sin().sum().backward()
        grads = [local.grad, weight.grad, decays.grad]
        return [out.detach(), *(grad for grad in grads if grad is not None)]

    results = LoopbackWorld(world_size).run(rank)
    layout = Layout.named(options.get("layout", "zigzag"), S, world_size)
    positions = torch.cat([layout.positions(r) for r in range(world_size)]).argsort()
    out, dx, dweight, ddecays = zip(*results, strict=True)
    return [torch.cat(out, 1)[:, positions], torch.cat(dx, 1)[:, positions], sum(dweight), sum(ddecays)]  # type: ignore[list-item]


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=S * 64 * 2.0**-52 * float(y.abs().max()))


@pytest.mark.parametrize("scheme", ["ring", "ulysses"])
@pytest.mark.parametrize("mask", [DOCUMENTS, TREE, None], ids=["documents", "tree", "no mask"])
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_recurrences_in_a_block_are_over_its_sequence(world_size: int, mask: IntervalMask | None, scheme: str) -> None:
    """Documents of either direction: a recurrence is causal, as a call of attention with is_causal is."""
    ours = in_context(world_size, mask, scheme=scheme)
    assert_same(ours, expected(IntervalMask.causal(S) if mask is None else mask))


def test_documents_in_both_directions_are_narrowed_to_causal_ones() -> None:
    mask = IntervalMask.documents([5, 12, 7], causal=False)
    assert_same(in_context(2, mask, layout="contiguous"), expected(DOCUMENTS))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_recompute_over_the_same_sequence_after_the_block(world_size: int, use_reentrant: bool) -> None:
    def checkpointed(*tensors: Tensor) -> Tensor:
        return checkpoint(layer, *tensors, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    assert_same(in_context(world_size, None, checkpointed, backward_inside=False), expected(IntervalMask.causal(S)))


def compiled_on_a_rank(world_size: int) -> bool:
    """Run in a process: torch.compile in one thread is seen in all."""
    x, weight, decays = inputs()
    layout = Layout.zigzag(S, world_size)
    group, rank = (dist.group.WORLD, dist.get_rank()) if world_size > 1 else (LoopbackWorld(1).groups[0], 0)
    expected_out = layout.shard(expected(DOCUMENTS)[0], 1, rank)
    with context_parallel(group, buffers=[x], buffer_seq_dims=[1], mask=DOCUMENTS):
        out = torch.compile(layer, backend="eager")(x, weight, decays)
    return torch.allclose(out, expected_out, rtol=0, atol=1e-11)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_compiled_functions_break_their_graph_at_recurrences(world_size: int) -> None:
    calls = run_ranks(world_size, compiled_on_a_rank, world_size) if world_size > 1 else [compiled_on_a_rank(1)]
    assert all(calls)


def test_a_block_of_one_rank_leaves_attention_to_torch_and_compiles_whole() -> None:
    def attend(x: Tensor) -> Tensor:
        q = x.unflatten(1, (2, 4))
        return functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    x = torch.randn(3, 8, 4)
    with context_parallel(LoopbackWorld(1).groups[0]):
        outs = [attend(x), torch.compile(attend, backend="eager", fullgraph=True)(x)]
    assert all(torch.equal(out, attend(x)) for out in outs)


def test_a_sequence_that_the_call_names_is_its_own() -> None:
    """Also in blocks within blocks, of which the innermost counts otherwise."""

    def rank(group: Any) -> None:
        x, weight, _ = inputs()
        layout = Layout.zigzag(S, 2)
        sequences = {mask: ShardedSequence(mask, layout, group) for mask in (DOCUMENTS, IntervalMask.causal(S))}
        local = sequences[DOCUMENTS].shard(x, 1)
        documents, causal = (ringtile.causal_conv1d(local, weight, sequence) for sequence in sequences.values())
        assert not torch.equal(documents, causal)
        with context_parallel(group, layout=layout):
            assert torch.equal(ringtile.causal_conv1d(local, weight), causal)
            with context_parallel(group, layout=layout, mask=DOCUMENTS):
                assert torch.equal(ringtile.causal_conv1d(local, weight), documents)
                assert torch.equal(ringtile.causal_conv1d(local, weight, sequences[IntervalMask.causal(S)]), causal)
                by_parts = ringtile.causal_conv1d(local, weight, mask=causal_mask, layout=layout, group=group)
                assert torch.equal(by_parts, causal)

    causal_mask = IntervalMask.causal(S)
    LoopbackWorld(2).run(rank)


def test_what_a_recurrence_cannot_know_is_refused() -> None:
    def said(error: type[Exception], mask: IntervalMask | None, local_len: int = S // 2) -> None:
        def rank(group: Any) -> str:
            _, weight, _ = inputs()
            with (
                context_parallel(group, layout=Layout.zigzag(S, 2), mask=mask),
                pytest.raises(error) as caught,
            ):
                ringtile.causal_conv1d(torch.zeros(2, local_len, C).double(), weight)
            return str(caught.value)

        messages.extend(LoopbackWorld(2).run(rank))

    messages: list[str] = []
    said(RefusedError, IntervalMask.sliding_window(S, 5))
    said(InputError, None, local_len=S)  # of the whole sequence
    for message in messages[:2]:
        assert "token 5 (row 0) attends [1, 6); expected causal documents" in message
    for message in messages[2:]:
        assert "x is (2, 24, 36); expected (2, 12, 36)" in message
    x, weight, _ = inputs()
    with pytest.raises(InputError, match="mask is a NoneType; expected an IntervalMask"):
        ringtile.causal_conv1d(x, weight)  # in no block
    with torch.device("cpu"), pytest.raises(InputError, match="mask is a NoneType"):
        ringtile.causal_conv1d(x, weight)  # in a mode that knows no sequence
