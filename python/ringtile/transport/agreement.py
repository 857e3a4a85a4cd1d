"""Agreement: how ranks make sure that they all make the same call, without waiting for each other each time.

A call is known by its *terms*: the op, the device type and whatever else must be equal on all ranks (shapes, dtypes,
scale, digests of mask and layout). Every rank tells every other its terms in a header of one fixed size, with what
tells the call from others of its kind: its number and, if they are known, a fingerprint of its data and the number of
the forward that a backward belongs to. Headers travel over a `Channel`, beside the payloads.

- New terms: the rank waits for all headers before a payload travels.
- Terms that all ranks have agreed on before: payloads start at once. On the CPU the headers are compared before the
  first payload is used, at the latest before the call returns. On a GPU each call compares what has arrived by then,
  so a later call raises the difference.

Ranks agree on terms together, so terms that are new to one rank are new to all. If any two ranks differ, every rank
receives a header that differs from its own: each raises RingMismatch, and none is left waiting.
"""

from __future__ import annotations

import abc
import json
import time
import zlib
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ringtile.errors import InputError

HEADER_VERSION = 5
# One size for ever: a receive of the wrong size kills the process, so a header must fit whatever the peer's version.
HEADER_BYTES = 1024
# Users may send on the group too (tags from 0 up); ours begin with the bytes "RT".
HELLO_TAG, HANG_UP_TAG, FIRST_PAYLOAD_TAG = 0x5254_0000, 0x5254_0001, 0x5254_0002
_NUM_PAYLOAD_TAGS = 2**31 - FIRST_PAYLOAD_TAG
_MAX_AGREED = 1024  # terms that a group remembers; the oldest are agreed on anew
MAX_REASON = 400  # characters, which JSON may double; a header has room for as many
_FAREWELL_SECONDS = 1.0  # how long a rank that lost a peer waits to hear why the peer gave up

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
        return (self._template % (call, forward_call, step, data)).ljust(HEADER_BYTES)

    def payload_tag(self, call: int) -> int:
        """The tag of the payloads of a call. Different calls, or different terms, do not receive each other's."""
        return FIRST_PAYLOAD_TAG + zlib.crc32(call.to_bytes(8, "little"), self._checksum) % _NUM_PAYLOAD_TAGS


class AgreedTerms:
    """The terms that all ranks of a group have agreed on; the last _MAX_AGREED of them."""

    def __init__(self) -> None:
        self._agreed: OrderedDict[object, Terms] = OrderedDict()

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
    """Carries headers from this rank to every other rank of a group, and theirs to this one, in order."""

    @abc.abstractmethod
    def send(self, header: bytes) -> None:
        """Sends HEADER_BYTES bytes to every peer, without waiting for their receives. Raises Gone."""

    @abc.abstractmethod
    def send_last(self, header: bytes) -> None:
        """Sends it to every peer that can still be reached, at once or not at all."""

    @abc.abstractmethod
    def receive(self, peer: int) -> bytes | None:
        """The next header of a peer, if it has arrived. Raises Gone when the peer has closed and all has been read."""

    @abc.abstractmethod
    def wait(self, peers: Collection[int], timeout_seconds: float | None = None) -> None:
        """Returns when there is something to receive from one of these peers.

        Raises Gone after the timeout; None: that of the group.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the channel; peers may still receive what was sent before."""


class Mismatch(NamedTuple):
    """The first difference that was found between this rank's headers and those of its peers."""

    call: int
    peer: int
    text: str


class _Sent(NamedTuple):
    op: str
    call: int
    header: bytes
    refused: bool  # this rank does not make the call: the others hear why, and what they say does not matter


