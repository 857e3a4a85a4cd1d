"""A lost rank of a large world is known to all others soon, over few connections; simulated, and over sockets."""

from __future__ import annotations

import concurrent.futures
import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Callable

import pytest
import torch.distributed as dist
from ringtile.transport import sockets
from ringtile.transport.agreement import PeerGoneError
from ringtile.transport.failures import MAX_NEIGHBORS, FailureDetector, Loss, neighbors
from ringtile.transport.rendezvous import Rendezvous

W = 1024
HOP_SECONDS = 0.05  # at most, from one rank's thread to another's: a busy host

# ---- who is connected to whom -------------------------------------------------------------------


def hops(world_size: int, gone: set[int] = frozenset()) -> dict[int, int]:  # type: ignore[assignment]
    """Return by rank how far it is from the first one that is not gone, without those that cannot be reached."""
    first = min(set(range(world_size)) - gone)
    distance, ready = {first: 0}, deque([first])
    while ready:
        rank = ready.popleft()
        for peer in neighbors(rank, world_size):
            if peer not in distance and peer not in gone:
                distance[peer] = distance[rank] + 1
                ready.append(peer)
    return distance


@pytest.mark.parametrize("world_size", [2, 3, 16, 17, 18, 19, 33, 64, 100, 257, 1000, W, 4097])
def test_a_rank_has_few_neighbors_and_is_theirs(world_size: int) -> None:
    by_rank = [neighbors(rank, world_size) for rank in range(world_size)]
    for rank, its in enumerate(by_rank):
        assert len(set(its)) == len(its) == min(len(by_rank[0]), MAX_NEIGHBORS)
        assert rank not in its
        assert all(rank in by_rank[peer] for peer in its)
    assert max(hops(world_size).values()) <= (1 if world_size <= 13 else 8 if world_size <= W else 12)
    assert len(hops(world_size)) == world_size


@pytest.mark.parametrize("world_size", [18, 40, W])
def test_the_rest_stays_connected_without_seven_ranks(world_size: int) -> None:
    rng = random.Random(0)
    for _ in range(30):
        near = rng.sample(neighbors(rng.randrange(world_size), world_size), 7)  # what cuts off a rank soonest
        for gone in (set(near), set(rng.sample(range(world_size), 7))):
            assert len(hops(world_size, gone)) == world_size - 7


# ---- 1,024 simulated ranks ----------------------------------------------------------------------


class Clock:
    """A virtual one: what happens on it takes no time."""

    def __init__(self, seed: int) -> None:
        self.now, self.rng = 0.0, random.Random(seed)
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.number = itertools.count()

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (seconds, next(self.number), action))

    def run(self) -> None:
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            action()


