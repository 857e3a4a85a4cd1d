"""Ranks that disagree, die or fall silent: an error that says so on every other rank, and soon."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import ringtile.attn.ring
import torch
import torch.distributed as dist
from attention_calls import problem
from pool import Pool, run_ranks
from ringtile import (
    AttentionDropout,
    InputError,
    IntervalMask,
    Layout,
    PeerLostError,
    RingMismatchError,
    RingtileError,
    ShardedSequence,
    ring_attention,
)
from ringtile.transport.groups import transport_of
from ringtile.transport.transport import Exchange

# ---- disagreement -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One attention call as a rank of two makes it."""

    batch: int = 1
    seq_len: int = 48
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 8
    dtype: torch.dtype = torch.float32
    layout: str = "zigzag"
    window: int = 48
    scale: float = 0.25
    softcap: float = 0.0
    scheme: str = "ring"
    dropout: float = 0.3
    seed: int = 1
    step: int = 2
    stream: int = 3
    row: int = 4

    def forward(self, group: dist.ProcessGroup | None) -> torch.Tensor:
        layout = Layout.named(self.layout, self.seq_len, dist.get_world_size(group))
        sizes = (self.batch, self.seq_len, self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim)
        p = problem(*sizes, dtype=self.dtype)
        q, k, v = (layout.shard(x, 1, dist.get_rank(group)).requires_grad_() for x in (p.q, p.k, p.v))
        mask = IntervalMask.sliding_window(self.seq_len, self.window)
        drop = AttentionDropout(
            self.dropout, self.row + torch.arange(self.batch), self.seed, step=self.step, stream=self.stream
        )
        sequence = ShardedSequence(mask, layout, group, scheme=self.scheme)
        return ring_attention(q, k, v, sequence, scale=self.scale, softcap=self.softcap, dropout=drop)


USUAL = Call()
DISAGREEMENTS = {
    "batch": (replace(USUAL, batch=2), "batch", 1, 2),
    "sequence length": (replace(USUAL, seq_len=52), "seq_len", 48, 52),
    "heads": (replace(USUAL, num_heads=8), "num_heads", 4, 8),
    "kv heads": (replace(USUAL, num_kv_heads=4), "num_kv_heads", 2, 4),
    "head dim": (replace(USUAL, head_dim=8), "head_dim", 16, 8),
    "value head dim": (replace(USUAL, v_head_dim=16), "v_head_dim", 8, 16),
    "dtype": (replace(USUAL, dtype=torch.bfloat16), "dtype", "torch.float32", "torch.bfloat16"),
    "layout": (replace(USUAL, layout="contiguous"), "layout digest", "-?[0-9]+", "-?[0-9]+"),
    "mask": (replace(USUAL, window=7), "mask digest", "-?[0-9]+", "-?[0-9]+"),
    "scale": (replace(USUAL, scale=0.5), "scale", 0.25, 0.5),
    "softcap": (replace(USUAL, softcap=30.0), "softcap", 0.0, 30.0),
    "scheme": (replace(USUAL, scheme="all_gather"), "scheme", ".*", ".*"),
    "dropout": (replace(USUAL, dropout=0.4), "dropout", 0.3, 0.4),
    "dropout seed": (replace(USUAL, seed=5), "dropout seed", 1, 5),
    "step": (replace(USUAL, step=5), "step", 2, 5),
    "dropout stream": (replace(USUAL, stream=5), "dropout stream", 3, 5),
    "rows": (replace(USUAL, row=5), "fingerprint of the data", ".*", ".*"),
}


def mismatch(call: Call, group: dist.ProcessGroup | None) -> str:
    with pytest.raises(RingMismatchError) as caught:
        call.forward(group)
    return str(caught.value)


def one_rank_differs(odd: int, names: list[str]) -> dict[str, str]:
    """By disagreement, what this rank was told; after it, the group works."""
    messages = {}
    group = dist.new_group()
    for name in names:
        messages[name] = mismatch(DISAGREEMENTS[name][0] if dist.get_rank() == odd else USUAL, group)
        assert USUAL.forward(group).isfinite().all()
    return messages


@pytest.mark.parametrize(("world_size", "odd", "names"), [(2, 1, list(DISAGREEMENTS)), (4, 2, ["batch", "mask"])])
def test_disagreement_is_named_on_every_rank(world_size: int, odd: int, names: list[str]) -> None:
    of_ranks = run_ranks(world_size, one_rank_differs, odd, names)
    for name in names:
        _, field, usual, different = DISAGREEMENTS[name]
        for rank, messages in enumerate(of_ranks):
            mine, theirs = (different, usual) if rank == odd else (usual, different)
            peer = (1 if odd == 0 else 0) if rank == odd else odd
            expected = rf".*disagree on {field} in call .*: rank {rank} has {mine}, rank {peer} has {theirs};"
            assert re.match(expected, messages[name]), messages[name]


