"""A transport over a torch.distributed process group."""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_process_group_store

from ringtile.errors import InputError, PeerLostError
from ringtile.transport import shared_memory, sockets
from ringtile.transport.agreement import HANG_UP_TAG, HELLO_TAG, tree_neighbours
from ringtile.transport.failures import SocketFailureDetector, neighbours
from ringtile.transport.shared_memory import SharedMemory
from ringtile.transport.sockets import SocketChannel
from ringtile.transport.transport import Exchange, Transport, Work, reason_of


class ProcessGroupTransport(Transport):
    """Point-to-point messages of a process group. Ranks are ranks within the group.

    CPU tensors travel through shared memory between ranks of one host. Between others they travel over the group if it
    has a backend for them, else over a gloo group beside it, which all of its ranks make in their first call. CUDA
    tensors travel over NCCL, headers over sockets.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)  # the registry lets go of a transport when its group is destroyed
        self._needs_beside = backend_name(group, "cpu") is None
        self._beside: dist.ProcessGroup | None = None  # from the first call on: its ranks wait for each other
        self._opened = False
        self._shared: SharedMemory | None = None  # from the first call on, with ranks of this host
        self._never_waited_for: list[Exchange] = []  # of calls on which the ranks disagreed

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup:
        if self._beside is not None and tensor.device.type == "cpu":
            return self._beside
        return self._own_group()

    def _own_group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise InputError("the process group was destroyed; make a new one, and what was built on it")
        return group

    def _shares(self, tensor: Tensor, peer: int) -> SharedMemory | None:
        """Return what carries the tensor to or from that peer; None: the process group."""
        shared = self._shared
        return shared if shared is not None and peer in shared.peers and tensor.device.type == "cpu" else None

    def _ordered(self, tag: int) -> int:
        """Return the tag in shared memory, where messages of a later call have larger ones."""
        return self.num_calls << 32 | tag

    def _start(self, tensor: Tensor, peer: int, tag: int, *, outgoing: bool) -> Work:
        if (shared := self._shares(tensor, peer)) is not None:
            return shared.post(tensor, peer, self._ordered(tag), outgoing=outgoing)
        group = self._group_for(tensor)
        work: Work = (group.send if outgoing else group.recv)([tensor], peer, tag)
        return work

    def check_device(self, device: torch.device) -> None:
        super().check_device(device)
        group = self._group()
        if device.type == "cpu" or group is None or self.world_size == 1:
            return
        if backend_name(group, device.type) != "nccl":
            raise InputError(
                f"the tensors are on {device} but the group's backend for {device.type} is "
                f"{backend_name(group, device.type)}; expected nccl: init_process_group or new_group with "
                f'backend="cpu:gloo,cuda:nccl"'
            )

    def _connect(self) -> tuple[SocketChannel, SocketFailureDetector]:
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        if self._needs_beside:
            try:
                self._beside = _gloo_beside(self._own_group())
            except RuntimeError as error:
                raise PeerLostError(
                    f"not all ranks of the group have made its first call with rank {self.rank}: {reason_of(error)}; "
                    f"see the other ranks' logs for the cause"
                ) from error

        def exchange(hello: bytes) -> dict[int, bytes]:
            mine = torch.frombuffer(bytearray(hello), dtype=torch.uint8)
            theirs = {peer: torch.empty_like(mine) for peer in peers}
            self._post(dict.fromkeys(peers, mine), theirs, HELLO_TAG, "the first call").wait_for_messages()
            return {peer: bytes(their.tolist()) for peer, their in theirs.items()}

        carrier = self._group_for(torch.empty(0, device="cpu"))._get_backend(torch.device("cpu"))
        timeout: datetime.timedelta = carrier.options._timeout
        seconds = timeout.total_seconds()
        wires = [each(self.rank, self.world_size) for each in (tree_neighbours, neighbours)]
        headers, news = sockets.connect(self.rank, wires, seconds, exchange)
        detector = SocketFailureDetector(self.rank, self.world_size, news)
        detector.listen()
        self._shared = shared_memory.share(self.rank, self.world_size, seconds, exchange)
        return headers, detector

    def _drop_messages(self) -> None:
        # gloo reads nothing more from a peer whose message has lost its tensor on the way.
        self._never_waited_for += [
            each for each in self._under_way if any(isinstance(work, dist.Work) for _, work in each.works)
        ]
        if self._shared is not None:
            self._shared.drop()

    def _open(self, device: torch.device) -> None:
        if device.type == "cpu" or self._opened:
            return
        # NCCL connects all ranks of a group in its first operation, and a round may leave some of them out.
        dist.all_reduce(torch.zeros(1, device=device), group=self._group())
        self._opened = True

    def _post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], tag: int, what: str) -> Exchange:
        if all(tensor.is_cpu for tensors in (sends, receives) for tensor in tensors.values()):
            return super()._post(sends, receives, tag, what)
        return self._post_batch(sends, receives, what)

    def _post_batch(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], what: str) -> Exchange:
        """Post all messages as one: NCCL would run each to its end, and two ranks that both send first would wait.

        NCCL tells messages between two ranks apart by their order alone.
        """
        group = self._group()
        batch = [
            dist.P2POp(function, tensor, group=group, group_peer=peer)
            for function, tensors in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in tensors.items()
            if tensor.numel() > 0
        ]
        peers = tuple(sorted({operation.group_peer for operation in batch}))
        with self.naming(peers, what):
            works = dist.batch_isend_irecv(batch) if batch else []
        return Exchange([(peers, work) for work in works], [*sends.values(), *receives.values()], self, what)

    def _end_messages(self) -> None:
        if self._shared is not None:
            self._shared.close()
        self._close_pairs()

    def stop_waiting(self) -> None:
        super().stop_waiting()
        self._close_pairs()

    def _close_pairs(self) -> None:
        if self._needs_beside and self._beside is None:
            return  # no call has begun
        # gloo closes a connection on which a receive timed out, and has no other way to close one. NCCL has none at all
        # that a peer would notice: its own watchdog ends a wait that is longer than the group's timeout.
        nothing = torch.empty(1, device="cpu")
        for peer in range(self.world_size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    never = self._group_for(nothing).recv([nothing], peer, HANG_UP_TAG)
                    never.wait(datetime.timedelta(milliseconds=1))


def backend_name(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Return the name of what carries a group's tensors of that device type; None: nothing does."""
    try:
        return str(group._get_backend(torch.device(device_type)).name())
    except RuntimeError:
        return None


def _gloo_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a gloo group of the same ranks, by them alone, which torch.distributed has no list of.

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
