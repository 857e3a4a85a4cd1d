"""One rank's end of a group: calls that all ranks agree on, and payloads straight from rank to rank.

`ProcessGroupTransport` works over a torch.distributed process group, `LoopbackTransport` over threads of one process;
the ring cannot tell them apart. A transport belongs to one group: it counts that group's calls and bytes, and one
thread at a time may use it.

On a GPU nothing here waits for the device or, once a kind of call is agreed on, for another host. Headers travel
between the CPUs. A message starts when the current stream reaches the call that posts it, and waiting for it makes the
current stream wait. NCCL runs the messages of a group one batch after another, so all ranks must post their batches in
one order; the order of the rounds is one.
"""

from __future__ import annotations

import abc
import contextlib
import queue
import threading
import weakref
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ringtile.errors import PeerLost, RingMismatch, RingtileError
from ringtile.transport.agreement import (
    FIRST_PAYLOAD_TAG,
    HEADER_BYTES,
    HEADER_TAG,
    AgreedTerms,
    HeaderValue,
    Terms,
    decode,
)

_REFUSAL_LEN = 400  # characters, which JSON may double; a header has room for as many


class Message(Protocol):
    """A message under way, sent or to be received. wait() raises RuntimeError when the peer is gone."""

    def wait(self) -> Any: ...


_Messages = list[tuple[tuple[int, ...], Message]]  # (the peers, the message)
_Receives = tuple[_Messages, dict[int, Tensor]]  # the receives of headers, and by peer where they arrive


@dataclass(frozen=True)
class Exchange:
    """Messages under way; their tensors stay untouched, and are kept here, until `wait` returns."""

    messages: _Messages
    tensors: list[Tensor]
    transport: Transport
    what: str  # "round 2 of call 3 (ring_attention forward)"

    def wait(self) -> None:
        """Returns when all of them have arrived. Raises PeerLost, RingMismatch. A profiler sees "ringtile::wait"."""
        self.transport.compare_headers()
        with _span("ringtile::wait"):
            self.wait_for()

    def wait_for(self, peers: Container[int] | None = None) -> None:
        """`wait`, without a look at headers, for the messages of these peers (None: all)."""
        for whose, message in self.messages:
            if peers is None or all(peer in peers for peer in whose):
                with self.transport.naming(whose, self.what):
                    message.wait()