def out_of_order() -> list[str]:
    """Rank 0 calls A then B, rank 1 calls B then A; then rank 1 goes backward where rank 0 goes forward; then each goes
    backward through another forward."""
    group = dist.new_group()
    calls = [USUAL, replace(USUAL, num_heads=8)]
    messages = [mismatch(call, group) for call in (calls if dist.get_rank() == 0 else calls[::-1])]
    one, two, three = (USUAL.forward(group) for _ in range(3))
    with pytest.raises(RingMismatchError) as caught:
        USUAL.forward(group) if dist.get_rank() == 0 else one.sum().backward()
    with pytest.raises(RingMismatchError) as of_forwards:
        (two, three)[dist.get_rank()].sum().backward()
    return [*messages, str(caught.value), str(of_forwards.value)]


def test_calls_in_another_order_and_backwards_of_different_forwards_are_named() -> None:
    first, second, third, fourth = run_ranks(2, out_of_order)[0]
    assert "disagree on num_heads in call 1" in first
    assert "rank 0 has 4, rank 1 has 8" in first
    assert "disagree on num_heads in call 2" in second
    assert "rank 0 has ring_attention forward, rank 1 has ring_attention backward" in third
    of_forward = "disagree on call of the forward in call 7 (ring_attention backward): rank 0 has 4, rank 1 has 5"
    assert of_forward in fourth


def of_batches(numbers_of_ranks: list[list[int]]) -> list[str]:
    """Checks and attends batches of equal shapes, by a sequence that is found again; what is raised, by batch."""
    rank, group = dist.get_rank(), dist.new_group()
    layout, mask = Layout.zigzag(48, dist.get_world_size()), IntervalMask.causal(48)
    said = []
    for number in numbers_of_ranks[rank]:
        p = problem(dtype=torch.float32, seed=number)
        sequence = ShardedSequence.of(mask, layout, group)
        try:
            sequence.check_same(torch.full((1, 48), number), p.q)
            ring_attention(*(sequence.shard(x, 1) for x in (p.q, p.k, p.v)), sequence.with_window(20))
            said.append("")
        except RingMismatchError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("other", [[0, 2, 3, 4], [0, 0, 1, 2]], ids=["skipped", "repeated"])
def test_a_skipped_or_repeated_batch_is_named(other: list[int]) -> None:
    """By every batch, not the first alone; the group stays usable."""
    for rank, said in enumerate(run_ranks(2, of_batches, [[0, 1, 2, 3], other])):
        assert said[0] == ""
        for call, message in enumerate(said[1:], 3):
            expected = rf"ranks disagree on fingerprint of the data in call {call} \(check_same\): rank {rank} "
            assert re.match(expected, message), message


def of_a_rank_that_stumbles() -> list[bool]:
    """Rank 0 raises before it shards anything of the first batch; then both work on."""
    group = dist.new_group()
    layout, mask = Layout.zigzag(48, dist.get_world_size()), IntervalMask.causal(48)
    finite = []
    for batch in range(3):
        sequence = ShardedSequence.of(mask, layout, group)
        if batch == 0 and dist.get_rank() == 0:
            continue
        p = problem(dtype=torch.float32, seed=batch)
        q, k, v = (sequence.shard(x, 1) for x in (p.q, p.k, p.v))
        if batch > 0:
            finite.append(bool(ring_attention(q.clone(), k.clone(), v.clone(), sequence).isfinite().all()))
    return finite


def test_a_batch_that_one_rank_gave_up_says_nothing_of_later_ones() -> None:
    """A fingerprint of what a sequence sharded first would differ for good: the sequence is found again."""
    assert run_ranks(2, of_a_rank_that_stumbles) == [[True, True]] * 2


def two_threads_on_one_group() -> list[str]:
    """The main thread makes a call on every rank; then rank 0 makes one in a second thread, rank 1 in its main one."""
    group = dist.new_group()
    USUAL.forward(group)
    said: list[str] = []

    def call() -> None:
        try:
            USUAL.forward(group)
        except RingtileError as error:
            said.append(f"{type(error).__name__}: {error}")

    if dist.get_rank() == 0:
        thread = threading.Thread(target=call, name="second")
        thread.start()
        thread.join()
    else:
        call()
    USUAL.forward(group).sum().backward()
    return said


def test_two_threads_on_one_group_are_refused() -> None:
    (refused,), (told,) = run_ranks(2, two_threads_on_one_group)
    expected = "ring_attention forward in thread 'second' on a group that thread 'MainThread' uses; expected one thread"
    assert refused.startswith(f"InputError: {expected}")
    assert told.startswith("RingMismatchError: ranks disagree on op")
    assert "ring_attention forward, refused: ring_attention forward in thread 'second'" in told


