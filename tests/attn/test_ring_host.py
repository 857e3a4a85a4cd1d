"""What the host does in a round of the ring, counted: below some thousand local tokens a GPU waits for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from attention_calls import MASKS, problem
from oracle import dense_attention, dense_gradients
from ringtile import IntervalMask, Layout, LoopbackWorld, ShardedSequence, ring_attention
from ringtile.attn import aten, choose, ring
from ringtile.attn.aten import InSquares
from ringtile.attn.backend import Final
from ringtile.attn.call import Call, Options
from ringtile.transport.loopback import LoopbackGroup
from strategies import dense
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
        q, k, v = (torch.randn(1, 32, heads, 8, dtype=torch.bfloat16) for heads in (2, 1, 1))
        sequence = ShardedSequence(IntervalMask.full(32 * world_size), layout, group)
        call = Call.of(sequence, q, k, v, Options(0.5))
        for _ in range(2):
            with group.transport.agree("calls", {}):
                with Calls() as forward:
                    out, lse = ring.forward(call, q, k, v)
                final = Final(out, out, lse, None)
                _ = final.delta
                with Calls() as backward:
                    ring.backward(call, final, q, k, v, torch.zeros_like(q, dtype=torch.float32))
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
        "ringtile::rows_add_": 1,
    }


class Wide(TorchDispatchMode):
    """The most elements of a float32 tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float32:
            self.largest = max(self.largest, found.numel())
        return found


@pytest.mark.parametrize("kernel", ["ringtile", "aten"])
def test_one_round_holds_no_float32_out(kernel: str) -> None:
    """With ringtile's kernel; 2 GiB at 131,072 tokens of 32 heads. Weights and out are rounded once."""
    q, k, v = (torch.randn(1, 64, heads, 16, dtype=torch.bfloat16) for heads in (2, 1, 1))
    sequence = ShardedSequence(IntervalMask.causal(64), Layout.contiguous(64, 1), None)
    call = Call.of(sequence, q, k, v, Options(0.25, 0.0, kernel))
    with Wide() as wide:
        out, lse = ring.forward(call, q, k, v)
    assert (wide.largest == 0) == (kernel == "ringtile")
    exact, norms = dense_attention(q.double(), k.double(), v.double(), dense(sequence.mask), 0.25)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2**-8 * float(v.abs().max()))
    if kernel == "ringtile":  # 100 roundings of numbers up to 10; aten's exponentials are less exact
        torch.testing.assert_close(lse, norms, rtol=0, atol=100 * 2**-24 * 10)


class Asked(InSquares):
    """aten's kernel for CPUs, which counts how often it is asked what it lacks."""

    num_asked = 0

    def lacks(self, block: Any) -> str:
        Asked.num_asked += 1
        return super().lacks(block)


def test_who_computes_is_asked_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where five backends are asked in every round. What a call differs in is asked anew: a backend that
    was chosen without a gradient of lse, or without a softcap, would leave it out."""
    (flash,) = aten.ATEN["cpu"]
    monkeypatch.setitem(aten.ATEN, "cpu", (Asked(flash.name, flash.attend, flash.attend_backward),))
    monkeypatch.setattr(choose, "_in_order", lambda *given: (*aten.ATEN["cpu"], choose.RINGTILE))
    p = problem(v_head_dim=16)
    sequence = ShardedSequence(MASKS["causal"], Layout.contiguous(48, 1))
    nothing = torch.zeros_like(p.dlse)

    def layer(dlse: torch.Tensor, softcap: float = 0.0) -> int:
        before, leaves = Asked.num_asked, [x.detach().requires_grad_() for x in (p.q, p.k, p.v)]
        out, lse = ring_attention(*leaves, sequence=sequence, softcap=softcap, return_lse=True)
        of_lse = [] if dlse is nothing else [(lse, dlse)]
        outputs, upstream = zip((out, p.dout), *of_lse, strict=True)
        gradients = torch.autograd.grad(outputs, leaves, upstream)
        expected = dense_gradients(p.q, p.k, p.v, dense(MASKS["causal"]), p.dout, dlse, softcap=softcap)
        for one, other in zip((out, *gradients), (expected[0], *expected[2:]), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        return Asked.num_asked - before

    for given in ((nothing,), (p.dlse,), (nothing, 2.0)):
        assert layer(*given) > 0
        assert layer(*given) == 0
    monkeypatch.setattr(choose, "_captures", lambda q: True)  # in which nothing is remembered
    sequence = ShardedSequence(MASKS["causal"], Layout.contiguous(48, 1))
    assert layer(nothing) == layer(nothing) > 0
