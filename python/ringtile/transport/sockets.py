"""Headers over sockets of their own, between some ranks of a group.

A message of a process group is posted and waited for with the help of another thread, and a receive that is posted
when a profiler starts, and done when it has stopped, corrupts the memory of the process (torch 2.13). A header is sent
and received by the calling thread alone, in a few microseconds; a socket shows at once that the peer has died; and the
kernel keeps the headers of a peer that is some calls ahead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from ringtile.transport.agreement import HEADER_BYTES, PeerGoneError
from ringtile.transport.store import Meeting

_TOKEN_BYTES = 16
_INTRODUCTION_SECONDS = 5.0
_ROOM_SECONDS = 0.5  # that the rest of a last word waits for room
_MAX_STRANGERS = 256  # that a rank listens to at once; then the first of them is no peer
_INTRODUCTION = struct.Struct(f"<IB{_TOKEN_BYTES}s")  # who connects, by which wire, and the token of who listens


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

_End = tuple[int, int]  # of a connection: the number of its wire, and the peer


def connect(meeting: Meeting, wires: Sequence[Collection[int]]) -> list[dict[int, socket.socket]]:
    """Connect this rank to the ranks of each wire, which connect to it at the same time, by sockets of each wire's own.

    The higher of two ranks connects to the lower: within a host by a Unix socket, which has no file and which only
    processes of its network namespace can reach, else by TCP. A rank to which no other host connects opens no port.
    Whoever does not know the token that a rank has told the others, or is slow to say it, is no peer.
    Raises PeerGoneError, on every rank where one cannot listen or connect.
    """
    rank, hosts = meeting.rank, meeting.hosts
    ends = [(i, peer) for i, peers in enumerate(wires) for peer in peers]
    awaited = {(i, peer) for i, peer in ends if peer > rank}
    token = secrets.token_bytes(_TOKEN_BYTES)
    connected: dict[_End, socket.socket] = {}
    with contextlib.ExitStack() as listening, contextlib.ExitStack() as on_failure:
        on_failure.callback(lambda: close_all(connected.values()))
        listeners: list[socket.socket] = []
        failure: PeerGoneError | None = None
        address = _Address(token.hex())
        try:
            # With room for all that connect before this rank accepts, strangers too.
            backlog = len(awaited) + _MAX_STRANGERS
            if any(hosts[peer] == hosts[rank] for _, peer in awaited):
                listeners.append(listening.enter_context(_listen_on_host(backlog)))
                address = address._replace(name=listeners[-1].getsockname()[1:].decode("ascii"))
            if any(hosts[peer] != hosts[rank] for _, peer in awaited):
                listeners.append(listening.enter_context(_listen(backlog, meeting.store_host)))
                host, port = listeners[-1].getsockname()[:2]
                address = address._replace(host=host, port=port)
        except OSError as error:
            failure = PeerGoneError(rank, f"it cannot listen for other ranks: {_reason(error)}")
        addresses = [_Address(*each["address"]) for each in meeting.say(failure, address=address)]
        # Half of the time: the others wait as long for the word that it failed.
        until = meeting.deadline - meeting.timeout_seconds / 2
        try:
            for i, peer in ends:
                if peer < rank:
                    hello = _INTRODUCTION.pack(rank, i, bytes.fromhex(addresses[peer].token))
                    connected[i, peer] = _connect(peer, addresses[peer], hosts[peer] == hosts[rank], hello, until)
        except PeerGoneError as error:
            failure = error
        meeting.say(failure)
        connected |= _accept(listeners, token, awaited, meeting.deadline)
        on_failure.pop_all()
    return [{peer: connected[i, peer] for peer in peers} for i, peers in enumerate(wires)]


class _Address(NamedTuple):
    """Where a rank listens, and what it wants to hear first. name: of its Unix socket."""

    token: str
    name: str = ""
    host: str = ""
    port: int = 0


def _listen_on_host(backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0ringtile-{secrets.token_hex(8)}")
    listener.listen(backlog)
    return listener


def _listen(backlog: int, store_host: str) -> socket.socket:
    refused = "this host has no address that others can reach; GLOO_SOCKET_IFNAME names the network interface to use"
    for family, host in _own_addresses(store_host):
        with contextlib.suppress(OSError):  # the name of this host may stand for an address that it does not have
            return socket.create_server((host, 0), family=family, backlog=backlog)
        refused = f"this host cannot listen on {host}; GLOO_SOCKET_IFNAME names the network interface to use"
    raise OSError(refused)


def _own_addresses(store_host: str) -> Iterator[tuple[socket.AddressFamily, str]]:
    """Yield the addresses of this host that peers may reach, the best first.

    That of the interface that GLOO_SOCKET_IFNAME names, and no other; or that from which this host reaches the host of
    the store (MASTER_ADDR), those that its name stands for, and those of its interfaces; but no loopback address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        yield socket.AF_INET, _address_of(interface)
        return
    for family, _, _, _, address in _resolve(store_host):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as anywhere:
            anywhere.connect((address[0], 9))  # sends nothing
            if not _is_loopback(own := anywhere.getsockname()[0]):
                yield family, own
    for family, _, _, _, address in _resolve(socket.gethostname()):
        if not _is_loopback(own := str(address[0])):
            yield family, own
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            if not _is_loopback(own := _address_of(name)):
                yield socket.AF_INET, own


