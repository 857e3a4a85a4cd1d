"""Virtual ranks: threads of one process."""

from __future__ import annotations

import collections
import itertools
import socket
import threading
import weakref
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ringtile.errors import InputError, PeerLostError
from ringtile.transport.agreement import Headers, tree_neighbors
from ringtile.transport.failures import FailureDetector, Notice
from ringtile.transport.sockets import SocketChannel
from ringtile.transport.transport import Transport, Work

Result = TypeVar("Result")

_serial = itertools.count()
_GONE = "it has hung up"


class _Parcel(NamedTuple):
    """A copy of what was sent, and the event that marks when a GPU has made it."""

    tensor: Tensor
    made: torch.cuda.Event | None


class _Arrival(NamedTuple):
    """A message to a virtual rank."""

    tensor: Tensor
    message: Future[_Parcel]
    timeout_seconds: float

    def wait(self) -> None:
        try:
            sent = self.message.result(self.timeout_seconds)
        except futures.TimeoutError:
            raise RuntimeError(f"nothing came for {self.timeout_seconds:g} s") from None
        if sent.made is not None:  # by the stream of the sender's thread; this thread may be on another one
            stream = torch.cuda.current_stream(sent.tensor.device)
            stream.wait_event(sent.made)
            sent.tensor.record_stream(stream)
        self.tensor.copy_(sent.tensor)


class _LoopbackDetector(FailureDetector):
    """Tells all others itself."""

    def __init__(self, rank: int, world_size: int, hall: list[_LoopbackDetector]) -> None:
        super().__init__(rank, world_size, [peer for peer in range(world_size) if peer != rank])
        self._hall = hall

    def _send(self, notice: Notice) -> None:
        for peer in self.neighbors:
            self._hall[peer].hear(self.rank, notice)

    def close(self) -> None:
        for peer in self.neighbors:
            self._hall[peer].hear_end(self.rank, _GONE)


class Hall:
    """What the virtual ranks of a world share: messages, detectors and channels."""

    def __init__(self, world_size: int, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.detectors: list[_LoopbackDetector] = []
        self._lock = threading.Lock()
        # By sender, receiver and tag, the messages that only one of the two has posted, in order.
        self._posted: dict[tuple[int, int, int], collections.deque[Future[_Parcel]]] = {}
        self._gone: set[int] = set()
        ends: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
        for rank in range(world_size):
            self.detectors.append(_LoopbackDetector(rank, world_size, self.detectors))
            for peer in tree_neighbors(rank, world_size):
                if peer > rank:
                    ends[rank][peer], ends[peer][rank] = socket.socketpair()
        self.channels = [SocketChannel(each, timeout_seconds) for each in ends]

    def post(self, sender: int, receiver: int, tag: int, parcel: _Parcel | None = None) -> Future[_Parcel]:
        """Return the oldest message that only the other rank has posted, or a new one. parcel: None from a receiver."""
        key = sender, receiver, tag
        with self._lock:
            posted = self._posted.setdefault(key, collections.deque())
            if posted and posted[0].done() == (parcel is None):
                message = posted.popleft()
            else:
                posted.append(message := Future())
            if not posted:
                del self._posted[key]
            if parcel is not None:
                message.set_result(parcel)
            elif sender in self._gone and not message.done():
                message.set_exception(RuntimeError(_GONE))
        return message

    def leave(self, rank: int) -> None:
        """End the messages of a rank; what it sent before still arrives."""
        with self._lock:
            self._gone.add(rank)
            for (sender, *_), posted in self._posted.items():
                for message in posted:
                    if sender == rank and not message.done():
                        message.set_exception(RuntimeError(_GONE))


class LoopbackTransport(Transport):
    """Messages between the threads of one LoopbackWorld."""

    def __init__(self, rank: int, world_size: int, hall: Hall) -> None:
        super().__init__(rank, world_size)
        self.hosts = (0,) * world_size
        self.detector = hall.detectors[rank]
        self._hall = hall

    def _connect(self) -> Headers:
        return Headers(self.rank, self.world_size, self._hall.channels[self.rank])

    def _start(self, tensor: Tensor, peer: int, *, outgoing: bool) -> Work | None:
        if not outgoing:
            return _Arrival(tensor, self._hall.post(peer, self.rank, self._payload_tag), self._hall.timeout_seconds)
        copy = tensor.clone()
        made = torch.cuda.current_stream(copy.device).record_event() if copy.is_cuda else None
        self._hall.post(self.rank, peer, self._payload_tag, _Parcel(copy, made))
        return None

    def _end_messages(self) -> None:
        self._hall.leave(self.rank)

    def leave(self) -> None:
        """End this rank's part, whether it has made a call or not."""
        self._headers = self._headers or self._connect()
        self.hang_up()


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
