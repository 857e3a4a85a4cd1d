"""What the ring over NCCL rests on, on CPUs: headers in the store, batches of messages, one order of batches."""

from __future__ import annotations

import contextlib
import datetime
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from attention_calls import MASKS, forward_and_backward, layout_of, problem, run_ring
from pool import run_ranks
from ringtile import (
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    PeerLostError,
    RingMismatchError,
    ShardedSequence,
    ring_attention,
)
from ringtile.transport import groups, rendezvous, sockets
from ringtile.transport.agreement import HeaderValue
from ringtile.transport.groups import ProcessGroupTransport, transport_of
from ringtile.transport.loopback import LoopbackGroup, LoopbackTransport
from ringtile.transport.transport import Messages, Works

# ---- headers in the store, messages in batches -----------------------------------------------


class AsOverNccl(ProcessGroupTransport):
    """Takes all payloads for CUDA tensors."""

    def agree(
        self, op: str, fields: Mapping[str, HeaderValue], device: torch.device | str | None = None, **options: int
    ) -> contextlib.AbstractContextManager[int]:
        return super().agree(op, fields, "cuda", **options)

    def check_device(self, device: torch.device) -> None:
        pass

    def _open(self, device: torch.device) -> None:
        pass

    def _post(self, messages: Messages, what: str) -> Works:
        return self._post_batch(messages, what)


def as_over_nccl(group: dist.ProcessGroup) -> ProcessGroupTransport:
    """Gives a gloo group the transport that a group gets whose backend carries no CPU tensors."""
    with patch.object(groups, "backend_name", lambda group, device_type: None):
        groups._transports[group] = made = AsOverNccl(group)
    return made


def ring_as_over_nccl(case: tuple[str, str]) -> tuple[bool, bool]:
    """It opens no socket, and makes no group."""
    mask, layout_name = case
    dist.new_group([0])  # rank 0 is in one group more than the others
    plain, group = dist.group.WORLD, dist.new_group()
    assert plain is not None and group is not None  # noqa: PT018
    p, layout = problem(), layout_of(layout_name, MASKS[mask], dist.get_world_size())
    as_over_nccl(group)
    other = forward_and_backward(p, ShardedSequence(MASKS[mask], layout, plain))
    groups_before = len(dist.distributed_c10d._world.pg_map)
    opened = AssertionError("a group of NCCL alone opens nothing")
    with patch.object(sockets, "connect", side_effect=opened), patch.object(dist, "ProcessGroupGloo", None):
        one = forward_and_backward(p, ShardedSequence(MASKS[mask], layout, group))
    assert len(dist.distributed_c10d._world.pg_map) == groups_before
    same = all(torch.equal(x, y) for x, y in zip(one[0], other[0], strict=True))
    return same, one[1:] == other[1:]


@pytest.mark.parametrize("case", [("documents", "zigzag"), ("window", "contiguous"), ("full", "striped")])
def test_ring_with_headers_in_the_store_and_batches_is_the_same(case: tuple[str, str]) -> None:
    assert run_ranks(4, ring_as_over_nccl, case) == [(True, True)] * 4


def groups_in_another_order() -> list[bool]:
    """Rank 0 makes a sequence over each of two groups, rank 1 the other way round; then they compute in one order."""
    timeout = datetime.timedelta(seconds=20)
    groups = [dist.new_group(timeout=timeout), dist.new_group(timeout=timeout)]
    layout, mask = Layout.zigzag(48, 2), IntervalMask.causal(48)
    p, sequences = problem(), {}
    for i in (0, 1) if dist.get_rank() == 0 else (1, 0):
        group = groups[i]
        assert group is not None
        as_over_nccl(group)
        sequences[i] = ShardedSequence.of(mask, layout, group)
    outs = [
        ring_attention(*(sequences[i].shard(x, 1) for x in (p.q, p.k, p.v)), sequences[i]) for i in range(len(groups))
    ]
    return [bool(out.isfinite().all()) for out in outs]


@pytest.mark.timeout(60)
def test_making_sequences_over_groups_in_another_order_waits_for_no_rank() -> None:
    """Making one sends nothing, over NCCL either."""
    assert run_ranks(2, groups_in_another_order) == [[True, True]] * 2


def disagreement_after_agreement() -> list[str]:
    """Rank 0 makes a call that was agreed on, rank 1 another one; then both make the first again and again.
    No host waits for the other: each goes on until the other's header has arrived."""
    group = dist.new_group()
    assert group is not None
    transport = as_over_nccl(group)

    def make(op: str) -> None:
        with transport.agree(op, {}):
            pass

    def make_forever(op: str) -> None:
        while True:
            make(op)
            op = "one"

    def make_until_told() -> str:
        with pytest.raises(RingMismatchError) as caught:
            make_forever("one" if dist.get_rank() == 0 else "other")
        return str(caught.value)

    make("one")
    make("other")
    return [make_until_told(), make_until_told()]


def test_disagreement_that_a_host_ran_past_is_named_by_a_later_call() -> None:
    for rank, messages in enumerate(run_ranks(2, disagreement_after_agreement)):
        mine, theirs = ("one", "other") if rank == 0 else ("other", "one")
        expected = f"ranks disagree on op in call 3 ({mine}): rank {rank} has {mine}, rank {1 - rank} has {theirs}"
        assert all(message.startswith(expected) for message in messages)


