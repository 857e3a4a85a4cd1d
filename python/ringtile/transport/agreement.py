"""Agreement: how ranks make sure that they all make the same call, without waiting for each other each time.

A call is known by its *terms*: the op, the device type and whatever else must be equal on all ranks (shapes, dtypes,
scale, digests of mask and layout). A *header* of one fixed size holds them, with what tells the call from others of its
kind: its number and, if they are known, a fingerprint of its data and the number of the forward that a backward belongs
to. Headers travel over a `Channel`, beside the payloads.

- New terms: every rank sends its header to every other, and waits for all headers before a payload travels.
- Terms that all ranks have agreed on before: payloads start at once, and headers travel along the edges of a tree of
  the ranks, so that a rank sends at most six whatever the number of ranks. A rank compares the headers of its
  neighbours with its own, and tells a neighbour that its side agrees as soon as its other neighbours have said so of
  theirs; when all of them have, all ranks agree. On the CPU that is awaited before the first payload is used, at the
  latest before the call returns. On a GPU each call compares what has arrived by then, so a later call raises the
  difference.

A rank that finds a difference, or has new terms, sends its header to every other rank, and so does every rank that
hears of it. Each then has all headers and raises RingMismatch; none is left waiting. Ranks agree on terms together, so
terms that are new to one rank are new to all.
"""

from __future__ import annotations

import abc
import collections
import json
import time
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ringtile.errors import InputError

HEADER_VERSION = 6
# One size for ever: a receive of the wrong size kills the process, so a header must fit whatever the peer's version.
HEADER_BYTES = 1024
# Users may send on the group too (tags from 0 up); ours begin with the bytes "RT".
HELLO_TAG, HANG_UP_TAG, FIRST_PAYLOAD_TAG = 0x5254_0000, 0x5254_0001, 0x5254_0002
_NUM_PAYLOAD_TAGS = 2**31 - FIRST_PAYLOAD_TAG
# The last byte of a header, white space to JSON, says what its sender knows: all ranks on its side of the tree agree;
# it does not know that yet; the ranks differ, or the terms are new, and every rank sends its header to every other.
_AGREES, _HERE, _DIFFERS = b" ", b"\t", b"\n"
_MAX_AGREED = 1024  # terms that a group remembers; the oldest are agreed on anew
MAX_REASON = 400  # characters, which JSON may double; a header has room for as many
_NOTICE_SECONDS = 1.0  # how long a rank that lost a peer waits to hear why the peer gave up

HeaderValue = int | float | str


class Terms:
    """What all ranks must agree on for one kind of call: the op, the device type, and the fields of the caller."""

    def __init__(self, op: str, device_type: str, fields: Mapping[str, HeaderValue]) -> None:
        text = json.dumps({"op": op, "device": device_type, **fields}).encode("ascii")
        # Fixed width: a header is made by writing four numbers, each as wide as an int64, into this template. What
        # differs first is named, so the fields of the caller precede what follows from them.
        self._template = (
            b'{"version": %d, "call": %%20d, ' % HEADER_VERSION
            + text[1:-1].replace(b"%", b"%%")
            + b', "call of the forward": %20d, "dropout step": %20d, "fingerprint of the data": %20d}'
        )
        num_bytes = len(self.header(0))
        if num_bytes > HEADER_BYTES:
            raise InputError(f"a header of {num_bytes} bytes; expected at most {HEADER_BYTES}")
        self._checksum = zlib.crc32(text)

    def header(self, call: int, forward_call: int = 0, data: int = 0, step: int = 0) -> bytes:
        """HEADER_BYTES bytes: the terms and what tells this call from others of its kind, as JSON padded with spaces.

        call: its number on the group. forward_call: in a backward, the number of the forward's call; 0: not known.
        data: a fingerprint of the data that the call is about; 0: not known. step: from which dropout is drawn.
        """
        return (self._template % (call, forward_call, step, data)).ljust(HEADER_BYTES - 1) + _HERE

    def payload_tag(self, call: int) -> int:
        """The tag of the payloads of a call. Different calls, or different terms, do not receive each other's."""
        return FIRST_PAYLOAD_TAG + zlib.crc32(call.to_bytes(8, "little"), self._checksum) % _NUM_PAYLOAD_TAGS


class AgreedTerms:
    """The terms that all ranks of a group have agreed on; the last _MAX_AGREED of them."""

    def __init__(self) -> None:
        self._agreed: collections.OrderedDict[object, Terms] = collections.OrderedDict()

    def find(self, key: object) -> Terms | None:
        return self._agreed.get(key)

    def add(self, key: object, terms: Terms) -> None:
        self._agreed[key] = terms
        if len(self._agreed) > _MAX_AGREED:
            self._agreed.popitem(last=False)


# ---- headers ------------------------------------------------------------------------------------


