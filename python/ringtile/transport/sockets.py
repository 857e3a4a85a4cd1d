"""How the ranks of a group connect, and what carries headers and news between them.

Not messages of the process group: those take another thread, and a receive that is posted when a profiler starts, and
done when it has stopped, corrupts the memory of the process (torch 2.13). The calling thread alone sends and receives a
header over a socket, in a few microseconds; a socket shows at once that the peer has died; and the kernel keeps the
headers of a peer that is some calls ahead.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, cast

from ringtile.transport.agreement import HEADER_BYTES, PeerGoneError

if TYPE_CHECKING:
    from ringtile.transport.rendezvous import Rendezvous

_TOKEN_BYTES = 16
_INTRODUCTION = struct.Struct(f"<IB{_TOKEN_BYTES}s")  # who connects, by which wire, and the token of who listens
_MAX_STRANGERS = 256  # that a rank listens to at once; then the first of them is no peer
LONGEST_SECONDS = 1e9  # a timeout of more, such as timedelta.max, is this one: clocks and the kernel can add it up
LONGEST_WAIT = 3600.0  # seconds of one wait, which counts milliseconds in an int; a longer one is several


class SocketChannel:
    """Carries headers between this rank and others, in order: a connected socket for each of them.

    timeout_seconds: that of the group. free: close the sockets, in a forked process without ending the connections.
    """

    def __init__(self, sockets: dict[int, socket.socket], timeout_seconds: float) -> None:
        self._sockets = sockets
        self.timeout_seconds = timeout_seconds
        self._parts = dict.fromkeys(sockets, b"")  # the part of a header that has arrived
        patience = struct.pack("ll", *divmod(int(timeout_seconds * 1e6), 10**6))  # of the kernel, for room in a send
        for connection in sockets.values():
            connection.setblocking(True)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.free = weakref.finalize(self, close_all, sockets.values())
        to_free_in_child.add(self)

    def send(self, header: bytes, peers: Collection[int]) -> None:
        """Send HEADER_BYTES bytes to these peers, without waiting for their receives.

        PeerGoneError: one is hundreds of calls behind. One that has left is for `receive` to notice, after what it
        said.
        """
        for peer in peers:
            try:
                self._sockets[peer].sendall(header)
            except ConnectionError:
                pass
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._sockets[peer].shutdown(socket.SHUT_WR)  # it may have got a part, as in `send_last`
                raise PeerGoneError(peer, f"it reads nothing: {_reason(error)}") from None

    def send_last(self, header: bytes) -> None:
        """Send it to every peer that can still be reached, at once or not at all.

        A peer that reads no more, so that only a part has room, finds its connection ended after it: what came next
        would be read as the rest.
        """
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                if connection.send(header, socket.MSG_DONTWAIT) < len(header):
                    connection.shutdown(socket.SHUT_WR)

    def receive(self, peer: int) -> bytes | None:
        """Return the next header of a peer, if it has arrived. PeerGoneError: the peer has closed and all is read."""
        part = self._parts[peer]
        try:
            arrived = self._sockets[peer].recv(HEADER_BYTES - len(part), socket.MSG_DONTWAIT)
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

    def wait(self, peers: Collection[int], seconds: float) -> bool:
        """Return whether there is something to receive from one of these peers, as soon as there is."""
        poll, deadline = select.poll(), time.monotonic() + seconds
        for peer in peers:
            poll.register(self._sockets[peer], select.POLLIN)
        while not (arrived := poll.poll(part_of(deadline) * 1000)) and time.monotonic() < deadline:
            pass
        return bool(arrived)

    def close(self) -> None:
        """End the connections, for which another thread may be waiting; peers still receive what was sent before."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def part_of(deadline: float) -> float:
    """Return the seconds that one wait until the deadline may take."""
    return min(max(deadline - time.monotonic(), 0.0), LONGEST_WAIT)


