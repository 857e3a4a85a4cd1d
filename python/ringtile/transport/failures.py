"""Which of many ranks was lost: each rank watches a few neighbors, and passes the first notice of a loss on to them.

A connection carries nothing while all is well. The neighbors of a rank that dies see its connections end; a rank that
fails says why. A notice travels from neighbor to neighbor, so every rank gets it within a few hops, and a rank needs
at most MAX_NEIGHBORS connections in a world of any size. A thread passes notices on, whatever the rank itself does.

If ranks are lost together, the others still get a notice: survivors that are cut off from the rest have lost
neighbors themselves. They may then name different ones of the lost ranks.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from ringtile.transport.agreement import HEADER_BYTES, PeerGoneError, in_header
from ringtile.transport.sockets import SocketChannel

MAX_NEIGHBORS = 12
_RELAY_SECONDS = 0.5  # how long a rank whose own neighbors are there waits for notices of others
_NOBODY = -1


def neighbors(rank: int, world_size: int) -> list[int]:
    """Return the ranks that a rank is connected to, and they to it: all others, or those at six distances both ways.

    The distances grow from 1 to world_size / 2 by one factor, so a notice takes few hops (8 among 1,024 ranks). A
    connected graph in which all ranks are alike and have d neighbors stays connected without any (2 d - 1) / 3 of
    them: here d >= 11, so without any 7.
    """
    if world_size - 1 <= MAX_NEIGHBORS:
        return [peer for peer in range(world_size) if peer != rank]
    num_distances, distances = MAX_NEIGHBORS // 2, [0]
    for i in range(num_distances):
        distances.append(max(distances[-1] + 1, round((world_size // 2) ** (i / (num_distances - 1)))))
    return sorted({(rank + way * distance) % world_size for distance in distances[1:] for way in (-1, 1)})


class Loss(NamedTuple):
    """A rank of the world that is lost, and the reason."""

    rank: int
    reason: str


class Notice(NamedTuple):
    """A rank fails, or has lost one. by: that rank; lost: the rank that is lost, _NOBODY if it does not know yet.

    fails: whether it fails itself; else it passes on that a connection has ended.
    """

    by: int
    fails: bool
    lost: int
    reason: str


class FailureDetector:
    """One rank's part: what it has heard, and what it passes on. channel: to its neighbors, if it has any."""

    def __init__(
        self,
        rank: int,
        world_size: int = 1,
        neighbors: Sequence[int] = (),
        channel: SocketChannel | None = None,
    ) -> None:
        self.rank = rank
        self.neighbors = neighbors
        self._knows_all = len(neighbors) == world_size - 1
        self._changed = threading.Condition()
        self._notice: Notice | None = None  # the first of a loss
        self._spoke: set[int] = set()  # the neighbors that have failed too
        self._ended: dict[int, str] = {}  # by neighbor whose connection has ended, how
        self._channel = channel
        self._listener = threading.Thread(target=self._listen, name="ringtile failures", daemon=True)
        self._closing = False

    # ---- connections ----------------------------------------------------------------------------

    def listen(self) -> None:
        """Start the thread that reads what the neighbors send, and passes it on."""
        self._listener.start()

    def _listen(self) -> None:
        assert self._channel is not None
        while not self._closing and (listening := [peer for peer in self.neighbors if peer not in self._ended]):
            self._channel.wait(listening, 3600.0)
            for peer in listening:
                if not self._closing:
                    self.read(peer)

    def read(self, peer: int) -> None:
        """Take in all that a neighbor has sent."""
        assert self._channel is not None
        try:
            while (notice := self._channel.receive(peer)) is not None:
                with contextlib.suppress(TypeError, ValueError):
                    self.hear(peer, Notice(*json.loads(notice)))
        except PeerGoneError as gone:
            self.hear_end(peer, gone.reason)

    def _send(self, notice: Notice) -> None:
        """Send it to every neighbor that can still be reached, at once or not at all."""
        if self._channel is not None:
            text = json.dumps(notice._replace(reason=in_header(notice.reason)))
            self._channel.send_last(text.encode("ascii").ljust(HEADER_BYTES))

    def close(self) -> None:
        """End the connections; the neighbors see that."""
        self._closing = True
        if self._channel is not None:
            self._channel.close()  # which ends the listener's wait
        if self._listener.ident and self._listener is not threading.current_thread():
            self._listener.join(1.0)

    # ---- what arrives ---------------------------------------------------------------------------

    def hear(self, peer: int, notice: Notice) -> None:
        """Take in what a neighbor says."""
        with self._changed:
            if notice.by == peer and notice.fails:
                self._spoke.add(peer)
        self._take(notice, is_loss=notice.lost != _NOBODY)

    def hear_end(self, peer: int, reason: str) -> None:
        """Take in that a neighbor's connection has ended."""
        with self._changed:
            self._ended[peer] = reason
        # A rank that has failed too leaves; it is not the cause.
        self._take(Notice(self.rank, False, peer, reason), is_loss=peer not in self._spoke)

    def _take(self, notice: Notice, is_loss: bool) -> None:
        """Keep the first loss, and pass it on."""
        with self._changed:
            is_first = is_loss and self._notice is None
            self._notice = notice if is_first else self._notice
            self._changed.notify_all()
        if is_first and not self._knows_all:
            self._send(notice)

    # ---- what this rank does --------------------------------------------------------------------

    def announce(self, reason: str, lost: int = _NOBODY) -> None:
        """Tell all ranks that this one fails, and which rank is lost, if it knows: itself, perhaps."""
        notice = Notice(self.rank, True, lost, reason)
        with self._changed:
            if lost != _NOBODY and self._notice is None:
                self._notice = notice
        self._send(notice)

    def find(self, suspect: Loss | None, cause: str, seconds: float) -> Loss | None:
        """Return who was lost, after `announce`: by the first notice, else a neighbor that has not failed by then.

        suspect: who is lost if nothing is heard. cause: what failed here. None: all ranks seem to be there.
        """
        deadline = time.monotonic() + seconds
        suspects = suspect is not None
        with self._changed:
            while (lost := self._heard()) is None:
                silent = [peer for peer in self.neighbors if peer not in self._spoke]
                if silent and suspect is not None and suspect.rank in self._spoke:
                    suspect = None  # it waits, too
                left = deadline - time.monotonic()
                if silent == [suspect.rank if suspect else None] or (not silent and self._knows_all and suspects):
                    return suspect
                if not silent:  # all are there; one that had a suspect may be about to say so
                    if self._knows_all:
                        deadline = min(deadline, time.monotonic())
                    left = deadline + _RELAY_SECONDS - time.monotonic()
                if left <= 0:
                    if suspect is not None or not silent:
                        return suspect
                    others = f", as are ranks {', '.join(map(str, silent[1:]))}" if len(silent) > 1 else ""
                    return Loss(silent[0], f"it is silent{others}, and {cause}")
                self._changed.wait(left)
            return lost

    def _heard(self) -> Loss | None:
        for peer, reason in self._ended.items():
            if peer not in self._spoke:
                return Loss(peer, reason)
        if (notice := self._notice) is None:
            return None
        if notice.lost in (notice.by, self.rank) or notice.by == self.rank:
            return Loss(notice.by if notice.lost == self.rank else notice.lost, notice.reason)
        return Loss(notice.lost, f"rank {notice.by} has lost it ({notice.reason})")
