"""Headers and messages of a group, without attention: what is agreed on, what is counted, what is said on failure."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import gc
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool, run_ranks
from ringtile import (
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    PeerLostError,
    RefusedError,
    RingMismatchError,
    ShardedSequence,
    ring_attention,
)
from ringtile.transport import agreement, shared_memory, sockets
from ringtile.transport.agreement import HEADER_BYTES, Terms
from ringtile.transport.groups import Group, group_name, transport_of
from ringtile.transport.loopback import LoopbackGroup


def pass_on(group: Group, *, rounds: int = 2) -> list[float]:
    """Every rank sends its number once around the ring; what it got in each round."""
    transport = transport_of(group)
    successor, predecessor = ((transport.rank + step) % transport.world_size for step in (1, -1))
    token, got = torch.full((3,), float(transport.rank)), []
    with transport.agree("test", {"rounds": rounds}):
        for i in range(rounds):
            received = torch.empty(3)
            transport.exchange({successor: token}, {predecessor: received}, f"round {i}").wait()
            token = received
            got.append(received[0].item())
    return got


def over_processes(rounds: int) -> tuple[list[float], int]:
    assert dist.group.WORLD is not None
    before = transport_of(dist.group.WORLD).bytes_sent
    return pass_on(dist.group.WORLD, rounds=rounds), transport_of(dist.group.WORLD).bytes_sent - before


def test_messages_arrive_in_order_and_are_counted() -> None:
    expected = [([3.0, 2.0], 24), ([0.0, 3.0], 24), ([1.0, 0.0], 24), ([2.0, 1.0], 24)]
    assert run_ranks(4, over_processes, 2) == expected
    assert LoopbackWorld(4).run(lambda group: (pass_on(group), group.transport.bytes_sent)) == expected


def test_empty_messages_do_not_travel() -> None:
    """The peer need not even take part."""

    def on_rank(group: LoopbackGroup) -> None:
        with group.transport.agree("test", {}):
            if group.transport.rank == 0:
                group.transport.exchange({1: torch.empty(0)}, {1: torch.empty(0)}, "round 0").wait()

    LoopbackWorld(2).run(on_rank)


# ---- headers ------------------------------------------------------------------------------------


def message_of(error: type[Exception], action: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_that_disagree_all_raise_and_name_field_values_and_ranks(odd: int) -> None:
    def on_rank(group: LoopbackGroup) -> str:
        rounds = 3 if group.transport.rank == odd else 2
        message = message_of(RingMismatchError, lambda: pass_on(group, rounds=rounds))
        assert pass_on(group) == [float((group.transport.rank - i - 1) % 3) for i in range(2)]  # still usable
        return message

    for rank, message in enumerate(LoopbackWorld(3).run(on_rank)):
        other = (1 if odd == 0 else 0) if rank == odd else odd
        mine, theirs = (3, 2) if rank == odd else (2, 3)
        assert f"disagree on rounds in call 1 (test): rank {rank} has {mine}, rank {other} has {theirs}" in message


def test_a_skipped_call_is_named() -> None:
    def on_rank(group: LoopbackGroup) -> str:
        if group.transport.rank == 1:
            group.transport.num_calls += 1
        return message_of(RingMismatchError, lambda: pass_on(group))

    messages = LoopbackWorld(2).run(on_rank)
    assert "disagree on call in call 1 (test): rank 0 has 1, rank 1 has 2" in messages[0]


@pytest.mark.parametrize("noise", [bytes(HEADER_BYTES), b"[" * HEADER_BYTES])
def test_a_message_that_is_no_header_is_named(noise: bytes) -> None:
    def on_rank(group: LoopbackGroup) -> str:
        if group.transport.rank == 1:
            group.transport._state.channels[1].send(noise, [0])
            return ""
        return message_of(RingMismatchError, lambda: pass_on(group))

    assert "rank 1 has no ringtile header" in LoopbackWorld(2).run(on_rank)[0]


def test_a_header_that_does_not_fit_is_refused() -> None:
    def on_rank(group: LoopbackGroup) -> None:
        with group.transport.agree("test", {"long": "x" * 2000}):
            pass

    with pytest.raises(InputError, match=r"header of 2... bytes; expected at most 1019"):
        LoopbackWorld(2).run(on_rank)


def call_in_group(seconds: float) -> list[float]:
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    assert group is not None
    return pass_on(group)


@pytest.mark.parametrize("seconds", [180_000_000.0, 1e12])
def test_any_timeout_that_torch_takes(seconds: float) -> None:
    """Published examples set ddp_timeout: 180000000; 24.8 days are 2**31 ms."""
    assert run_ranks(2, call_in_group, seconds) == [[1.0, 0.0], [0.0, 1.0]]
    assert LoopbackWorld(2, timeout_seconds=seconds).run(pass_on) == [[1.0, 0.0], [0.0, 1.0]]


def test_virtual_ranks_wait_for_ever_or_more_than_no_time() -> None:
    assert LoopbackWorld(2, timeout_seconds=math.inf).run(pass_on) == [[1.0, 0.0], [0.0, 1.0]]
    for seconds in (0, -1.0, math.nan, None, "60"):
        with pytest.raises(InputError, match=r"timeout_seconds is .*expected more than 0 s"):
            LoopbackWorld(2, timeout_seconds=seconds)  # type: ignore[arg-type]


# ---- once ranks have agreed ---------------------------------------------------------------------


def test_payloads_of_an_agreed_call_do_not_wait_for_headers() -> None:
    """Rank 1 makes its second call only when rank 0 is inside its own."""
    inside = threading.Event()

    def on_rank(group: LoopbackGroup) -> float:
        transport, peer = group.transport, 1 - group.transport.rank
        got = torch.empty(1)
        for call in range(2):
            if call == 1 and transport.rank == 1:
                assert inside.wait(10)
            with transport.agree("test", {}):
                message = transport.exchange({peer: torch.full((1,), float(call))}, {peer: got}, "round 0")
                if call == 1:
                    inside.set()
                message.wait()
        return got.item()

    assert LoopbackWorld(2, timeout_seconds=10).run(on_rank) == [1.0, 1.0]


def exchange(group: Group, size: int) -> float:
    """A ring of one round with messages of that size."""
    transport = transport_of(group)
    world_size, got = transport.world_size, torch.empty(size)
    with transport.agree("test", {"size": size}):
        sends, receives = ({(transport.rank + step) % world_size: x} for step, x in ((1, torch.ones(size)), (-1, got)))
        transport.exchange(sends, receives, "round 1").wait()
    return got.sum().item()


def agreed_calls_differ(odd: int, shares_memory: str) -> list[str]:
    group = dist.new_group()
    assert group is not None
    messages = []
    with mock.patch.dict(os.environ, {shared_memory.VARIABLE: shares_memory}):
        for _ in range(2):
            assert [exchange(group, size) for size in (1000, 20)] == [1000.0, 20.0]
            messages.append(
                message_of(RingMismatchError, lambda: exchange(group, 20 if dist.get_rank() == odd else 1000))
            )
        assert exchange(group, 1000) == 1000.0
    return messages


@pytest.mark.parametrize(("world_size", "odd", "shares_memory"), [(2, 1, "0"), (2, 1, "1"), (4, 2, "0")])
def test_agreed_calls_that_differ_are_named_and_leave_the_group_usable(
    world_size: int, odd: int, shares_memory: str
) -> None:
    """Payloads of both calls are under way by then, of other sizes, which would kill a process if they met in gloo."""
    for rank, messages in enumerate(run_ranks(world_size, agreed_calls_differ, odd, shares_memory)):
        other = (1 if odd == 0 else 0) if rank == odd else odd
        mine, theirs = (20, 1000) if rank == odd else (1000, 20)
        for message, call in zip(messages, (3, 6), strict=True):
            place = f"disagree on size in call {call} (test): rank {rank} has {mine}, rank {other} has {theirs};"
            assert place in message


def test_more_kinds_of_calls_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringtile.transport.transport._MAX_AGREED", 2)
    calls = [1, 2, 3, 1, 2, 3, 3, 2, 1]
    assert LoopbackWorld(3).run(lambda group: [exchange(group, size) for size in calls]) == [calls] * 3


def header_messages(world_size: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Count by call and rank the headers that are sent; the first call has new terms."""
    sent = [0] * world_size
    send = sockets.SocketChannel.send

    def counted(channel: sockets.SocketChannel, header: bytes, peers: Collection[int]) -> None:
        assert len(header) == HEADER_BYTES
        sent[rank_of[channel]] += len(peers)
        send(channel, header, peers)

    monkeypatch.setattr(sockets.SocketChannel, "send", counted)
    met, counts = threading.Barrier(world_size), []

    def on_rank(group: LoopbackGroup) -> None:
        for _ in range(3):
            pass_on(group)
            if met.wait() == 0:
                counts.append(list(sent))
                sent[:] = [0] * world_size
            met.wait()

    world = LoopbackWorld(world_size)
    rank_of = {channel: rank for rank, channel in enumerate(world.groups[0].transport._state.channels)}
    assert max(len(channel._sockets) for channel in rank_of) <= 3
    world.run(on_rank)
    return counts


