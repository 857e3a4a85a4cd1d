"""How the ranks of a ring talk: a header that all must agree on, then payloads straight from rank to rank.

`ProcessGroupTransport` works over a torch.distributed process group, `LoopbackWorld` over threads of one process; the
ring cannot tell them apart. A transport belongs to one group: it counts that group's calls and bytes, and one thread
at a time may use it.

On a GPU nothing here waits for the device. Headers travel between the CPUs. A message starts when the current stream
has come as far as the call that posts it, and waiting for it makes the current stream wait. NCCL runs the messages of
a group one batch after the other, so all ranks must post their batches in one order; that of the rounds is one.
"""

from __future__ import annotations

import abc
import contextlib
import datetime
import itertools
import json
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, _resolve_process_group
from torch.distributed.distributed_c10d import GroupName, _get_process_group_store

from .errors import InputError, PeerLost, RingMismatch, RingtileError

HEADER_VERSION = 1
# One size for ever: a receive of the wrong size is not survivable, so a header must fit whatever the peer's version.
HEADER_BYTES = 1024
# A group's user may send on it too (tags from 0 up); ours are the bytes "RT" and a number.
HEADER_TAG, PAYLOAD_TAG, HANG_UP_TAG = 0x5254_0000, 0x5254_0001, 0x5254_0002

_REFUSAL_LEN = 400  # characters, which JSON may double; a header has room for so many

HeaderValue = int | float | str
Result = TypeVar("Result")


class Message(Protocol):
    """A message on its way, sent or to be received. wait() raises RuntimeError when the peer is gone."""

    def wait(self) -> Any: ...


@dataclass(frozen=True)
class Exchange:
    """Messages on their way; their tensors stay untouched, and are kept here, until `wait` returns."""

    messages: list[tuple[str, Message]]  # (whose, message)
    tensors: list[Tensor]
    transport: Transport
    what: str

    def wait(self) -> None:
        """Returns when all of them have arrived. Raises PeerLost. A profiler sees it as "ringtile::wait"."""
        with torch.profiler.record_function("ringtile::wait"):
            for who, message in self.messages:
                with self.transport.naming(who, self.what):
                    message.wait()


class Transport(abc.ABC):
    """One rank's end of a group of ranks.

    rank, world_size: of this group. bytes_sent: payload sent so far, in bytes, headers not counted.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.bytes_sent = 0
        self._call = 0
        self._op = ""
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def call(self, op: str, fields: Mapping[str, HeaderValue], device: torch.device | str = "cpu") -> Iterator[None]:
        """One operation that all ranks take part in: agree on op and fields, then exchange payloads in the body.

        device: where the payloads are; `check_device` has accepted it.

        Every rank tells every other its header before any payload travels. If any two differ, every rank meets one
        that differs from its own: all raise RingMismatch, and the group stays usable. Any other failure leaves
        messages under way: this rank hangs up, so that no peer waits for it, and refuses later calls with PeerLost.
        """
        with self._lock:
            if self._failure is not None:
                raise PeerLost(
                    f"{op} on a group that failed before ({self._failure}); destroy the process group and start anew"
                ) from self._failure
            self._call += 1
            self._op = op
            try:
                if self.world_size > 1:
                    device = torch.device(device)
                    about = {"op": op, "device": device.type}
                    self._agree({"version": HEADER_VERSION, "call": self._call, **about, **fields})
                    self._open(device)
                yield
            except RingMismatch:
                raise
            except BaseException as error:
                self._failure = error
                self.hang_up()
                raise

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
        return self._post(sends, receives, PAYLOAD_TAG, what)

    def _post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], tag: int, what: str) -> Exchange:
        messages: list[tuple[str, Message]] = []
        for post, tensors in ((self._receive, receives), (self._send, sends)):
            for peer, tensor in tensors.items():
                if tensor.numel() > 0:
                    with self.naming(f"rank {peer}", what):
                        messages.append((f"rank {peer}", post(tensor, peer, tag)))
        return Exchange(messages, [*sends.values(), *receives.values()], self, what)

    def check_device(self, device: torch.device) -> None:  # noqa: B027
        """InputError: this group cannot carry tensors of that device."""

    def _open(self, device: torch.device) -> None:  # noqa: B027
        """What all ranks must do together before any two of them exchange payloads on that device."""

    def _agree(self, header: dict[str, HeaderValue]) -> None:
        mine = _encode(header)
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        theirs = {peer: torch.zeros_like(mine) for peer in peers}
        self._post(dict.fromkeys(peers, mine), theirs, HEADER_TAG, "the header").wait()
        for peer in peers:
            if not torch.equal(theirs[peer], mine):
                self._disagree(header, _decode(theirs[peer]), peer)

    def _disagree(self, mine: dict[str, HeaderValue], theirs: dict[str, HeaderValue], peer: int) -> None:
        names = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
        field = names[0] if names else "header"
        raise RingMismatch(
            f"ranks disagree on {field} in call {self._call} ({self._op}): rank {self.rank} has "
            f"{mine.get(field, 'none')}, rank {peer} has {theirs.get(field, 'none')}; all ranks of a group must make "
            f"the same calls in the same order, with the same global sequence"
        )

    @contextlib.contextmanager
    def naming(self, who: str, what: str) -> Iterator[None]:
        """Turns the RuntimeError of a message into a PeerLost that says whose ("rank 2") and when."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RingtileError):
                raise
            reason = str(error).split("] ", 1)[-1].split(". ", 1)[0]  # gloo's: [file:line] reason. Advice.
            raise PeerLost(
                f"{who} was lost in {what} of call {self._call} ({self._op}) of rank {self.rank}: {reason}; look at "
                f"the own output of {who} for the cause"
            ) from error

    @abc.abstractmethod
    def hang_up(self) -> None:
        """Ends this rank's messages for good: a peer that waits for one gets PeerLost."""

    @abc.abstractmethod
    def _send(self, tensor: Tensor, peer: int, tag: int) -> Message: ...

    @abc.abstractmethod
    def _receive(self, tensor: Tensor, peer: int, tag: int) -> Message: ...