def _resolve(host: str) -> list[Any]:
    try:
        return list(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM))
    except OSError:
        return []


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface, such as eth0."""
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        reply = fcntl.ioctl(any_socket, get_address, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(reply[20:24])


def _connect(peer: int, address: _Address, on_host: bool, hello: bytes, deadline: float) -> socket.socket:
    seconds = max(0.1, deadline - time.monotonic())
    try:
        if on_host:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(seconds)
            connection.connect(f"\0{address.name}")
        else:
            connection = socket.create_connection((address.host, address.port), seconds)
        connection.sendall(hello)
        return connection
    except OSError as error:
        where = "its Unix socket" if on_host else f"{address.host} port {address.port}"
        advice = "" if on_host else "; GLOO_SOCKET_IFNAME names the network interface that its host should use"
        raise PeerGoneError(peer, f"no connection to {where}: {_reason(error)}{advice}") from None


def _accept(
    listeners: Sequence[socket.socket], token: bytes, missing: set[_End], deadline: float
) -> dict[_End, socket.socket]:
    """Return the connections of these peers. Nobody waits for another."""
    accepted: dict[_End, socket.socket] = {}
    said: dict[socket.socket, bytes] = {}  # by whom it is not known yet, in the order in which they came
    until: dict[socket.socket, float] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as undo:
        undo.callback(close_all, accepted.values())
        undo.callback(close_all, said)

        def drop(stranger: socket.socket) -> None:
            selector.unregister(stranger)
            del said[stranger], until[stranger]

        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        while missing - set(accepted):
            now = time.monotonic()
            if now >= deadline:
                raise PeerGoneError(min(missing - set(accepted))[1], "it did not connect")
            for key, _ in selector.select(min([deadline, *until.values()]) - now):
                if key.fileobj in listeners:
                    with contextlib.suppress(ConnectionError, BlockingIOError):  # it has gone again
                        try:
                            stranger, _ = cast(socket.socket, key.fileobj).accept()
                        except OSError as error:
                            if error.errno not in (errno.EMFILE, errno.ENFILE):
                                raise
                            reason = f"this rank cannot accept its connection: {_reason(error)}"
                            raise PeerGoneError(min(missing - set(accepted))[1], reason) from None
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
                end = _introduced(said[stranger], token)
                drop(stranger)
                if end in missing - set(accepted):
                    accepted[end] = stranger
                else:
                    stranger.close()
            while until and (len(until) > _MAX_STRANGERS or min(until.values()) <= time.monotonic()):
                stranger = next(iter(until))
                drop(stranger)
                stranger.close()
        undo.pop_all()
        close_all(said)
    return accepted


def _introduced(said: bytes, token: bytes) -> _End | None:
    """Return whose connection it is; None: no peer's."""
    if len(said) < _INTRODUCTION.size:
        return None
    peer, wire, theirs = _INTRODUCTION.unpack(said)
    return (wire, peer) if secrets.compare_digest(theirs, token) else None