def _span(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range in a profile; costs nothing where nobody profiles."""
    return torch.profiler.record_function(name) if torch._C._autograd._profiler_enabled() else contextlib.nullcontext()


@dataclass(frozen=True)
class _Headers:
    """The headers of one call: mine under way to all peers, theirs on the way to me."""

    op: str
    call: int
    mine: Tensor
    theirs: dict[int, Tensor]
    exchange: Exchange

    def compare(self) -> None:
        """Waits for all of them. Raises PeerLost, RingMismatch."""
        self.exchange.wait_for()
        for peer, header in self.theirs.items():
            if not torch.equal(header, self.mine):
                self._raise_mismatch(peer, decode(header))

    def agreeing(self) -> set[int]:
        """The peers whose header is mine, once all have arrived."""
        return {peer for peer, header in self.theirs.items() if torch.equal(header, self.mine)}

    def _raise_mismatch(self, peer: int, theirs: dict[str, HeaderValue]) -> None:
        mine, rank = decode(self.mine), self.exchange.transport.rank
        names = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
        field = names[0] if names else "header"
        raise RingMismatch(
            f"ranks disagree on {field} in call {self.call} ({self.op}): rank {rank} has "
            f"{mine.get(field, 'none')}, rank {peer} has {theirs.get(field, 'none')}; all ranks of a group must make "
            f"the same calls in the same order, with the same global sequence"
        )


class Transport(abc.ABC):
    """One rank's end of a group of ranks.

    rank, world_size: of this group. bytes_sent: payload sent so far, in bytes; headers do not count.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.bytes_sent = 0
        self._call = 0
        self._op = ""
        self._payload_tag = FIRST_PAYLOAD_TAG
        self._agreed = AgreedTerms()
        self._headers: _Headers | None = None  # of this call, not compared yet
        self._next_headers: _Receives | None = None  # of the next call; not an Exchange, which would be a cycle
        self._under_way: list[Exchange] = []  # of this call
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._watched: queue.SimpleQueue[_Headers | None] | None = None  # for the thread that compares them

    @contextlib.contextmanager
    def call(self, op: str, fields: Mapping[str, HeaderValue], device: torch.device | str = "cpu") -> Iterator[None]:
        """One operation that all ranks take part in: agree on op and fields, then exchange payloads in the body.

        device: where the payloads are; `check_device` has accepted it. See agreement.py for who waits for whom.

        RingMismatch leaves the group usable, except on a GPU after terms that were agreed on, where NCCL's messages may
        be under way. Any other failure breaks the group: this rank hangs up, so that no peer waits for it, and refuses
        later calls with PeerLost.
        """
        if self.world_size == 1:
            yield
            return
        with self._lock:
            self._raise_failure(op)
            self._call += 1
            self._op = op
            try:
                self._agree(op, fields, torch.device(device))
                yield
                self.compare_headers()
            except RingMismatch:
                raise
            except BaseException as error:
                self._failure = error
                self.hang_up()
                raise
            finally:
                self._headers = None
                self._under_way.clear()

    def _raise_failure(self, op: str) -> None:
        if self._failure is None:
            return
        if isinstance(self._failure, RingMismatch):  # found by the watcher
            raise self._failure
        raise PeerLost(
            f"{op} on a group that failed before ({self._failure}); destroy the process group and start anew"
        ) from self._failure

    def _agree(self, op: str, fields: Mapping[str, HeaderValue], device: torch.device) -> None:
        key = (op, device.type, *fields.items())
        agreed = self._agreed.find(key)
        terms = agreed or Terms(op, device.type, fields)
        self._payload_tag = terms.payload_tag(self._call)
        headers = self._post_headers(op, terms.header(self._call))
        if agreed is None:
            headers.compare()
            self._agreed.add(key, terms)
            self._open(device)
        elif self._host_runs_ahead(device):
            self._watch(headers)
        else:
            self._headers = headers

    def compare_headers(self) -> None:
        """Compares the headers of this call with those of all peers, once. Raises PeerLost, RingMismatch."""
        headers, self._headers = self._headers, None
        if headers is None:
            return
        with _span("ringtile::wait_for_headers"):
            try:
                headers.compare()
            except RingMismatch:
                # A message between two ranks that agree is received whole, or the next one would never be read.
                for exchange in self._under_way:
                    exchange.wait_for(headers.agreeing())
                raise

    def _watch(self, headers: _Headers) -> None:
        """Leaves the headers to a thread, which compares them in the order of the calls."""
        if self._watched is None:
            self._watched = queue.SimpleQueue()
            threading.Thread(target=_watch, args=(self._watched,), name="ringtile headers", daemon=True).start()
            weakref.finalize(self, self._watched.put, None)
        self._watched.put(headers)

    def _post_headers(self, op: str, mine: Tensor) -> _Headers:
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        place = self._place("the header")
        messages, theirs = self._next_headers or self._receive_headers(peers, place)
        # Receives for the next call: a header that finds its receive posted travels at once; otherwise gloo's two sides
        # would first find each other. Before the send, without which no peer ends this call and closes its connections.
        self._next_headers = self._receive_headers(peers, place)
        sends = self._post(dict.fromkeys(peers, mine), {}, HEADER_TAG, place)
        exchange = Exchange([*messages, *sends.messages], [*theirs.values(), mine], self, place)
        return _Headers(op, self._call, mine, theirs, exchange)

    def _receive_headers(self, peers: list[int], place: str) -> _Receives:
        headers = {peer: torch.empty(HEADER_BYTES, dtype=torch.uint8) for peer in peers}
        return self._post({}, headers, HEADER_TAG, place).messages, headers

    def refuse(self, op: str, reason: Exception) -> None:
        """Tells the others, in place of the header of a call, why this rank cannot take part: they raise RingMismatch.

        Without it they would wait for this rank until it ends. Ranks that refuse for the same reason agree.
        """
        said = f"{op}, refused: {reason}"[:_REFUSAL_LEN].encode("ascii", "replace").decode()
        with contextlib.suppress(RingtileError), self.call(said, {}):
            pass

    def start(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], what: str) -> Exchange:
        """Posts contiguous payloads to and from peers (by rank) and returns at once. Raises PeerLost.

        Both sides must post messages between them in the same order. An empty tensor does not travel. `what` says
        in errors where this is, as in "round 2".
        """
        self.bytes_sent += sum(tensor.nbytes for tensor in sends.values())
        exchange = self._post(sends, receives, self._payload_tag, self._place(what))
        self._under_way.append(exchange)
        return exchange

    def _place(self, what: str) -> str:
        return f"{what} of call {self._call} ({self._op})"

    def _post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], tag: int, what: str) -> Exchange:
        messages: _Messages = []
        for post, tensors in ((self._receive, receives), (self._send, sends)):
            for peer, tensor in tensors.items():
                if tensor.numel() > 0:
                    with self.naming((peer,), what):
                        messages.append(((peer,), post(tensor, peer, tag)))
        return Exchange(messages, [*sends.values(), *receives.values()], self, what)

    def check_device(self, device: torch.device) -> None:  # noqa: B027
        """InputError: this group cannot carry tensors of that device."""

    def _host_runs_ahead(self, device: torch.device) -> bool:
        """Whether the host goes on before kernels and messages are done, so that it must not wait for headers."""
        return device.type != "cpu"

    def _open(self, device: torch.device) -> None:  # noqa: B027
        """What all ranks must do together before any two of them exchange payloads on that device."""

    @contextlib.contextmanager
    def naming(self, peers: tuple[int, ...], what: str) -> Iterator[None]:
        """Turns the RuntimeError of a message into a PeerLost that says whose ("rank 2") and when."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RingtileError):
                raise
            who = f"rank {' or '.join(map(str, peers))}"
            reason = str(error).split("] ", 1)[-1].split(". ", 1)[0]  # gloo's: [file:line] reason. Advice.
            raise PeerLost(
                f"{who} was lost in {what} of rank {self.rank}: {reason}; see {who}'s log for the cause"
            ) from error

    @abc.abstractmethod
    def hang_up(self) -> None:
        """Ends this rank's messages for good: a peer that waits for one gets PeerLost."""

    @abc.abstractmethod
    def _send(self, tensor: Tensor, peer: int, tag: int) -> Message: ...

    @abc.abstractmethod
    def _receive(self, tensor: Tensor, peer: int, tag: int) -> Message: ...


def _watch(pending: queue.SimpleQueue[_Headers | None]) -> None:
    """Compares headers until there are no more; the next call of the transport raises what it finds."""
    while (headers := pending.get()) is not None:
        try:
            headers.compare()
        except RingtileError as error:
            headers.exchange.transport._failure = error
            return
        del headers  # it keeps the transport alive
