"""The context-parallel group of a rank: the ranks that share one sequence, and their small collectives; and what
accelerate's ParallelismConfig says of groups."""

from __future__ import annotations

import contextlib
import datetime
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

import ringtile
from ringtile.checksum import checksum
from ringtile.derivatives import gradients
from ringtile.errors import ConfigError, InputError, PeerLostError, RefusedError, RingMismatchError, with_kind
from ringtile.hf.keys import MASK
from ringtile.hf.masks import read
from ringtile.transport.agreement import PeerGoneError
from ringtile.transport.groups import backend_name, transport_of
from ringtile.transport.rendezvous import Rendezvous, own_connection
from ringtile.transport.sockets import LONGEST_SECONDS

if TYPE_CHECKING:
    from ringtile.hf.written import Written


def deepspeed_shards_sequences(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed shards the sequence (ALST / Ulysses through accelerate), and ringtile stands back."""
    parallelism = accelerator.parallelism_config
    return parallelism is not None and bool(parallelism.sp_enabled)


def accelerate_knows_groups(accelerator: Accelerator) -> bool:
    """Whether accelerate already gives the ranks of a group the same batches, and counts each batch once."""
    parallelism = accelerator.parallelism_config
    return parallelism is not None and bool(parallelism.cp_enabled)


_num_meetings = 0  # of all ranks


def meet_world(timeout_seconds: float, failure: Exception | None = None) -> None:
    """Wait until all ranks of the world come to `ringtile.enable`, at most so long.

    failure: why this rank goes no further, which the others hear; then it does not wait.
    Raises RingMismatchError where ranks have other versions or are of two runs, and PeerLostError.
    """
    global _num_meetings
    _num_meetings += 1
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = {each.__name__: str(each.__version__) for each in (ringtile, torch, transformers)}
    mine["TORCHELASTIC_RUN_ID"] = os.environ.get("TORCHELASTIC_RUN_ID", "")
    seconds = min(timeout_seconds, LONGEST_SECONDS)
    reason = None if failure is None else PeerGoneError(rank, with_kind(failure))
    try:
        rendezvous = Rendezvous(own_connection(_get_default_store()), rank, world_size, seconds, reason, **mine)
    except PeerGoneError as gone:
        if failure is not None:
            return
        error = PeerLostError(
            f"rank {gone.peer} was lost in ringtile.enable of rank {rank}: {gone.reason}; see rank {gone.peer}'s log "
            f"for the cause"
        )
        error.rank = gone.peer
        raise error from None
    for peer, theirs in enumerate(rendezvous.facts):
        for name, value in mine.items():
            if theirs[name] != value:
                with contextlib.suppress(PeerGoneError):
                    rendezvous.say(of=())  # once all have read this: the rank that serves the store may end now
                raise RingMismatchError(
                    f"ranks disagree on {name}: rank {rank} has {value!r}, rank {peer} has {theirs[name]!r}; expected "
                    f"the same packages on every host, and one run for each MASTER_ADDR and MASTER_PORT"
                )


@contextlib.contextmanager
def failures_told(timeout_seconds: float) -> Iterator[None]:
    """Tell the other ranks of an error in the body, unless it comes after they have met: they wait for this one."""
    before = _num_meetings
    try:
        yield
    except Exception as error:
        if dist.is_initialized() and dist.get_world_size() > 1 and _num_meetings == before:
            meet_world(timeout_seconds, error)
        raise


class ContextParallelGroup:
    """`size` ranks that share a sequence, this one among them.

    They follow one another along the data-parallel dimension of a mesh (data, tensor): of tp_size neighbors, which
    hold parts of the same weights, each is in a group of its own. The tp_size * size ranks that get the same batch are
    consecutive. Without tensor parallelism, a group is k * size .. (k + 1) * size - 1.

    Every rank of the world must build one of two or more: torch.distributed makes process groups collectively. The
    data-parallel engine needs no notice: it averages gradients over all ranks of its dimension.
    Raises ConfigError when size does not divide the number of ranks there.
    """

    def __init__(self, size: int, timeout_seconds: float, device: torch.device, tp_size: int = 1) -> None:
        world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        along_data, place = world_size // tp_size, rank // tp_size
        if along_data % size:
            ranks = "is 1 rank" if world_size == 1 else f"are {world_size} ranks"
            ranks += f", {along_data} along the data-parallel dimension" * (tp_size > 1)
            raise ConfigError(
                f"context_parallel_size is {size} but there {ranks}; expected a divisor of the number "
                f"of ranks (start more of them with torchrun --nproc_per_node, or set context_parallel_size: 1)"
            )
        self.size = size
        self.tp_size = tp_size
        self.copies = size * tp_size  # ranks that get the same batch
        self.device = device
        self.rank = place % size
        self.data_index = place // size  # which of the data_size different batches this rank gets
        self.data_size = along_data // size
        self._tp_rank = rank % tp_size
        self._num_failures = 0
        self.memory_bytes = memory_bytes(device)  # the least of a device of this group
        if size == 1 or not dist.is_initialized():
            return
        meet_world(timeout_seconds)
        timeout = datetime.timedelta(seconds=timeout_seconds)
        firsts = [first + i for first in range(0, world_size, self.copies) for i in range(tp_size)]
        for members in (range(first, first + self.copies, tp_size) for first in firsts):
            group = dist.new_group(list(members), timeout=timeout, pg_options=_options(device, timeout))
            if rank in members:
                # Weak: an enabled Trainer outlives destroy_process_group, and would keep the threads of gloo.
                self._process_group = weakref.ref(group)
        # Connects all ranks before any of them can close the group.
        least = torch.tensor(self.memory_bytes, device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.process_group)
        self.memory_bytes = int(least)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """None: a group of one rank. InputError: it was destroyed."""
        if not hasattr(self, "_process_group"):
            return None
        group: dist.ProcessGroup | None = self._process_group()
        if group is None:
            raise InputError("the process group was destroyed; make a new one, and a new Trainer on it")
        return group

    def world_rank(self, rank: int) -> int:
        """The rank in the world of a rank of this group."""
        return (self.data_index * self.size + rank) * self.tp_size + self._tp_rank

    def close(self) -> None:
        """Frees the process group. Local: every rank of the group does so in its own time."""
        if dist.is_initialized() and hasattr(self, "_process_group") and (group := self._process_group()):
            dist.destroy_process_group(group)

    def meet(self, what: str, step: int, **fields: int) -> None:
        """Wait until the ranks that share a sequence come to the same step, for at most ddp_timeout.

        what: which, as in "a step of training"; step: its number; fields: what else must be equal. On a GPU the host
        goes on, and a later call raises what differs. Without it, a rank that does something else is waited for in a
        collective of the engine, which names nobody.
        Raises RingMismatchError, saying what each of two ranks has come to, and PeerLostError.
        """
        with transport_of(self.process_group).agree(what, fields, self.device, step=step):
            pass

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over the group, the same bits on all of its ranks. A collective."""
        total = value.detach().clone()
        if self.size == 1:
            return total
        dist.all_reduce(total, group=self.process_group)
        return total

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor over the group, the same bits on all ranks; of equal ones, these. A collective."""
        return (self.sum(value.double()) / self.size).to(value.dtype)

    def check_same(self, what: str, value: Tensor) -> Tensor:
        """The tensor; RefusedError, on all ranks of the group, if it differs between them by more than rounding. A
        collective."""
        x = value.detach().double()
        eps = torch.finfo(value.dtype).eps ** 0.5 if value.is_floating_point() else 0.0
        differs = (x - self.mean(x)).abs().sum() > eps * x.abs().sum()
        if bool(self.sum(differs.long())):
            raise RefusedError(
                f"{what} {tuple(value.shape)} differs between the ranks that share a sequence; expected a tensor made "
                f"of whole rows: compute it in the loss, from outputs that have an entry for each token"
            )
        return value

    def largest_of_all(self, *numbers: int) -> list[int]:
        """The largest of each number over all ranks of the world. A collective of the world."""
        if self.copies * self.data_size == 1:
            return [*numbers]
        largest = torch.tensor(numbers, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        found: list[int] = largest.tolist()
        return found

    def fails_alone(self, reason: str, seconds: float) -> bool:
        """Whether another rank of the world does not fail, which says so here within so many seconds, as this one does.

        For what fails between collectives of an engine, in which the others wait. reason: for `failure_of_peer`.
        """
        self._num_failures += 1
        store = own_connection(_get_default_store())
        store.set(self._failure_key(dist.get_rank()), reason)
        try:
            store.wait([*map(self._failure_key, range(dist.get_world_size()))], datetime.timedelta(seconds=seconds))
        except RuntimeError:
            return True
        return False

    def failure_of_peer(self) -> PeerLostError | None:
        """A rank of the world that `fails_alone`, for those that waited for it; None: there is none."""
        self._num_failures += 1
        with contextlib.suppress(RuntimeError):  # the store is gone, too
            store = own_connection(_get_default_store())
            for rank, key in enumerate(map(self._failure_key, range(dist.get_world_size()))):
                if store.check([key]):
                    return PeerLostError(f"rank {rank} was lost: {store.get(key).decode()}; see its log")
        return None

    def _failure_key(self, rank: int) -> str:
        return f"ringtile failure {_num_meetings} {self._num_failures} {rank}"

    def check_same_batch(self, inputs: Mapping[str, Any], written: Written | None = None) -> dict[str, Any]:
        """The batch, with the tensors that describe its documents on the host; checked to be the same on all ranks.

        One all-gather of a few integers. Without it, different batches of equal shape would train unnoticed. The result
        comes with the tensors, so that the host waits for a GPU once.
        written: compared too. Raises RingMismatchError, naming what differs and where, RefusedError.
        """
        if self.size == 1:
            return read(inputs)[0]
        besides = {} if written is None else written.numbers
        header = _fingerprint(inputs) | besides
        # A number goes to a GPU with a kernel's launch: for a copy of it, the host would wait.
        mine = torch.stack(
            [
                x.to(self.device) if isinstance(x, Tensor) else torch.full((), x, dtype=torch.int64, device=self.device)
                for x in header.values()
            ]
        )
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self.process_group)
        on_host, (values,) = read(inputs, torch.stack(gathered))
        for rank in range(1, self.size):
            for name, expected, got in zip(header, values[0].tolist(), values[rank].tolist(), strict=True):
                if got != expected:
                    first, other = self.world_rank(0), self.world_rank(rank)
                    if written is not None and name in besides:
                        written.refuse(name, first, other)
                    raise RingMismatchError(
                        f"ranks {first} and {other} share a sequence but got different batches: {name} is "
                        f"{expected} on rank {first}, {got} on rank {other}; expected the same batch on "
                        f"every rank of a context-parallel group (same seed and data, a sampler that ignores the rank)"
                    )
        return on_host


def memory_bytes(device: torch.device) -> int:
    """The memory of a device; of a CPU this rank's share of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _options(device: torch.device, timeout: datetime.timedelta) -> Any:
    """Over NCCL, options of one group, which new_group fills in: streams of high priority, few thread blocks. None over
    anything else.

    The thread blocks of a round's attention and those of NCCL for the next keys become ready together. There are
    thousands of the former; in line behind them, the keys would travel when the round is over. Those of attention fill
    the shared memory of a multiprocessor: one of NCCL's, which takes up to 32 for messages, has one to itself while it
    waits for a late peer. Whether 8 is best has not been measured; NCCL_MAX_CTAS overrules it.
    """
    if backend_name(dist.distributed_c10d._get_default_group(), device.type) != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8
    options._timeout = timeout  # as given to new_group, which warns of any other
    return options


_NO_TOKENS = torch.empty(0, 0, device="cpu")


def _fingerprint(inputs: Mapping[str, Any]) -> dict[str, int | Tensor]:
    """The numbers that must be equal on all ranks: a few readable ones first, then checksums."""
    tensors = {name: value for name, value in sorted(inputs.items()) if isinstance(value, Tensor)}
    main = tensors.get("input_ids", tensors.get("inputs_embeds", _NO_TOKENS))
    kinds = " ".join(f"{name}:{value.dtype}:{tuple(value.shape)}" for name, value in tensors.items())
    header: dict[str, int | Tensor] = {"the number of rows": main.size(0), "the number of tokens": main.size(1)}
    header["the checksum of keys, dtypes and shapes"] = zlib.crc32(kinds.encode())
    for name in ("input_ids", "labels"):
        header[f"the checksum of {name}"] = checksum(tensors.pop(name)) if name in tensors else 0
    header[f"the checksum of {MASK}"] = getattr(inputs.get(MASK), "digest", 0)
    header["the checksum of the other tensors"] = checksum(*tensors.values(), device=main.device)
    return header


def exchanged(value: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """forward(value), of whose gradient the value gets backward(gradient)."""
    found: Tensor = _Exchange.apply(value, forward, backward)  # type: ignore[no-untyped-call]
    return found


def of_a_collective(error: BaseException | None) -> bool:
    """Return whether torch.distributed raised it, or what it was raised from."""
    while error is not None:
        said = str(error) if isinstance(error, RuntimeError) else ""
        # gloo says where it failed, but not that a wait timed out, nor to a call after the timeout.
        unplaced = any(words in said for words in ("timeout caused pair closure", "Operation timed out!"))
        if isinstance(error, dist.DistError) or "gloo/" in said or unplaced:
            return True
        error = error.__cause__ or error.__context__
    return False


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.exchange = backward
        return forward(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = gradients("a sharded model by its inputs", lambda: [ctx.exchange(gradient)], gradient)
        return *found, None, None