class Headers:
    """One rank's headers: one to every peer in each call, compared with what the peers sent in the same call."""

    def __init__(self, rank: int, world_size: int, channel: Channel) -> None:
        self._rank = rank
        self._channel = channel
        self._gave_up = False
        self._num_sent = 0
        self._num_received = {peer: 0 for peer in range(world_size) if peer != rank}
        self._sent: dict[int, _Sent] = {}  # the last of them, until all peers have sent theirs
        self.agreeing: set[int] = set()  # the peers whose header equals the last one of this rank

    def send(self, op: str, call: int, header: bytes, *, refused: bool = False) -> None:
        self._num_sent += 1
        self._sent[self._num_sent] = _Sent(op, call, header, refused)
        self.agreeing.clear()
        self._channel.send(header)

    def compare(self, *, wait: bool) -> Mismatch | None:
        """Compares the headers sent so far with those of the peers: all of them, or what has arrived. Raises Gone."""
        mismatch: Mismatch | None = None
        while behind := [peer for peer, received in self._num_received.items() if received < self._num_sent]:
            arrived = False
            for peer in behind:
                while self._num_received[peer] < self._num_sent and (header := self._channel.receive(peer)):
                    arrived = True
                    if (difference := self._compare_next(peer, header)) is not None:
                        mismatch = min(mismatch or difference, difference)
            if not arrived:
                if not wait:
                    break
                self._channel.wait(behind)
        compared = min(self._num_received.values())
        self._sent = {number: sent for number, sent in self._sent.items() if number > compared}
        return mismatch

    def _compare_next(self, peer: int, header: bytes) -> Mismatch | None:
        self._num_received[peer] += 1
        mine = self._sent[self._num_received[peer]]
        if header == mine.header:
            if self._num_received[peer] == self._num_sent:
                self.agreeing.add(peer)
            return None
        fields = decode(header)
        if "gave up" in fields:
            raise self._blame(peer, fields)
        if mine.refused:
            return None
        text = describe_difference(self._rank, decode(mine.header), peer, fields, mine.call, mine.op)
        return Mismatch(mine.call, peer, text)

    # ---- when a peer is lost --------------------------------------------------------------------

    def give_up(self, reason: str, blamed: int) -> None:
        """Tells every peer, in place of the next header, why this rank leaves the group. Only the first reason counts.

        blamed: the rank whose loss made it leave; its own rank if the cause is its own.
        """
        if self._gave_up:
            return
        self._gave_up = True
        self._channel.send_last(farewell(reason, blamed))

    def close(self) -> None:
        self._channel.close()

    def root_of(self, gone: Gone) -> Gone:
        """Who was lost first, as far as the peers say: one that gave up says whom it blames.

        Waits a little for what they have to say. No header can be received afterwards.
        """
        seen = {self._rank}
        while gone.peer not in seen:
            seen.add(gone.peer)
            gone = self._farewell(gone.peer) or gone
        return gone

    def _farewell(self, peer: int) -> Gone | None:
        """What a peer said when it gave up; None: it is silent, or ended without a word."""
        deadline = time.monotonic() + _FAREWELL_SECONDS
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


def farewell(reason: str, blamed: int) -> bytes:
    """HEADER_BYTES bytes in place of a header: a rank gives up, why, and whom it blames."""
    said = reason[:MAX_REASON].encode("ascii", "replace").decode()
    text = json.dumps({"version": HEADER_VERSION, "gave up": said, "blamed": blamed})
    return text.encode("ascii").ljust(HEADER_BYTES)


def describe_difference(
    rank: int, mine: Mapping[str, HeaderValue], peer: int, theirs: Mapping[str, HeaderValue], call: int, op: str
) -> str:
    """The first field in which two headers differ, with both values."""
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    field = names[0] if names else "header"
    return (
        f"ranks disagree on {field} in call {call} ({op}): rank {rank} has {mine.get(field, 'none')}, rank {peer} has "
        f"{theirs.get(field, 'none')}; all ranks of a group must make the same calls in the same order, with the same "
        f"global sequence"
    )


def decode(header: bytes) -> dict[str, HeaderValue]:
    try:
        fields = json.loads(header)
    except (ValueError, RecursionError):  # the latter from 1024 brackets
        fields = None
    return fields if isinstance(fields, dict) else {"version": "no ringtile header"}
