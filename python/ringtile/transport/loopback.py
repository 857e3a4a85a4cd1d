"""Virtual ranks: threads of one process."""

from __future__ import annotations

import collections
import itertools
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ringtile.errors import InputError, PeerLostError, shown
from ringtile.transport.agreement import Headers, tree_neighbors
from ringtile.transport.failures import FailureDetector, Notice
from ringtile.transport.sockets import LONGEST_SECONDS, SocketChannel
from ringtile.transport.transport import Transport, VirtualGroup, Work

Result = TypeVar("Result")

_serial = itertools.count()
_GONE = "it has hung up"
_Key = tuple[int, int, int, int]  # of a message: sender, receiver, payload tag, and its number among those


class LoopbackState:
    """What the virtual ranks of a world share: messages, detectors and channels."""

    def __init__(self, world_size: int, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.detectors: list[_LoopbackDetector] = []
        self.changed = threading.Condition()
        self.sent: dict[_Key, tuple[Tensor, torch.cuda.Event | None]] = {}  # copies, and when a GPU has made each
        self.gone: set[int] = set()
        ends: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
        for rank in range(world_size):
            self.detectors.append(_LoopbackDetector(rank, world_size, self.detectors))
            for peer in tree_neighbors(rank, world_size):
                if peer > rank:
                    ends[rank][peer], ends[peer][rank] = socket.socketpair()
        self.channels = [SocketChannel(each, timeout_seconds) for each in ends]


class _LoopbackDetector(FailureDetector):
    """Tells all others itself."""

    def __init__(self, rank: int, world_size: int, state: list[_LoopbackDetector]) -> None:
        super().__init__(rank, world_size, [peer for peer in range(world_size) if peer != rank])
        self._state = state

    def _send(self, notice: Notice) -> None:
        for peer in self.neighbors:
            self._state[peer].hear(self.rank, notice)

    def close(self) -> None:
        for peer in self.neighbors:
            self._state[peer].hear_end(self.rank, _GONE)


class _Arrival(NamedTuple):
    """A message to a virtual rank."""

    tensor: Tensor
    key: _Key
    state: LoopbackState

    def wait(self) -> None:
        state, sender = self.state, self.key[0]
        with state.changed:
            if self.key not in state.sent:
                state.changed.wait_for(lambda: self.key in state.sent or sender in state.gone, state.timeout_seconds)
            if self.key not in state.sent:
                raise RuntimeError(_GONE if sender in state.gone else f"nothing came for {state.timeout_seconds:g} s")
            sent, made = state.sent.pop(self.key)
        if made is not None:  # by the stream of the sender's thread; this thread may be on another one
            stream = torch.cuda.current_stream(sent.device)
            stream.wait_event(made)
            sent.record_stream(stream)
        self.tensor.copy_(sent)


class LoopbackTransport(Transport):
    """Messages between the threads of one LoopbackWorld."""

    def __init__(self, rank: int, world_size: int, state: LoopbackState) -> None:
        super().__init__(rank, world_size)
        self.hosts = (0,) * world_size
        self.detector = state.detectors[rank]
        self._state = state
        self._call, self._numbers = 0, collections.Counter[tuple[int, int]]()  # of its messages, by their way

    def _connect(self) -> Headers:
        return Headers(self.rank, self.world_size, self._state.channels[self.rank])

    def _start(self, tensor: Tensor, peer: int, *, outgoing: bool) -> Work | None:
        if self._call != self.num_calls:
            self._call = self.num_calls
            self._numbers.clear()
        way = (self.rank, peer) if outgoing else (peer, self.rank)
        self._numbers[way] += 1
        key = *way, self._payload_tag, self._numbers[way]
        if not outgoing:
            return _Arrival(tensor, key, self._state)
        copy = tensor.clone()
        made = torch.cuda.current_stream(copy.device).record_event() if copy.is_cuda else None
        with self._state.changed:
            self._state.sent[key] = copy, made
            self._state.changed.notify_all()
        return None

    def _end_messages(self) -> None:
        """End the messages of this rank; what it sent before still arrives."""
        with self._state.changed:
            self._state.gone.add(self.rank)
            self._state.changed.notify_all()

    def leave(self) -> None:
        """End this rank's part, whether it has made a call or not."""
        self._headers = self._headers or self._connect()
        self.close()


class LoopbackGroup(VirtualGroup):
    """One virtual rank's handle of its world; goes wherever a process group goes."""

    transport: LoopbackTransport

    def __init__(self, transport: LoopbackTransport) -> None:
        super().__init__(transport, f"loopback-{next(_serial)}")


class LoopbackWorld:
    """W virtual ranks as threads of this process, for tests and for many ranks on one device.

    Each of them calls a function with its group:

        outputs = LoopbackWorld(4).run(lambda group: ring_attention(..., group=group))
    """

    def __init__(self, world_size: int, timeout_seconds: float = 60.0) -> None:
        if world_size < 1:
            raise InputError(f"world_size is {world_size}; expected at least 1")
        if not isinstance(timeout_seconds, int | float) or not timeout_seconds > 0:
            raise InputError(f"timeout_seconds is {shown(timeout_seconds)}; expected more than 0 s, math.inf for ever")
        state = LoopbackState(world_size, min(timeout_seconds, LONGEST_SECONDS))
        self.groups = [LoopbackGroup(LoopbackTransport(rank, world_size, state)) for rank in range(world_size)]

    def run(self, function: Callable[[LoopbackGroup], Result]) -> list[Result]:
        """Call function(group) on every rank, once per world, and return the results by rank.

        A rank that returns or raises leaves the ring: peers that still wait get PeerLostError. When ranks raised, the
        cause is raised here rather than the PeerLostError it made elsewhere.
        """
        results: dict[int, Result] = {}
        errors: list[BaseException] = []

        def run_rank(group: LoopbackGroup) -> None:
            try:
                results[group.transport.rank] = function(group)
            except BaseException as error:
                errors.append(error)
            finally:
                group.transport.leave()

        threads = [threading.Thread(target=run_rank, args=(group,)) for group in self.groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise min(errors, key=lambda error: isinstance(error, PeerLostError))
        return [results[rank] for rank in range(len(self.groups))]
