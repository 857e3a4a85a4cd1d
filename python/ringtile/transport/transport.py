"""One rank's end of a group: calls that all ranks agree on, and payloads straight from rank to rank.

`ProcessGroupTransport` works over a torch.distributed process group, `LoopbackTransport` over threads of one process;
the ring cannot tell them apart. A transport belongs to one group: it counts that group's calls and bytes, and one
thread at a time may use it.

On a GPU nothing here waits for the device or, once a kind of call is agreed on, for another host. A message starts when
the current stream reaches the call that posts it, and waiting for it makes the current stream wait. NCCL runs the
messages of a group one batch after another, so all ranks must post their batches in one order; the order of the rounds
is one.
"""

from __future__ import annotations

import abc
import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from ringtile.errors import InputError, PeerLostError, RefusedError, RingMismatchError, RingtileError, with_kind
from ringtile.transport.agreement import FIRST_PAYLOAD_TAG, Headers, HeaderValue, PeerGoneError, Terms, in_header
from ringtile.transport.failures import FailureDetector, Loss

ALONE = contextlib.nullcontext(0)  # the calls of one rank, which has nobody to agree with


class Work(Protocol):
    """A message under way, sent or to be received. wait() raises RuntimeError when the peer is gone."""

    def wait(self) -> Any: ...


NOT_IN_CUDA_GRAPHS = (torch.Tag.cudagraph_unsafe,)  # of ops: torch.compile calls them between its CUDA graphs
_PROPAGATED = "_ringtile_propagated"  # an attribute of an error that the other ranks have heard of
_MAX_AGREED = 1024  # terms that a group remembers; the oldest are agreed on anew
_SEARCH_SECONDS = 1.0  # how long a rank that lost a peer waits to hear who was lost first
Messages: TypeAlias = list[tuple[int, Tensor, bool]]  # to post: the peer, the payload, whether it is sent
_E = TypeVar("_E", bound=Exception)
Works: TypeAlias = list[tuple[tuple[int, ...], Work]]  # with the peers of each


@dataclass(eq=False, slots=True)
class Exchange:
    """Messages under way; their tensors stay untouched, and are kept alive, until `wait` returns."""

    works: Works
    messages: Messages
    transport: Transport
    what: str  # "round 2"

    def wait(self) -> None:
        """Return when all have arrived. Raise PeerLostError or RingMismatchError. A profiler sees "ringtile::wait"."""
        transport = self.transport
        # Costs nothing where nobody profiles.
        profiled = torch._C._autograd._profiler_enabled()
        with torch.profiler.record_function("ringtile::wait") if profiled else contextlib.nullcontext():
            if transport._behind:
                transport.compare_headers()
            began = time.perf_counter()
            for peers, work in self.works:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise transport._lost(peers, reason_of(error), self.what) from error
            transport.wait_seconds += time.perf_counter() - began
        transport._under_way.discard(self)


