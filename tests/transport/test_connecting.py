"""How the ranks of a group meet and connect: strangers, ranks that do not come, addresses, a full connection."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import errno
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ringtile import PeerLostError, RingMismatchError
from ringtile.transport import agreement, failures, groups, rendezvous, sockets
from ringtile.transport.agreement import HEADER_BYTES
from ringtile.transport.rendezvous import Rendezvous


def all_meet(world_size: int, function: Callable[[Rendezvous], Any], seconds: float = 40.0) -> list[Any]:
    """Call a function on each of these ranks, which have met in one store; return what each returns or raises."""
    store = dist.HashStore()

    def join(rank: int) -> Any:
        try:
            return function(Rendezvous(store, rank, world_size, seconds))
        except agreement.PeerGoneError as gone:
            return gone

    with concurrent.futures.ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(join, range(world_size)))


@pytest.mark.parametrize("world_size", [8, 64, pytest.param(256, marks=pytest.mark.long)])
def test_a_rank_meets_and_connects_by_the_same_few_operations_of_the_store(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts have 8 ranks. A rank reads what few others say, and an answer of rank 0 that grows by its place alone."""
    operations: Counter[tuple[str, int]] = Counter()
    rank_of = threading.local()

    class Counted:
        def __init__(self, prefix: str, store: dist.Store) -> None:
            self._store = dist.PrefixStore(prefix, store)

        def __getattr__(self, name: str) -> Any:
            def operate(*arguments: Any) -> Any:
                operations["operations", rank_of.rank] += 1
                if name == "multi_get":
                    operations["keys read", rank_of.rank] += len(arguments[0])
                return getattr(self._store, name)(*arguments)

            return operate

    def join(rank: int) -> int:
        rank_of.rank = rank
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        meeting = Rendezvous(store, rank, world_size, 40.0)
        meeting.hosts = tuple(peer // 8 * 8 for peer in range(world_size))
        on_host = [peer for peer in range(rank // 8 * 8, rank // 8 * 8 + 8) if peer != rank]
        wires = [agreement.tree_neighbors(rank, world_size), failures.neighbors(rank, world_size), on_host]
        links = sockets.connect(meeting, wires)
        for wire in links:
            sockets.close_all(wire.values())
        return sum(map(len, links))

    monkeypatch.setattr(rendezvous, "PrefixStore", Counted)
    monkeypatch.setattr(rendezvous, "_host_id", lambda: f"host {rank_of.rank // 8}")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with concurrent.futures.ThreadPoolExecutor(world_size) as threads:
        num_sockets = list(threads.map(join, range(world_size)))
    assert max(num_sockets) <= 3 + failures.MAX_NEIGHBORS + 7
    for rank in range(world_size):
        assert operations["operations", rank] <= (22 if rank == 0 else 13)
        assert operations["keys read", rank] <= 3 + 3 + failures.MAX_NEIGHBORS + 7 + (
            3 * world_size if rank == 0 else 0
        )


def to_all_others(meeting: Rendezvous) -> list[dict[int, socket.socket]]:
    return sockets.connect(meeting, [[peer for peer in range(len(meeting.hosts)) if peer != meeting.rank]])


def on_two_hosts(meeting: Rendezvous) -> Rendezvous:
    meeting.hosts = tuple(range(len(meeting.hosts)))
    return meeting


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hosts", [1, 2])
def test_strangers_that_say_nothing_delay_no_rank(hosts: int) -> None:
    """They are there before the peer; one of them knows no token, one is gone. Within a host there is no port."""
    strangers, say = [], Rendezvous.say

    def say_and_be_slow(meeting: Rendezvous, failure: Any = None, **fields: Any) -> list[dict[str, Any]]:
        said = say(meeting, failure, **fields)
        if meeting.rank == 1 and "token" in fields:
            name, host, port = (said[0].get(key) for key in ("name", "host", "port"))
            assert (name is None, port is not None) == (hosts == 2, hosts == 2)
            for text in (b"", b"x", b"x" * sockets._INTRODUCTION.size, None):
                strangers.append(socket.socket(socket.AF_UNIX) if hosts == 1 else socket.socket())
                strangers[-1].connect(f"\0{name}" if hosts == 1 else (host, port))
                strangers[-1].sendall(text or b"")
            strangers[-1].close()
        return said

    began = time.monotonic()
    with mock.patch.object(Rendezvous, "say", say_and_be_slow):
        links = all_meet(2, lambda meeting: to_all_others(on_two_hosts(meeting) if hosts == 2 else meeting))
    assert time.monotonic() - began < 20.0  # of the 40 s in which ranks must meet
    first, second = (sockets.SocketChannel(*each, 20.0) for each in links)
    second.send(b"x" * HEADER_BYTES, [0])
    assert first.wait([1], 20.0)
    assert first.receive(1) == b"x" * HEADER_BYTES
    assert strangers[2].recv(1) == b""  # closed: it said what no peer says
    for each in (first, second, *strangers):
        each.close()


def test_a_peer_that_does_not_come_or_connect_is_named_in_time() -> None:
    def connect(meeting: Rendezvous) -> Any:
        return to_all_others(meeting) if meeting.rank == 0 else [meeting.say(token=""), meeting.say()]

    began = time.monotonic()
    with pytest.raises(agreement.PeerGoneError, match=r"nothing came for 0\.1 s") as gone:
        Rendezvous(dist.HashStore(), 0, 2, 0.1)
    assert gone.value.peer == 1
    assert str(all_meet(3, connect, 0.5)[0]) == "it did not connect"
    assert time.monotonic() - began < 20.0  # of the 40 s in which ranks must meet


def test_a_rank_that_does_not_come_is_named_by_all() -> None:
    """By rank 0, which reads what each says, and by those that wait for its answer."""
    store = dist.HashStore()

    def join(rank: int) -> Any:
        with pytest.raises(agreement.PeerGoneError, match=r"nothing came for 0\.5 s") as gone:
            Rendezvous(store, rank, 4, 0.5)
        return gone.value.peer

    for absent in (0, 2):
        store = dist.HashStore()
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            assert list(threads.map(join, {0, 1, 2, 3} - {absent})) == [absent] * 3


@pytest.mark.timeout(60)
def test_a_rank_that_cannot_be_reached_is_named_by_all_at_once() -> None:
    """As behind a firewall: no rank waits for those that raised."""
    say = Rendezvous.say

    def unreachable(meeting: Rendezvous, failure: Any = None, **fields: Any) -> list[dict[str, Any]]:
        if meeting.rank == 0 and "token" in fields:
            fields["port"] = 1  # on which nobody listens
        return say(meeting, failure, **fields)

    began = time.monotonic()
    with mock.patch.object(Rendezvous, "say", unreachable):
        gone = all_meet(3, lambda meeting: to_all_others(on_two_hosts(meeting)))
    assert time.monotonic() - began < 10
    assert [each.peer for each in gone] == [1, 0, 0]
    assert gone[0].reason.startswith("it cannot reach rank 0: no connection to ")
    assert all("port 1: Connection refused; GLOO_SOCKET_IFNAME" in each.reason for each in gone)


@pytest.mark.timeout(60)
def test_a_rank_without_descriptors_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    listen, failed = sockets._listen_on_host, []

    def once(backlog: int) -> socket.socket:
        with lock:
            if not failed:
                failed.append(threading.get_ident())
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return listen(backlog)

    lock = threading.Lock()
    monkeypatch.setattr(sockets, "_listen_on_host", once)
    gone = all_meet(3, to_all_others)
    assert len({each.peer for each in gone}) == 1
    assert {each.reason for each in gone} == {"it cannot listen for other ranks: Too many open files"}


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_long_timeout_is_several_waits(monkeypatch: pytest.MonkeyPatch, hosts: int) -> None:
    """A wait counts milliseconds in an int. Here each ends after 10 ms, and a rank is late at every step."""

    def late(meeting: Rendezvous) -> bytes | None:
        peer = 1 - meeting.rank
        meeting = on_two_hosts(meeting) if hosts == 2 else meeting
        time.sleep(0.2 * meeting.rank)
        (links,) = to_all_others(meeting)
        channel = sockets.SocketChannel(links, meeting.timeout_seconds)
        time.sleep(0.2 * meeting.rank)
        channel.send(b"x" * HEADER_BYTES, [peer])
        assert channel.wait([peer], meeting.timeout_seconds)
        return channel.receive(peer)

    monkeypatch.setattr(sockets, "LONGEST_WAIT", 0.01)
    assert all_meet(2, late, sockets.LONGEST_SECONDS) == [b"x" * HEADER_BYTES] * 2
    assert not sockets.SocketChannel({}, 1.0).wait([], 0.03)


def test_a_store_that_has_ended_is_named_at_once() -> None:
    """A rank that comes after the one that serves the store has left. A new connection would wait for the store."""

    class Group:
        _device_types = (torch.device("cpu"),)
        rank, size, recv = (lambda self: 1), (lambda self: 2), mock.Mock(side_effect=RuntimeError)

        def _get_backend(self, device: torch.device) -> Any:
            backend = mock.Mock()
            backend.name.return_value, backend.options._timeout = "gloo", datetime.timedelta(seconds=300)
            return backend

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    del server
    group, began = Group(), time.monotonic()
    with (
        mock.patch.object(groups, "_get_process_group_store", return_value=dist.PrefixStore("0", client)),
        mock.patch.object(dist, "get_process_group_ranks", return_value=[0, 1]),
    ):
        transport = groups.ProcessGroupTransport(group)  # type: ignore[arg-type]
        with pytest.raises(PeerLostError, match=r"rank 0 was lost .*the store of the group has ended"):
            transport.find_hosts()
    assert time.monotonic() - began < 20.0


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous, "HEADER_VERSION", 0)
    with pytest.raises(agreement.PeerGoneError):
        Rendezvous(store, 1, 2, 0.01)
    monkeypatch.undo()
    with pytest.raises(RingMismatchError, match=r"version in call 1 \(connecting\): rank 0 has 1, rank 1 has 0"):
        Rendezvous(store, 0, 2, 1.0)


def test_an_address_is_never_the_loopback_that_a_name_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in /etc/hosts of Debian: this host's name, and so MASTER_ADDR on the first host, is 127.0.1.1."""
    at = {"here": "127.0.1.1", "there": "10.1.2.3"}

    def resolve(host: str, *args: object, **kwargs: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (at[host], 0))] if host in at else []

    class Anywhere(socket.socket):
        def connect(self, address: Any) -> None:
            self.own = "10.1.2.9" if address[0].startswith("10.") else "127.0.0.1"

        def getsockname(self) -> Any:
            return self.own, 0

    addresses = {"lo": "127.0.0.1", "eth0": "10.1.2.9"}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(sockets.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(sockets.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(sockets.socket, "if_nameindex", lambda: list(enumerate(addresses)))
    monkeypatch.setattr(sockets, "_address_of", addresses.get)
    with mock.patch.object(sockets.socket, "socket", Anywhere):
        assert list(sockets._own_addresses("here")) == [(socket.AF_INET, "10.1.2.9")]
        assert next(sockets._own_addresses("there")) == (socket.AF_INET, "10.1.2.9")


@pytest.mark.parametrize("is_header", [False, True])
def test_what_has_no_room_is_nopart_of_the_next_word(is_header: bool) -> None:
    """The peer reads nothing until the connection is full, then everything, and then there are more."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 50_000)
    one = socket.create_connection(listener.getsockname())
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 50_000)
    other, _ = listener.accept()
    sender = sockets.SocketChannel({0: one}, 0.3)
    other.settimeout(0.2)
    received, numbers = bytearray(), iter(range(10**6))
    one.sendall(b"y" * 1000)  # else the kernel's pages, and so its room, end where a word does

    def read_all() -> None:
        with contextlib.suppress(TimeoutError):
            while part := other.recv(1 << 20):
                received.extend(part)

    for fills in (is_header, False, False):
        with pytest.raises(agreement.PeerGoneError, match="it reads nothing") if fills else contextlib.nullcontext():
            while fills:
                sender.send(str(next(numbers)).encode().rjust(HEADER_BYTES), [0])
        for _ in range(3000):
            sender.send_last(str(next(numbers)).encode().rjust(HEADER_BYTES))
        read_all()
    words = [bytes(received[i : i + HEADER_BYTES]) for i in range(1000, len(received) - HEADER_BYTES, HEADER_BYTES)]
    assert len(words) > 40
    assert all(word.strip().isdigit() and b" " not in word.strip() for word in words)
    for each in (sender, other, listener):
        each.close()


# ---- headers through the store ------------------------------------------------------------------


class Store(dist.HashStore):
    """The store of a group, until it ends."""

    ended = False

    def set(self, key: str, value: Any) -> None:
        if self.ended:
            raise dist.DistStoreError("Connection reset by peer")
        super().set(key, value)


def in_store(timeout_seconds: float = 5.0) -> tuple[Store, list[rendezvous.StoreChannel]]:
    store = Store()
    return store, [rendezvous.StoreChannel(store, rank, [1 - rank], timeout_seconds) for rank in (0, 1)]


def header(number: int) -> bytes:
    return str(number).encode().ljust(HEADER_BYTES)


def take(channel: sockets.SocketChannel, peer: int) -> bytes:
    assert channel.wait([peer], 20.0)
    received = channel.receive(peer)
    assert received is not None
    return received


def test_headers_in_the_store_stay_in_order_and_the_last_ones_arrive() -> None:
    _, (first, second) = in_store()
    for number in range(5):
        first.send(header(number), [1])
    first.send_last(header(5))
    first.close()
    assert [take(second, 0) for _ in range(6)] == [header(number) for number in range(6)]
    second.close()
    with pytest.raises(agreement.PeerGoneError, match="it has closed the connection"):
        second.receive(0)


def test_a_group_that_was_idle_for_longer_than_its_timeout_is_awake_at_once() -> None:
    """Its threads wait, and look for nothing meanwhile."""
    _, channels = in_store(0.2)
    time.sleep(0.2)
    operations = [
        mock.patch.object(Store, name, side_effect=AssertionError) for name in ("check", "get", "add", "wait")
    ]
    with contextlib.ExitStack() as forbidden:
        for each in operations:
            forbidden.enter_context(each)
        time.sleep(0.3)
    for rank, channel in enumerate(channels):
        channel.send(header(rank), [1 - rank])
    assert [take(channel, 1 - rank) for rank, channel in enumerate(channels)] == [header(1), header(0)]
    for channel in channels:
        channel.close()
        assert not any(carrier.is_alive() for carrier in channel._carriers)


def test_the_end_of_the_store_is_told() -> None:
    store, (first, _) = in_store()
    store.ended = True
    first.send(header(0), [1])
    heard = agreement.decode(take(first, 1))
    assert (heard["lost"], heard["reason"]) == (1, "the store of the group has ended: Connection reset by peer")
