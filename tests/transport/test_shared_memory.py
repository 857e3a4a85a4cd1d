"""CPU tensors between ranks of one host: who shares memory, what happens where that fails, and that bits stay."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool, run_ranks
from ringtile import InputError, IntervalMask, Layout, PeerLostError, ShardedSequence
from ringtile.transport import shared_memory
from ringtile.transport.groups import ProcessGroupTransport, transport_of
from ringtile.transport.shared_memory import VARIABLE, make_segment
from test_ring_failures import USUAL

LONG = 2**20  # float32: twice what a ring of chunks holds


@contextlib.contextmanager
def switched(value: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {VARIABLE: value}):
        yield


def opened(value: str = "1") -> tuple[dist.ProcessGroup, frozenset[int]]:
    """A group whose ranks have made their first call, and the ranks that share memory with this one."""
    group = dist.new_group()
    assert group is not None
    transport = transport_of(group)
    assert isinstance(transport, ProcessGroupTransport)
    with switched(value), transport.agree("test", {}):
        pass
    return group, frozenset() if transport._shared is None else transport._shared.peers


def numbers_of(group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the numbers of a ring, forward and backward, and of a long message to and from every rank."""
    out = USUAL.forward(group)
    (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
    world_size, rank = dist.get_world_size(), dist.get_rank()
    sequence = ShardedSequence(IntervalMask.causal(LONG), Layout.contiguous(LONG, world_size), group)
    full = sequence.unshard(torch.arange(LONG // world_size) + rank * LONG, 0)
    return [out.detach(), full]


def over_both() -> tuple[bool, frozenset[int], frozenset[int]]:
    (fast, sharing), (slow, sharing_slow) = opened(), opened("0")
    same = all(torch.equal(x, y) for x, y in zip(numbers_of(fast), numbers_of(slow), strict=True))
    return same, sharing, sharing_slow


def test_shared_memory_and_gloo_give_the_same_bits() -> None:
    assert run_ranks(2, over_both) == [(True, {1}, set()), (True, {0}, set())]


def one_rank_does_not() -> tuple[bool, frozenset[int]]:
    mixed, sharing = opened("0" if dist.get_rank() == 1 else "1")
    slow, _ = opened("0")
    return all(torch.equal(x, y) for x, y in zip(numbers_of(mixed), numbers_of(slow), strict=True)), sharing


def test_a_rank_that_shares_nothing_talks_to_the_others_over_gloo() -> None:
    shared = [{2, 3}, set(), {0, 3}, {0, 2}]
    assert run_ranks(4, one_rank_does_not) == [(True, frozenset(peers)) for peers in shared]


def unknown_value() -> str:
    with pytest.raises(InputError) as caught:
        opened("yes")
    return str(caught.value)


def test_an_unknown_value_of_the_variable_is_refused() -> None:
    expected = "RINGTILE_SHARED_MEMORY is 'yes'; expected 1, or 0 to send all messages over the process group"
    assert run_ranks(2, unknown_value) == [expected] * 2


# ---- where sharing fails ------------------------------------------------------------------------


def no_files(world_size: int) -> int:
    raise OSError("Too many open files")


def no_segment(world_size: int) -> int:
    """A file that has no seals, and cannot be mapped as one that has."""
    return os.open("/dev/null", os.O_RDWR)


def unsealed(world_size: int) -> int:
    with mock.patch.object(fcntl, "fcntl"):
        return make_segment(world_size)


def too_small(world_size: int) -> int:
    return make_segment(world_size - 1)


def with_fault(odd: int) -> list[frozenset[int]]:
    """Return by fault of one rank who shares memory with this one; the group works in any case."""
    sharing = []
    for fault in (no_files, no_segment, unsealed, too_small):
        is_odd = dist.get_rank() == odd
        with mock.patch.object(shared_memory, "make_segment", fault) if is_odd else contextlib.nullcontext():
            group, peers = opened()
        assert numbers_of(group)[1].sum() > 0
        sharing.append(peers)
    return sharing


@pytest.mark.parametrize("odd", [0, 1])
def test_ranks_that_cannot_share_go_on_over_gloo(odd: int) -> None:
    assert run_ranks(2, with_fault, odd) == [[set()] * 4] * 2


# ---- under way ----------------------------------------------------------------------------------


def long_message_to_a_busy_rank(busy: int) -> float:
    """The busy rank does not come to wait before its peer has waited."""
    group, _ = opened()
    transport, rank = transport_of(group), dist.get_rank()
    x = torch.full((LONG,), 3.0) if rank == 0 else torch.zeros(LONG)
    with transport.agree("test", {"busy": busy}):
        message = transport.exchange({1: x} if rank == 0 else {}, {} if rank == 0 else {0: x}, "round 0")
        done = torch.ones(1)
        if rank == busy:
            dist.recv(done, 1 - rank)
            message.wait()
        else:
            message.wait()
            dist.send(done, 1 - rank)
    return x.sum().item()


@pytest.mark.parametrize("busy", [0, 1])
def test_a_long_message_travels_while_one_side_computes(busy: int) -> None:
    assert run_ranks(2, long_message_to_a_busy_rank, busy) == [3.0 * LONG] * 2


def maps_and_threads() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text().count("memfd:ringtile")
    return maps, len(list(Path("/proc/self/task").iterdir()))


def segments_of_a_group() -> list[int]:
    before, _ = maps_and_threads()
    group, _ = opened()
    numbers_of(group)
    during, _ = maps_and_threads()
    child = os.fork()
    if child == 0:
        os._exit(maps_and_threads()[0])
    inherited = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.destroy_process_group(group)
    del group
    return [during - before, inherited, maps_and_threads()[0] - before]


def test_segments_go_with_their_group_and_not_to_forked_processes() -> None:
    assert run_ranks(2, segments_of_a_group) == [[2, 0, 0]] * 2


def killed_with_a_child() -> tuple[str, float]:
    """Rank 1 forks a process that outlives it, as a DataLoader does, and is killed in a long message."""
    group, sharing = opened()
    assert len(sharing) == 1
    transport, child = transport_of(group), torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 1:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        child[0] = pid
        dist.send(child, 0)
    else:
        dist.recv(child, 1)
    x = torch.zeros(LONG)
    try:
        with transport.agree("test", {"long": 1}):
            if dist.get_rank() == 1:
                transport.exchange({0: x}, {}, "round 0")
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
            transport.exchange({}, {1: x}, "round 0").wait()
            transport.exchange({}, {1: x}, "round 1").wait()
    except PeerLostError as error:
        return str(error), time.monotonic() - start
    finally:
        os.kill(int(child), signal.SIGKILL)
    return "nothing happened", 0.0


def test_a_rank_that_is_killed_while_its_child_lives_on_is_named_at_once() -> None:
    with contextlib.closing(Pool(2, 60.0)) as pool:
        message, seconds = pool.outcomes(killed_with_a_child)[0]
    assert re.match(r"rank 1 was lost in (round [01]|the header) of call 2 \(test\) of rank 0: ", message), message
    assert seconds < 2, message