class Transport(abc.ABC):
    """One rank's end of a group of ranks.

    This class has the three things that a rank does: `agree` with the others on a call, `exchange` payloads in it, and
    `refuse` one. An implementation has what carries them: `_connect`, `_start` and `_end_messages`. It may also refuse
    devices (`check_device`), post the messages of an exchange in another way (`_post`), prepare a group once its ranks
    have agreed (`_open`), and forget messages (`_drop_messages`).

    rank, world_size: of this group. bytes_sent: payload sent so far, in bytes; headers do not count. num_calls: the
    calls made so far. wait_seconds: how long the host has waited for headers and payloads so far; on a GPU only a
    stream waits for payloads. hosts: by rank its host, numbered by its first rank, from the first call on. detector:
    watches the other ranks, from the first call on; over NCCL alone it has no neighbors.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.bytes_sent = 0
        self.wait_seconds = 0.0
        self.num_calls = 0
        self.hosts = (0,) * (world_size == 1)
        self._op = ""
        self._world_ranks: Sequence[int] = range(world_size)  # by which errors name ranks that are lost
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None  # whose forwards use this group
        self._payload_tag = FIRST_PAYLOAD_TAG
        self._agreed: dict[object, Terms] = {}
        self._headers: Headers | None = None  # from the first call on
        self.detector = FailureDetector(rank)
        self._behind = False  # whether headers of this call are still to be compared, before a payload is used
        self._under_way: set[Exchange] = set()  # of this call
        self._failure: BaseException | None = None  # of which the others have heard
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def agree(
        self,
        op: str,
        fields: Mapping[str, HeaderValue],
        device: torch.device | str | None = None,
        *,
        forward_call: int = 0,
        data: int = 0,
        step: int = 0,
    ) -> Iterator[int]:
        """Make one call, in which all ranks take part: agree on op and fields, then exchange payloads in the body.

        device: where the payloads are; None: there are none. forward_call, data, step: as in `Terms.header`. See
        agreement.py for who waits for whom. The context is the number of the call, 0 for one rank.

        RingMismatchError leaves the group usable, except on a GPU after terms that were agreed on, where messages of
        NCCL may be under way. Any other failure breaks the group: this rank hangs up, so that no peer waits for it, and
        refuses later calls with PeerLostError. Raises InputError in a forked process, and in a second thread, and what
        `check_device` raises.
        """
        if self.world_size == 1:
            yield 0
            return
        self._check_process_and_thread(op)
        if device is not None:
            device = torch.device(device)
            try:
                self.check_device(device)
            except Exception as error:
                self.refuse(op, error)
                raise
        device = torch.device(device or "cpu")
        key = (op, device.type, *fields.items())
        with self._numbered(op):
            agreed = self._agreed.get(key)
            terms = agreed or Terms(op, device.type, fields)
            self._payload_tag = terms.payload_tag(self.num_calls)
            # Where the host goes on before kernels and messages are done, it must not wait for headers.
            runs_ahead = agreed is not None and device.type != "cpu"
            self._send_header(terms.header(self.num_calls, forward_call, data, step), runs_ahead=runs_ahead)
            self._behind = True
            if agreed is None:
                self.compare_headers()
                self._agreed[key] = terms
                if len(self._agreed) > _MAX_AGREED:
                    del self._agreed[next(iter(self._agreed))]
                if device.type != "cpu":
                    self._open(device)
            elif runs_ahead:
                self.compare_headers(wait=False)
            yield self.num_calls
            if self._behind:
                self.compare_headers()

    @contextlib.contextmanager
    def _numbered(self, op: str) -> Iterator[None]:
        """Number the next call of this group. Any error in it but RingMismatchError breaks the group."""
        with self._lock:
            if isinstance(self._failure, RingMismatchError):  # of a call whose payloads may still be under way
                raise self._failure
            if self._failure is not None:
                raise PeerLostError(
                    f"{op} on a group that failed before ({with_kind(self._failure)}); destroy the process group and "
                    f"start anew"
                ) from self._failure
            self.num_calls += 1
            self._op = op
            try:
                yield
            except RingMismatchError as error:
                self._failure = error if error.breaks_group else None
                raise
            except BaseException as error:
                self.break_group(error)
                raise
            finally:
                self._behind = False
                if self._under_way:
                    self._drop_messages()
                    self._under_way.clear()

    def find_hosts(self) -> tuple[int, ...]:
        """Return hosts. A call, if it is the first. Raise RingMismatchError or PeerLostError."""
        if not self.hosts:
            with self.agree("agree on hosts", {}):
                pass
        return self.hosts

    def _check_process_and_thread(self, op: str) -> None:
        """Raise InputError where calls would come in an order that the other ranks do not see.

        A backward may come from threads of autograd's own; its order follows from that of the forwards.
        """
        if os.getpid() != self._pid:
            raise InputError(
                f"{op} in a process that was forked from a rank, such as a DataLoader worker; expected the rank itself"
            )
        thread = threading.current_thread()
        if thread is self._thread or torch._C._current_graph_task_id() != -1:
            return
        if self._thread is not None and self._thread.is_alive():
            error = InputError(
                f"{op} in thread {thread.name!r} on a group that thread {self._thread.name!r} uses; expected "
                f"one thread a group: make a group for each with torch.distributed.new_group"
            )
            raise self.refuse(op, error)
        self._thread = thread

    def _send_header(self, header: bytes, **options: bool) -> None:
        """Send it to the neighbors. options: as of `Headers.send`."""
        try:
            if self._headers is None:
                self._headers = self._connect()
            self._headers.send(header, **options)
        except PeerGoneError as gone:
            raise self._lost((gone.peer,), gone.reason, "the header") from gone

    def compare_headers(self, *, wait: bool = True) -> None:
        """Make sure, once, that all ranks make this call; without waiting, as far as headers have arrived.

        Raises PeerLostError, RingMismatchError.
        """
        if not self._behind or self._headers is None:
            return
        self._behind = False
        began = time.perf_counter()
        try:
            self._headers.compare(wait=wait)
        except PeerGoneError as gone:
            raise self._lost((gone.peer,), gone.reason, "the header") from gone
        self.wait_seconds += time.perf_counter() - began

    def break_group(self, error: BaseException) -> None:
        """Mark the group broken, announce the reason, and close this rank's connections: no peer waits for it."""
        if self._failure is None:
            self._failure = error
            self._announce(Loss(self.rank, with_kind(error)))
        self.close()

    def _announce(self, loss: Loss) -> None:
        """Announce who is lost: this rank, or one that it waits for."""
        self.detector.announce(loss.reason, loss.rank)
        if self._headers is not None:
            self._headers.announce(loss.reason, loss.rank)

    def close(self) -> None:
        """Close this rank's connections: a peer that waits for a message gets PeerLostError."""
        self.detector.close()
        if self._headers is not None:
            self._headers.close()
        self._end_messages()

    def refuse(self, op: str, error: _E) -> _E:
        """Tell the others, in place of the header of a call, why this rank does not make it; return the error.

        Those that make a call raise RingMismatchError with the reason; without it they would wait until this rank ends.
        Ranks that refuse together go on together. An error is told once, and not if the others have it too.
        """
        is_known = _PROPAGATED in error.__dict__ or isinstance(error, RingMismatchError | PeerLostError)
        if self.world_size > 1 and os.getpid() == self._pid and not is_known:
            error.__dict__[_PROPAGATED] = True
            said = in_header(f"{op}, refused: {error}")
            with contextlib.suppress(RingtileError), self._numbered(said):
                self._send_header(Terms(said, "cpu", {}).header(self.num_calls), refused=True)
        return error

    @contextlib.contextmanager
    def propagate_errors(self, op: str) -> Iterator[None]:
        """Tell the others of any error in the body, which is what a call of op does before its first message."""
        try:
            yield
        except Exception as error:
            self.refuse(op, error)
            raise

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], what: str) -> Exchange:
        """Post contiguous payloads to and from peers (by rank), and return at once. Raise PeerLostError.

        Both sides must post messages between them in the same order. An empty tensor does not travel. `what` says
        in errors where this is, as in "round 2".
        """
        messages: Messages = []
        for peer, tensor in receives.items():
            if tensor.numel():
                messages.append((peer, tensor, False))
        for peer, tensor in sends.items():
            if tensor.numel():
                messages.append((peer, tensor, True))
                self.bytes_sent += tensor.nbytes
        exchange = Exchange(self._post(messages, what), messages, self, what)
        self._under_way.add(exchange)
        return exchange

    def _post(self, messages: Messages, what: str) -> Works:
        """Start all messages of an exchange, in this order."""
        works: Works = []
        for peer, tensor, outgoing in messages:
            try:
                work = self._start(tensor, peer, outgoing=outgoing)
            except RuntimeError as error:
                raise self._lost((peer,), reason_of(error), what) from error
            if work is not None:
                works.append(((peer,), work))
        return works

    def check_device(self, device: torch.device) -> None:
        """Raise InputError where this group cannot carry tensors of that device, RefusedError where a CUDA graph would.

        Ranks agree on the host, and a replay has no host: a rank that replays another graph than its peers, or calls
        while they replay, would take their payloads for its own.
        """
        if self.world_size == 1 or device.type != "cuda" or not torch.cuda.is_available():
            return
        if torch.cuda.is_current_stream_capturing():
            raise RefusedError(
                f"a CUDA graph is being captured, and its replays could not check that all {self.world_size} ranks of "
                f"the group make the same call; capture only what lies between calls that communicate, as "
                f"torch.compile(mode='reduce-overhead') does"
            )

    def _drop_messages(self) -> None:  # noqa: B027
        """Forget messages that nobody will wait for: their tensors may be freed, and others take their places."""

    def _open(self, device: torch.device) -> None:  # noqa: B027
        """Do what all ranks must do together before any two of them exchange payloads on that device."""

    def _lost(self, suspects: tuple[int, ...], reason: str, what: str) -> PeerLostError:
        """Return the error for one of these ranks that is gone, which blames the rank that was lost first."""
        found = Loss(suspects[0], reason) if len(suspects) == 1 else None
        if self._failure is None:
            self.detector.announce(reason)  # at once: the others may be asking the same, or waiting for headers
            if found is not None and self._headers is not None:
                self._headers.announce(found.reason, found.rank)
            if (found := self.detector.find(found, reason, _SEARCH_SECONDS)) is not None:
                self._announce(found)
        named = found or Loss(suspects[0], reason)
        who = f"rank {' or '.join(str(self._world_ranks[rank]) for rank in ([named.rank] if found else suspects))}"
        error = PeerLostError(
            f"{who} was lost in {what} of call {self.num_calls} ({self._op}) of rank {self._world_ranks[self.rank]}: "
            f"{named.reason}; see {who}'s log for the cause"
        )
        error.rank = self._world_ranks[named.rank]
        self._failure = self._failure or error
        return error

    @abc.abstractmethod
    def _connect(self) -> Headers:
        """Connect, in the first call, the headers; find the hosts, and who watches the others.

        Raises PeerGoneError, RingMismatchError.
        """

    @abc.abstractmethod
    def _start(self, tensor: Tensor, peer: int, *, outgoing: bool) -> Work | None:
        """Start a message to or from a peer; None: it is done. The tensor is contiguous and not empty.

        Messages of different payload tags do not meet. Raises RuntimeError.
        """

    @abc.abstractmethod
    def _end_messages(self) -> None:
        """Make the peers' waits for messages of this rank fail, from now on."""


