"""A sharded sequence: what it holds, what it remembers, and what it refuses."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_calls import problem
from ringtile import (
    InputError,
    IntervalMask,
    Layout,
    LayoutError,
    LoopbackWorld,
    ShardedSequence,
    ops,
    ring_attention,
)
from ringtile.attn.call import Options
from ringtile.attn.traced import attend, sequence_of_tensors
from ringtile.sequence import sharded
from ringtile.transport.loopback import LoopbackGroup
from torch import Tensor

CAUSAL, ZIGZAG = IntervalMask.causal(40), Layout.zigzag(40, 2)
ONE = Layout.contiguous(40, 1)


def test_attention_over_a_sequence_is_attention_over_its_parts() -> None:
    p = problem()

    def on_rank(group: LoopbackGroup) -> None:
        sequence = ShardedSequence(IntervalMask.causal(48), Layout.zigzag(48, 2), group)
        q, k, v = (sequence.shard(x, 1) for x in (p.q, p.k, p.v))
        out = ring_attention(q, k, v, mask=sequence.mask, layout=sequence.layout, group=group)
        assert torch.equal(ring_attention(q, k, v, sequence), out)
        narrow = ring_attention(q, k, v, sequence & IntervalMask.sliding_window(48, 5))
        assert torch.equal(ring_attention(q, k, v, sequence.with_window(5)), narrow)
        assert not torch.equal(narrow, out)

    LoopbackWorld(2).run(on_rank)


# ---- what is remembered -------------------------------------------------------------------------


def test_narrower_sequences_are_remembered() -> None:
    sequence = ShardedSequence(IntervalMask.full(40), ONE)
    window = sequence & IntervalMask.sliding_window(40, 7)
    assert sequence.with_window(7) is window
    assert sequence & IntervalMask.sliding_window(40, 7) is window
    assert sequence.with_window(8) is not window
    assert sequence.with_window(None) is sequence
    assert sequence.causal is sequence & IntervalMask.causal(40)
    assert sequence.causal.mask == IntervalMask.causal(40)


def test_equal_parts_give_the_same_sequence() -> None:
    first = ShardedSequence.of(CAUSAL, ONE)
    assert ShardedSequence.of(IntervalMask.causal(40), Layout.contiguous(40, 1)) is first
    assert ShardedSequence.of(IntervalMask.full(40), ONE) is not first
    for tensors in (
        (first.begin, first.end, first.layout_tensor),
        (CAUSAL.begin.clone(), CAUSAL.end.clone(), ONE.tensor),
    ):
        assert sequence_of_tensors(*tensors, "") is first


def test_a_group_has_sequences_of_its_own() -> None:
    def on_rank(group: LoopbackGroup) -> ShardedSequence:
        return ShardedSequence.of(CAUSAL, ZIGZAG, group)

    one, other = LoopbackWorld(2).run(on_rank)
    assert one is not other


def test_equal_digests_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collision must not hand out another mask's plan."""
    monkeypatch.setattr(ops, "digest", lambda begin, end, layout: 0)
    full, causal = IntervalMask.full(41), IntervalMask.causal(41)
    layout = Layout.contiguous(41, 1)
    one, other = (sequence_of_tensors(m.begin, m.end, layout.tensor, "") for m in (full, causal))
    assert one.plan.rounds[0].num_pairs == 41 * 41
    assert other.plan.rounds[0].num_pairs == 41 * 42 // 2


def test_digests_tell_masks_and_layouts_apart() -> None:
    def on_rank(group: LoopbackGroup) -> set[tuple[int, int]]:
        masks, layouts = (CAUSAL, IntervalMask.sliding_window(40, 39)), (ZIGZAG, Layout.contiguous(40, 2))
        return {ShardedSequence(mask, layout, group).digests for mask in masks for layout in layouts}

    one, other = LoopbackWorld(2).run(on_rank)
    assert len(one) == 4
    assert one == other
    sides = IntervalMask.tree([-1, 0, 0], [4, 3, 3])
    assert IntervalMask(*(x[:, 0] for x in sides.bounds)).digest != sides.digest  # two rows of the same numbers


