"""CPU tensors between ranks of one host, through shared memory (csrc/transport/shared_memory.h).

In the first call of a group each rank makes a segment, which has no name and is gone with the last process that maps
it, and hands it to the peers on its host over their connections (sockets.py). Two ranks share memory exactly if each
has mapped the other's segment and has read from it what the other rank had said, through the store, that it would write
there. They tell each other; if anything has failed for either, their messages go on over the process group.

The connection stays: a byte on it wakes a rank that sleeps, and its end shows that the peer has died.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ringtile.errors import InputError
from ringtile.ops import _C
from ringtile.transport.sockets import Meeting, close_all, to_free_in_child

VARIABLE = "RINGTILE_SHARED_MEMORY"
_MAX_RANKS = 2048  # a header holds a bit for each
_TOKEN_BYTES = 16
_SHARING_SECONDS = 5.0  # that a peer may take to send its segment; then the two go on without


class _SharedMessage(NamedTuple):
    """A message under way."""

    handle: Any
    timeout_seconds: float

    def wait(self) -> None:
        try:
            done = _C.shm_wait(self.handle, self.timeout_seconds)
        except TimeoutError:
            raise RuntimeError(f"nothing came for {self.timeout_seconds:g} s") from None
        if not done:
            raise RuntimeError("it has closed the connection")


class SharedMemory:
    """One rank's end of the memory that it shares with `peers`. free: end all messages, for the peers too."""

    def __init__(self, end: Any, links: dict[int, socket.socket], peers: frozenset[int], timeout_seconds: float):
        self.peers = peers
        self._end = end
        self._timeout_seconds = timeout_seconds
        self.free = weakref.finalize(self, _free, end, links)
        to_free_in_child.add(self)

    def post(self, tensor: Tensor, peer: int, tag: int, *, outgoing: bool) -> _SharedMessage:
        """Start a message to or from a peer. The tensor is contiguous and not empty."""
        handle = _C.shm_post(self._end, peer, outgoing, tag, tensor.data_ptr(), tensor.nbytes, tensor)
        return _SharedMessage(handle, self._timeout_seconds)

    def drop(self) -> None:
        """Forget all messages under way."""
        _C.shm_drop(self._end)


def _free(end: Any, links: dict[int, socket.socket]) -> None:
    _C.shm_close(end)
    close_all(links.values())


# ---- sharing ------------------------------------------------------------------------------------


def token_of_segment() -> str:
    """Return what a segment of this rank begins with, in hexadecimal; "" if it shares no memory.

    InputError: the variable has an unknown value.
    """
    if (value := os.environ.get(VARIABLE) or "1") not in ("0", "1"):
        raise InputError(f"{VARIABLE} is {value!r}; expected 1, or 0 to send all messages over the process group")
    return "" if value == "0" else secrets.token_hex(_TOKEN_BYTES)


def peers_of(meeting: Meeting) -> list[int]:
    """Return the ranks of this host that may share memory with this one."""
    own, ranks = meeting.rank, range(len(meeting.hosts))
    sharing = {rank for rank in ranks if meeting.facts[rank]["token"] and meeting.hosts[rank] == meeting.hosts[own]}
    return sorted(sharing - {own}) if own in sharing and len(ranks) <= _MAX_RANKS else []


def make_segment(token: bytes, world_size: int) -> int:
    """Return a file that begins with token. Raise OSError, and AttributeError on a system without such files."""
    file = os.memfd_create("ringtile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, _C.shm_segment_bytes(world_size))
    # Whoever shrinks a mapped file makes others crash.
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    os.pwrite(file, token, 0)
    return file


def share(meeting: Meeting, links: dict[int, socket.socket]) -> SharedMemory | None:
    """Share memory with the peers of these connections, which do so at the same time; None: with nobody.

    All ranks of the group call this, with links or without, and have met with their token_of_segment().
    """
    tokens = [bytes.fromhex(fact["token"]) for fact in meeting.facts]
    files: dict[int, int] = {}
    peers: frozenset[int] = frozenset()
    try:
        if links:
            with contextlib.suppress(OSError, AttributeError):
                files[meeting.rank] = make_segment(tokens[meeting.rank], len(tokens))
        own = [files[meeting.rank]] if files else []
        for link in links.values():
            link.settimeout(_SHARING_SECONDS)
            with contextlib.suppress(OSError):
                socket.send_fds(link, [b"\0"], own)
        for peer, link in links.items():
            with contextlib.suppress(OSError):
                files.update(zip((peer,), socket.recv_fds(link, 1, 1)[1], strict=False))
        end = _map(meeting.rank, files, links, tokens) if own else None
        mapped = [set(each["mapped"]) for each in meeting.say(mapped=sorted(files) if end is not None else [])]
        peers = frozenset(peer for peer in mapped[meeting.rank] & set(links) if meeting.rank in mapped[peer])
    finally:
        for file in files.values():
            os.close(file)
        if not peers:
            close_all(links.values())
    return SharedMemory(end, links, peers, meeting.timeout_seconds) if peers else None


def _map(rank: int, files: Mapping[int, int], links: Mapping[int, socket.socket], tokens: list[bytes]) -> Any:
    """Return this rank's end of the segments, None on failure."""
    with contextlib.suppress(OSError):
        for peer, file in files.items():
            seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
            size_is_fixed = seals & fcntl.F_SEAL_SHRINK and os.fstat(file).st_size == _C.shm_segment_bytes(len(tokens))
            if not size_is_fixed or os.pread(file, _TOKEN_BYTES, 0) != tokens[peer]:
                return None
        return _C.shm_open(
            rank,
            tuple(files.get(each, -1) for each in range(len(tokens))),
            tuple(links[each].fileno() if each in files and each != rank else -1 for each in range(len(tokens))),
        )
    return None
