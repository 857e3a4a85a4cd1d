"""Numbers at the limits of a dtype, beyond them, and not finite: exact where they can be, else refused."""

from __future__ import annotations

import pytest
import torch
from ringtile import (
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    ShardedSequence,
    ring_attention,
    tiled_linear_cross_entropy,
)
from ringtile.transport.loopback import LoopbackGroup
from test_op_faults import LABELS, ONE, WEIGHT, S, tokens
from torch import Tensor


@pytest.mark.parametrize(
    ("dtype", "scale", "softcap"),
    [
        (torch.float32, 1e39, 0.0),
        (torch.bfloat16, -1e39, 0.0),
        (torch.float32, 1.0, 1e39),
        (torch.float16, 1.0, 1e-44),
        (torch.float32, 1.0, 1e-39),
        (torch.float64, 1.0, 1e-310),
        (torch.float64, 1.0, 1e308),
        (torch.float32, 2e19, 5.0),  # sums of scores would overflow, and the softcap hide it
        (torch.float64, float("inf"), 0.0),
        (torch.float64, float("nan"), 0.0),
        (torch.float64, 1.0, float("nan")),
    ],
)
def test_numbers_out_of_range_are_refused(dtype: torch.dtype, scale: float, softcap: float) -> None:
    """In the dtype of the kernel they are infinite or subnormal: rows of 0 would become NaN, gradients wrong."""
    x = tokens().to(dtype)
    with pytest.raises(InputError, match=r"expected numbers of torch\.float"):
        ring_attention(x, x, x, ONE, scale=scale, softcap=softcap)
    with pytest.raises(InputError, match="expected"):
        tiled_linear_cross_entropy(x, WEIGHT.to(dtype), LABELS, logit_scale=scale, softcap=softcap)


def test_numbers_at_the_limits_are_exact() -> None:
    x = tokens().float()
    limits = torch.finfo(torch.float32)
    assert not ring_attention(0 * x, x, x, ONE, scale=limits.max**0.5).isnan().any()
    one = ring_attention(x, x, x, ONE)
    # A softcap so large changes a score by less than its rounding; as small as this one it makes all scores equal.
    torch.testing.assert_close(ring_attention(x, x, x, ONE, softcap=1 / limits.tiny), one, rtol=1e-5, atol=1e-6)
    mean = x.cumsum(1) / torch.arange(1, S + 1)[:, None, None]
    torch.testing.assert_close(ring_attention(x, x, x, ONE, softcap=limits.tiny), mean, rtol=1e-5, atol=1e-6)


NOT_FINITE = [float("inf"), -float("inf"), float("nan")]


def poisoned(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, IntervalMask]:
    """q, k, v, dout and a mask; one or two numbers of them are not finite."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(1, 13, 2, 3, generator=generator, dtype=torch.float64) for _ in range(4))
    for _ in range(1 + seed % 2):
        x = (q, k, v, dout)[int(torch.randint(4, (), generator=generator))]
        at = int(torch.randint(x.numel(), (), generator=generator))
        x.view(-1)[at] = NOT_FINITE[int(torch.randint(3, (), generator=generator))]
    masks = [IntervalMask.causal(13), IntervalMask.sliding_window(13, 4), IntervalMask.documents([5, 8], causal=False)]
    return q, k, v, dout, masks[seed % 3]


def outputs_of_ring(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: IntervalMask, layout: Layout) -> list[Tensor]:
    """out, lse (as out), dq, dk, dv, global."""

    def on_rank(group: LoopbackGroup) -> list[Tensor]:
        sequence = ShardedSequence(mask, layout, group)
        local = [sequence.shard(x, 1).requires_grad_() for x in (q, k, v)]
        out, lse = ring_attention(*local, sequence, return_lse=True)
        grads = torch.autograd.grad(out, local, sequence.shard(dout, 1))
        return [sequence.unshard(x.detach(), 1) for x in (out, lse.transpose(1, 2), *grads)]

    return LoopbackWorld(layout.world_size).run(on_rank)[0]


@pytest.mark.parametrize("seed", range(18))
def test_what_is_not_finite_is_so_for_every_world_and_layout(seed: int) -> None:
    """docs/design/ring.md: the same numbers are finite, and those are the same."""
    *tensors, mask = poisoned(seed)
    expected = outputs_of_ring(*tensors, mask, Layout.contiguous(13, 1))
    for layout in (Layout.contiguous(13, 2), Layout.zigzag(13, 3), Layout.striped(13, 3)):
        got = outputs_of_ring(*tensors, mask, layout)
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
            assert torch.equal(x.isfinite(), y.isfinite()), (name, layout.world_size)
            torch.testing.assert_close(x[x.isfinite()], y[y.isfinite()], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(18))
def test_what_is_not_finite_stays_where_the_mask_lets_it_go(seed: int) -> None:
    """A query is touched by its own q and dout and by the keys it attends; a key by the queries that attend it."""
    q, k, v, dout, mask = poisoned(seed)
    out, lse, dq, dk, dv = outputs_of_ring(q, k, v, dout, mask, Layout.zigzag(13, 3))
    keys = torch.arange(13)
    attends = (mask.begin[0, :, None] <= keys) & (keys < mask.end[0, :, None])

    def bad(x: Tensor) -> Tensor:
        return ~x.isfinite().all(-1)[0]  # (tokens, heads)

    bad_key = (attends[:, :, None] & (bad(k) | bad(v))[None]).any(1)
    forward, backward = bad(q) | bad_key, bad(q) | bad(dout) | bad_key
    bad_query = (attends[:, :, None] & backward[:, None]).any(0)
    assert not (bad(out) & ~forward).any()
    assert not (bad(lse[..., None]) & ~forward).any()
    assert not (bad(dq) & ~backward).any()
    assert not (bad(dk) & ~bad_query).any()
    assert not (bad(dv) & ~bad_query).any()