def _encode(header: Mapping[str, HeaderValue]) -> Tensor:
    """uint8 (HEADER_BYTES,): the header as JSON, padded with spaces. Python writes floats so that they read back."""
    text = json.dumps(header).encode("ascii")
    if len(text) > HEADER_BYTES:
        raise InputError(f"a header of {len(text)} bytes; expected at most {HEADER_BYTES}")
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)


def _decode(header: Tensor) -> dict[str, HeaderValue]:
    try:
        fields = json.loads(bytes(header.tolist()))
    except ValueError:
        fields = None
    return fields if isinstance(fields, dict) else {"version": "no ringtile header"}


# ---- processes ----------------------------------------------------------------------------------


class ProcessGroupTransport(Transport):
    """Point-to-point messages of a process group. Ranks are ranks within the group.

    CPU tensors, and so headers, travel over the group if it has a backend for them, else over a gloo group beside it,
    which all of its ranks make in their first call. CUDA tensors travel over NCCL.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)  # the registry lets go of a transport when its group is destroyed
        self._beside = None if _backend(group, "cpu") else _gloo_beside(group)
        self._opened = False

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self._beside if self._beside is not None and tensor.device.type == "cpu" else self._group()

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        return self._posted(dist.isend(tensor, group=self._group_for(tensor), group_dst=peer, tag=tag))

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> Message:
        return self._posted(dist.irecv(tensor, group=self._group_for(tensor), group_src=peer, tag=tag))

    def check_device(self, device: torch.device) -> None:
        group = self._group()
        if device.type == "cpu" or group is None or self.world_size == 1:
            return
        if _backend(group, device.type) != "nccl":
            raise InputError(
                f"the tensors are on {device} but the group's backend for {device.type} is "
                f"{_backend(group, device.type)}; expected nccl: init_process_group or new_group with "
                f'backend="cpu:gloo,cuda:nccl"'
            )

    def _open(self, device: torch.device) -> None:
        if device.type == "cpu" or self._opened:
            return
        # NCCL connects all ranks of a group in its first operation, and a round may leave some of them out.
        dist.all_reduce(torch.zeros(1, device=device), group=self._group())
        self._opened = True

    def _post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], tag: int, what: str) -> Exchange:
        tensors = [*sends.values(), *receives.values()]
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return super()._post(sends, receives, tag, what)
        return self._post_batch(sends, receives, what)

    def _post_batch(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], what: str) -> Exchange:
        """All messages as one: NCCL would run each to its end before the next, and two ranks that both send first wait.

        NCCL tells messages between two ranks apart by their order alone.
        """
        pairs = [(dist.irecv, receives), (dist.isend, sends)]
        batch = [
            dist.P2POp(function, tensor, group=self._group(), group_peer=peer)
            for function, tensors in pairs
            for peer, tensor in tensors.items()
            if tensor.numel() > 0
        ]
        peers = sorted({operation.group_peer for operation in batch})
        who = f"rank {' or '.join(map(str, peers))}"
        with self.naming(who, what):
            works = dist.batch_isend_irecv(batch) if batch else []
        return Exchange([(who, work) for work in works], [*sends.values(), *receives.values()], self, what)

    def hang_up(self) -> None:
        # gloo closes a connection on which a receive timed out, and has no other way to close one. NCCL has none at all
        # that a peer would notice: its own watchdog ends a wait that is longer than the group's timeout.
        nothing = torch.empty(1)
        for peer in range(self.world_size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    never = self._posted(
                        dist.irecv(nothing, group=self._group_for(nothing), group_src=peer, tag=HANG_UP_TAG)
                    )
                    never.wait(datetime.timedelta(milliseconds=1))

    def _posted(self, work: dist.Work | None) -> dist.Work:
        if work is None:
            raise InputError("this process is not a rank of the group; pass a group that it belongs to")
        return work


def _backend(group: dist.ProcessGroup, device_type: str) -> str | None:
    """The name of what carries a group's tensors of that device type; None: nothing does."""
    try:
        return str(group._get_backend(torch.device(device_type)).name())
    except RuntimeError:
        return None


