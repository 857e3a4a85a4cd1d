"""From a group, or its name, to this rank's transport: that over a torch.distributed process group, and collectives.

The all-gather and the reduce-scatter of a sharded sequence, each the adjoint of the other, are one differentiable op.
Every rank of the group calls them, forward and backward. Layouts are tensors here, int64 (R, 5): rank, global_begin,
stride, local_begin, length, rank after rank.

Shape letters: S global tokens, N local tokens, R runs of all ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported before there is a group. Its functions keep the world's group of that moment, as a default argument, until
# Python ends; the first call of an op of ours would make torch import it.
import torch.distributed.nn.functional
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _get_process_group_store

from ringtile import arguments, derivatives, ops
from ringtile.errors import InputError, shown
from ringtile.transport import shared_memory, sockets
from ringtile.transport.agreement import HANG_UP_TAG, Headers, HeaderValue, tree_neighbors
from ringtile.transport.failures import FailureDetector, neighbors
from ringtile.transport.rendezvous import Rendezvous, StoreChannel, own_connection
from ringtile.transport.shared_memory import SharedMemory
from ringtile.transport.sockets import SocketChannel
from ringtile.transport.transport import (
    NOT_IN_CUDA_GRAPHS,
    Alone,
    Exchange,
    Messages,
    Transport,
    VirtualGroup,
    Work,
    Works,
    reason_of,
    virtual_groups,
)

Group = dist.ProcessGroup | DeviceMesh | VirtualGroup | str

_ALONE = Alone(0, 1)
# Weak: they say which transport belongs to a living group, and keep nothing alive.
_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, Transport] = weakref.WeakKeyDictionary()
_transports_lock = threading.Lock()


def group_name(group: Group | None) -> str:
    """Return the name by which an op, which takes no objects, refers to a group; "" for None."""
    if group is None:
        return ""
    group = group_of_mesh(group)
    return group if isinstance(group, str) else str(group.group_name)


def group_of_mesh(group: Group) -> dist.ProcessGroup | VirtualGroup | str:
    """Return the group of a mesh, or the group itself. InputError: the mesh has several dimensions."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise InputError(f"the mesh has dimensions {group.mesh_dim_names}; pass one of them, as in mesh['cp']")
    return group.get_group()


def transport_of(group: Group | None) -> Transport:
    """Return this rank's end of a group, or of the group with that name; of a world of one rank for None and "".

    Raises InputError when no group of that name is alive.
    """
    if group is None or group == "":
        return _ALONE
    group = group_of_mesh(group)
    if isinstance(group, str):
        try:
            group = virtual_groups.get(group) or _resolve_process_group(GroupName(group))
        except RuntimeError as error:
            raise InputError(f"there is no process group named {group!r}: {str(error).splitlines()[0]}") from None
    if isinstance(group, VirtualGroup):
        return group.transport
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"the group is {shown(group)}; expected a process group that this rank is a member of, or a DeviceMesh of "
            f"one dimension"
        )
    with _transports_lock:
        if group not in _transports:
            _transports[group] = ProcessGroupTransport(group)
        return _transports[group]


def propagate_errors(group: Group | None, op: str, x: object) -> contextlib.AbstractContextManager[None]:
    """Do `Transport.propagate_errors` of a group for a call of op on x; nothing while the call is only traced."""
    return contextlib.nullcontext() if is_traced(x) else transport_of(group).propagate_errors(op)


def is_traced(x: object) -> bool:
    """Return whether x stands for a tensor of a later run: a compiler's fake one."""
    return torch.compiler.is_compiling() or (isinstance(x, Tensor) and type(x) not in (Tensor, torch.nn.Parameter))


def only_group_of(world_size: int) -> dist.ProcessGroup | None:
    """Return the group that a call over so many ranks must mean when it names none; None: none, or a choice."""
    if world_size == 1 or not dist.is_initialized():
        return None
    found = [group for group in dist.distributed_c10d._world.pg_map if dist.get_world_size(group) == world_size]
    return found[0] if len(found) == 1 else None


