"""A transport over a torch.distributed process group."""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store

from ringtile.errors import InputError
from ringtile.transport import shared_memory, sockets
from ringtile.transport.agreement import HANG_UP_TAG, tree_neighbours
from ringtile.transport.failures import FailureDetector, SocketFailureDetector, neighbours
from ringtile.transport.shared_memory import SharedMemory
from ringtile.transport.sockets import SocketChannel
from ringtile.transport.store import Meeting, StoreChannel
from ringtile.transport.transport import Channel, Exchange, Transport, Work


class ProcessGroupTransport(Transport):
    """Point-to-point messages of a process group. Ranks are ranks within the group.

    CPU tensors travel through shared memory between ranks of one host, and over the group between others, headers over
    sockets. CUDA tensors travel over NCCL. A group that has NCCL alone carries no CPU tensors; its headers go through
    its store, it opens no connection, and whom it has lost NCCL's own watchdog says.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = weakref.ref(group)  # the registry lets go of a transport when its group is destroyed
        self.carries_cpu = backend_name(group, "cpu") is not None
        self._opened = False
        self._shared: SharedMemory | None = None  # from the first call on, with ranks of this host
        self._never_waited_for: list[Exchange] = []  # of calls on which the ranks disagreed

    def _own_group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise InputError("the process group was destroyed; make a new one, and what was built on it")
        return group

    def _start(self, tensor: Tensor, peer: int, tag: int, *, outgoing: bool) -> Work:
        if self._shared is not None and peer in self._shared.peers and tensor.is_cpu:
            ordered = self.num_calls << 32 | tag  # there, messages of a later call have larger tags
            return self._shared.post(tensor, peer, ordered, outgoing=outgoing)
        group = self._own_group()
        work: Work = (group.send if outgoing else group.recv)([tensor], peer, tag)
        return work

    def check_device(self, device: torch.device) -> None:
        super().check_device(device)
        group, is_cpu = self._group(), device.type == "cpu"
        if group is None or self.world_size == 1 or (is_cpu and self.carries_cpu):
            return
        if is_cpu or (found := backend_name(group, device.type)) != "nccl":
            raise InputError(
                f"the tensors are on {device} but the group's backend for {device.type} is {None if is_cpu else found}"
                f"; expected {'gloo' if is_cpu else 'nccl'}: init_process_group or new_group with "
                f'backend="cpu:gloo,cuda:nccl"'
            )

    def _connect(self) -> tuple[Channel, FailureDetector | None]:
        group, rank, world_size = self._own_group(), self.rank, self.world_size
        device = torch.device("cpu") if self.carries_cpu else group._device_types[0]
        seconds: float = group._get_backend(device).options._timeout.total_seconds()
        joint: Any = _get_process_group_store(group)
        store = joint.clone()  # a connection of its own, on which others do not wait
        token = shared_memory.token_of_segment() if self.carries_cpu else ""
        meeting = Meeting(store, rank, world_size, seconds, token=token)
        self.hosts = meeting.hosts
        if not self.carries_cpu:
            return StoreChannel(meeting.store, rank, tree_neighbours(rank, world_size), seconds), None
        peers = [peer for peer in range(world_size) if peer != rank and self.hosts[peer] == self.hosts[rank]]
        sharing = [peer for peer in peers if token and meeting.facts[peer]["token"]]
        wires = [tree_neighbours(rank, world_size), neighbours(rank, world_size), sharing]
        headers, news, links = sockets.connect(meeting, wires)
        self._shared = shared_memory.share(meeting, links)
        detector = SocketFailureDetector(rank, world_size, SocketChannel(news, seconds))
        detector.listen()
        return SocketChannel(headers, seconds), detector

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

        NCCL tells messages between two ranks apart by their order alone. As torch's batch_isend_irecv, whose checks of
        each message would take most of the time.
        """
        group = self._own_group()
        batch = [
            (post, [tensor], peer)
            for post, tensors in ((group.recv, receives), (group.send, sends))
            for peer, tensor in tensors.items()
            if tensor.numel() > 0
        ]
        tensors = [*sends.values(), *receives.values()]
        works: list[tuple[tuple[int, ...], Work]] = []
        peers = tuple(sorted({peer for *_, peer in batch}))
        with self.naming(peers, what):
            if batch and _coalesces(group, device := tensors[0].device):
                group._start_coalescing(device)
                for post, message, peer in batch:
                    post(message, peer, 0)
                works.append((peers, group._end_coalescing(device)))
            else:
                works += [(peers, post(message, peer, 0)) for post, message, peer in batch]
        return Exchange(works, tensors, self, what)

    def _end_messages(self) -> None:
        if self._shared is not None:
            self._shared.close()
        self._close_pairs()

    def stop_waiting(self) -> None:
        super().stop_waiting()
        self._close_pairs()

    def _close_pairs(self) -> None:
        group = self._group()
        if group is None or not self.carries_cpu:
            return
        # gloo closes a connection on which a receive timed out, and has no other way to close one. NCCL has none at all
        # that a peer would notice: its own watchdog ends a wait that is longer than the group's timeout.
        nothing = torch.empty(1, device="cpu")
        for peer in range(self.world_size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    never = group.recv([nothing], peer, HANG_UP_TAG)
                    never.wait(datetime.timedelta(milliseconds=1))


def backend_name(group: dist.ProcessGroup, device_type: str) -> str | None:
    """Return the name of what carries a group's tensors of that device type; None: nothing does."""
    try:
        return str(group._get_backend(torch.device(device_type)).name())
    except RuntimeError:
        return None


def _coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the group takes several messages as one batch, as NCCL does."""
    return type(group) is dist.ProcessGroup and bool(group._get_backend(device).supports_coalescing)