class Gone(RuntimeError):
    """A peer is lost. peer: its rank; reason: what is known."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer
        self.reason = reason


class Channel(abc.ABC):
    """Carries headers between this rank and others of its group, in order."""

    @abc.abstractmethod
    def send(self, header: bytes, peers: Collection[int]) -> None:
        """Send HEADER_BYTES bytes to these peers, without waiting for their receives. Raises Gone."""

    @abc.abstractmethod
    def send_last(self, header: bytes) -> None:
        """Send it to every peer that can still be reached, at once or not at all."""

    @abc.abstractmethod
    def receive(self, peer: int) -> bytes | None:
        """Return the next header of a peer, if it has arrived. Raises Gone when the peer has closed and all is read."""

    @abc.abstractmethod
    def wait(self, peers: Collection[int], timeout_seconds: float | None = None) -> None:
        """Return when there is something to receive from one of these peers.

        Raises Gone after the timeout; None: that of the group.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End the channel; peers may still receive what was sent before."""


class Mismatch(NamedTuple):
    """A difference between this rank's header and a peer's. ran_ahead: a rank has gone on with that call regardless."""

    text: str
    ran_ahead: bool


def tree_neighbours(rank: int, world_size: int) -> list[int]:
    """Return the neighbours of a rank, at most three, in a tree of all ranks: two binary trees with joined roots."""
    up = rank // 2 - 1 if rank > 1 else 1 - rank
    return [peer for peer in (up, 2 * rank + 2, 2 * rank + 3) if peer < world_size]


@dataclass(eq=False, slots=True)
class _Sent:
    """This rank's header of a call, and what is known of those of the others."""

    op: str
    call: int
    header: bytes
    agreed: bool  # these terms, before
    runs_ahead: bool  # the host goes on without waiting for others
    refused: bool  # this rank does not make the call: the others hear why, and what they say does not matter
    differs: bool = False  # so all ranks send their headers to all
    told: set[int] = field(default_factory=set)  # the peers that need no more from this rank
    heard: dict[int, bytes] = field(default_factory=dict)  # by peer, its header
    done: set[int] = field(default_factory=set)  # the peers that will say no more

    def agrees(self, header: bytes) -> bool:
        return header[:-1] == self.header[:-1]


