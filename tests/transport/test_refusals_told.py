"""What one rank refuses, wherever it notices, every other rank hears in place of a message, and at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from ringtile import (
    InputError,
    Layout,
    LoopbackWorld,
    PeerLostError,
    RefusedError,
    RingMismatchError,
    ShardedSequence,
    ring_attention,
    tiled_linear_cross_entropy,
)
from ringtile.transport.loopback import LoopbackGroup
from test_op_faults import MASK, B, D, H, S, tokens
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

# ---- arguments of ring_attention and unshard, between processes ---------------------------------


def freed(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


V = 7
LABELS = torch.arange(B * S * H).view(B, S, H) % V
WEIGHT = torch.linspace(-1, 1, V * D, dtype=torch.float64).view(V, D)
# What one of two ranks passes instead; faults/op_calls.py draws others, for ranks that are threads.
WRONG_OF_ONE_RANK: dict[str, dict[str, Any]] = {
    "mask None": {"mask": None},
    "no group": {"group": None},
    "meta": {"q": tokens()[:, :4].to("meta")},
    "freed": {"k": tokens()[:, :4]},  # freed below: no freed tensor travels to a rank
    "scale too large": {"scale": 1e400},
    "a dual number": {},  # made below
}


def one_rank_refuses() -> dict[str, tuple[str, float]]:
    """Return by the name of a wrong call what this rank is told, and when (seconds)."""
    rank, told = dist.get_rank(), {}
    layout = Layout.zigzag(S, 2)
    q = layout.shard(tokens(), 1, rank)
    usual: dict[str, Any] = {"q": q, "k": q, "v": q, "mask": MASK, "layout": layout, "group": dist.group.WORLD}
    expected = ring_attention(**usual)
    for name, change in WRONG_OF_ONE_RANK.items():
        arguments = {**usual, **change} if rank == 0 else usual
        if rank == 0 and name == "freed":
            arguments["k"] = freed(q)
        began = time.monotonic()
        with forward_ad.dual_level():
            if rank == 0 and name == "a dual number":
                arguments["q"] = forward_ad.make_dual(q, q)
            with pytest.raises((InputError, RefusedError, RingMismatchError)) as caught:
                ring_attention(**arguments)
        told[name] = f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - began
    # Sharded tensors, and the collective.
    for name, local, dim in (("unshard a list", [1.0], 1), ("unshard dim 9", q, 9), ("unshard meta", q.to("meta"), 1)):
        began = time.monotonic()
        with pytest.raises((InputError, RingMismatchError)) as caught:
            layout.unshard(*((local, dim) if rank == 0 else (q, 1)), dist.group.WORLD)
        told[name] = f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - began
    assert torch.equal(ring_attention(**usual), expected)
    return told


def test_what_one_rank_refuses_is_told_to_the_others() -> None:
    with contextlib.closing(Pool(2)) as pool:  # a call without a group can be told where there is one group only
        refusing, other = pool.run(one_rank_refuses)
    assert len(refusing) == len(WRONG_OF_ONE_RANK) + 3
    for name, (message, _) in refusing.items():
        assert message.startswith(("InputError", "RefusedError")), (name, message)
        assert other[name][0].startswith("RingMismatchError: ranks disagree on op"), (name, other[name])
        assert "refused: " in other[name][0], (name, other[name])
        assert other[name][1] < 5, (name, other[name])


# ---- backward passes, the tiled loss, and what follows a call -----------------------------------


class Rank:
    """One of the ranks of a case: its group, what it attends, and whether it is the one that refuses."""

    def __init__(self, group: LoopbackGroup) -> None:
        self.group, self.refuses = group, group.transport.rank == 1
        self.sequence = ShardedSequence(MASK, Layout.zigzag(S, 2), group)
        self.q = self.sequence.shard(tokens(), 1).requires_grad_()

    def attend(self) -> Tensor:
        out: Tensor = ring_attention(self.q, self.q, self.q, self.sequence)
        return out

    def loss(self, reduction: str = "none", **change: Any) -> Tensor:
        """Vocabulary parallel."""
        first, last = ((0, 3), (3, V))[self.group.transport.rank]
        usual = {"hidden": tokens().requires_grad_(), "weight": WEIGHT[first:last], "labels": LABELS}
        arguments = {**usual, **(change if self.refuses else {})}
        return tiled_linear_cross_entropy(**arguments, reduction=reduction, tile_tokens=5, group=self.group)


def dual_gradient(rank: Rank, out: Tensor) -> None:
    dout = torch.ones_like(out)
    out.backward(forward_ad.make_dual(dout, dout) if rank.refuses else dout)


def backward_twice(rank: Rank, out: Tensor) -> None:
    """On the rank that refuses the first backward frees the graph."""
    out.sum().backward(retain_graph=not rank.refuses)
    out.sum().backward()


def written_to(rank: Rank) -> None:
    x = rank.q * 1
    out = ring_attention(x, x, x, rank.sequence)
    if rank.refuses:
        x.zero_()
    out.sum().backward()


def second_derivative(rank: Rank, out: Tensor) -> None:
    """The others go on, and make another call."""
    (grad,) = torch.autograd.grad(out.sum(), rank.q, create_graph=True)
    if rank.refuses:
        grad.sum().backward()
    rank.attend()


class Mode(TorchDispatchMode):
    """Looks at ops, as selective checkpointing does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def seen_by_a_mode(rank: Rank) -> None:
    with Mode():
        ring_attention(rank.q, rank.q, rank.q, rank.sequence, scale="x" if rank.refuses else None)  # type: ignore[arg-type]


