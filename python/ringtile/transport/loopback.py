"""Virtual ranks: threads of one process that talk through queues."""

from __future__ import annotations

import collections
import itertools
import socket
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ringtile.errors import InputError, PeerLostError
from ringtile.transport.agreement import tree_neighbours
from ringtile.transport.failures import FailureDetector, Notice
from ringtile.transport.sockets import SocketChannel
from ringtile.transport.transport import Transport, Work

Result = TypeVar("Result")

_serial = itertools.count()


class _Parcel(NamedTuple):
    """A copy of what was sent, and the event that marks when a GPU has made it."""

    tensor: Tensor
    made: torch.cuda.Event | None


class _Mailbox:
    """The messages from one virtual rank to another, by tag, each in the order of sending."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parcels: dict[int, collections.deque[_Parcel]] = {}
        self._closed = False

    def put(self, tag: int, parcel: _Parcel) -> None:
        with self._changed:
            self._parcels.setdefault(tag, collections.deque()).append(parcel)
            self._changed.notify_all()

    def close(self) -> None:
        """Hang up, as the sender; what it sent before still arrives."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def get(self, tag: int, timeout_seconds: float) -> _Parcel:
        with self._changed:
            if not self._changed.wait_for(lambda: tag in self._parcels or self._closed, timeout_seconds):
                raise RuntimeError(f"nothing came for {timeout_seconds:g} s")
            if tag not in self._parcels:
                raise RuntimeError("it has hung up")
            parcels = self._parcels[tag]
            parcel = parcels.popleft()
            if not parcels:
                del self._parcels[tag]
            return parcel


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


class _LoopbackDetector(FailureDetector):
    """Tells all others itself."""

    def __init__(self, rank: int, world_size: int, hall: list[_LoopbackDetector]) -> None:
        super().__init__(rank, world_size, [peer for peer in range(world_size) if peer != rank])
        self._hall = hall

    def _send(self, notice: Notice) -> None:
        for peer in self.neighbours:
            self._hall[peer].hear(self.rank, notice)

    def close(self) -> None:
        for peer in self.neighbours:
            self._hall[peer].hear_end(self.rank, "it has hung up")


class Hall:
    """The mailboxes, detectors and channels of all virtual ranks of a world."""

    def __init__(self, world_size: int, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.mailboxes = {pair: _Mailbox() for pair in itertools.permutations(range(world_size), 2)}  # sender, receiver
        self.detectors: list[_LoopbackDetector] = []
        ends: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
        for rank in range(world_size):
            self.detectors.append(_LoopbackDetector(rank, world_size, self.detectors))
            for peer in tree_neighbours(rank, world_size):
                if peer > rank:
                    ends[rank][peer], ends[peer][rank] = socket.socketpair()
        self.channels = [SocketChannel(each, timeout_seconds) for each in ends]


class LoopbackTransport(Transport):
    """Messages between the threads of one LoopbackWorld."""

    def __init__(self, rank: int, world_size: int, hall: Hall) -> None:
        super().__init__(rank, world_size)
        self.hosts = (0,) * world_size
        self._hall = hall
        self._posted: dict[tuple[int, int], collections.deque[_Arrival]] = {}  # by sender and tag

    def _connect(self) -> tuple[SocketChannel, FailureDetector]:
        return self._hall.channels[self.rank], self._hall.detectors[self.rank]

    def _start(self, tensor: Tensor, peer: int, tag: int, *, outgoing: bool) -> Work:
        if outgoing:
            copy = tensor.clone()
            made = torch.cuda.current_stream(copy.device).record_event() if copy.is_cuda else None
            self._hall.mailboxes[self.rank, peer].put(tag, _Parcel(copy, made))
            return _Sent()
        posted = self._posted.setdefault((peer, tag), collections.deque())
        mailbox = self._hall.mailboxes[peer, self.rank]
        posted.append(_Arrival(tensor, mailbox, tag, self._hall.timeout_seconds, posted))
        return posted[-1]

    def _drop_messages(self) -> None:
        self._posted.clear()

    def _end_messages(self) -> None:
        for (sender, _), mailbox in self._hall.mailboxes.items():
            if sender == self.rank:
                mailbox.close()

    def leave(self) -> None:
        """End this rank's part, whether it has made a call or not."""
        for end in self._connect()[::-1]:
            end.close()
        self._end_messages()


class LoopbackGroup:
    """One virtual rank's handle of its world; goes wherever a process group goes."""

    def __init__(self, transport: LoopbackTransport) -> None:
        self.transport = transport
        self.group_name = f"loopback-{next(_serial)}"
        loopback_groups[self.group_name] = self


class LoopbackWorld:
    """W virtual ranks as threads of this process, for tests and for many ranks on one device.

    Each of them calls a function with its group:

        outputs = LoopbackWorld(4).run(lambda group: ring_attention(..., group=group))
    """

    def __init__(self, world_size: int, timeout_seconds: float = 60.0) -> None:
        if world_size < 1:
            raise InputError(f"world_size is {world_size}; expected at least 1")
        hall = Hall(world_size, timeout_seconds)
        self.groups = [LoopbackGroup(LoopbackTransport(rank, world_size, hall)) for rank in range(world_size)]

    def run(self, function: Callable[[LoopbackGroup], Result]) -> list[Result]:
        """Call function(group) on every rank, once per world, and return the results by rank.

        A rank that returns or raises leaves the ring: peers that still wait get PeerLostError. When ranks raised, the
        cause is raised here rather than the PeerLostError it made elsewhere.
        """
        results: dict[int, Result] = {}
        errors: list[BaseException] = []

        def run_rank(rank: int) -> None:
            try:
                results[rank] = function(self.groups[rank])
            except BaseException as error:
                errors.append(error)
            finally:
                self.groups[rank].transport.leave()

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(len(self.groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise min(errors, key=lambda error: isinstance(error, PeerLostError))
        return [results[rank] for rank in range(len(self.groups))]


# Weak: it says which virtual ranks are alive, and keeps none of them so.
loopback_groups: weakref.WeakValueDictionary[str, LoopbackGroup] = weakref.WeakValueDictionary()
