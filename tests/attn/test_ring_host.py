"""What the host does in a round of the ring, counted: below some thousand local tokens a GPU waits for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from ringtile import IntervalMask, Layout, LoopbackWorld, ShardedSequence
from ringtile.attn import ring
from ringtile.attn.backend import Final
from ringtile.attn.call import AttentionCall
from ringtile.transport.loopback import LoopbackGroup
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts calls of torch's operations, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.num: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num[func.name()] += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_ring(world_size: int) -> tuple[Counter[str], Counter[str]]:
    """Rank 0's, in the forward and in the backward, each the second of its kind."""

    def on_rank(group: LoopbackGroup) -> tuple[Counter[str], Counter[str]]:
        layout = Layout.zigzag(32 * world_size, world_size)
        call = AttentionCall(ShardedSequence(IntervalMask.full(32 * world_size), layout, group), 0.5)
        q, k, v = (torch.randn(1, 32, heads, 8, dtype=torch.bfloat16) for heads in (2, 1, 1))
        for _ in range(2):
            with group.transport.agree("calls", {}):
                with Calls() as forward:
                    out, lse = ring.forward(call, q, k, v)
                final = Final(out, out, lse, None)
                _ = final.delta
                with Calls() as backward:
                    ring.backward(call, final, q, k, v)
        return forward.num, backward.num

    return LoopbackWorld(world_size).run(on_rank)[0]


def test_a_round_makes_few_calls() -> None:
    """On a GPU each is Python and a launch, of which a round of few tokens has time for some 20. Loopback's own copies
    stand for what NCCL sends: a clone for each message sent, a copy for each received."""
    less, more = calls_of_a_ring(4), calls_of_a_ring(8)
    pairs = zip(less, more, strict=True)
    forward, backward = ({name: (b[name] - a[name]) / 4 for name in b if b[name] != a[name]} for a, b in pairs)
    copies = [each.pop("aten::copy_") for each in (forward, backward)]
    assert copies == [each.pop("aten::clone") for each in (forward, backward)]  # `x[...] += y` would make one more
    assert forward == {"aten::new_empty": 1, "aten::unbind.int": 1, "ringtile::attn_fwd_": 1}  # the message to receive
    assert backward == {
        "aten::new_empty": 3,  # also for the block's gradients, and for those that return
        "aten::unbind.int": 3,
        "ringtile::attn_bwd_": 1,
        "aten::_foreach_add_.List": 1,
    }