def test_headers_of_a_call_do_not_grow_with_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for world_size in (2, 4, 8, 16, 32):
        with monkeypatch.context() as patches:
            calls = header_messages(world_size, patches)
        assert calls == [calls[0]] * 3  # new terms cost no more
        assert max(calls[0]) <= 6
        assert sum(calls[0]) < 4 * world_size


@pytest.mark.parametrize("world_size", range(1, 40))
def test_the_tree_of_headers_is_a_tree(world_size: int) -> None:
    edges = {(rank, peer) for rank in range(world_size) for peer in agreement.tree_neighbors(rank, world_size)}
    assert edges == {(peer, rank) for rank, peer in edges}
    assert len(edges) == 2 * (world_size - 1)
    reached = {0}
    for _ in range(2 * world_size.bit_length()):
        reached |= {peer for rank, peer in edges if rank in reached}
    assert reached == set(range(world_size))


@pytest.mark.parametrize("world_size", [3, 4, 8, 9])
@pytest.mark.parametrize("seed", range(3))
def test_an_agreed_call_that_differs_anywhere_is_named_by_all_in_that_call(world_size: int, seed: int) -> None:
    """Each identity of a call in turn, on a random rank, with ranks that come at random times."""
    rng = random.Random(seed)
    usual: dict[str, Any] = {"op": "one", "fields": {}, "forward_call": 1, "data": 7, "step": 3}
    fields = {
        "op": "op",
        "forward_call": "call of the forward",
        "data": "fingerprint of the data",
        "step": "step",
    }
    others = {"op": "other", "forward_call": 2, "data": 8, "step": 4}
    odds = [(name, rng.randrange(world_size)) for name in fields]
    delays = [[rng.choice([0.0, 0.0, 0.01]) for _ in odds] for _ in range(world_size)]

    def on_rank(group: LoopbackGroup) -> None:
        transport = group.transport
        for change in ({}, {"op": "other"}, {}):
            with transport.agree(**{**usual, **change}):
                pass
        for (name, odd), delay in zip(odds, delays[transport.rank], strict=True):
            time.sleep(delay)
            mine = {**usual, name: others[name]} if transport.rank == odd else usual
            with pytest.raises(RingMismatchError) as caught, transport.agree(**mine):
                pass
            peer = odd if transport.rank != odd else min(agreement.tree_neighbors(odd, world_size))
            values = (others[name], usual[name]) if transport.rank == odd else (usual[name], others[name])
            said = (
                f"disagree on {fields[name]} in call {transport.num_calls} ({mine['op']}): rank {transport.rank} has "
            )
            assert f"{said}{values[0]}, rank {peer} has {values[1]};" in str(caught.value)
        with transport.agree(**usual):
            pass

    LoopbackWorld(world_size, timeout_seconds=20).run(on_rank)


