"""`context_parallel` against PyTorch's attention of the whole sequence on one rank, in float64.

Shape letters: B batch, S global tokens, H query heads, G kv heads, D head dim, Dv value head dim, W ranks.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import pytest
import ringtile
import torch
from ringtile import (
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    MaskNotExpressibleError,
    RefusedError,
    ShardedSequence,
    context_parallel,
)
from ringtile.attn import traced
from ringtile.torch_context_parallel import scope as scope_module
from ringtile.torch_context_parallel.mode import RingMode
from ringtile.torch_context_parallel.scope import AttentionScope
from ringtile.transport.loopback import LoopbackGroup
from strategies import dense
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

# Sums of at most 50 products of float64 numbers of size 1, as in test_ring.
TOLERANCE = 1e-12


class Inputs(NamedTuple):
    """Global tensors as scaled_dot_product_attention takes them: heads before tokens."""

    q: Tensor  # (B, H, S, D)
    k: Tensor  # (B, G, S, D)
    v: Tensor  # (B, G, S, Dv)
    dout: Tensor  # (B, H, S, Dv)


def inputs(seq_len: int = 50, num_heads: int = 4, num_kv_heads: int = 4) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_heads, 16), (num_kv_heads, 16), (num_kv_heads, 8), (num_heads, 8))
    return Inputs(*(torch.randn(2, h, seq_len, d, generator=generator, dtype=torch.float64) for h, d in shapes))


def expected(x: Inputs, **arguments: Any) -> list[Tensor]:
    """out, dq, dk, dv of the whole sequence on one rank."""
    leaves = [t.clone().requires_grad_() for t in x[:3]]
    out = sdpa(*leaves, **arguments)
    return [out.detach(), *torch.autograd.grad(out, leaves, x.dout)]


def in_context(
    group: LoopbackGroup,
    x: Inputs,
    layout: Layout | str,
    mask: IntervalMask | None,
    scheme: str = "ring",
    **arguments: Any,
) -> list[Tensor]:
    """Return the same as `expected` on one rank of a ring, for its own tokens."""
    tensors = [t.clone() for t in x]
    dims = [2, -2, 2, 2]
    with context_parallel(group, buffers=tensors, buffer_seq_dims=dims, layout=layout, mask=mask, scheme=scheme):
        leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        out = sdpa(*leaves, **arguments)
        results = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]
    assert all(torch.equal(t, full) for t, full in zip(tensors, x, strict=True))
    return results


def run(
    world_size: int,
    x: Inputs,
    layout: Layout | str = "zigzag",
    mask: IntervalMask | None = None,
    **arguments: Any,
) -> list[Tensor]:
    """Return every result of all ranks, in global order."""
    sharded = Layout.named(layout, x.q.size(2), world_size) if isinstance(layout, str) else layout
    order = torch.cat([sharded.positions(rank) for rank in range(world_size)]).argsort()
    ranks = LoopbackWorld(world_size).run(lambda group: in_context(group, x, layout, mask, **arguments))
    return [torch.cat(shards, 2).index_select(2, order) for shards in zip(*ranks, strict=True)]


def assert_equal(got: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seq_len", [48, 50])  # 50 divides neither by 4 nor by 2 * 4
def test_attention_in_the_context_is_attention(world_size: int, layout: str, is_causal: bool, seq_len: int) -> None:
    x = inputs(seq_len)
    assert_equal(run(world_size, x, layout, is_causal=is_causal), expected(x, is_causal=is_causal))


@pytest.mark.parametrize(
    ("arguments", "num_kv_heads"),
    [({"scale": 0.3}, 4), ({"is_causal": True, "enable_gqa": True}, 2), ({"enable_gqa": True}, 2), ({}, 1)],
)
def test_arguments_mean_what_they_mean_to_pytorch(arguments: dict[str, Any], num_kv_heads: int) -> None:
    x = inputs(num_kv_heads=num_kv_heads)
    assert_equal(run(2, x, **arguments), expected(x, **arguments))


@pytest.mark.parametrize("is_causal", [False, True])
def test_mask_of_the_context_holds_and_is_narrowed_by_causal(is_causal: bool) -> None:
    """Documents of any length, in a layout balanced for this mask."""
    x, mask = inputs(), IntervalMask.documents([[3, 30, 17], [1, 24, 25]], causal=False)
    attend = dense(mask & IntervalMask.causal(50) if is_causal else mask)[:, None]
    layout = Layout.balanced(mask, 4, chunk=3)
    assert_equal(run(4, x, layout, mask, is_causal=is_causal), expected(x, attn_mask=attend))


def test_scheme_of_the_context_holds_also_under_a_dense_mask() -> None:
    """The bytes are those of its plan."""
    x, layout = inputs(48), Layout.zigzag(48, 2)
    cost = ringtile.plan_attention(
        *(IntervalMask.causal(48), layout),
        **{"num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "v_head_dim": 8, "scheme": "ulysses"},
        dtype=torch.float64,
        batch=2,
    )

    def on_rank(group: LoopbackGroup, **arguments: Any) -> list[Tensor]:
        results = in_context(group, x, layout, None, "ulysses", **arguments)
        of_rank = cost.ranks[group.transport.rank]
        assert group.transport.bytes_sent == of_rank.forward_bytes_sent + of_rank.backward_bytes_sent
        return results

    for arguments in ({"is_causal": True}, {"attn_mask": torch.ones(48, 48, dtype=torch.bool).tril()}):
        ranks = LoopbackWorld(2).run(functools.partial(on_rank, **arguments))
        order = torch.cat([layout.positions(rank) for rank in range(2)]).argsort()
        got = [torch.cat(shards, 2).index_select(2, order) for shards in zip(*ranks, strict=True)]
        assert_equal(got, expected(x, is_causal=True))


def test_dense_mask_of_one_interval_per_query_is_taken() -> None:
    x = inputs()
    window, documents = IntervalMask.sliding_window(50, 9), IntervalMask.documents([20, 30])
    assert_equal(run(2, x, attn_mask=dense(window)[0]), expected(x, attn_mask=dense(window)[0]))
    both = dense(window & documents)[:, None]
    assert_equal(run(2, x, mask=documents, attn_mask=dense(window)), expected(x, attn_mask=both))


def test_one_rank_with_a_mask_is_masked_and_without_one_is_untouched() -> None:
    x, mask = inputs(), IntervalMask.documents([20, 30])
    assert_equal(run(1, x, mask=mask), expected(x, attn_mask=dense(mask)))
    with context_parallel(LoopbackWorld(1).groups[0], buffers=[x.q], buffer_seq_dims=[2]):
        assert sdpa(x.q, x.k, x.v, is_causal=True).equal(expected(x, is_causal=True)[0])


def test_layers_and_steps_share_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first call, eager attention examines no mask or layout again, and goes through no op."""
    group = LoopbackWorld(1).groups[0]
    scope = AttentionScope(group)
    x = [t.requires_grad_() for t in inputs(seq_len=8)[:3]]
    mask = IntervalMask.documents([3, 5])

    def attend() -> list[Tensor]:
        with RingMode(scope):
            outs = [sdpa(*x, is_causal=is_causal) for is_causal in (False, True)]
        with context_parallel(group, mask=mask):
            outs += [sdpa(*x, is_causal=is_causal) for is_causal in (False, True)]
        return [*outs, *torch.autograd.grad([out.sum() for out in outs], x)]

    def unwanted(*_: Any) -> None:
        raise AssertionError

    first = attend()
    for owner, name in (
        (scope_module, "sequence_of"),
        (IntervalMask, "__post_init__"),
        (IntervalMask, "__eq__"),
        (ShardedSequence, "__init__"),
        (traced, "sequence_of_tensors"),
    ):
        monkeypatch.setattr(owner, name, unwanted)
    assert all(a.equal(b) for a, b in zip(first, attend(), strict=True))