AFTER: dict[str, tuple[str, Callable[[Rank], Any]]] = {  # what is refused by name, or the reason in torch's words
    "dual gradient of attention": ("forward-mode AD", lambda rank: dual_gradient(rank, rank.attend())),
    "dual gradient of unshard": (
        "forward-mode AD",
        lambda rank: dual_gradient(rank, rank.sequence.unshard(rank.q, 1)),
    ),
    "dual gradient of the loss": ("forward-mode AD", lambda rank: dual_gradient(rank, rank.loss())),
    "attention backward twice": ("a second time", lambda rank: backward_twice(rank, rank.attend())),
    "unshard backward twice": ("a second time", lambda rank: backward_twice(rank, rank.sequence.unshard(rank.q, 1))),
    "loss backward twice": ("a second time", lambda rank: backward_twice(rank, rank.loss())),
    "keys written to": ("inplace operation", written_to),
    "second derivative of attention": ("differentiated again", lambda rank: second_derivative(rank, rank.attend())),
    "call seen by a mode": ("scale is 'x'", seen_by_a_mode),
    "hidden None": ("hidden is a NoneType", lambda rank: rank.loss(hidden=None)),
    "labels of int32": ("labels are torch.int32", lambda rank: rank.loss(labels=LABELS.int())),
    "weight freed": ("freed or resized", lambda rank: rank.loss(weight=freed(WEIGHT))),
    "weight on meta": ("weight is on meta", lambda rank: rank.loss(weight=WEIGHT.to("meta"))),
    "softcap of the loss": ("softcap is 'x'", lambda rank: rank.loss(softcap="x")),
    "reduction": ("reduction is 'average'", lambda rank: rank.loss("average" if rank.refuses else "sum")),
}


@pytest.mark.parametrize("name", AFTER)
def test_what_one_rank_refuses_later_is_told(name: str) -> None:
    """And the group is as good as before."""
    reason, case = AFTER[name]

    def on_rank(group: LoopbackGroup) -> Tensor:
        rank = Rank(group)
        expected = rank.attend().detach()
        with pytest.raises((RuntimeError, ValueError)) as caught:
            case(rank)
        error = caught.value
        assert isinstance(error, RingMismatchError) != rank.refuses
        assert reason in str(error)
        assert rank.refuses or "rank 1 has" in str(error)
        assert torch.equal(rank.attend(), expected)
        return expected

    with forward_ad.dual_level():
        LoopbackWorld(2, timeout_seconds=5).run(on_rank)


def test_storage_freed_before_the_backward_is_told() -> None:
    """Noticed by a kernel, when the others may wait for a payload already."""

    def on_rank(group: LoopbackGroup) -> str:
        rank = Rank(group)
        x = rank.q * 1
        out = ring_attention(x, x, x, rank.sequence)
        if rank.refuses:
            x.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError) as caught:
            out.sum().backward()
        return f"{type(caught.value).__name__}: {caught.value}"

    other, refusing = LoopbackWorld(2, timeout_seconds=5).run(on_rank)
    assert "freed or resized" in refusing
    assert other.startswith(f"{PeerLostError.__name__}: rank 1 was lost")
    assert "freed or resized" in other


def test_ranks_that_refuse_together_go_on_together() -> None:
    def on_rank(group: LoopbackGroup) -> bool:
        rank = Rank(group)
        expected = rank.attend()
        rank.refuses = True
        for reason, case in AFTER.values():
            with pytest.raises((RuntimeError, ValueError), match=reason):
                case(rank)
        return torch.equal(rank.attend(), expected)

    with forward_ad.dual_level():
        assert LoopbackWorld(2, timeout_seconds=5).run(on_rank) == [True, True]