class Alone(Transport):
    """The transport of a world of one rank, which sends nothing."""

    def _connect(self) -> Headers:
        raise AssertionError("one rank has no peers")

    def _start(self, tensor: Tensor, peer: int, *, outgoing: bool) -> Work | None:
        raise AssertionError("one rank has no peers")

    def _end_messages(self) -> None:
        pass


class VirtualGroup:
    """A handle of one rank's transport; it goes, as its name does while it lives, wherever a process group goes."""

    def __init__(self, transport: Transport, group_name: str) -> None:
        self.transport, self.group_name = transport, group_name
        virtual_groups[group_name] = self


# Weak: it says which are alive, and keeps none of them so.
virtual_groups: weakref.WeakValueDictionary[str, VirtualGroup] = weakref.WeakValueDictionary()


def reason_of(error: object) -> str:
    """Return the reason in an error of gloo, which says: [file:line] reason. Advice."""
    reason = str(error).split("] ", 1)[-1].split(". ", 1)[0]
    return reason.splitlines()[0] if reason else "no reason"


# ---- messages of several tensors -----------------------------------------------------------------

Kind: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"  # of a tensor


class Message(NamedTuple):
    """Tensors one after another in one flat buffer, so that nothing is copied where it is used as it arrived."""

    flat: Tensor  # contiguous, of any shape
    parts: tuple[Tensor, ...]

    @classmethod
    def empty(cls, like: Tensor, tensors: Sequence[Kind]) -> Message:
        """Make uninitialized tensors, on the device of like."""
        order = sorted(range(len(tensors)), key=lambda i: -tensors[i][1].itemsize)  # so that each is aligned
        sizes = [math.prod(tensors[i][0]) * tensors[i][1].itemsize for i in order]
        flat = like.new_empty(sum(sizes), dtype=torch.uint8)
        pieces = dict(zip(order, flat.split_with_sizes(sizes), strict=True))
        return cls(flat, tuple(pieces[i].view(dtype).view(shape) for i, (shape, dtype) in enumerate(tensors)))


def all_gather(x: Tensor, transport: Transport, what: str) -> Tensor:
    """Return x of all ranks, (W, *x.shape); x has the same shape on each. Inside a call. what: as in `exchange`."""
    out = x.new_empty((transport.world_size, *x.shape))
    out[transport.rank] = x
    received = {peer: part for peer, part in enumerate(out) if peer != transport.rank}
    transport.exchange(dict.fromkeys(received, x), received, what).wait()
    return out