def one_rank_is_lost(world_size: int, victim: int, late: set[int], how: str) -> None:
    """how: it is silent from the first call on, has come to it and been stopped ("here"), does not come to one that was
    agreed on, or fails. late: they come just before the timeout."""
    done, began, seconds = threading.Barrier(world_size), time.monotonic(), 2.5

    def on_rank(group: LoopbackGroup) -> tuple[str, float]:
        transport, message, taken = group.transport, "", 0.0
        if how in ("agreed", "fails"):
            pass_on(group)
        if transport.rank == victim:
            if how == "here":
                transport._send_header(Terms("test", "cpu", {"rounds": 2}).header(1))
            elif how == "fails":
                transport.break_group(ValueError("the cause"))
        else:
            # Most of the others wait for ranks that only wait themselves, and that have come later.
            time.sleep(2.0 if transport.rank in late else 0.15 * (transport.rank % 3) * (how in ("agreed", "fails")))
            message = message_of(PeerLostError, lambda: pass_on(group))
            taken = time.monotonic() - began
        done.wait(50)
        return message, taken

    of_call = "call 1" if how in ("here", "silent") else "call 2"
    reason = "ValueError: the cause" if how == "fails" else "nothing came for 2.5 s"
    for rank, (message, taken) in enumerate(LoopbackWorld(world_size, seconds).run(on_rank)):
        assert taken < seconds + 2
        if rank != victim:
            assert message.startswith(f"rank {victim} was lost in "), message
            assert f" of {of_call} (test) of rank {rank}: " in message, message
            assert reason in message, message


