"""Headers over sockets of their own: TCP connections between some ranks of a group.

A message of a process group is posted and waited for with the help of another thread, and a receive that is posted
when a profiler starts, and done when it has stopped, corrupts the memory of the process (torch 2.13). A header is sent
and received by the calling thread alone, in a few microseconds; a socket shows at once that the peer has died; and the
kernel keeps the headers of a peer that is some calls ahead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from ringtile.errors import RingMismatchError
from ringtile.transport.agreement import (
    HEADER_BYTES,
    HEADER_VERSION,
    MAX_REASON,
    HeaderValue,
    PeerGoneError,
    decode,
    describe_difference,
)

_TOKEN_BYTES = 16
_INTRODUCTION_SECONDS = 5.0
_ROOM_SECONDS = 0.5  # that the rest of a last word waits for room
_MAX_STRANGERS = 256  # that a rank listens to at once; then the first of them is no peer
_INTRODUCTION = struct.Struct(f"<I{_TOKEN_BYTES}s")  # the rank that connects, and the token of the rank that listens


class SocketChannel:
    """Carries headers between this rank and others, in order: a connected socket for each of them."""

    def __init__(self, sockets: dict[int, socket.socket], timeout_seconds: float) -> None:
        self._sockets = sockets
        self._timeout_seconds = timeout_seconds
        self._parts = dict.fromkeys(sockets, b"")  # the part of a header that has arrived
        self._sends_last = threading.Lock()  # the thread that passes news on, and the rank's own
        for connection in sockets.values():
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._close = weakref.finalize(self, close_all, sockets.values())
        to_close_in_child.add(self)

    def send(self, header: bytes, peers: Collection[int]) -> None:
        """Send HEADER_BYTES bytes to these peers, without waiting for their receives.

        PeerGoneError: one is too far behind. One that has left is for `receive` to notice, after what it said.
        """
        for peer in peers:
            self._send(header, peer)

    def _send(self, header: bytes, peer: int) -> None:
        connection = self._sockets[peer]
        try:
            try:
                sent = connection.send(header)
            except BlockingIOError:
                sent = 0
            if sent < HEADER_BYTES:  # the socket is full: the peer is hundreds of calls behind
                connection.settimeout(self._timeout_seconds)
                connection.sendall(header[sent:])
                connection.setblocking(False)
        except ConnectionError:
            return
        except OSError as error:
            raise PeerGoneError(peer, _reason(error)) from None

    def send_last(self, header: bytes) -> None:
        """Send it to every peer that can still be reached, at once or not at all.

        A peer that reads no more, so that part of it has no room, finds its connection ended instead of a part: what
        came next would be read as the rest of it.
        """
        for connection in self._sockets.values():
            with self._sends_last, contextlib.suppress(OSError):
                sent, until = connection.send(header), time.monotonic() + _ROOM_SECONDS
                while sent < len(header) and (left := until - time.monotonic()) > 0:
                    if _has_room(connection, left):
                        sent += connection.send(header[sent:])
                if sent < len(header):
                    connection.shutdown(socket.SHUT_WR)

    def receive(self, peer: int) -> bytes | None:
        """Return the next header of a peer, if it has arrived. PeerGoneError: the peer has closed and all is read."""
        part = self._parts[peer]
        try:
            arrived = self._sockets[peer].recv(HEADER_BYTES - len(part))
        except BlockingIOError:
            return None
        except OSError as error:
            raise PeerGoneError(peer, _reason(error)) from None
        if not arrived:
            raise PeerGoneError(peer, "it has closed the connection")
        part += arrived
        complete = len(part) == HEADER_BYTES
        self._parts[peer] = b"" if complete else part
        return part if complete else None

    def wait(self, peers: Collection[int], timeout_seconds: float | None = None) -> None:
        """Return when there is something to receive from one of these peers.

        Raises PeerGoneError after the timeout; None: that of the group.
        """
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        poll = select.poll()
        for peer in peers:
            poll.register(self._sockets[peer], select.POLLIN)
        if not poll.poll(seconds * 1000):
            raise PeerGoneError(min(peers), f"nothing came for {seconds:g} s")

    def shut_down(self) -> None:
        """End the connections, which another thread may be waiting for; `close` frees them."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the channel; peers may still receive what was sent before."""
        self._close()


