"""CPU tensors between ranks of one host, through shared memory (csrc/transport/shared_memory.h).

In the first call of a group each rank makes a segment, which has no name and is gone with the last process that maps
it, and listens on an abstract Unix socket, which only processes of its network namespace can reach. Two ranks share
memory exactly if each has received the other's segment over a connection of these sockets, has mapped it, and has read
from it what the other rank had said, over the group, that it would write there. They tell each other over the group;
if anything has failed for either, their messages go on over the process group.

The connection stays: a byte on it wakes a rank that sleeps, and its end shows that the peer has died.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ringtile.errors import InputError
from ringtile.ops import _C
from ringtile.transport.agreement import HEADER_BYTES, PeerGoneError, decode
from ringtile.transport.sockets import close_all, to_close_in_child

VARIABLE = "RINGTILE_SHARED_MEMORY"
_MAX_RANKS = 2048  # a header holds a bit for each
_TOKEN_BYTES = 16
_SHARING_SECONDS = 5.0  # then ranks that have not shared memory go on without
_INTRODUCTION = struct.Struct(f"<I{_TOKEN_BYTES}s")  # the rank that connects, and the token of the rank that listens
_CREDENTIALS = struct.Struct("3i")  # process, user, group

ExchangeHellos = Callable[[bytes], dict[int, bytes]]  # sends HEADER_BYTES bytes to every peer and returns theirs


@dataclass(frozen=True)
class _SharedMessage:
    """A message under way. peer: its rank."""

    handle: Any
    peer: int
    timeout_seconds: float

    def wait(self) -> None:
        try:
            done = _C.shm_wait(self.handle, self.timeout_seconds)
        except TimeoutError:
            raise PeerGoneError(self.peer, f"nothing came for {self.timeout_seconds:g} s") from None
        if not done:
            raise PeerGoneError(self.peer, "it has closed the connection")


class SharedMemory:
    """One rank's end of the memory that it shares with `peers`."""

    def __init__(self, end: Any, links: dict[int, socket.socket], peers: frozenset[int], timeout_seconds: float):
        self.peers = peers
        self._end = end
        self._timeout_seconds = timeout_seconds
        self._close = weakref.finalize(self, _close, end, links)
        to_close_in_child.add(self)

    def post(self, tensor: Tensor, peer: int, tag: int, *, outgoing: bool) -> _SharedMessage:
        """Start a message to or from a peer. The tensor is contiguous and not empty."""
        handle = _C.shm_post(self._end, peer, outgoing, tag, tensor.data_ptr(), tensor.nbytes, tensor)
        return _SharedMessage(handle, peer, self._timeout_seconds)

    def drop(self) -> None:
        """Forget all messages under way."""
        _C.shm_drop(self._end)

    def close(self) -> None:
        """End all messages, for the peers too."""
        self._close()


def _close(end: Any, links: dict[int, socket.socket]) -> None:
    _C.shm_close(end)
    close_all(links.values())


# ---- sharing ------------------------------------------------------------------------------------


