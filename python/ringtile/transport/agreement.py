"""Agreement: how ranks make sure that they all make the same call, without waiting for each other each time.

A call is known by its *terms*: the op, the device type and whatever else must be equal on all ranks (shapes, dtypes,
scale, digests of mask and layout). A *header* of one fixed size holds them, with what tells the call from others of its
kind. Headers travel beside the payloads, along the edges of a tree of the ranks. A rank sends its header to its
neighbors, at most three, compares theirs with it, and tells a neighbor that its side of the edge agrees as soon as its
other neighbors have said so of theirs.

- New terms: a rank waits for that before a payload travels.
- Terms that all ranks have agreed on before: payloads start at once. On the CPU a rank waits for the others' headers
  before it uses the first payload, at the latest before the call returns. On a GPU each call compares what has arrived
  by then, so a later call raises the difference. Terms that are new to one rank are new to all.

A rank that finds a difference, or hears of one, passes the header that differs on, in place of the word that its side
agrees. So each rank raises RingMismatchError, and no header on an edge belongs to a later call.

A rank that has waited for the timeout asks the neighbors that wait as it does for whom, as they do theirs. Who misses
one that has not come says so at once, however late it came itself.
"""

from __future__ import annotations

import collections
import json
import struct
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ringtile.errors import InputError, RingMismatchError

if TYPE_CHECKING:
    from ringtile.transport.sockets import SocketChannel

HEADER_VERSION = 1
HEADER_BYTES = 1024
# Users may send on the group too (tags from 0 up); ours begin with the bytes "RT".
HANG_UP_TAG, FIRST_PAYLOAD_TAG = 0x5254_0000, 0x5254_0001
_NUM_PAYLOAD_TAGS = 2**31 - FIRST_PAYLOAD_TAG
# A header ends with the rank whose it is and a byte that says what its sender knows: that all ranks on its side of the
# tree agree; that it makes this call, and no more yet; that it does, and goes on without waiting for the others; that
# the ranks differ, and the header is one that differs from its own; that it has waited long enough; or, in place of a
# header, why the group is broken.
_END = struct.Struct("<Ic")
_TEXT_BYTES = HEADER_BYTES - _END.size
_AGREES, _HERE, _AHEAD, _DIFFERS, _ASKS, _BREAKS = b"=", b".", b">", b"!", b"?", b" "
_ANSWER_SECONDS = 1.0  # that a rank which has asked for whom the others wait gives them to find out
MAX_REASON = 400  # characters, which JSON may double; a header has room for as many

HeaderValue = int | float | str


class Terms:
    """The terms of one kind of call, equal on all ranks: the op, the device type, and the fields of the caller."""

    def __init__(self, op: str, device_type: str, fields: Mapping[str, HeaderValue]) -> None:
        text = json.dumps({"op": op, "device": device_type, **fields}).encode("ascii")
        # Fixed width: a header is made by writing four numbers, each as wide as an int64, into this template. What
        # differs first is named, so the fields of the caller precede what follows from them.
        self._template = (
            b'{"version": %d, "call": %%20d, ' % HEADER_VERSION
            + text[1:-1].replace(b"%", b"%%")
            + b', "call of the forward": %20d, "step": %20d, "fingerprint of the data": %20d}'
        )
        num_bytes = len(self.header(0))
        if num_bytes > _TEXT_BYTES:
            raise InputError(f"a header of {num_bytes} bytes; expected at most {_TEXT_BYTES}")
        self._checksum = zlib.crc32(text)

    def header(self, call: int, forward_call: int = 0, data: int = 0, step: int = 0) -> bytes:
        """Return the terms and what tells this call from others of its kind, as JSON padded with spaces.

        call: its number on the group. forward_call: in a backward, the number of the forward's call; 0: not known.
        data: a fingerprint of data that must be the same on all ranks; 0: none. step: of a training, from which dropout
        is drawn; 0: none.
        """
        return (self._template % (call, forward_call, step, data)).ljust(_TEXT_BYTES)

    def payload_tag(self, call: int) -> int:
        """Return the tag of a call's payloads. Different calls, or different terms, do not receive each other's."""
        return FIRST_PAYLOAD_TAG + zlib.crc32(call.to_bytes(8, "little"), self._checksum) % _NUM_PAYLOAD_TAGS