def _has_room(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


# A forked process, such as a DataLoader worker, would keep the connections of a rank that dies.
to_close_in_child: weakref.WeakSet[Any] = weakref.WeakSet()


def _close_in_child() -> None:
    for each in list(to_close_in_child):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


def close_all(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


# ---- connecting ---------------------------------------------------------------------------------


class _Address(NamedTuple):
    """Where a rank listens, and what it wants to hear first."""

    host: str
    port: int
    token: str

    @classmethod
    def of(cls, listener: socket.socket) -> _Address:
        host, port = listener.getsockname()[:2]
        return cls(host, port, secrets.token_hex(_TOKEN_BYTES))


def connect(
    rank: int,
    wires: Sequence[Collection[int]],
    timeout_seconds: float,
    exchange: Callable[[bytes], Mapping[int, bytes]],
) -> list[SocketChannel]:
    """Connect this rank to the ranks of each wire, which connect to it at the same time, by sockets of each wire's own.

    exchange: sends HEADER_BYTES bytes to all these ranks, or more, and returns theirs. It is called twice: with where a
    rank listens, and once it has connected, so that no rank waits for one that cannot.

    Raises PeerGoneError, on every rank where one cannot listen or connect, and RingMismatchError where a rank runs
    another version of ringtile.
    """
    deadline = time.monotonic() + timeout_seconds
    connected: list[dict[int, socket.socket]] = [{} for _ in wires]
    with contextlib.ExitStack() as listening:
        listeners: list[socket.socket] = []
        failure: PeerGoneError | None = None
        try:
            # With room for all that connect before this rank accepts, strangers too.
            listeners += [listening.enter_context(_listen(len(peers) + _MAX_STRANGERS)) for peers in wires]
        except OSError as error:
            failure = PeerGoneError(rank, f"it cannot listen for other ranks: {_reason(error)}")
        own = [_Address.of(each) for each in listeners]
        addresses = _exchange_addresses(rank, own, failure, exchange)
        try:
            try:
                for i, peers in enumerate(wires):
                    for peer in (peer for peer in peers if peer < rank):
                        # Half of the time: the others wait as long for the word that it failed.
                        until = deadline - timeout_seconds / 2
                        connected[i][peer] = _connect(rank, peer, addresses[peer][i], until)
            except PeerGoneError as error:
                failure = error
            _exchange_failures(rank, failure, exchange)
            for i, peers in enumerate(wires):
                connected[i] |= _accept(listeners[i], own[i].token, {peer for peer in peers if peer > rank}, deadline)
        except BaseException:
            for each in connected:
                close_all(each.values())
            raise
    return [SocketChannel(each, timeout_seconds) for each in connected]


def _hello(failure: str, **fields: Any) -> bytes:
    said = failure[:MAX_REASON].encode("ascii", "replace").decode()
    return json.dumps({"version": HEADER_VERSION, **fields, "failure": said}).encode("ascii").ljust(HEADER_BYTES)


def _exchange_failures(
    rank: int, failure: PeerGoneError | None, exchange: Callable[[bytes], Mapping[int, bytes]]
) -> None:
    """Tell the others why this rank goes no further, if so, and hear it of them. PeerGoneError: one does not."""
    said = "" if failure is None else f"it cannot reach rank {failure.peer}: {failure.reason}"
    answers = exchange(_hello(failure=said))
    if failure is not None:
        raise failure
    for peer, answer in sorted(answers.items()):
        if reason := decode(answer).get("failure"):
            raise PeerGoneError(peer, str(reason))


def _exchange_addresses(
    rank: int,
    own: Sequence[_Address],
    failure: PeerGoneError | None,
    exchange: Callable[[bytes], Mapping[int, bytes]],
) -> dict[int, list[_Address]]:
    mine: dict[str, HeaderValue] = {"version": HEADER_VERSION}
    hellos = exchange(_hello(failure="" if failure is None else failure.reason, addresses=own))
    if failure is not None:
        raise failure
    addresses = {}
    for peer, hello in hellos.items():
        fields: dict[str, Any] = decode(hello)
        if fields.get("version") != HEADER_VERSION:
            theirs = {"version": fields.get("version", "none")}
            raise RingMismatchError(describe_difference(rank, mine, peer, theirs, 1, "connecting"))
        if reason := fields.get("failure"):
            raise PeerGoneError(peer, str(reason))
        addresses[peer] = [_Address(str(host), int(port), str(token)) for host, port, token in fields["addresses"]]
    return addresses


def _listen(backlog: int) -> socket.socket:
    for family, host in _own_hosts():
        with contextlib.suppress(OSError):  # the name of this host may stand for an address that it does not have
            return socket.create_server((host, 0), family=family, backlog=backlog)
    return socket.create_server(("127.0.0.1", 0), backlog=backlog)


def _own_hosts() -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of this host that peers may reach, by the rule by which gloo chooses one."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return [(socket.AF_INET, _address_of(interface))]
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]


def _address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface, such as eth0."""
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        reply = fcntl.ioctl(any_socket, get_address, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(reply[20:24])


def _connect(rank: int, peer: int, address: _Address, deadline: float) -> socket.socket:
    try:
        connection = socket.create_connection((address.host, address.port), max(0.1, deadline - time.monotonic()))
        connection.sendall(_INTRODUCTION.pack(rank, bytes.fromhex(address.token)))
    except OSError as error:
        raise PeerGoneError(
            peer,
            f"no connection to {address.host} port {address.port}: {_reason(error)}; GLOO_SOCKET_IFNAME names the "
            f"network interface that its host should use",
        ) from None
    return connection


def _accept(listener: socket.socket, token: str, missing: set[int], deadline: float) -> dict[int, socket.socket]:
    """Return the connections of these peers.

    Whoever does not know the token, or is slow to say it, is no peer; nobody waits for another.
    """
    accepted: dict[int, socket.socket] = {}
    said: dict[socket.socket, bytes] = {}  # by whom it is not known yet, in the order in which they came
    until: dict[socket.socket, float] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as undo:
        undo.callback(close_all, accepted.values())
        undo.callback(close_all, said)

        def drop(stranger: socket.socket) -> None:
            selector.unregister(stranger)
            del said[stranger], until[stranger]

        selector.register(listener, selectors.EVENT_READ)
        while missing - set(accepted):
            now = time.monotonic()
            if now >= deadline:
                raise PeerGoneError(min(missing - set(accepted)), "it did not connect")
            for key, _ in selector.select(min([deadline, *until.values()]) - now):
                if key.fileobj is listener:
                    with contextlib.suppress(ConnectionError, BlockingIOError):  # it has gone again
                        try:
                            stranger, _ = listener.accept()
                        except OSError as error:
                            if error.errno not in (errno.EMFILE, errno.ENFILE):
                                raise
                            reason = f"this rank cannot accept its connection: {_reason(error)}"
                            raise PeerGoneError(min(missing - set(accepted)), reason) from None
                        stranger.setblocking(False)
                        selector.register(stranger, selectors.EVENT_READ)
                        said[stranger], until[stranger] = b"", time.monotonic() + _INTRODUCTION_SECONDS
                    continue
                stranger = cast(socket.socket, key.fileobj)
                try:
                    arrived = stranger.recv(_INTRODUCTION.size - len(said[stranger]))
                except OSError:
                    arrived = b""
                said[stranger] += arrived
                if arrived and len(said[stranger]) < _INTRODUCTION.size:
                    continue
                peer = _introduced(said[stranger], token)
                drop(stranger)
                if peer in missing - set(accepted):
                    accepted[peer] = stranger
                else:
                    stranger.close()
            while until and (len(until) > _MAX_STRANGERS or min(until.values()) <= time.monotonic()):
                stranger = next(iter(until))
                drop(stranger)
                stranger.close()
        undo.pop_all()
        close_all(said)
    return accepted


def _introduced(said: bytes, token: str) -> int:
    """Return the rank that says so; -1: it does not know the token."""
    if len(said) < _INTRODUCTION.size:
        return -1
    peer, theirs = _INTRODUCTION.unpack(said)
    return int(peer) if secrets.compare_digest(theirs, bytes.fromhex(token)) else -1
