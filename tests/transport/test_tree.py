"""Headers along the tree: all ranks agree, or each of them hears of a difference. Simulated, on a virtual clock."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import random
import time
from collections import deque
from collections.abc import Collection
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from pool import Pool
from ringtile import RingMismatchError
from ringtile.transport import failures, shared_memory
from ringtile.transport.agreement import Headers, Terms, tree_neighbors
from ringtile.transport.groups import transport_of
from test_failures import HOP_SECONDS, Clock, W
from test_transport import exchange

LONG = 1_000_000


class World(Clock):
    """Ranks whose headers take a random time."""

    def __init__(self, world_size: int, seed: int = 0) -> None:
        super().__init__(seed)
        self.call = 0
        channels = [Channel(self, rank, world_size) for rank in range(world_size)]
        self.channels = channels
        self.headers = [Headers(rank, world_size, channels[rank]) for rank in range(world_size)]  # type: ignore[arg-type]
        self.outcome: dict[int, tuple[float, str]] = {}  # by rank, when it knew, and the text of a mismatch

    def make(self, ops: list[str], refused: Collection[int] = (), late: dict[int, float] | None = None) -> None:
        """A call of every rank, of that op; late: by rank, how much later than the others it comes."""
        self.call += 1
        self.outcome.clear()
        began = self.now
        for channel in self.channels:
            channel.num_sent = 0
        for rank, op in enumerate(ops):
            delay = self.rng.uniform(0.0, HOP_SECONDS) + (late or {}).get(rank, 0.0)
            self.at(began + delay, lambda rank=rank, op=op: self.come(rank, op, rank in refused))  # type: ignore[misc]
        self.run()
        self.outcome = {rank: (when - began, text) for rank, (when, text) in self.outcome.items()}

    def come(self, rank: int, op: str, refuses: bool) -> None:
        self.headers[rank].send(Terms(op, "cpu", {}).header(self.call), refused=refuses)
        self.look(rank)

    def look(self, rank: int) -> None:
        try:
            self.headers[rank].compare(wait=False)
        except RingMismatchError as error:
            self.outcome.setdefault(rank, (self.now, str(error)))
        if not self.headers[rank]._open:
            self.outcome.setdefault(rank, (self.now, ""))


class Channel:
    """The connections of a rank; what two ranks send each other stays in order."""

    def __init__(self, world: World, rank: int, world_size: int) -> None:
        self.world, self.rank, self.num_sent, self.timeout_seconds = world, rank, 0, 1.0
        self.boxes: dict[int, deque[bytes]] = {peer: deque() for peer in tree_neighbors(rank, world_size)}
        self.last: dict[int, float] = {}

    def send(self, header: bytes, peers: Collection[int]) -> None:
        for peer in peers:
            self.num_sent += 1
            at = max(self.world.now + self.world.rng.uniform(0.001, HOP_SECONDS), self.last.get(peer, 0.0))
            self.last[peer] = at
            self.world.at(at, lambda peer=peer: self.arrive(peer, header))  # type: ignore[misc]

    def arrive(self, peer: int, header: bytes) -> None:
        self.world.channels[peer].boxes[self.rank].append(header)
        if self.world.headers[peer]._open:  # it is in a call
            self.world.look(peer)

    def receive(self, peer: int) -> bytes | None:
        return self.boxes[peer].popleft() if self.boxes[peer] else None


def test_a_rank_of_1024_has_few_sockets() -> None:
    for rank in range(W):
        assert len(tree_neighbors(rank, W)) + len(failures.neighbors(rank, W)) <= 16


@pytest.mark.parametrize("late", [0, 5, 1023])
def test_1024_ranks_agree_within_a_second_of_the_last_one(late: int) -> None:
    world = World(W)
    world.make(["op"] * W, late={late: 7.0})
    assert len(world.outcome) == W
    for when, text in world.outcome.values():
        assert text == ""
        assert 7.0 <= when < 8.0
    assert max(channel.num_sent for channel in world.channels) <= 6


@pytest.mark.parametrize("odd", [0, 5, 1023])
@pytest.mark.parametrize("refuses", [False, True])
def test_1024_ranks_hear_of_one_that_differs_within_a_second(odd: int, refuses: bool) -> None:
    world = World(W)
    ops = ["op"] * W
    ops[odd] = "another"
    world.make(ops, refused=[odd] if refuses else [])
    assert set(world.outcome) == set(range(W))
    for rank, (when, text) in world.outcome.items():
        assert when < 1.0
        if rank != odd:
            assert f"rank {rank} has op, rank {odd} has another" in text
    assert (f"rank {odd} has another, rank" in world.outcome[odd][1]) != refuses
    assert max(channel.num_sent for channel in world.channels) <= 6
    world.make(["op"] * W)
    assert {text for _, text in world.outcome.values()} == {""}


@pytest.mark.parametrize("seed", range(40))
def test_whoever_differs_or_refuses_every_rank_that_calls_is_told_what_is_true(seed: int) -> None:
    """Several calls in a row, of which some differ: no header is taken for one of another call."""
    rng = random.Random(seed)
    world_size = rng.randrange(2, 30)
    world = World(world_size, seed)
    for _ in range(12):
        kinds = rng.choice([1, 1, 2, 3, world_size])
        ops = [f"op {rng.randrange(kinds)}" for _ in range(world_size)]
        refused = [rank for rank in range(world_size) if rng.random() < rng.choice([0.0, 0.0, 0.3])]
        for rank in refused:
            ops[rank] = rng.choice(["refused", "refused, too"])
        world.make(ops, refused, late={rng.randrange(world_size): 0.3})
        for rank in set(range(world_size)) - set(refused):
            _, text = world.outcome[rank]
            assert (text == "") == (len(set(ops)) == 1)
            other = int(text.split(", rank ")[1].split()[0]) if text else rank
            assert not text or f"rank {rank} has {ops[rank]}, rank {other} has {ops[other]};" in text
            assert not text or ops[other] != ops[rank]


# ---- what is under way after a difference -------------------------------------------------------


def posted_late(odd: int, late: int) -> list[float]:
    """A rank posts its messages of a call when the others have left it; then a call on which all agree."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=20))
    assert group is not None
    transport, rank = transport_of(group), dist.get_rank()
    with mock.patch.dict(os.environ, {shared_memory.VARIABLE: "0"}):
        got = [exchange(group, LONG), exchange(group, 20)]
    post = transport._post

    def post_late(*arguments: Any) -> Any:
        time.sleep(0.5)
        return post(*arguments)

    transport._post = post_late if rank == late else post  # type: ignore[method-assign]
    with pytest.raises(RingMismatchError):
        exchange(group, 20 if rank == odd else LONG)
    gc.collect()  # which an error, whose frames hold the messages, may wait for
    del transport._post
    return [*got, exchange(group, LONG)]


def test_messages_of_gloo_that_nobody_waits_for_stop_no_other() -> None:
    """Rank 3 sends to rank 0, and rank 0 to rank 1, in a call on which they agree and rank 2 does not."""
    with contextlib.closing(Pool(4)) as pool:
        for late in (1, 3):
            assert pool.run(posted_late, 2, late, timeout=60) == [[LONG, 20.0, LONG]] * 4
