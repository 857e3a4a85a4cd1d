"""A mask on a GPU stays there for as long as the GPU may read it. The GPU is fake: tensors that claim to be on one."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from ringtile import IntervalMask, Layout, RefusedError, ShardedSequence, ops
from ringtile.sequence import plan
from ringtile.sequence.pieces import packs_of, pieces_of
from ringtile.sequence.plan import Transfer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

GPU = torch.device("cuda:0")


class Stream(str):
    """By name; an event is the name of the stream that it was recorded on."""

    waits: ClassVar[list[tuple[str, str]]] = []  # stream, event

    def record_event(self) -> str:
        return str(self)

    def wait_event(self, event: str) -> None:
        self.waits.append((str(self), event))


@dataclass
class FakeGpu:
    stream: str = "the first stream"
    captures: bool = False
    recorded: list[tuple[int, str]] = field(default_factory=list)  # tensor, stream
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))

    def mask_of(self, sequence: ShardedSequence) -> tuple[Tensor, Tensor]:
        assert sequence.plan  # made of real tensors
        with self.mode:
            begin, end = sequence.plan.on(GPU)[0].bounds.read()
            return begin, end


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(fake.stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.captures)
    monkeypatch.setattr(Tensor, "record_stream", lambda x, stream: fake.recorded.append((id(x), stream)))
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)  # of which a CPU build has none
    monkeypatch.setattr(plan, "_in_graphs", {})
    monkeypatch.setattr(Stream, "waits", [])
    return fake


def sequence() -> ShardedSequence:
    return ShardedSequence(IntervalMask.causal(40), Layout.contiguous(40, 1))


def alive(tensors: tuple[Tensor, Tensor]) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(x) for x in tensors]


def test_every_other_stream_that_reads_a_mask_is_told_to_the_allocator_once(gpu: FakeGpu) -> None:
    one = sequence()
    begin, end = gpu.mask_of(one)
    assert begin.device == GPU
    assert gpu.recorded == []  # the allocator knows the stream that it allocated on
    for gpu.stream in ("the first stream", "a second", "a third", "a second"):
        assert gpu.mask_of(one)[0] is begin
    expected = [(id(x), stream) for stream in ("a second", "a third") for x in (begin, end)]
    assert gpu.recorded == expected
    assert Stream.waits == [("a second", "the first stream"), ("a third", "the first stream")]  # for the copy


def test_a_mask_goes_with_its_sequence_but_not_from_under_a_graph(gpu: FakeGpu) -> None:
    eager, captured = sequence(), sequence()
    tensors = [alive(gpu.mask_of(one)) for one in (eager, captured)]
    gpu.captures = True
    for _ in range(3):
        gpu.mask_of(captured)
    gpu.captures = False
    gpu.mask_of(captured)
    del eager, captured
    gc.collect()
    assert [[ref() is not None for ref in refs] for refs in tensors] == [[False] * 2, [True] * 2]
    assert len(plan._in_graphs) == 1  # however many calls were captured


def test_packs_of_pieces_are_kept_as_the_mask_is(gpu: FakeGpu) -> None:
    """Which aten's flash attention reads in place of the mask."""
    one = sequence()
    assert one.plan  # made of real tensors
    with gpu.mode:
        (mask,) = one.plan.on(GPU)
    assert pieces_of(mask) is not None
    with gpu.mode:
        q = torch.empty(1, 40, 2, 8, device=GPU)
        gpu.captures = True
        with pytest.raises(RefusedError, match=r"is not on cuda:0 yet, .* make the same call once before the capture"):
            packs_of(mask, q, q)
        gpu.captures = False
        (pack,) = packs_of(mask, q, q)
        assert pack.q_offsets.device == pack.k_offsets.device == GPU
        gpu.stream, gpu.captures = "a second", True
        assert packs_of(mask, q, q)[0] is pack
    assert gpu.recorded == [(id(x), "a second") for x in (pack.q_offsets, pack.k_offsets)]
    refs = alive((pack.q_offsets, pack.k_offsets))
    del one, mask, pack
    gc.collect()
    assert all(ref() is not None for ref in refs)


def test_runs_of_a_transfer_are_there_where_a_launch_takes_no_more(gpu: FakeGpu) -> None:
    """As a mask is; fewer go with the launch."""
    one, few = sequence(), ops.MAX_RUNS_WITHOUT_TABLE
    assert one.plan  # made of real tensors
    runs = ops.runs_tensor([(2 * row, 1, row, 1) for row in range(few + 1)])
    with gpu.mode:
        (round,) = one.plan.on(GPU)
        assert round.table(Transfer(1, runs[:few], few, False)) is None
        transfer = Transfer(1, runs, few + 1, False)
        table = round.table(transfer)
        gpu.stream = "a second"
        assert round.table(transfer) is table is not None
    assert (table.device, table.shape) == (GPU, runs.shape)
    assert gpu.recorded == [(id(table), "a second")]


def test_positions_are_copied_once(gpu: FakeGpu) -> None:
    """Which dropout and masks with two sides ask for in every round: a layout by documents has hundreds of runs."""
    one = sequence()
    assert one.plan  # made of real tensors
    with gpu.mode:
        positions = one.plan.on(GPU)[0].positions.read()[0]
        gpu.stream = "a second"
        assert one.plan.on(GPU)[0].positions.read()[0] is positions
    assert positions.device == GPU
    assert (gpu.recorded, Stream.waits) == ([(id(positions), "a second")], [("a second", "the first stream")])


def test_a_copy_that_a_capture_cannot_make_is_refused_by_name(gpu: FakeGpu) -> None:
    one = sequence()
    gpu.captures = True
    with pytest.raises(RefusedError, match=r"is not on cuda:0 yet, .* make the same call once before the capture"):
        gpu.mask_of(one)
    gpu.captures = False
    gpu.mask_of(one)
    gpu.captures = True
    assert gpu.mask_of(one)[0].device == GPU