def test_a_rank_that_is_lost_is_named_by_all_within_two_seconds_after_the_timeout() -> None:
    """Of the first rank that waits. The root of the tree of headers, inner ranks, a leaf, in a world each; a victim
    whose neighbors, or one of them and another rank, come late. The worlds wait at the same time."""
    worlds = [(8, 1, set(), "here"), (20, 1, set(), "here"), (8, 7, {0, 2, 6}, "silent"), (8, 3, {0, 1}, "silent")]
    worlds += [(8, victim, set(), how) for victim in (0, 1, 2, 7) for how in ("agreed", "fails")]
    with concurrent.futures.ThreadPoolExecutor(len(worlds)) as threads:
        list(threads.map(lambda world: one_rank_is_lost(*world), worlds))


# ---- CUDA graphs --------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [{0, 1}, {1}])
def test_no_call_is_captured_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch, who: set[int]) -> None:
    """Also one that was agreed on before; and a rank that captures alone leaves no other waiting."""
    here = threading.local()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: getattr(here, "captures", False))

    def on_rank(group: LoopbackGroup) -> str:
        def call() -> None:
            with group.transport.agree("test", {}, "cuda:0"):
                pass

        if len(who) == 2:
            call()
        here.captures = group.transport.rank in who
        message = message_of(RefusedError if here.captures else RingMismatchError, call)
        here.captures = False
        call()
        return message

    reason = "a CUDA graph is being captured, and its replays could not check that all 2 ranks of the group make the"
    messages = LoopbackWorld(2).run(on_rank)
    assert [reason in message for message in messages] == [True, True]


# ---- lost peers ---------------------------------------------------------------------------------


def test_a_rank_that_fails_ends_the_wait_of_the_others() -> None:
    """Rank 1 waits for 2, which fails; rank 0 waits for 1, which gives up. All blame rank 2, whose error is raised."""
    told: dict[int, str] = {}

    def on_rank(group: LoopbackGroup) -> None:
        transport = group.transport
        try:
            with transport.agree("test", {}):
                if transport.rank == 2:
                    raise ValueError("the cause")
                transport.exchange({}, {transport.rank + 1: torch.empty(1)}, "round 1").wait()
        except PeerLostError as error:
            told[transport.rank] = str(error)
            told[transport.rank + 10] = message_of(PeerLostError, lambda: pass_on(group))
            raise

    with pytest.raises(ValueError, match="the cause"):
        LoopbackWorld(3, timeout_seconds=30).run(on_rank)
    for rank in (0, 1):
        assert f"rank 2 was lost in round 1 of call 1 (test) of rank {rank}: " in told[rank]
        assert "ValueError: the cause" in told[rank]
        assert "failed before" in told[rank + 10]