def _gloo_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A gloo group of the same ranks, made by them alone, which torch.distributed has no list of.

    They meet under the group's own name. dist.new_group(use_local_synchronization=True) would let them meet under the
    number of groups that each is in, and ranks that are in different numbers of groups would wait for ever.
    """
    timeout = group._get_backend(group._device_types[0]).options._timeout
    store = PrefixStore("ringtile/", _get_process_group_store(group))
    beside = dist.ProcessGroup(store, group.rank(), group.size())
    backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
    beside._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    beside._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return beside


# ---- virtual ranks in one process ---------------------------------------------------------------


class _Parcel(NamedTuple):
    """A copy of what was sent, and the event that marks when a GPU has made it."""

    tensor: Tensor
    made: torch.cuda.Event | None


# By (sender, receiver, tag), in the order of sending; None: the sender has hung up.
Mailboxes = dict[tuple[int, int, int], "queue.Queue[_Parcel | None]"]


@dataclass(frozen=True)
class _Arrival:
    """A message to a virtual rank."""

    tensor: Tensor
    mailbox: queue.Queue[_Parcel | None]
    timeout_seconds: float

    def wait(self) -> None:
        try:
            sent = self.mailbox.get(timeout=self.timeout_seconds)
        except queue.Empty:
            raise RuntimeError(f"nothing came for {self.timeout_seconds} s") from None
        if sent is None:
            self.mailbox.put(None)
            raise RuntimeError("it has hung up")
        if sent.made is not None:  # by the stream of the sender's thread; this thread may be on another one
            stream = torch.cuda.current_stream(sent.tensor.device)
            stream.wait_event(sent.made)
            sent.tensor.record_stream(stream)
        self.tensor.copy_(sent.tensor)


class _Sent:
    """A message that its receiver may take whenever it likes."""

    def wait(self) -> None:
        pass


class LoopbackTransport(Transport):
    """Messages between the threads of one LoopbackWorld."""

    def __init__(self, rank: int, world_size: int, mailboxes: Mailboxes, timeout_seconds: float) -> None:
        super().__init__(rank, world_size)
        self._mailboxes = mailboxes
        self._timeout_seconds = timeout_seconds

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        copy = tensor.clone()
        made = torch.cuda.current_stream(copy.device).record_event() if copy.is_cuda else None
        self._mailboxes[self.rank, peer, tag].put(_Parcel(copy, made))
        return _Sent()

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> Message:
        return _Arrival(tensor, self._mailboxes[peer, self.rank, tag], self._timeout_seconds)

    def hang_up(self) -> None:
        for (sender, _, _), mailbox in self._mailboxes.items():
            if sender == self.rank:
                mailbox.put(None)


class LoopbackGroup:
    """One virtual rank's handle of its world; goes wherever a process group goes."""

    def __init__(self, transport: LoopbackTransport) -> None:
        self.transport = transport
        self.group_name = f"loopback-{next(_serial)}"
        _loopback_groups[self.group_name] = self


class LoopbackWorld:
    """W virtual ranks as threads of this process, for tests and for many ranks on one device.

    outputs = LoopbackWorld(4).run(lambda group: ring_attention(..., group=group))
    """

    def __init__(self, world_size: int, timeout_seconds: float = 60.0) -> None:
        if world_size < 1:
            raise InputError(f"world_size is {world_size}; expected at least 1")
        mailboxes: Mailboxes = {
            (sender, receiver, tag): queue.Queue()
            for sender, receiver in itertools.permutations(range(world_size), 2)
            for tag in (HEADER_TAG, PAYLOAD_TAG)
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


# ---- from a group to its transport --------------------------------------------------------------

Group = dist.ProcessGroup | LoopbackGroup | str

# Weak: they say which transport belongs to a living group, and keep nothing alive.
_serial = itertools.count()
_loopback_groups: weakref.WeakValueDictionary[str, LoopbackGroup] = weakref.WeakValueDictionary()
_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroupTransport] = weakref.WeakKeyDictionary()
_transports_lock = threading.Lock()


def group_name(group: Group | None) -> str:
    """The name by which an op, whose arguments are tensors, numbers and strings, refers to a group; "" for None."""
    if group is None:
        return ""
    return group if isinstance(group, str) else str(group.group_name)


def transport_of(group: Group | None) -> Transport:
    """This rank's end of a group, or of the group with that name; of a world of one rank for None and "".

    Raises InputError when no group of that name is alive.
    """
    if group is None or group == "":
        return LoopbackTransport(0, 1, {}, 0.0)
    if isinstance(group, str):
        if group in _loopback_groups:
            return _loopback_groups[group].transport
        try:
            group = _resolve_process_group(GroupName(group))
        except RuntimeError as error:
            raise InputError(f"there is no process group named {group!r}: {str(error).splitlines()[0]}") from None
    if isinstance(group, LoopbackGroup):
        return group.transport
    with _transports_lock:
        if group not in _transports:
            _transports[group] = ProcessGroupTransport(group)
        return _transports[group]