# ---- entering and leaving -----------------------------------------------------------------------


def on_one_rank_of_two(function: Any) -> Any:
    """function(group) on rank 0 of two, where nothing is communicated."""
    return function(LoopbackWorld(2).groups[0])


def test_buffers_come_back_with_their_memory_also_after_an_error() -> None:
    full = torch.arange(24).view(2, 12)
    view, kept = full[:, 2:10], torch.arange(8.0)
    before = full.clone()

    def enter(group: LoopbackGroup) -> None:
        with context_parallel(group, buffers=[view, kept], buffer_seq_dims=[1, 0], no_restore_buffers={kept}):
            assert view.tolist() == before[:, [2, 3, 8, 9]].tolist()
            view.zero_()  # the shard, not the buffer
            raise KeyError

    with pytest.raises(KeyError):
        on_one_rank_of_two(enter)
    assert view.data_ptr() == full[:, 2:].data_ptr()
    assert full.equal(before)
    assert kept.tolist() == [0, 1, 6, 7]


def test_buffers_may_become_leaves_inside() -> None:
    """PyTorch's own tests use the manager so: q, k, v are buffers, and require grad within the block."""
    x = inputs()

    def gradients(group: LoopbackGroup) -> list[Tensor | None]:
        tensors = [t.clone() for t in x]
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[2] * 4, layout="contiguous"):
            for t in tensors[:3]:
                t.requires_grad_()
            sdpa(*tensors[:3], is_causal=True).backward(tensors[3])
            found = [t.grad for t in tensors[:3]]
        assert all(t.equal(full) for t, full in zip(tensors, x, strict=True))
        return found

    shards = zip(*LoopbackWorld(2).run(gradients), strict=True)
    assert_equal([torch.cat(of_ranks, 2) for of_ranks in shards], expected(x, is_causal=True)[1:])