@pytest.mark.parametrize(
    ("error", "said"), [(KeyboardInterrupt(), "KeyboardInterrupt;"), (OSError("x"), "OSError: x;")]
)
def test_an_error_without_a_text_is_told_by_its_kind(error: BaseException, said: str) -> None:
    def on_rank(group: LoopbackGroup) -> str:
        if group.transport.rank == 0:
            return message_of(PeerLostError, lambda: pass_on(group))
        with contextlib.suppress(KeyboardInterrupt, OSError), group.transport.agree("test", {"rounds": 2}):
            raise error
        return ""

    message = LoopbackWorld(2).run(on_rank)[0]
    assert f": {said} see rank 1's log" in message


# ---- groups -------------------------------------------------------------------------------------


def test_a_group_and_its_name_have_one_transport() -> None:
    world = LoopbackWorld(2)
    assert transport_of(group_name(world.groups[1])) is transport_of(world.groups[1])
    assert transport_of(world.groups[1]) is not transport_of(world.groups[0])


def test_no_group_is_a_world_of_one() -> None:
    transport = transport_of(None)
    assert (transport.rank, transport.world_size, group_name(None)) == (0, 1, "")
    with transport.agree("test", {}):
        pass


def test_a_name_without_a_group_is_refused() -> None:
    name = group_name(LoopbackWorld(1).groups[0])  # its world is gone at once
    for unknown in (name, "never"):
        with pytest.raises(InputError, match=f"no process group named '{unknown}'"):
            transport_of(unknown)


def world_has_one_transport() -> bool:
    world, other = dist.group.WORLD, dist.new_group()
    assert world is not None and other is not None  # noqa: PT018
    return transport_of(world) is transport_of(world.group_name) and transport_of(other) is not transport_of(world)


def transport_outlives_its_group() -> bool:
    gc.disable()
    try:
        group = dist.new_group()
        assert group is not None
        assert [exchange(group, 3) for _ in range(2)] == [3.0, 3.0]
        transport = weakref.ref(transport_of(group))
        dist.destroy_process_group(group)
        del group
        return transport() is not None
    finally:
        gc.enable()


def test_a_transport_goes_with_its_group_at_once() -> None:
    """Its sockets and threads do not wait for the garbage collector."""
    assert run_ranks(2, transport_outlives_its_group) == [False, False]


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def threads_after_destroy() -> tuple[int, int, int]:
    """Before a group is made, while it is there, and after it was destroyed, with what was made on it in use."""
    torch.zeros(1, requires_grad=True).sum().backward()  # autograd's threads stay
    before, group = _threads(), dist.new_group()
    assert group is not None
    layout, mask = Layout.zigzag(48, 2), IntervalMask.causal(48)
    sequence = ShardedSequence(mask, layout, group)
    q, k, v = (torch.randn(1, 24, 2, 8, requires_grad=True) for _ in range(3))
    out = ring_attention(q, k, v, sequence)
    out.sum().backward()
    whole, transport = sequence.unshard(torch.zeros(24, 2**17), 0), transport_of(group)
    during = _threads()
    dist.barrier(group)
    dist.destroy_process_group(group)
    kept = weakref.ref(group)
    del group
    assert kept() is None
    assert transport.world_size == 2
    del transport  # whose own thread copies to shared memory, and knows nothing of torch
    deadline = time.monotonic() + 5  # the kernel lists a thread for a moment after it was joined
    while (after := _threads()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(each is not None for each in (sequence, out, whole))
    return before, during, after


def test_nothing_of_ours_keeps_the_threads_of_a_destroyed_group() -> None:
    with contextlib.closing(Pool(2)) as pool:  # in which no other group's threads begin or end meanwhile
        outcomes = pool.run(threads_after_destroy)
    for before, during, after in outcomes:
        assert during > before
        assert after <= before


def test_every_process_group_has_its_own_transport() -> None:
    assert run_ranks(2, world_has_one_transport) == [True, True]


def test_world_of_no_rank_is_refused() -> None:
    with pytest.raises(InputError, match="world_size is 0"):
        LoopbackWorld(0)
