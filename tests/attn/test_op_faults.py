"""Calls of the public ops that the random ones of tests/campaigns/faults/op_calls.py would not find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from faults.op_calls import Gated
from ringtile import (
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RefusedError,
    ShardedSequence,
    attention,
    causal_conv1d,
    context_parallel,
    gated_delta_rule,
    ring_attention,
    selective_scan,
    ssd,
    tiled_mlp,
)
from ringtile.transport.loopback import LoopbackGroup
from torch import Tensor, nn

B, S, H, D = 1, 8, 2, 4
MASK, LAYOUT = IntervalMask.causal(S), Layout.contiguous(S, 1)
ONE = ShardedSequence(MASK, LAYOUT)


def tokens(batch: int = B) -> Tensor:
    return torch.randn(batch, S, H, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_double_backward_of_the_weights_is_refused() -> None:
    """A gradient penalty on weights, whose path leads through no input."""
    module = Gated(torch.float64)
    (grad,) = torch.autograd.grad(tiled_mlp(module, tokens()).sum(), module.up.weight, create_graph=True)
    with pytest.raises(RefusedError, match="the tiled MLP were differentiated again"):
        (grad**2).sum().backward()


def everything_made(seq_len: int) -> list[Tensor]:
    """A batch computed with objects that are all made here, through every cache."""
    lengths = [seq_len // 3, seq_len - seq_len // 3]
    masks = [
        IntervalMask.causal(seq_len) & IntervalMask.sliding_window(seq_len, 5),
        IntervalMask.documents(lengths),
        IntervalMask.documents([lengths], causal=False),
        IntervalMask.prefix_lm(seq_len, 4) & IntervalMask.full(seq_len),
        IntervalMask.chunked(seq_len, 6),
    ]
    q = torch.arange(seq_len * D * 2, device="cpu", dtype=torch.float32).sin().view(1, seq_len, 2, D)
    outs = [attention(q, q, q, mask=mask) for mask in masks]
    layouts = [
        Layout.contiguous(seq_len, 2),
        Layout.striped(seq_len, 2),
        Layout.per_document(lengths, 2),
        Layout.balanced(masks[0], 2, chunk=4),
    ]

    def on_rank(group: LoopbackGroup, layout: Layout) -> Tensor:
        sequence = ShardedSequence(masks[0], layout, group)
        local = sequence.shard(q, 1)
        return sequence.unshard(ring_attention(local, local, local, sequence.with_window(3)), 1)

    return outs + [LoopbackWorld(2).run(lambda group, layout=layout: on_rank(group, layout))[0] for layout in layouts]


@contextlib.contextmanager
def set_to(setter: Callable[[Any], None], value: object, usual: object) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(usual)


@pytest.mark.parametrize(
    ("seq_len", "default"),
    [
        (61, lambda: torch.device("meta")),
        (62, lambda: set_to(torch.set_default_device, "meta", None)),
        (63, lambda: set_to(torch.set_default_dtype, torch.float64, torch.float32)),
        (64, lambda: set_to(torch.set_default_dtype, torch.bfloat16, torch.float32)),
    ],
)
def test_defaults_of_torch_reach_no_host_tensor(seq_len: int, default: Callable[[], Any]) -> None:
    """transformers makes models under torch.device("meta"): what is made and remembered there serves later calls.

    The lengths differ from each other, so that nothing made before is found.
    """
    with default():
        made = everything_made(seq_len)
    again = everything_made(seq_len)
    assert made[0].device.type == "cpu"
    for out, expected in zip(made, again, strict=True):
        assert torch.equal(out, expected)


def test_freed_storages_are_refused_inside_context_parallel() -> None:
    heads = torch.randn(B, H, D, S).transpose(2, 3)
    heads.untyped_storage().resize_(0)  # FSDP frees the storage of a tensor and keeps the tensor

    def on_rank(group: LoopbackGroup) -> None:
        with (
            context_parallel(group, mask=IntervalMask.causal(2 * S)),
            pytest.raises(InputError, match="freed or resized"),
        ):
            nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    LoopbackWorld(2).run(on_rank)


def tokens_of(*sizes: int) -> Tensor:
    return torch.rand(B, S, *sizes) * -1


RECURRENT: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "gated_delta_rule": (
        gated_delta_rule,
        [*(tokens_of(H, D) for _ in "qkv"), tokens_of(H), tokens_of(H)],
    ),
    "ssd": (ssd, [tokens_of(H, D), tokens_of(H), torch.zeros(H), tokens_of(1, D), tokens_of(1, D)]),
    "selective_scan": (
        selective_scan,
        [tokens_of(D), tokens_of(D), torch.zeros(D, D), tokens_of(D), tokens_of(D)],
    ),
    "causal_conv1d": (causal_conv1d, [tokens_of(D), torch.zeros(D, 3)]),
    "ring_attention": (ring_attention, [tokens_of(H, D) for _ in "qkv"]),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_tensors_of_inference_mode_are_refused_where_autograd_would_save_them(name: str) -> None:
    op, tensors = RECURRENT[name]
    expected = op(*tensors, ONE)
    with torch.inference_mode():
        made = tensors[0].clone()
    assert torch.equal(op(made, *tensors[1:], ONE), expected)
    with pytest.raises(InputError, match="inference mode"):
        op(made, *(x.clone().requires_grad_() for x in tensors[1:]), ONE)


def test_a_ring_over_a_batch_of_no_rows() -> None:
    def on_rank(group: LoopbackGroup) -> torch.Size:
        sequence = ShardedSequence(MASK, Layout.zigzag(S, 2), group)
        q = sequence.shard(tokens(0), 1).requires_grad_()
        out = sequence.unshard(ring_attention(q, q, q, sequence), 1)
        return torch.autograd.grad(out.sum(), q)[0].shape

    assert LoopbackWorld(2).run(on_rank) == [(0, S // 2, H, D)] * 2


def test_numbers_at_the_limits_are_exact() -> None:
    x = tokens().float()
    limits = torch.finfo(torch.float32)
    assert not ring_attention(0 * x, x, x, ONE, scale=limits.max**0.5).isnan().any()
    one = ring_attention(x, x, x, ONE)
    # A softcap so large changes a score by less than its rounding; as small as this one it makes all scores equal.
    torch.testing.assert_close(ring_attention(x, x, x, ONE, softcap=1 / limits.tiny), one, rtol=1e-5, atol=1e-6)
    mean = x.cumsum(1) / torch.arange(1, S + 1)[:, None, None]
    torch.testing.assert_close(ring_attention(x, x, x, ONE, softcap=limits.tiny), mean, rtol=1e-5, atol=1e-6)
