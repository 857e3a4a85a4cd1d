"""CPU tensors between ranks of one host, through shared memory (csrc/transport/shared_memory.h).

In the first call of a group each rank makes a segment, which has no name and is gone with the last process that maps
it, and hands it to the peers on its host over their connections (sockets.py). Two ranks share memory exactly if each
has mapped the other's segment; if anything has failed for either, their messages go on over the process group.

The connection stays: a byte on it wakes a rank that sleeps, and its end shows that the peer has died.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor

from ringtile.errors import InputError
from ringtile.ops import _C
from ringtile.transport.rendezvous import Rendezvous
from ringtile.transport.sockets import close_all, to_free_in_child

VARIABLE = "RINGTILE_SHARED_MEMORY"
_SHARING_SECONDS = 5.0  # that a peer may take to send its segment; then the two go on without


class _SharedMessage(NamedTuple):
    """A message under way."""

    handle: Any
    timeout_seconds: float

    def wait(self) -> None:
        _C.shm_wait(self.handle, self.timeout_seconds)


class SharedMemory:
    """One rank's end of the memory that it shares with `peers`. free: end all messages, for the peers too."""

    def __init__(
        self, end: Any, places: dict[int, int], links: dict[int, socket.socket], peers: Collection[int], seconds: float
    ):
        """places: of each peer, among the ranks that the segments have room for."""
        self.peers = peers
        self._places = places
        self._end = end
        self._timeout_seconds = seconds
        self.free = weakref.finalize(self, _free, end, links)
        to_free_in_child.add(self)

    def post(self, tensor: Tensor, peer: int, tag: int, *, outgoing: bool) -> _SharedMessage:
        """Start a message to or from a peer. The tensor is contiguous and not empty."""
        handle = _C.shm_post(self._end, self._places[peer], outgoing, tag, tensor.data_ptr(), tensor.nbytes, tensor)
        return _SharedMessage(handle, self._timeout_seconds)

    def drop(self) -> None:
        """Forget all messages under way."""
        _C.shm_drop(self._end)


def _free(end: Any, links: dict[int, socket.socket]) -> None:
    _C.shm_close(end)
    close_all(links.values())


# ---- sharing ------------------------------------------------------------------------------------


def shares_memory() -> bool:
    """Return whether this rank may share memory. InputError: the variable has an unknown value."""
    if (value := os.environ.get(VARIABLE) or "1") not in ("0", "1"):
        raise InputError(f"{VARIABLE} is {value!r}; expected 1, or 0 to send all messages over the process group")
    return value == "1"


def peers_of(rendezvous: Rendezvous) -> list[int]:
    """Return the ranks of this host that may share memory with this one. They have met with shares=shares_memory()."""
    rank, hosts = rendezvous.rank, rendezvous.hosts
    sharing = [peer for peer, fact in enumerate(rendezvous.facts) if fact["shares"] and hosts[peer] == hosts[rank]]
    return [peer for peer in sharing if peer != rank] if rank in sharing else []


def make_segment(num_ranks: int) -> int:
    """Return a file for a segment with room for so many ranks. Raise OSError; AttributeError: no system for it."""
    file = os.memfd_create("ringtile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, _C.shm_segment_bytes(num_ranks))
    # Whoever shrinks a mapped file makes others crash.
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return file


def share(rendezvous: Rendezvous, links: dict[int, socket.socket]) -> SharedMemory | None:
    """Share memory with the peers of these connections, which do so at the same time; None: with nobody.

    All ranks of the group call this, with links or without.
    """
    # Of this host: a segment has room for 2 MB from each.
    rank, ranks = rendezvous.rank, sorted({rendezvous.rank, *links})
    places = {peer: place for place, peer in enumerate(ranks)}
    files: dict[int, int] = {}
    end, peers = None, frozenset[int]()
    try:
        if links:
            with contextlib.suppress(OSError, AttributeError):
                files[rank] = make_segment(len(ranks))
        own = list(files.values())
        for link in links.values():
            link.settimeout(_SHARING_SECONDS)
            with contextlib.suppress(OSError):
                socket.send_fds(link, [b"\0"], own)
        for peer, link in links.items():
            with contextlib.suppress(OSError):
                files.update(zip((peer,), socket.recv_fds(link, 1, 1)[1], strict=False))
        if own and all(map(_is_segment, files.values(), [_C.shm_segment_bytes(len(ranks))] * len(files))):
            ends = {peer: links[peer].fileno() for peer in files if peer != rank}
            with contextlib.suppress(OSError):
                end = _C.shm_open(places[rank], *(tuple(each.get(i, -1) for i in ranks) for each in (files, ends)))
        said = rendezvous.say(of=ranks, mapped=[] if end is None else sorted(files))
        peers = frozenset(peer for peer in said[rank]["mapped"] if peer in links and rank in said[peer]["mapped"])
    finally:
        for file in files.values():
            os.close(file)
        if not peers:
            close_all(links.values())
    return SharedMemory(end, places, links, peers, rendezvous.timeout_seconds) if peers else None


def _is_segment(file: int, num_bytes: int) -> bool:
    """Return whether a peer's file is as large as it must be, and stays so."""
    with contextlib.suppress(OSError):  # it has no seals
        return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK) and os.fstat(file).st_size == num_bytes
    return False