def test_backward_outside_that_needs_a_sharded_buffer_raises() -> None:
    labels, logits = torch.arange(8), torch.randn(4, 8, requires_grad=True)

    def forward(group: LoopbackGroup) -> Tensor:
        with context_parallel(group, buffers=[labels], buffer_seq_dims=[0]):
            return torch.nn.functional.cross_entropy(logits, labels)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        on_one_rank_of_two(forward).backward()


def test_nested_contexts_and_other_threads_are_independent() -> None:
    x = inputs()
    wanted = expected(x, is_causal=True)
    outer_layout = Layout.striped(50, 2)

    def nested(group: LoopbackGroup) -> tuple[list[Tensor], Tensor]:
        outer = x.q.clone()
        with context_parallel(group, buffers=[outer], buffer_seq_dims=[2], layout="striped"):
            inner = in_context(group, x, "contiguous", None, is_causal=True)
            plain = threading.Thread(target=lambda: in_thread.append(sdpa(x.q, x.k, x.v, is_causal=True)))
            plain.start()
            plain.join()
            local = [outer_layout.shard(t, 2, group.transport.rank) for t in (x.k, x.v)]
            return inner, sdpa(outer, *local, is_causal=True)

    in_thread: list[Tensor] = []
    (first, outer_0), (second, outer_1) = LoopbackWorld(2).run(nested)
    assert_equal([torch.cat(shards, 2) for shards in zip(first, second, strict=True)], wanted)
    assert all(out.equal(wanted[0]) for out in in_thread)
    assert len(in_thread) == 2
    assert_equal([torch.stack((outer_0, outer_1), 3).flatten(2, 3)], wanted[:1])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_attention_is_recomputed_by_the_ring(use_reentrant: bool) -> None:
    x = inputs()
    wanted = expected(x, is_causal=True)

    def gradients(group: LoopbackGroup) -> list[Tensor | None]:
        tensors = [t.clone() for t in x]
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[2] * 4, layout="contiguous"):
            leaves = [t.detach().requires_grad_() for t in tensors[:3]]
            out = checkpoint(lambda *qkv: sdpa(*qkv, is_causal=True), *leaves, use_reentrant=use_reentrant)
            assert isinstance(out, Tensor)
            out.backward(tensors[3])
            return [leaf.grad for leaf in leaves]

    assert_equal([torch.cat(shards, 2) for shards in zip(*LoopbackWorld(2).run(gradients), strict=True)], wanted[1:])