# ---- headers ------------------------------------------------------------------------------------


class PeerGoneError(RuntimeError):
    """A peer is lost. peer: its rank; reason: what is known."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer
        self.reason = reason


def tree_neighbors(rank: int, world_size: int) -> list[int]:
    """Return the neighbors of a rank, at most three, in a tree of all ranks: two binary trees with joined roots."""
    up = rank // 2 - 1 if rank > 1 else 1 - rank
    return [peer for peer in (up, 2 * rank + 2, 2 * rank + 3) if peer < world_size]


@dataclass(eq=False, slots=True)
class _Sent:
    """This rank's header of a call, and those of others that differ."""

    text: bytes
    runs_ahead: bool  # the host goes on without waiting for others
    refused: bool  # this rank does not make the call: the others hear why, and what they say does not matter
    others: dict[int, bytes] = field(default_factory=dict)  # texts, by rank


class Headers:
    """One rank's headers of all calls of a group. channel: to its neighbors in the tree.

    A rank goes on only from a call in which it has told all neighbors, so at most the last one needs a word from it.
    """

    def __init__(self, rank: int, world_size: int, channel: SocketChannel) -> None:
        self._rank = rank
        self._channel = channel
        self._neighbors = tree_neighbors(rank, world_size)
        self._ends = {says: _END.pack(rank, says) for says in (_AGREES, _HERE, _AHEAD, _DIFFERS, _ASKS)}
        self._open: collections.deque[_Sent] = collections.deque()  # whose headers are not all compared, oldest first
        self._left = dict.fromkeys(self._neighbors, 0)  # by neighbor, the open calls in which it has more to say
        self._untold: list[int] = []  # the neighbors that need a word on the last call
        self._here: set[int] = set()  # the neighbors that have come to the first call in which they have more to say
        self._asked = False  # a neighbor has waited long enough for the oldest open call
        self._next: dict[int, bytes] = {}  # by neighbor, its header of the next call; empty: it has closed

    def send(self, text: bytes, *, runs_ahead: bool = False, refused: bool = False) -> None:
        """Send the header of this rank's next call to its neighbors. Arguments as of `_Sent`. PeerGoneError."""
        self._open.append(_Sent(text, runs_ahead, refused))
        for peer in self._neighbors:
            self._left[peer] += 1
        says = _DIFFERS if refused else _AHEAD if runs_ahead else _AGREES if len(self._neighbors) == 1 else _HERE
        self._untold = self._neighbors if says == _HERE else []
        self._channel.send(text + self._ends[says], self._neighbors)

    def _pass_on(self) -> None:
        """Tell each neighbor that this rank's side agrees, once all others have said so of theirs."""
        late = [peer for peer in self._neighbors if self._left[peer]]
        if ready := [peer for peer in self._untold if late in ([], [peer])]:
            self._untold = [peer for peer in self._untold if peer not in ready]
            self._channel.send(self._open[-1].text + self._ends[_AGREES], ready)

    def _differ(self, rank: int, text: bytes) -> None:
        """Tell the neighbors of a rank whose header differs; those whose side agrees are the ones that know."""
        untold, self._untold = self._untold, []
        self._channel.send(text + _END.pack(rank, _DIFFERS), untold)

    def compare(self, *, wait: bool) -> None:
        """Compare the headers of all calls so far: all of them, or what has arrived.

        Raises PeerGoneError, and RingMismatchError, which breaks the group where a rank has gone on with its call.
        """
        deadline, has_asked = 0.0, False  # 0.0: it has not waited yet
        while self._open:
            arrived = self._read(all_neighbors=deadline > 0.0)
            if len(self._open) not in self._left.values():
                self._asked, sent = False, self._open.popleft()
                if sent.others:
                    raise self._mismatch(sent, min(sent.others))
            elif not arrived:
                if not wait:
                    return
                missing = [peer for peer in self._neighbors if self._left[peer] == len(self._open)]
                deadline = deadline or time.monotonic() + self._channel.timeout_seconds
                listening = [peer for peer in self._neighbors if peer not in self._next]
                is_asked = self._asked and not has_asked
                if is_asked or not self._channel.wait(listening, deadline - time.monotonic()):
                    silent = [peer for peer in missing if peer not in self._here]
                    if silent or has_asked:
                        reason = f"nothing came for {self._channel.timeout_seconds:g} s"
                        raise PeerGoneError(min(silent or missing), reason)
                    self._channel.send(self._open[0].text + self._ends[_ASKS], missing)
                    deadline, has_asked = time.monotonic() + _ANSWER_SECONDS, True

    def _read(self, *, all_neighbors: bool) -> bool:
        """Take in what has arrived, and answer it; return whether an open call has got any further.

        all_neighbors: listen to those, too, of which no open call waits for more.
        """
        arrived = False
        for peer in self._neighbors:
            while (left := self._left[peer]) or (all_neighbors and peer not in self._next):
                try:
                    header = self._next.pop(peer, None) or self._channel.receive(peer)
                except PeerGoneError:
                    if left:
                        raise
                    header = b""  # the next call raises it
                if header is None:
                    break
                if header[-1:] == _ASKS:
                    self._asked |= left < len(self._open) or peer in self._here
                elif left:
                    arrived = True
                    self._hear(self._open[-left], peer, header)
                else:
                    self._next[peer] = header
        return arrived

    def _hear(self, sent: _Sent, peer: int, header: bytes) -> None:
        text, says = header[:_TEXT_BYTES], header[-1:]
        if says == _BREAKS:
            fields = decode(header)
            reason = fields.get("reason", "a message that is no ringtile header")
            if (lost := fields.get("lost")) is not None:
                raise PeerGoneError(lost, reason)
            raise self._break(RingMismatchError(reason))
        if says == _HERE and not sent.runs_ahead:
            self._here.add(peer)
        else:
            self._here.discard(peer)
            self._left[peer] -= 1
        if text == sent.text:
            if says == _AGREES and self._untold:
                self._pass_on()
        elif not sent.refused:
            whose = _END.unpack(header[_TEXT_BYTES:])[0] if says == _DIFFERS else peer
            sent.others[whose] = text
            if sent.runs_ahead or says == _AHEAD:
                raise self._break(self._mismatch(sent, whose))
            self._differ(whose, text)

    def _mismatch(self, sent: _Sent, peer: int) -> RingMismatchError:
        return RingMismatchError(describe_difference(self._rank, decode(sent.text), peer, decode(sent.others[peer])))

    def _break(self, mismatch: RingMismatchError) -> RingMismatchError:
        """Tell the neighbors of a difference in a call that a rank has gone on with; they tell theirs."""
        mismatch.breaks_group = True
        self.announce(str(mismatch))
        return mismatch

    def announce(self, reason: str, lost: int | None = None) -> None:
        """Tell the neighbors, in place of the next header, why the group is broken. lost: the rank, if one is."""
        self._channel.send_last(announcement(reason, lost))

    def close(self) -> None:
        """End the connections, for which another thread may be waiting; what was sent before still arrives."""
        self._channel.close()


def announcement(reason: str, lost: int | None) -> bytes:
    """Return what stands in place of a header; arguments as of `Headers.announce`. It ends with _BREAKS."""
    text = json.dumps({"version": HEADER_VERSION, "lost": lost, "reason": in_header(reason)})
    return text.encode("ascii").ljust(HEADER_BYTES)


def in_header(text: str) -> str:
    """Return what a header has room for."""
    return text.encode("ascii", "replace").decode()[:MAX_REASON]


def describe_difference(rank: int, mine: Mapping[str, Any], peer: int, theirs: Mapping[str, Any]) -> str:
    """Return the first field in which two headers differ, with both values."""
    name = next((each for each in {**mine, **theirs} if mine.get(each) != theirs.get(each)), "header")
    return (
        f"ranks disagree on {name} in call {mine['call']} ({mine['op']}): rank {rank} has {mine.get(name, 'none')}, "
        f"rank {peer} has {theirs.get(name, 'none')}; all ranks of a group must make the same calls in the same order, "
        f"with the same global sequence"
    )


def decode(header: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(header[:_TEXT_BYTES])
    except (ValueError, RecursionError):  # the latter from 1024 brackets
        fields = None
    return fields if isinstance(fields, dict) else {"version": "no ringtile header"}