class SlowStore(dist.PrefixStore):
    def set(self, key: str, value: str) -> None:
        time.sleep(0.2)
        super().set(key, value)


def headers_on_their_way() -> list[str]:
    """The threads that are left of a group that is destroyed just after a call for which no host waited."""
    group, before = dist.new_group(), set(threading.enumerate())
    assert group is not None
    transport = as_over_nccl(group)
    with patch.object(rendezvous, "PrefixStore", SlowStore):
        for _ in range(2):
            with transport.agree("test", {}):
                pass
    assert set(threading.enumerate()) - before
    del transport
    dist.destroy_process_group(group)
    del group
    return [thread.name for thread in set(threading.enumerate()) - before]


def test_the_last_header_of_a_group_reaches_the_store() -> None:
    """The process may end with the group, and others wait for its header."""
    assert run_ranks(2, headers_on_their_way) == [[], []]


def refused_over_nccl_alone() -> list[str]:
    """What rank 0 raises where rank 1 fails: a loss without a connection; then what both raise for a CPU tensor."""
    first, second = dist.new_group(), dist.new_group()
    assert first is not None and second is not None  # noqa: PT018
    transport, said = as_over_nccl(first), []
    with transport.agree("test", {}):
        pass

    def call_until_told() -> None:
        while True:
            with transport.agree("test", {}):
                if dist.get_rank() == 1:
                    raise ValueError("of rank 1")
            time.sleep(0.01)

    with pytest.raises((ValueError, PeerLostError)) as caught:
        call_until_told()
    said.append(str(caught.value))
    with patch.object(groups, "backend_name", lambda group, device_type: None):
        plain = ProcessGroupTransport(second)
    with pytest.raises(InputError) as refused, plain.agree("test", {}, "cpu"):
        pass
    return [*said, str(refused.value)]


def test_over_nccl_alone_a_failure_is_told_and_tensors_on_the_cpu_are_refused() -> None:
    (told, no_cpu), (own, also) = run_ranks(2, refused_over_nccl_alone)
    assert own == "of rank 1"
    assert told.startswith("rank 1 was lost in the header of call ")
    assert "of rank 0: ValueError: of rank 1; see rank 1's log" in told
    assert no_cpu.startswith("the tensors are on cpu but the group's backend for cpu is None; expected gloo: ")
    assert also == no_cpu


def refuses_cuda() -> str:
    with pytest.raises(InputError) as caught:
        transport_of(dist.new_group()).check_device(torch.device("cuda:1"))
    return str(caught.value)


def test_cuda_tensors_over_gloo_are_refused() -> None:
    expected = "the tensors are on cuda:1 but the group's backend for cuda is gloo; expected nccl"
    assert all(message.startswith(expected) for message in run_ranks(2, refuses_cuda))


def test_ranks_on_different_devices_disagree() -> None:
    def on_rank(group: LoopbackGroup) -> str:
        with (
            pytest.raises(RingMismatchError) as caught,
            group.transport.agree("test", {}, ("cpu", "cuda")[group.transport.rank]),
        ):
            pass
        return str(caught.value)

    assert "disagree on device in call 1 (test): rank 0 has cpu, rank 1 has cuda" in LoopbackWorld(2).run(on_rank)[0]


# ---- one order of batches ------------------------------------------------------------------------


class OneAfterTheOther:
    """Virtual ranks whose batches run as NCCL's do: the messages of one are through before the next begins."""

    def __init__(self) -> None:
        self.ranks: dict[LoopbackTransport, ThreadPoolExecutor] = defaultdict(lambda: ThreadPoolExecutor(1))
        self.boxes: dict[tuple[str | int, ...], queue.Queue[torch.Tensor]] = {}

    def box(self, *key: str | int) -> queue.Queue[torch.Tensor]:
        return self.boxes.setdefault(key, queue.Queue())  # a defaultdict gives two threads two boxes

    def post(self, of: LoopbackTransport, messages: Messages) -> Works:
        sends = {peer: x.clone() for peer, x, outgoing in messages if outgoing}
        receives = {peer: x for peer, x, outgoing in messages if not outgoing}

        def run() -> None:
            for peer, x in sends.items():
                self.box("message", of.rank, peer).put(x)
            for peer, x in receives.items():
                x.copy_(self.box("message", peer, of.rank).get(timeout=10))
                self.box("received", of.rank, peer).put(x)
            for peer in sends:
                self.box("received", peer, of.rank).get(timeout=10)

        batch = SimpleNamespace(wait=self.ranks[of].submit(run).result)
        return [((of.rank,), batch)] if messages else []


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(5, marks=pytest.mark.long)])
@pytest.mark.parametrize("mask", MASKS)
def test_ring_over_batches_in_order_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, mask: str, world_size: int
) -> None:
    """Also where some ranks have nothing to say in a round: all post the same batches, less those that are empty."""
    p, layouts = problem(), [layout_of(name, MASKS[mask], world_size) for name in ("contiguous", "zigzag", "uneven")]
    expected = [run_ring(p, MASKS[mask], layout) for layout in layouts]
    nccl = OneAfterTheOther()

    def in_order(of: LoopbackTransport, messages: Messages, what: str) -> Works:
        return nccl.post(of, messages)

    monkeypatch.setattr(LoopbackTransport, "_post", in_order)
    for layout, right in zip(layouts, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(run_ring(p, MASKS[mask], layout), right, strict=True))