class Headers:
    """One rank's headers of all calls of a group."""

    def __init__(self, rank: int, world_size: int, channel: Channel) -> None:
        self._rank = rank
        self._channel = channel
        self._gave_up = False
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._neighbours = tree_neighbours(rank, world_size)
        self._open: collections.deque[_Sent] = collections.deque()  # whose headers are not all compared, oldest first
        self._mismatch: Mismatch | None = None  # of a call that a rank has gone on with
        self.agreeing: set[int] = set()  # the peers whose header equals this rank's where not all do

    def send(
        self,
        op: str,
        call: int,
        header: bytes,
        *,
        agreed: bool = False,
        runs_ahead: bool = False,
        refused: bool = False,
    ) -> None:
        sent = _Sent(op, call, header, agreed, runs_ahead, refused)
        self._open.append(sent)
        if not agreed:
            self._send_to_all(sent)
        elif len(self._neighbours) == 1:
            self._pass_on(sent)
        else:
            self._channel.send(header, self._neighbours)

    def _pass_on(self, sent: _Sent) -> None:
        """Tell each neighbour that this rank's side agrees, once all others have said so of theirs."""
        for peer in self._neighbours:
            if peer not in sent.told and all(other in sent.done for other in self._neighbours if other != peer):
                sent.told.add(peer)
                self._channel.send(sent.header[:-1] + _AGREES, (peer,))

    def _send_to_all(self, sent: _Sent) -> None:
        sent.differs = True
        self._channel.send(sent.header[:-1] + _DIFFERS, [peer for peer in self._peers if peer not in sent.told])

    def compare(self, *, wait: bool) -> Mismatch | None:
        """Compare the headers of all calls so far: all of them, or what has arrived. Raises Gone."""
        overtime = False
        while self._open and self._mismatch is None:
            arrived, sent = self._read(), self._open[0]
            missing = [peer for peer in (self._peers if sent.differs else self._neighbours) if peer not in sent.done]
            if not missing:
                self._open.popleft()
                if sent.differs and (mismatch := self._difference(sent)) is not None:
                    return mismatch
            elif not arrived:
                if not wait:
                    break
                try:
                    self._channel.wait(missing)
                except Gone as gone:
                    silent = [peer for peer in missing if peer not in sent.heard]
                    if not silent and not overtime:
                        overtime = True  # they wait too, and will say for whom
                        continue
                    raise Gone(min(silent or missing), gone.reason) from None
        return self._mismatch

    def _read(self) -> bool:
        """Take in what has arrived, and answer it; return whether there was anything."""
        arrived = False
        nothing_came: set[int] = set()  # of these peers, so what comes later belongs to no later call
        for sent in self._open:
            for peer in self._peers if sent.differs else self._neighbours:
                while peer not in sent.done and peer not in nothing_came and self._mismatch is None:
                    if (header := self._channel.receive(peer)) is None:
                        nothing_came.add(peer)
                    else:
                        arrived = True
                        self._hear(sent, peer, header)
        return arrived

    def _hear(self, sent: _Sent, peer: int, header: bytes) -> None:
        says = header[-1:]
        sent.heard[peer] = header
        if says != _HERE or sent.runs_ahead:
            sent.done.add(peer)
        if sent.agrees(header):
            if says == _DIFFERS and not sent.differs:
                self._send_to_all(sent)
            elif says == _AGREES and not sent.differs and not sent.runs_ahead:
                self._pass_on(sent)
            return
        fields = decode(header)
        if "gave up" in fields:
            raise self._blame(peer, fields)
        if "disagreement" in fields:
            self._mismatch = Mismatch(str(fields["disagreement"]), True)
        elif sent.runs_ahead and not sent.refused and (sent.agreed or says != _DIFFERS):
            self._mismatch = Mismatch(self._describe(sent, peer), True)
        elif not sent.differs:
            self._send_to_all(sent)

    def _difference(self, sent: _Sent) -> Mismatch | None:
        """Return how the headers of all ranks differ from this rank's; None: they do not, or it refuses the call."""
        self.agreeing = {peer for peer, header in sent.heard.items() if sent.agrees(header)}
        others = set(self._peers) - self.agreeing
        return Mismatch(self._describe(sent, min(others)), False) if others and not sent.refused else None

    def _describe(self, sent: _Sent, peer: int) -> str:
        return describe_difference(self._rank, decode(sent.header), peer, decode(sent.heard[peer]), sent.call, sent.op)

    def announce(self, mismatch: Mismatch) -> None:
        """Tell every peer, in place of the next header, of a difference that leaves the group unusable."""
        said = mismatch.text.encode("ascii", "replace").decode()[:MAX_REASON]
        text = json.dumps({"version": HEADER_VERSION, "disagreement": said})
        self._channel.send_last(text.encode("ascii").ljust(HEADER_BYTES))

    # ---- when a peer is lost --------------------------------------------------------------------

    def give_up(self, reason: str, blamed: int) -> None:
        """Tells every peer, in place of the next header, why this rank leaves the group. Only the first reason counts.

        blamed: the rank whose loss made it leave; its own rank if the cause is its own.
        """
        if self._gave_up:
            return
        self._gave_up = True
        self._channel.send_last(abort_notice(reason, blamed))

    def close(self) -> None:
        self._channel.close()

    def root_of(self, gone: Gone) -> Gone:
        """Who was lost first, as far as the peers say: one that gave up says whom it blames.

        Waits a little for what they have to say. No header can be received afterwards.
        """
        seen = {self._rank}
        while gone.peer not in seen:
            seen.add(gone.peer)
            gone = self._abort_notice_of(gone.peer) or gone
        return gone

    def _abort_notice_of(self, peer: int) -> Gone | None:
        """What a peer said when it gave up; None: it is silent, or ended without a word."""
        deadline = time.monotonic() + _NOTICE_SECONDS
        try:
            while (left := deadline - time.monotonic()) > 0:
                while (header := self._channel.receive(peer)) is not None:
                    if "gave up" in (fields := decode(header)):
                        return self._blame(peer, fields)
                self._channel.wait([peer], left)
        except Gone:
            pass
        return None

    def _blame(self, peer: int, fields: Mapping[str, HeaderValue]) -> Gone:
        blamed = fields.get("blamed")
        if not isinstance(blamed, int) or blamed in (peer, self._rank):
            return Gone(peer, str(fields["gave up"]))
        return Gone(blamed, f"rank {peer} gave up when it lost rank {blamed} ({fields['gave up']})")


def abort_notice(reason: str, blamed: int) -> bytes:
    """HEADER_BYTES bytes in place of a header: a rank gives up, why, and whom it blames."""
    said = reason[:MAX_REASON].encode("ascii", "replace").decode()
    text = json.dumps({"version": HEADER_VERSION, "gave up": said, "blamed": blamed})
    return text.encode("ascii").ljust(HEADER_BYTES)


def describe_difference(
    rank: int, mine: Mapping[str, HeaderValue], peer: int, theirs: Mapping[str, HeaderValue], call: int, op: str
) -> str:
    """The first field in which two headers differ, with both values."""
    names = [each for each in {**mine, **theirs} if mine.get(each) != theirs.get(each)]
    name = names[0] if names else "header"
    return (
        f"ranks disagree on {name} in call {call} ({op}): rank {rank} has {mine.get(name, 'none')}, rank {peer} has "
        f"{theirs.get(name, 'none')}; all ranks of a group must make the same calls in the same order, with the same "
        f"global sequence"
    )


def decode(header: bytes) -> dict[str, HeaderValue]:
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError):  # the latter from 1024 brackets
        fields = None
    return fields if isinstance(fields, dict) else {"version": "no ringtile header"}