# ---- over a process group -----------------------------------------------------------------------


class ProcessGroupTransport(Transport):
    """Point-to-point messages of a process group. Ranks are ranks within the group.

    CPU tensors travel through shared memory between ranks of one host, and over the group between others, headers over
    sockets. CUDA tensors travel over NCCL. A group that has NCCL alone carries no CPU tensors; its headers go through
    its store, it opens no connection, and whom it has lost NCCL's own watchdog says.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._world_ranks = dist.get_process_group_ranks(group)
        self._group = weakref.ref(group)  # the registry lets go of a transport when its group is destroyed
        self._carries = {"cpu"} if backend_name(group, "cpu") else set()  # types of devices, as far as looked up
        self._opened = False
        self._coalesces: bool | None = None  # None: not asked yet
        self._shared: SharedMemory | None = None  # from the first call on, with ranks of this host
        self._never_waited_for: list[Exchange] = []  # of calls on which the ranks disagreed

    def _own_group(self) -> dist.ProcessGroup:
        if (group := self._group()) is None:
            raise InputError("the process group was destroyed; make a new one, and what was built on it")
        return group

    def check_device(self, device: torch.device) -> None:
        super().check_device(device)
        if device.type in self._carries or self.world_size == 1 or (group := self._group()) is None:
            return
        is_cpu = device.type == "cpu"  # and this group is known to carry no such tensors
        found, expected = (None, "gloo") if is_cpu else (backend_name(group, device.type), "nccl")
        if found != expected:
            raise InputError(
                f"the tensors are on {device} but the group's backend for {device.type} is {found}; expected "
                f'{expected}: init_process_group or new_group with backend="cpu:gloo,cuda:nccl"'
            )
        self._carries.add(device.type)

    def _connect(self) -> Headers:
        group, rank, world_size = self._own_group(), self.rank, self.world_size
        device = torch.device("cpu") if "cpu" in self._carries else group._device_types[0]
        timeout: datetime.timedelta = group._get_backend(device).options._timeout
        seconds = min(timeout.total_seconds(), sockets.LONGEST_SECONDS)
        store = own_connection(_get_process_group_store(group))
        rendezvous = Rendezvous(store, rank, world_size, seconds, shares=shared_memory.shares_memory())
        self.hosts, tree = rendezvous.hosts, tree_neighbors(rank, world_size)
        if "cpu" not in self._carries:
            channel = StoreChannel(rendezvous.store, rank, tree, seconds)
            weakref.finalize(self, channel.close)
            return Headers(rank, world_size, channel)
        watched = neighbors(rank, world_size)
        headers, news, links = sockets.connect(rendezvous, [tree, watched, shared_memory.peers_of(rendezvous)])
        self._shared = shared_memory.share(rendezvous, links)
        self.detector = detector = FailureDetector(rank, world_size, watched, SocketChannel(news, seconds))
        weakref.finalize(self, detector.close)
        detector.listen()
        return Headers(rank, world_size, SocketChannel(headers, seconds))

    def _open(self, device: torch.device) -> None:
        if not self._opened:
            # NCCL connects all ranks of a group in its first operation, and a round may leave some of them out.
            dist.all_reduce(torch.zeros(1, device=device), group=self._group())
            self._opened = True

    def _start(self, tensor: Tensor, peer: int, *, outgoing: bool) -> Work:
        if self._shared is not None and peer in self._shared.peers and tensor.is_cpu:
            ordered = self.num_calls << 32 | self._payload_tag  # there, messages of a later call have larger tags
            return self._shared.post(tensor, peer, ordered, outgoing=outgoing)
        group = self._own_group()
        work: Work = (group.send if outgoing else group.recv)([tensor], peer, self._payload_tag)
        return work

    def _post(self, messages: Messages, what: str) -> Works:
        # All are where the call's payloads are.
        return (super()._post if not messages or messages[0][1].is_cpu else self._post_batch)(messages, what)

    def _post_batch(self, messages: Messages, what: str) -> Works:
        """Post all messages as one: NCCL would run each to its end, and two ranks that both send first would wait.

        NCCL tells messages between two ranks apart by their order alone. As torch's batch_isend_irecv, whose checks of
        each message would take most of the time.
        """
        if not messages:
            return []
        group, device = self._own_group(), messages[0][1].device
        peers = tuple(sorted({peer for peer, *_ in messages}))
        try:
            if self._coalesces is None:
                self._coalesces = _coalesces(group, device)
            if self._coalesces:
                group._start_coalescing(device)
            works: Works = []
            for peer, tensor, outgoing in messages:
                works.append((peers, (group.send if outgoing else group.recv)([tensor], peer, 0)))
            return [(peers, group._end_coalescing(device))] if self._coalesces else works
        except RuntimeError as error:
            raise self._lost(peers, reason_of(error), what) from error

    def _drop_messages(self) -> None:
        # gloo reads nothing more from a peer whose message has lost its tensor on the way.
        self._never_waited_for += [
            each for each in self._under_way if any(isinstance(work, dist.Work) for _, work in each.works)
        ]
        if self._shared is not None:
            self._shared.drop()

    def _end_messages(self) -> None:
        if self._shared is not None:
            self._shared.free()
        self._close_pairs()

    def _close_pairs(self) -> None:
        group = self._group()
        if group is None or "cpu" not in self._carries:
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


# ---- the end of the process ----------------------------------------------------------------------

_EXIT_SECONDS = 10.0  # for gloo


@atexit.register
def wait_for_gloo() -> None:
    """Wait, without the GIL, until gloo's threads in this process sleep, and have not run since the last look.

    A thread of gloo lets go of the tensors of its last work after it has told of it. For a tensor that Python has
    dropped it needs the GIL; Python, once it finalizes, ends a thread that asks for it, and C++ aborts the process
    (status -6, "terminate called without an active exception").
    """
    deadline, before = time.monotonic() + _EXIT_SECONDS, None
    while (found := _threads_of_gloo()) and time.monotonic() < deadline:
        if found == before and not any("State:\tR" in text for text in found):
            return
        before = found
        time.sleep(0.001)


def _threads_of_gloo() -> list[str]:
    """Return /proc's text on each thread of gloo: its state, and how often it gave up the CPU. It waits for the GIL of
    a caller asleep, but has run by the time that the caller has the GIL again. Empty where there is no /proc."""
    texts = []
    for path in sorted(Path("/proc/self/task").glob("*/status")):
        with contextlib.suppress(OSError):  # it has ended
            if "gloo_" in (text := path.read_text()).partition("\n")[0]:  # pt_gloo_runloop, gloo_tcp_loop
                texts.append(text)
    return texts


# ---- collectives along the sequence -------------------------------------------------------------


def all_gather_seq(local: Tensor, layout: Tensor, dim: int, seq_len: int, group: Group | None) -> Tensor:
    """Return the shards of all ranks in global order: size N in `dim` -> size S. Any dtype; differentiable.

    The gradient of a rank's shard is the sum over all ranks, added in rank order in at least float32.
    The last ranks may hold none. InputError: local has not N tokens in `dim`, or the layout is for more ranks.
    RingMismatchError, PeerLostError.
    """
    if not torch.compiler.is_compiling():
        with propagate_errors(group, "unshard", local):
            dim = arguments.check_dim("local", local, dim)
            if local.device.type == "meta" and transport_of(group).world_size > 1:  # would not get as far as the op
                raise InputError("local is on meta, which holds no data for the other ranks; expected a real device")
            derivatives.check_once("unshard", local)
    full: Tensor = unshard_op(local, layout, dim % local.dim(), seq_len, False, group_name(group))
    return full


_NAMES = "unshard", "gradient of unshard"


@torch.library.custom_op("ringtile::unshard", mutates_args=(), tags=NOT_IN_CUDA_GRAPHS)
def unshard_op(x: Tensor, layout: Tensor, dim: int, size: int, is_gradient: bool, group_name: str) -> Tensor:
    """Return the shards of all ranks in global order; or the adjoint: this rank's shard of x, summed over all ranks.

    The sum is in rank order, in at least float32. size: of the result in dim.
    """
    op, transport = _NAMES[is_gradient], transport_of(group_name)
    rank, ranks = transport.rank, range(transport.world_size)
    with transport.propagate_errors(op):
        runs = _runs_of_ranks(layout, int(layout[:, 4].sum()) if is_gradient else size, transport)
        lens = [int(each[:, 3].sum()) for each in runs]
        _check(op, x, dim, sum(lens) if is_gradient else lens[rank], rank)
    terms: dict[str, HeaderValue] = {
        "layout digest": ops.digest(layout, layout[:0], layout[:0]),
        "dtype": str(x.dtype),
        "dim": dim,
        "the other sizes": str([*x.shape[:dim], *x.shape[dim + 1 :]]),
    }
    with transport.agree(op, terms, x.device):
        if is_gradient:
            sends = [ops.resized(x, dim, num) for num in lens]
            for shard, of_rank in zip(sends, runs, strict=True):
                ops.rows_pack_([x], of_rank, dim, [shard])
        else:
            sends = [x.contiguous()] * len(ranks)
        shards = [ops.resized(x, dim, lens[rank if is_gradient else peer]) for peer in ranks if peer != rank]
        shards.insert(rank, sends[rank])
        # As bytes, because gloo does not know every dtype. Flat: a tensor without numbers is contiguous whatever its
        # strides, and no bytes if the last is not 1.
        there, back = (
            {peer: x.flatten().view(torch.uint8) for peer, x in enumerate(parts) if peer != rank}
            for parts in (sends, shards)
        )
        transport.exchange(there, back, op).wait()
    if not is_gradient:
        full = ops.resized(x, dim, size)
        for shard, of_rank in zip(shards, runs, strict=True):
            ops.rows_unpack_([full], of_rank, dim, [shard])
        return full
    total = torch.zeros_like(shards[rank], dtype=torch.promote_types(x.dtype, torch.float32))
    for shard in shards:
        total += shard
    return total.to(x.dtype)


def _runs_of_ranks(layout: Tensor, seq_len: int, transport: Transport) -> list[Tensor]:
    """Return the runs (R, 4) of each rank. The last ranks may have none."""
    world_size = int(layout[:, 0].max()) + 1 if layout.numel() else 0
    if not 0 < world_size <= transport.world_size:
        raise InputError(
            f"the layout is for {world_size} ranks, the group has {transport.world_size}; expected the same number"
        )
    ops.layout_check(layout, seq_len, world_size)
    return [layout[layout[:, 0] == rank, 1:].contiguous() for rank in range(transport.world_size)]


def _check(op: str, x: Tensor, dim: int, size: int, rank: int) -> None:
    arguments.check_device("the tensor", x)
    arguments.check_storage("the tensor", x)
    if x.size(dim) != size:
        raise InputError(f"{op} of a tensor {tuple(x.shape)}, dim {dim}; expected size {size} in dim on rank {rank}")


@unshard_op.register_fake
def _(x: Tensor, layout: Tensor, dim: int, size: int, is_gradient: bool, group_name: str) -> Tensor:
    return ops.resized(x, dim, size)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, int, int, bool, str], output: Tensor) -> None:
    x, layout, ctx.dim, _, ctx.is_gradient, ctx.group_name = inputs
    ctx.size = x.size(ctx.dim)
    ctx.save_for_backward(layout)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    is_gradient = not ctx.is_gradient
    with propagate_errors(ctx.group_name, _NAMES[is_gradient], upstream):
        if is_gradient:
            derivatives.check_once("the backward of unshard", upstream)
        (layout,) = ctx.saved_tensors
        of_x = unshard_op(upstream, layout, ctx.dim, ctx.size, is_gradient, ctx.group_name)
    return of_x, *[None] * 5


unshard_op.register_autograd(_backward, setup_context=_setup)