def close_all(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _free_in_child() -> None:
    for each in list(to_free_in_child):
        each.free()


# A forked process, such as a DataLoader worker, would keep the connections of a rank that dies.
to_free_in_child: weakref.WeakSet[Any] = weakref.WeakSet()
os.register_at_fork(after_in_child=_free_in_child)


# ---- connecting ---------------------------------------------------------------------------------

_End = tuple[int, int]  # of a connection: the number of its wire, and the peer


def connect(rendezvous: Rendezvous, wires: Sequence[Collection[int]]) -> list[dict[int, socket.socket]]:
    """Connect this rank to the ranks of each wire, which connect to it at the same time, by sockets of each wire's own.

    The higher of two ranks connects to the lower: within a host by a Unix socket, which has no file and which only
    processes of its network namespace can reach, else by TCP. A rank to which no other host connects opens no port.
    Whoever does not know the token that a rank has told the others is no peer.
    Raises PeerGoneError, on every rank where one cannot listen or connect.
    """
    rank, hosts = rendezvous.rank, rendezvous.hosts
    ends = [(i, peer) for i, peers in enumerate(wires) for peer in peers]
    awaited = {(i, peer) for i, peer in ends if peer > rank}
    near = {hosts[peer] == hosts[rank] for _, peer in awaited}
    token = secrets.token_bytes(_TOKEN_BYTES)
    connected: dict[_End, socket.socket] = {}
    failure: PeerGoneError | None = None
    with contextlib.ExitStack() as listening, contextlib.ExitStack() as on_failure:
        on_failure.callback(lambda: close_all(connected.values()))
        listeners: list[socket.socket] = []
        backlog = len(awaited) + _MAX_STRANGERS  # with room for all that connect before this rank accepts
        addresses: dict[str, Any] = {}
        try:
            if True in near:
                listeners.append(listening.enter_context(_listen_on_host(backlog)))
                addresses["name"] = listeners[-1].getsockname()[1:].decode("ascii")
            if False in near:
                listeners.append(listening.enter_context(_listen(backlog, rendezvous.store_host)))
                addresses["host"], addresses["port"] = listeners[-1].getsockname()[:2]
        except OSError as error:
            failure = PeerGoneError(rank, f"it cannot listen for other ranks: {_reason(error)}")
        said = rendezvous.say(failure, of=sorted({peer for _, peer in ends}), token=token.hex(), **addresses)
        # Half of the time: the others wait as long for the word that it failed.
        until = rendezvous.deadline - rendezvous.timeout_seconds / 2
        try:
            for i, peer in ends:
                if peer < rank:
                    hello = _INTRODUCTION.pack(rank, i, bytes.fromhex(said[peer]["token"]))
                    connected[i, peer] = _connect(peer, said[peer], hosts[peer] == hosts[rank], hello, until)
        except PeerGoneError as error:
            failure = error
        rendezvous.say(failure, of=())
        _accept(listeners, token, awaited, connected, rendezvous.deadline)
        on_failure.pop_all()
    return [{peer: connected[i, peer] for peer in peers} for i, peers in enumerate(wires)]


def _listen_on_host(backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0ringtile-{secrets.token_hex(8)}")
    listener.listen(backlog)
    return listener


def _listen(backlog: int, store_host: str) -> socket.socket:
    refused = "this host has no address that others can reach"
    for family, host in _own_addresses(store_host):
        with contextlib.suppress(OSError):  # the name of this host may stand for an address that it does not have
            return socket.create_server((host, 0), family=family, backlog=backlog)
        refused = f"this host cannot listen on {host}"
    raise OSError(f"{refused}; GLOO_SOCKET_IFNAME names the network interface to use")


def _own_addresses(store_host: str) -> Iterator[tuple[socket.AddressFamily, str]]:
    """Yield the addresses of this host that peers may reach, the best first.

    That of the interface that GLOO_SOCKET_IFNAME names, and no other; or that from which this host reaches the host of
    the store (MASTER_ADDR), and those of its interfaces; but no loopback address.
    """
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        yield socket.AF_INET, _address_of(interface)
        return
    found: list[tuple[socket.AddressFamily, str]] = []
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(store_host or None, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as anywhere:
                anywhere.connect(address)  # sends nothing
                found.append((family, anywhere.getsockname()[0]))
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            found.append((socket.AF_INET, _address_of(name)))
    yield from ((family, own) for family, own in found if own != "::1" and not own.startswith("127."))


def _address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface, such as eth0."""
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        reply = fcntl.ioctl(any_socket, get_address, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(reply[20:24])


def _connect(peer: int, address: dict[str, Any], on_host: bool, hello: bytes, deadline: float) -> socket.socket:
    seconds = max(0.1, part_of(deadline))
    try:
        if on_host:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(seconds)
            connection.connect(f"\0{address['name']}")
        else:
            connection = socket.create_connection((address["host"], address["port"]), seconds)
        connection.sendall(hello)
        return connection
    except OSError as error:
        where = "its Unix socket" if on_host else f"{address['host']} port {address['port']}"
        advice = "" if on_host else "; GLOO_SOCKET_IFNAME names the network interface that its host should use"
        raise PeerGoneError(peer, f"no connection to {where}: {_reason(error)}{advice}") from None


def _accept(
    listeners: Sequence[socket.socket],
    token: bytes,
    missing: set[_End],
    connected: dict[_End, socket.socket],
    deadline: float,
) -> None:
    """Add the connections of the ends that are missing. Nobody waits for another."""
    open_ones = [*listeners]  # then strangers, which have said nothing yet, the oldest first
    with contextlib.ExitStack() as at_end:
        at_end.callback(lambda: close_all(open_ones[len(listeners) :]))
        for listener in listeners:
            listener.setblocking(False)
        while missing:
            if time.monotonic() >= deadline:
                raise PeerGoneError(min(missing)[1], "it did not connect")
            for one in cast("list[socket.socket]", wait(open_ones, part_of(deadline))):
                if one in listeners:
                    try:
                        open_ones.append(one.accept()[0])
                    except (ConnectionError, BlockingIOError):  # it has gone again
                        continue
                    except OSError as error:
                        reason = f"this rank cannot accept its connection: {_reason(error)}"
                        raise PeerGoneError(min(missing)[1], reason) from None
                    if len(open_ones) - len(listeners) <= _MAX_STRANGERS:
                        continue
                    one = open_ones[len(listeners)]
                if one in open_ones:
                    open_ones.remove(one)
                    if (end := _introduced(one, token)) in missing:
                        missing.remove(end)
                        connected[end] = one
                    else:
                        one.close()


def _introduced(stranger: socket.socket, token: bytes) -> _End | None:
    """Return whose connection it is; None: no peer's. A peer says all at once."""
    try:
        peer, wire, theirs = _INTRODUCTION.unpack(stranger.recv(_INTRODUCTION.size, socket.MSG_DONTWAIT))
    except (OSError, struct.error):
        return None
    return (wire, peer) if secrets.compare_digest(theirs, token) else None