def test_autocast_casts_as_for_pytorch() -> None:
    x = [t.float() for t in inputs()[:3]]

    def attend(group: LoopbackGroup) -> Tensor:
        with (
            context_parallel(group, mask=IntervalMask.causal(50), layout="contiguous"),
            torch.autocast("cpu", torch.bfloat16),
        ):
            half = slice(0, 25) if group.transport.rank == 0 else slice(25, 50)
            return sdpa(*(t[:, :, half] for t in x))

    out = torch.cat(LoopbackWorld(2).run(attend), 2)
    half = sdpa(*(t.bfloat16() for t in x), is_causal=True)
    assert out.dtype == half.dtype
    torch.testing.assert_close(out, half, rtol=2**-7, atol=2**-8)  # each rounded once to 8 bits, and P in torch's


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dropout_p": 0.1}, RefusedError, "dropout_p 0.1; the ring has no dropout"),
        (
            {"attn_mask": torch.zeros(50, 50)},
            RefusedError,
            "attn_mask is torch.float32; the ring adds nothing to scores",
        ),
        ({"attn_mask": torch.ones(25, 25, dtype=torch.bool)}, InputError, "expected all 50 global tokens"),
        ({"attn_mask": torch.eye(50).roll(1) == 0}, MaskNotExpressibleError, "row 0, query 1 "),
        ({"attn_mask": torch.ones(50, 50).bool(), "is_causal": True}, InputError, "attn_mask and is_causal"),
        ({"q": torch.zeros(2, 8, 25, 16, dtype=torch.float64)}, InputError, "8 heads, key 4.*enable_gqa"),
        ({"q": torch.zeros(8, 25, 16, dtype=torch.float64)}, InputError, r"expected \(batch, heads, local tokens"),
        ({"q": torch.zeros(2, 4, 24, 16, dtype=torch.float64)}, InputError, "q has 24 tokens"),
    ],
)
def test_calls_that_cannot_be_honored_are_refused(arguments: dict[str, Any], error: Any, message: str) -> None:
    x = inputs()

    def attend(group: LoopbackGroup) -> None:
        tensors = [t.clone() for t in x[:3]]
        with context_parallel(group, buffers=tensors, buffer_seq_dims=[2] * 3):
            query = arguments.get("q", tensors[0])
            sdpa(query, *tensors[1:], **{name: value for name, value in arguments.items() if name != "q"})

    with pytest.raises(error, match=message):
        LoopbackWorld(2).run(attend)


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_hidden_in_another_function_is_refused(need_weights: bool) -> None:
    layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 4, 8)

    def attend(group: LoopbackGroup) -> None:
        with context_parallel(group, mask=IntervalMask.full(8)), torch.no_grad():
            layer(x, x, x, need_weights=need_weights)

    with pytest.raises(RefusedError, match="MultiheadAttention"):
        LoopbackWorld(2).run(attend)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"buffer_seq_dims": [0, 0]}, r"buffers \[0\] and seq_dims \[0, 1\]"),
        ({"no_restore_buffers": [torch.zeros(8)]}, "no_restore_buffers has a tensor that is not in buffers"),
        ({"mask": IntervalMask.causal(9)}, r"buffers, mask and layout are of \[8, 9\] tokens"),
        ({"layout": Layout.contiguous(9, 2)}, r"buffers, mask and layout are of \[8, 9\] tokens"),
        ({"layout": Layout.contiguous(8, 4)}, "8 tokens over 4 ranks; expected 8 over 2"),
        ({"buffers": [torch.zeros(8, requires_grad=True)]}, "requires grad"),
        ({"buffers": [torch.zeros(8)] * 2, "buffer_seq_dims": [0, 0]}, "buffer 1 is given twice"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused_before_sharding(arguments: dict[str, Any], message: str) -> None:
    arguments = {"buffers": [torch.zeros(8)], "buffer_seq_dims": [0], **arguments}

    def enter(group: LoopbackGroup) -> None:
        with context_parallel(group, **arguments):
            pass

    with pytest.raises(InputError, match=message):
        on_one_rank_of_two(enter)
    assert arguments["buffers"][0].shape == (8,)