class World(Clock):
    """Detectors whose messages take a random time."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_messages = [0] * W
        self.lost: set[int] = set()
        self.channels = [Channel(self, rank) for rank in range(W)]
        self.detectors = [FailureDetector(rank, W, neighbors(rank, W), self.channels[rank]) for rank in range(W)]  # type: ignore[arg-type]
        self.known: dict[int, float] = {}  # by rank, when it has heard of a loss

    def post(self, sender: int, receiver: int, header: bytes | None) -> None:
        """None: the end of the connection. Messages of a pair stay in order."""
        at = max(self.now + self.rng.uniform(0.001, HOP_SECONDS), self.channels[receiver].last.get(sender, 0.0))
        self.channels[receiver].last[sender] = at

        def arrive() -> None:
            if receiver in self.lost:
                return
            self.channels[receiver].boxes[sender].append(header)
            self.detectors[receiver].read(sender)
            if self.detectors[receiver]._heard() is not None:
                self.known.setdefault(receiver, self.now)

        self.at(at, arrive)

    def kill(self, ranks: set[int]) -> None:
        self.lost |= ranks
        for rank in ranks:
            for peer in neighbors(rank, W):
                self.post(rank, peer, None)


class Channel:
    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.boxes: dict[int, deque[bytes | None]] = {peer: deque() for peer in neighbors(rank, W)}
        self.last: dict[int, float] = {}

    def send_last(self, header: bytes) -> None:
        for peer in self.boxes:
            self.world.num_messages[self.rank] += 1
            self.world.post(self.rank, peer, header)

    def receive(self, peer: int) -> bytes | None:
        if not self.boxes[peer]:
            return None
        if (header := self.boxes[peer].popleft()) is None:
            raise PeerGoneError(peer, "it has closed the connection")
        return header


CHORDS = neighbors(0, W)


@pytest.mark.parametrize(
    "lost",
    [{0}, {0, CHORDS[0], CHORDS[5]}, set(CHORDS), set(range(0, W, 3))],
    ids=["one", "three neighbors", "all of one rank's", "a third of all"],
)
def test_every_survivor_hears_of_a_loss_within_a_second(lost: set[int]) -> None:
    world = World()
    world.kill(lost)
    world.run()
    survivors = set(range(W)) - lost
    assert set(world.known) == survivors
    assert max(world.known.values()) < 1.0
    for rank in survivors:
        found = world.detectors[rank].find(None, "", 0.0)
        assert found is not None
        assert found.rank in lost
        assert "it has closed the connection" in found.reason
        assert world.num_messages[rank] <= MAX_NEIGHBORS  # passes on once


def test_every_rank_hears_the_reason_of_one_that_fails() -> None:
    world = World()
    world.detectors[700].announce("ValueError: a bad row", 700)
    world.kill({700})
    world.run()
    for rank in set(range(W)) - {700}:
        found = world.detectors[rank].find(None, "", 0.0)
        assert found is not None
        assert found.rank == 700
    assert max(world.known.values()) < 1.0
    reasons = [world.detectors[rank].find(None, "", 0.0) for rank in (3, 299)]
    assert all(reason is not None and reason.reason == "ValueError: a bad row" for reason in reasons)


# ---- over sockets -------------------------------------------------------------------------------


def connected(world_size: int) -> tuple[list[FailureDetector], list[sockets.SocketChannel]]:
    store = dist.HashStore()

    def join(rank: int) -> sockets.SocketChannel:
        meeting = Rendezvous(store, rank, world_size, 20.0)
        return sockets.SocketChannel(*sockets.connect(meeting, [neighbors(rank, world_size)]), 20.0)

    with concurrent.futures.ThreadPoolExecutor(world_size) as threads:
        channels = list(threads.map(join, range(world_size)))
    detectors = [
        FailureDetector(rank, world_size, neighbors(rank, world_size), channel) for rank, channel in enumerate(channels)
    ]
    for detector in detectors:
        detector.listen()
    return detectors, channels


@pytest.mark.parametrize("world_size", [3, 17, 64])
def test_over_sockets_too(world_size: int) -> None:
    """A rank dies; later one hears of it before it fails itself. No more sockets than neighbors."""
    detectors, channels = connected(world_size)
    assert max(len(channel._sockets) for channel in channels) <= MAX_NEIGHBORS
    victim = world_size - 1
    began = time.monotonic()
    detectors[victim].close()
    for detector in detectors[:victim]:
        detector.announce("a collective failed")
        found = detector.find(None, "", 60.0)
        assert found is not None
        assert found.rank == victim
    assert time.monotonic() - began < 60.0  # no wait ran out
    for detector in detectors[:victim]:
        detector.close()
        assert not detector._listener.is_alive()


def test_a_rank_that_does_not_fail_with_the_others_is_silent() -> None:
    """Rank 2 of 20 is stopped. Its neighbors say so, and the ranks that are not its neighbors hear it."""
    detectors, _ = connected(20)
    others = [detector for detector in detectors if detector.rank != 2]

    def find(detector: FailureDetector) -> Loss | None:
        detector.announce("a collective failed")
        lost = detector.find(None, "a collective failed: Timed out", 0.5)
        if lost is not None:
            detector.announce(lost.reason, lost.rank)
        return lost

    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        found = list(threads.map(find, others))
    assert all(each is not None and each.rank == 2 for each in found)
    assert any(each == Loss(2, "it is silent, and a collective failed: Timed out") for each in found)
    for detector in detectors:
        detector.close()


def test_nobody_is_lost_where_all_fail_together() -> None:
    detectors, _ = connected(3)
    for detector in detectors:
        detector.announce("another error")
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda detector: detector.find(None, "", 60.0), detectors)) == [None] * 3
    assert time.monotonic() - began < 60.0  # no wait ran out
    for detector in detectors:
        detector.close()