def test_the_second_call_reads_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with the same sequence, nor with the same mask and layout, nor in the op, nor in the backward.

    Only tensors that are no sequence's own are compared with those of the living ones.
    """
    sharded._remembered.clear()  # another test's equal mask would be compared with this one
    p = problem(seq_len=40)
    p.q.requires_grad_()
    sequence = ShardedSequence(CAUSAL, ONE)

    def attend_thrice() -> None:
        out = ring_attention(p.q, p.k, p.v, sequence) + ring_attention(p.q, p.k, p.v, mask=CAUSAL, layout=ONE)
        op_out, _ = attend(p.q, p.k, p.v, sequence, Options(0.25))
        (out + op_out).sum().backward()

    attend_thrice()
    for name in ("digest", "plan_rank", "layout_check"):
        monkeypatch.setattr(ops, name, lambda *_: pytest.fail("read again"))
    monkeypatch.setattr(torch, "equal", lambda *_: pytest.fail("compared again"))
    attend_thrice()


def test_equal_tensors_are_those_of_a_sequence_whose_mask_was_not_written_to() -> None:
    mask = IntervalMask.causal(41)
    layout, copies = Layout.contiguous(41, 1), [x.clone() for x in mask.bounds]
    sequence = ShardedSequence(mask, layout)
    assert sequence_of_tensors(*copies, layout.tensor, "") is sequence
    mask.end.fill_(41)
    assert sequence_of_tensors(*copies, layout.tensor, "") is not sequence
    full = IntervalMask.full(41).bounds
    assert sequence_of_tensors(*full, layout.tensor, "") is not sequence


def test_tensors_written_to_are_another_sequence() -> None:
    begin, end, layout = CAUSAL.begin.clone(), CAUSAL.end.clone(), ONE.tensor.clone()
    first = sequence_of_tensors(begin, end, layout, "")
    end.fill_(40)
    second = sequence_of_tensors(begin, end, layout, "")
    assert second is not first
    assert second.mask == IntervalMask.full(40)


@pytest.mark.parametrize(("two_sides", "field"), [(False, "mask.end"), (True, "end"), (True, "mask.key_end")])
def test_a_mask_written_to_is_refused(two_sides: bool, field: str) -> None:
    mask = IntervalMask.shared_prefix(20, [10, 10]) if two_sides else IntervalMask.causal(40)
    sequence, p = ShardedSequence(mask, ONE), problem(seq_len=40)
    operator.attrgetter(field)(sequence).fill_(40)
    for attends in (ring_attention, lambda *given: attend(*given, Options(0.25))):
        with pytest.raises(InputError, match="the mask was written to after the sequence was made"):
            attends(p.q, p.k, p.v, sequence)


def test_two_sides_are_found_again_by_their_tensors() -> None:
    mask = IntervalMask.shared_prefix(20, [10, 10])
    sequence = ShardedSequence.of(mask, ONE)
    copies = [x.clone() for x in mask.bounds]
    assert sequence_of_tensors(*copies, ONE.tensor, "") is sequence
    assert sequence_of_tensors(mask.begin, mask.end, ONE.tensor, "").mask == IntervalMask.causal(40)
    assert IntervalMask.of_bounds(*(x[None] for x in IntervalMask.causal(40).bounds)) == IntervalMask.causal(40)
    with pytest.raises(InputError, match=r"begin is torch.int32 \(3, 1, 40\)"):
        IntervalMask.of_bounds(*(x.expand(3, 1, 40) for x in IntervalMask.causal(40).bounds))


def test_nothing_outlives_its_group_or_its_user() -> None:
    """The last few sequences of a group are remembered, and go with it."""
    sequences: list[weakref.ref[Any]] = []

    def on_rank(group: LoopbackGroup) -> None:
        sequences.extend(
            weakref.ref(ShardedSequence.of(IntervalMask.sliding_window(40, i + 1), ZIGZAG, group)) for i in range(40)
        )
        gc.collect()
        assert sum(ref() is not None for ref in sequences) <= 2 * sharded._MAX_REMEMBERED

    LoopbackWorld(2).run(on_rank)
    gc.collect()
    assert all(ref() is None for ref in sequences)
    living = len(sharded.living_sequences)
    for _ in range(100):
        ShardedSequence(CAUSAL, ONE)
    assert len(sharded.living_sequences) <= living + 1


def test_a_sequence_whose_group_is_gone_is_refused() -> None:
    sequence = ShardedSequence(CAUSAL, ZIGZAG, LoopbackWorld(2).groups[0])
    gc.collect()
    p = problem(seq_len=20)
    with pytest.raises(InputError, match="the group of this sequence was destroyed"):
        ring_attention(p.q, p.k, p.v, sequence)


# ---- what is refused ----------------------------------------------------------------------------

REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "lengths": (lambda: ShardedSequence(IntervalMask.causal(41), ONE), "the mask is of 41 tokens, the layout of 40"),
    "ranks": (lambda: ShardedSequence(CAUSAL, ZIGZAG), "the layout is for 2 ranks, the group has 1"),
    "mask": (lambda: ShardedSequence(None, ONE), "mask is a NoneType; expected an IntervalMask"),  # type: ignore[arg-type]
    "layout": (lambda: ShardedSequence(CAUSAL, "zigzag"), "layout is a str; expected a Layout"),  # type: ignore[arg-type]
    "group": (lambda: ShardedSequence(CAUSAL, ONE, "nobody"), "no process group named 'nobody'"),
    "both": (
        lambda: ring_attention(*[torch.zeros(1, 40, 1, 8)] * 3, ShardedSequence(CAUSAL, ONE), mask=CAUSAL),  # type: ignore[misc]
        "got a sequence and mask, layout or group",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_parts_that_do_not_fit_are_refused_by_name(case: str) -> None:
    call, message = REFUSALS[case]
    with pytest.raises(InputError, match=message):
        call()


def test_runs_that_are_no_partition_are_refused() -> None:
    mask, layout = IntervalMask.causal(4), torch.tensor([[0, 0, 1, 0, 2], [0, 1, 1, 2, 2]])
    with pytest.raises(LayoutError, match="position 1 is held 2 times"):
        sequence_of_tensors(mask.begin, mask.end, layout, "")


def test_remembered_sequences_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of 40 tokens has 320 bytes, its plan about as many: there is room for six, and never less than four."""
    for max_bytes, expected in ((6 * 640 + 100, 6), (0, 4)):
        monkeypatch.setattr(sharded, "_MAX_BYTES", max_bytes)
        group = LoopbackWorld(1).groups[0]
        made = [weakref.ref(ShardedSequence.of(IntervalMask.sliding_window(40, w), ONE, group)) for w in range(1, 20)]
        gc.collect()
        assert [ref() is not None for ref in made] == [False] * (19 - expected) + [True] * expected