class SharedSegment:
    """A rank's segment, and the socket on which its peers ask for it; both None where the system has no such thing."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.name = ""  # of the socket
        self.file: int | None = None
        self.listener: socket.socket | None = None

    def offer(self) -> bytes:
        """Return what peers must know to ask for it."""
        return json.dumps({"segment": self.name, "token": self.token.hex()}).encode("ascii").ljust(HEADER_BYTES)

    def open(self, world_size: int) -> None:
        """Make it. Raise OSError, and AttributeError on a system without sealed memory files or abstract sockets."""
        self.file = os.memfd_create("ringtile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.file, _C.shm_segment_bytes(world_size))
        # Whoever shrinks a mapped file makes others crash.
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.pwrite(self.file, self.token, 0)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"ringtile-{secrets.token_hex(8)}"
        self.listener.bind("\0" + name)
        self.listener.listen(world_size)
        self.name = name

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        if self.file is not None:
            os.close(self.file)
        self.file = self.listener = None


def share(rank: int, world_size: int, timeout_seconds: float, exchange: ExchangeHellos) -> SharedMemory | None:
    """Share memory with the peers on this host. All ranks call this at the same time; None: with nobody.

    exchange: as in `sockets.connect`.
    """
    value = os.environ.get(VARIABLE) or "1"
    if value not in ("0", "1"):
        raise InputError(f"{VARIABLE} is {value!r}; expected 1, or 0 to send all messages over the process group")
    own = SharedSegment()
    try:
        if value == "1" and world_size <= _MAX_RANKS:
            with contextlib.suppress(OSError, AttributeError):
                own.open(world_size)
        return _share(rank, own, time.monotonic() + min(timeout_seconds, _SHARING_SECONDS), timeout_seconds, exchange)
    finally:
        own.close()


def _share(
    rank: int, own: SharedSegment, deadline: float, timeout_seconds: float, exchange: ExchangeHellos
) -> SharedMemory | None:
    offers = {peer: decode(offer) for peer, offer in exchange(own.offer()).items()}
    tokens = {peer: bytes.fromhex(str(offer["token"])) for peer, offer in offers.items()}
    with contextlib.ExitStack() as on_failure:
        links: dict[int, socket.socket] = {}
        on_failure.callback(lambda: close_all(links.values()))
        for peer in range(rank):
            name = str(offers[peer]["segment"])
            if own.file is not None and name:
                with contextlib.suppress(OSError):
                    links[peer] = _connect(name, _INTRODUCTION.pack(rank, tokens[peer]), own.file, deadline)
        reached = _exchange_sets(rank, links, exchange)
        if not any(reached.values()):
            return None
        files = _accept(own, {peer for peer in reached if rank in reached[peer]}, links, deadline)
        for peer in set(links) - set(files):
            with contextlib.suppress(OSError):
                _, files[peer] = _receive_file(links[peer], 1, deadline)
        try:
            end = _map(rank, own, files, links, tokens)
        finally:
            for file in files.values():
                os.close(file)
        mapped = _exchange_sets(rank, {} if end is None else files, exchange)
        peers = frozenset(peer for peer in mapped[rank] if rank in mapped[peer])
        if end is None or not peers:
            return None
        on_failure.pop_all()
        return SharedMemory(end, links, peers, timeout_seconds)


def _exchange_sets(rank: int, mine: Collection[int], exchange: ExchangeHellos) -> dict[int, set[int]]:
    """Return for each rank the set of ranks that it names."""
    bits = f"{sum(1 << peer for peer in mine):x}"
    texts = exchange(json.dumps({"ranks": bits}).encode("ascii").ljust(HEADER_BYTES))
    numbers = {peer: int(str(decode(text).get("ranks", 0)), 16) for peer, text in texts.items()}
    sets = {peer: {bit for bit in range(number.bit_length()) if number >> bit & 1} for peer, number in numbers.items()}
    return {**sets, rank: set(mine)}


def _connect(name: str, introduction: bytes, file: int, deadline: float) -> socket.socket:
    """Connect to the rank that listens there, and send it this rank's segment."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(max(0.1, deadline - time.monotonic()))
        link.connect("\0" + name)
        _check_user(link)
        socket.send_fds(link, [introduction], [file])
    except OSError:
        link.close()
        raise
    return link


def _accept(own: SharedSegment, expected: set[int], links: dict[int, socket.socket], deadline: float) -> dict[int, int]:
    """Return the segments of the peers that have connected, and add their connections to links. Each gets this rank's.

    Whoever does not know the token, or is slow to say it, is no peer.
    """
    files: dict[int, int] = {}
    assert own.listener is not None or not expected
    with contextlib.suppress(OSError):
        while own.listener is not None and own.file is not None and set(files) != expected:
            own.listener.settimeout(max(0.1, deadline - time.monotonic()))
            link, _ = own.listener.accept()
            try:
                _check_user(link)
                said, file = _receive_file(link, _INTRODUCTION.size, deadline)
                peer, token = _INTRODUCTION.unpack(said)
                if peer not in expected - set(files) or not secrets.compare_digest(token, own.token):
                    os.close(file)
                    raise OSError("no peer")
                links[peer], files[peer] = link, file
                socket.send_fds(link, [b"\0"], [own.file])
            except OSError:
                if link not in links.values():
                    link.close()
    return files


def _check_user(link: socket.socket) -> None:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
        raise PermissionError("a process of another user")


def _receive_file(link: socket.socket, num_bytes: int, deadline: float) -> tuple[bytes, int]:
    link.settimeout(max(0.1, min(1.0, deadline - time.monotonic())))
    said, files, _, _ = socket.recv_fds(link, num_bytes, 1)
    if len(files) != 1 or len(said) != num_bytes:
        for file in files:
            os.close(file)
        raise OSError("no segment came")
    return said, files[0]


def _map(
    rank: int,
    own: SharedSegment,
    files: Mapping[int, int],
    links: Mapping[int, socket.socket],
    tokens: Mapping[int, bytes],
) -> Any:
    """Return this rank's end of the segments, None on failure."""
    num_ranks = len(tokens) + 1
    with contextlib.suppress(OSError):
        if own.file is None or not files:
            return None
        for peer, file in files.items():
            seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
            size_is_fixed = seals & fcntl.F_SEAL_SHRINK and os.fstat(file).st_size == _C.shm_segment_bytes(num_ranks)
            if not size_is_fixed or os.pread(file, _TOKEN_BYTES, 0) != tokens[peer]:
                return None
        by_rank = {rank: own.file, **files}
        return _C.shm_open(
            rank,
            tuple(by_rank.get(each, -1) for each in range(num_ranks)),
            tuple(links[each].fileno() if each in files else -1 for each in range(num_ranks)),
        )
    return None