def call_in_a_forked_process() -> str:
    reader, writer = os.pipe()
    transport_of(dist.group.WORLD)
    child = os.fork()
    if child == 0:
        try:
            USUAL.forward(dist.group.WORLD)
        except InputError as error:
            os.write(writer, str(error).encode())
        os._exit(0)  # without gloo's clean-up, which waits for the threads of the parent
    os.waitpid(child, 0)
    message = os.read(reader, 1000).decode()
    os.close(reader)
    os.close(writer)
    assert USUAL.forward(dist.group.WORLD).isfinite().all()
    return message


def test_a_ring_in_a_forked_process_is_refused() -> None:
    for message in run_ranks(2, call_in_a_forked_process):
        assert message.startswith("ring_attention forward in a process that was forked from a rank")


def call_of_a_stranger() -> str:
    """The group has rank 1 alone."""
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(InputError) as caught:
        transport_of(group)
    return str(caught.value)


def test_a_process_that_is_not_a_member_is_refused() -> None:
    assert "expected a process group that this rank is a member of" in run_ranks(2, call_of_a_stranger)[0]


# ---- lost ranks ---------------------------------------------------------------------------------


def ring_with_victim(signal_number: int, where: str) -> tuple[str, float]:
    """The last rank sends itself a signal before it posts a message; what the others are told, and seconds after it."""
    transport, store = transport_of(dist.group.WORLD), dist.distributed_c10d._get_default_store()
    start_messages = transport.exchange

    def fatal(sends: Any, receives: Any, what: str) -> Exchange:
        if what == where:
            store.set("the signal", str(time.monotonic()))
            os.kill(os.getpid(), signal_number)
        return start_messages(sends, receives, what)

    if transport.rank == transport.world_size - 1:
        transport.exchange = fatal  # type: ignore[method-assign]
    store.set(f"{transport.rank} is ready", "")
    store.wait([f"{rank} is ready" for rank in range(transport.world_size)], datetime.timedelta(seconds=60))
    try:
        USUAL.forward(dist.group.WORLD).sum().backward()
    except PeerLostError as error:
        return str(error), time.monotonic() - float(store.get("the signal"))
    return "nothing happened", 0.0


@pytest.mark.parametrize(
    ("world_size", "where"),
    [
        *((4, "round 1"), (2, "the gradients of round 1")),
        *(pytest.param(*cell, marks=pytest.mark.long) for cell in ((2, "round 1"), (4, "the gradients of round 1"))),
    ],
)
def test_killed_rank_ends_the_ring_of_all_others(world_size: int, where: str) -> None:
    """All survivors name the victim, those too that only wait for a rank that gave up."""
    with contextlib.closing(Pool(world_size, 60.0)) as pool:
        outcomes = pool.outcomes(ring_with_victim, signal.SIGKILL, where)
    assert isinstance(outcomes.pop(), EOFError)
    direction = "backward" if "gradients" in where else "forward"
    for rank, (message, seconds) in enumerate(outcomes):
        place = where if world_size == 2 else ".*round [123]"
        expected = (
            rf"rank {world_size - 1} was lost in {place} of call . \(ring_attention {direction}\) of rank {rank}: "
        )
        assert re.match(expected, message), message
        assert seconds < 5, message


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_stopped_rank_is_named_by_all_after_the_timeout_of_the_group(world_size: int) -> None:
    group_timeout, victim = 4.0, world_size - 1
    with contextlib.closing(Pool(world_size, group_timeout)) as pool:
        outcomes = pool.outcomes(ring_with_victim, signal.SIGSTOP, "round 1", stopped=victim)
    for rank, (message, seconds) in enumerate(outcomes[:-1]):
        place = rf"round [123] of call 1 \(ring_attention forward\) of rank {rank}: "
        assert re.match(f"rank {victim} was lost in {place}", message), message
        assert group_timeout - 2 <= seconds < group_timeout + 5  # of a busy machine, where it may lag behind the others
    if world_size == 2:
        reason = "nothing came for 4 s|Timed out waiting 4000ms for recv operation to complete"  # shared memory, gloo
        assert re.search(f": ({reason}); see rank 1's log", outcomes[0][0]), outcomes[0][0]


def failing_kernel() -> str:
    """The last rank's kernel fails in round 0: a defect, or no memory left. No other must wait for its keys."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise MemoryError("no memory left")

    loss = USUAL.forward(dist.group.WORLD).sum()  # its self-test runs the backward too
    if dist.get_rank() == dist.get_world_size() - 1:
        ringtile.attn.ring.ops.attn_bwd_ = fail
    try:
        loss.backward()
    except (PeerLostError, MemoryError) as error:
        first = str(error)
    with pytest.raises(PeerLostError, match="failed before"):
        USUAL.forward(dist.group.WORLD)
    return first


def test_rank_that_fails_inside_the_ring_is_named() -> None:
    with contextlib.closing(Pool(3, 60.0)) as pool:
        *others, last = pool.run(failing_kernel, timeout=30.0)
    assert last == "no memory left"
    for message in others:
        assert "rank 2 was lost in" in message
        assert "MemoryError: no memory left" in message