def test_the_mask_that_was_asked_for_longest_ago_is_forgotten() -> None:
    world = LoopbackWorld(2)  # which the sequence does not keep
    sequence = ShardedSequence(CAUSAL, ZIGZAG, world.groups[0])
    masks = [IntervalMask.sliding_window(CAUSAL.seq_len, window) for window in range(1, 18)]
    first, second = sequence & masks[0], sequence & masks[1]
    for mask in masks[2:]:
        assert (sequence & masks[0]) is first
        _ = sequence & mask
    assert (sequence & masks[0]) is first
    assert (sequence & masks[1]) is not second


CHANGES: dict[str, Callable[[Tensor], dict[str, Any]]] = {  # of k, after a call that was right
    "freed": lambda k: (k.untyped_storage().resize_(0), {"k": k})[1],
    "sparse": lambda k: {"k": k.to_sparse()},
    "another dtype": lambda k: {"k": k.double()},
    "another batch": lambda k: {"k": k[:1]},
    "other strides": lambda k: {"k": torch.zeros(2, 16, 2, 16)[..., ::2]},
    "on another device": lambda k: {"k": k.to("meta")},
    "no tensor": lambda k: {"k": None},
    "a scale that is none": lambda k: {"scale": "small"},
    "a softcap that no float32 holds": lambda k: {"softcap": 1e-40},
    "no such kernel": lambda k: {"attention_kernel": "fast"},
    "a kernel that no dict holds": lambda k: {"attention_kernel": ["auto"]},
    "a mask that was written to": lambda k: {},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_call_differs_in_from_the_one_before_is_checked(change: str) -> None:
    mask = IntervalMask.causal(16)
    sequence = ShardedSequence(mask, Layout.contiguous(16, 1))
    q, k, v = (torch.randn(2, 16, 2, 8) for _ in range(3))
    expected = ring_attention(q, k, v, sequence)
    assert torch.equal(ring_attention(q, k, v, sequence, scale=8**-0.5), expected)
    assert not torch.equal(ring_attention(q, k, v, sequence, scale=1.0), expected)
    if "mask" in change:
        mask.begin.fill_(3)
    given = {"q": q, "k": k, "v": v, **CHANGES[change](k)}
    with pytest.raises(InputError):
        ring_attention(**given, sequence=sequence)


def test_a_scale_that_is_written_to_is_read_in_every_call() -> None:
    sequence, scale = ShardedSequence(IntervalMask.causal(16), Layout.contiguous(16, 1)), torch.tensor(0.5)
    q = torch.randn(1, 16, 2, 8)
    one = ring_attention(q, q, q, sequence, scale=scale)  # type: ignore[arg-type]
    scale.fill_(0.25)
    other = ring_attention(q, q, q, sequence, scale=scale)  # type: ignore[arg-type]
    assert not torch.equal(one, other)
    assert torch.equal(other, ring_attention(q, q, q, sequence, scale=0.25))


def test_calls_with_a_scale_each_are_forgotten() -> None:
    sequence = ShardedSequence(IntervalMask.causal(4), Layout.contiguous(4, 1))
    q = torch.zeros(1, 4, 1, 8)
    for i in range(200):
        ring_attention(q, q, q, sequence, scale=1 / (i + 1))
    assert len(sequence.calls) <= 64
