"""Virtual ranks: threads of one process that talk through queues."""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ringtile.errors import InputError, PeerLost
from ringtile.transport.agreement import Channel, Gone
from ringtile.transport.transport import Message, Transport

Result = TypeVar("Result")

_HEADERS = -1  # their tag

_serial = itertools.count()


class _Parcel(NamedTuple):
    """A copy of what was sent, and the event that marks when a GPU has made it."""

    tensor: Tensor
    made: torch.cuda.Event | None


class _NothingCame(RuntimeError):
    pass


class _Mailbox:
    """What one virtual rank has sent to another, parcels and headers, by tag, each in the order of sending."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed  # one for all that a rank receives
        self._parcels: dict[int, collections.deque[Any]] = {}
        self._closed = False

    def put(self, tag: int, parcel: _Parcel | bytes) -> None:
        with self.changed:
            self._parcels.setdefault(tag, collections.deque()).append(parcel)
            self.changed.notify_all()

    def close(self) -> None:
        """The sender hangs up; what it sent before still arrives."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    def ready(self, tag: int) -> bool:
        """Whether `get` need not wait."""
        return tag in self._parcels or self._closed

    def get(self, tag: int, timeout_seconds: float) -> Any:
        with self.changed:
            if not self.changed.wait_for(lambda: self.ready(tag), timeout_seconds):
                raise _NothingCame(f"nothing came for {timeout_seconds} s")
            if tag not in self._parcels:
                raise RuntimeError("it has hung up")
            parcels = self._parcels[tag]
            parcel = parcels.popleft()
            if not parcels:
                del self._parcels[tag]
            return parcel


Mailboxes = dict[tuple[int, int], _Mailbox]  # by (sender, receiver)


@dataclass(eq=False)
class _Arrival:
    """A message to a virtual rank. Those of one sender and tag arrive in the order of posting, not of waiting."""

    tensor: Tensor
    mailbox: _Mailbox
    tag: int
    timeout_seconds: float
    posted: collections.deque[_Arrival]  # and not yet sent, of this sender and tag
    sent: _Parcel | None = None

    def wait(self) -> None:
        while self.sent is None:
            self.posted[0].sent = self.mailbox.get(self.tag, self.timeout_seconds)
            self.posted.popleft()
        sent = self.sent
        if sent.made is not None:  # by the stream of the sender's thread; this thread may be on another one
            stream = torch.cuda.current_stream(sent.tensor.device)
            stream.wait_event(sent.made)
            sent.tensor.record_stream(stream)
        self.tensor.copy_(sent.tensor)


class _Sent:
    """A message that its receiver may take whenever it likes."""

    def wait(self) -> None:
        pass


class _LoopbackChannel(Channel):
    """Headers through the mailboxes, under a tag of their own."""

    def __init__(self, rank: int, mailboxes: Mailboxes, timeout_seconds: float) -> None:
        self._incoming = {sender: mailbox for (sender, receiver), mailbox in mailboxes.items() if receiver == rank}
        self._outgoing = {receiver: mailbox for (sender, receiver), mailbox in mailboxes.items() if sender == rank}
        self._timeout_seconds = timeout_seconds

    def send(self, header: bytes, peers: Collection[int]) -> None:
        for peer in peers:
            self._outgoing[peer].put(_HEADERS, header)

    def send_last(self, header: bytes) -> None:
        self.send(header, self._outgoing)

    def receive(self, peer: int) -> bytes | None:
        try:
            header: bytes = self._incoming[peer].get(_HEADERS, 0.0)
            return header
        except _NothingCame:
            return None
        except RuntimeError as error:
            raise Gone(peer, str(error)) from None

    def wait(self, peers: Collection[int], timeout_seconds: float | None = None) -> None:
        boxes = [self._incoming[peer] for peer in peers]
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        with boxes[0].changed:
            if not boxes[0].changed.wait_for(lambda: any(box.ready(_HEADERS) for box in boxes), seconds):
                raise Gone(min(peers), f"nothing came for {seconds} s")

    def close(self) -> None:
        for mailbox in self._outgoing.values():
            mailbox.close()


class LoopbackTransport(Transport):
    """Messages between the threads of one LoopbackWorld."""

    def __init__(self, rank: int, world_size: int, mailboxes: Mailboxes, timeout_seconds: float) -> None:
        super().__init__(rank, world_size)
        self._mailboxes = mailboxes
        self._timeout_seconds = timeout_seconds
        self._posted: dict[tuple[int, int], collections.deque[_Arrival]] = {}  # by sender and tag

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        copy = tensor.clone()
        made = torch.cuda.current_stream(copy.device).record_event() if copy.is_cuda else None
        self._mailboxes[self.rank, peer].put(tag, _Parcel(copy, made))
        return _Sent()

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> Message:
        posted = self._posted.setdefault((peer, tag), collections.deque())
        posted.append(_Arrival(tensor, self._mailboxes[peer, self.rank], tag, self._timeout_seconds, posted))
        return posted[-1]

    def _drop_messages(self) -> None:
        self._posted.clear()

    def _open_channel(self) -> Channel:
        return _LoopbackChannel(self.rank, self._mailboxes, self._timeout_seconds)

    def hang_up(self) -> None:
        for (sender, _), mailbox in self._mailboxes.items():
            if sender == self.rank:
                mailbox.close()


class LoopbackGroup:
    """One virtual rank's handle of its world; goes wherever a process group goes."""

    def __init__(self, transport: LoopbackTransport) -> None:
        self.transport = transport
        self.group_name = f"loopback-{next(_serial)}"
        loopback_groups[self.group_name] = self


class LoopbackWorld:
    """W virtual ranks as threads of this process, for tests and for many ranks on one device.

    outputs = LoopbackWorld(4).run(lambda group: ring_attention(..., group=group))
    """

    def __init__(self, world_size: int, timeout_seconds: float = 60.0) -> None:
        if world_size < 1:
            raise InputError(f"world_size is {world_size}; expected at least 1")
        changed = [threading.Condition() for _ in range(world_size)]
        mailboxes: Mailboxes = {
            (sender, receiver): _Mailbox(changed[receiver])
            for sender, receiver in itertools.permutations(range(world_size), 2)
        }
        self.groups = [
            LoopbackGroup(LoopbackTransport(rank, world_size, mailboxes, timeout_seconds)) for rank in range(world_size)
        ]

    def run(self, function: Callable[[LoopbackGroup], Result]) -> list[Result]:
        """Calls function(group) on every rank, once per world, and returns the results by rank.

        A rank that returns or raises leaves the ring: peers that still wait for it get PeerLost. When ranks raised,
        the cause is raised here rather than the PeerLost it made elsewhere.
        """
        results: dict[int, Result] = {}
        errors: list[BaseException] = []

        def run_rank(rank: int) -> None:
            try:
                results[rank] = function(self.groups[rank])
            except BaseException as error:
                errors.append(error)
            finally:
                self.groups[rank].transport.hang_up()

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(len(self.groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise min(errors, key=lambda error: isinstance(error, PeerLost))
        return [results[rank] for rank in range(len(self.groups))]


# Weak: it says which virtual ranks are alive, and keeps none of them so.
loopback_groups: weakref.WeakValueDictionary[str, LoopbackGroup] = weakref.WeakValueDictionary()
