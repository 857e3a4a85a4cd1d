"""The plan: which keys a rank needs of every other, in which round, and what that sends. Integers only.

Round i of the ring: rank r works on the keys of rank (r - i) mod W, or, at once, on those of all ranks in one round.
Only needed keys travel, straight from their owner; in the backward the partial dk, dv travel straight back. Where ranks
share heads (heads.py), the ring is one of groups: each has the tokens of its ranks.

A round is on a device, with its mask. Copies of masks are kept alive until every stream and CUDA graph that reads them
is done.

Shape letters: B batch, Bm mask rows (B or 1), S global tokens, N local tokens, H query heads, G kv heads, D head dim,
Dv value head dim, W ranks, R runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ringtile import ops
from ringtile.errors import RefusedError
from ringtile.scheme import Scheme, candidates, shares_of
from ringtile.sequence.heads import HeadGroup, join
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask

_CPU = torch.device("cpu")


class Shape(NamedTuple):
    """The sizes of q (B, N, H, D), k (B, N, G, D) and v (B, N, G, Dv) that all ranks share: all but N."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    latent_dim: int = 0  # numbers of a token that a ring sends in place of its k and v; 0: it sends these

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Shape:
        batch, _, num_heads, head_dim = q.shape  # a shape costs what one size does
        return cls(batch, num_heads, k.shape[2], head_dim, v.shape[3], q.dtype)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device. For a copy to a GPU from memory that is not pinned, the host would wait.

    torch uses pinned memory again only when the copy was made. On the current stream: another one has to wait for it.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class DeviceTensors:
    """CPU tensors, copied to a device when they are first read; on a CPU, the tensors themselves.

    It may go while kernels that read it are still to run, on any stream: the allocator gives freed memory to the stream
    that it was allocated on at once, and on others waits for what they have been given to do if it knows of them.

    A CUDA graph reads the same memory again in every replay, and nothing tells when the last one was. So what a graph
    was captured with is never freed. For masks that adds 8 bytes a token for each sequence that graphs are captured
    with, a small part of the queries and outputs of the same tokens that every such graph holds.
    """

    def __init__(self, device: torch.device, *host: Tensor) -> None:
        self.device, self.host, self._is_cuda = device, host, device.type == "cuda"
        self._there: tuple[Tensor, ...] | None = host if device.type == "cpu" else None

    def on(self, device: torch.device) -> DeviceTensors:
        """Return the same tensors, for another device."""
        return self if device == self.device else DeviceTensors(device, *self.host)

    def read(self) -> tuple[Tensor, ...]:
        """Return the tensors there, for kernels that the caller launches on the current stream.

        RefusedError where that stream captures a CUDA graph, and they are not there yet.
        """
        if self._there is None:
            self._there = self._copied()
        elif self._is_cuda:  # asking a device for its type costs as much as the rest on a CPU
            stream = torch.cuda.current_stream(self.device)
            captures = torch.cuda.is_current_stream_capturing()
            if stream not in self._streams:
                if not captures:  # before a capture torch waits for the device
                    stream.wait_event(self._event)
                for x in self._there:
                    x.record_stream(stream)
                self._streams.add(stream)
            if captures:
                _in_graphs.setdefault(id(self), self)
        return self._there

    def _copied(self) -> tuple[Tensor, ...]:
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            raise RefusedError(
                f"the mask of this sequence is not on {self.device} yet, and cannot be copied there while a CUDA graph "
                f"is captured; make the same call once before the capture"
            )
        there = tuple(to_device(x, self.device) for x in self.host)
        if self._is_cuda:
            stream = torch.cuda.current_stream(self.device)
            self._streams, self._event = {stream}, stream.record_event()  # those that the allocator knows of
        return there


_in_graphs: dict[int, DeviceTensors] = {}  # by id; for the life of the process


@dataclass(frozen=True, eq=False)
class Transfer:
    """Keys of one rank that another one works on in a round."""

    rank: int  # the other one
    runs: Tensor  # int64 CPU (R, 4): row of the block, or of the owner's k, 1, row of the message, length
    num_keys: int
    is_head: bool  # whether they are the first rows of the block, or of k, in order


@dataclass(eq=False)
class Round:
    """The part of one rank in one round, on one device; the same for all calls with one plan.

    This rank may be among the others, where its keys are part of a block. Nothing travels of a round without a plan.
    """

    bounds: DeviceTensors  # int32 (Bm, N): begin and end of the queries
    positions: DeviceTensors  # int64 (N): of the queries; few kernels read them
    k_runs: Tensor  # int64 CPU (R, 4): positions of the keys; local_begin = row of the block
    key_bounds: DeviceTensors | None = None  # int32 (Bm, rows of the block): IntervalMask.loose_key_bounds, if any
    index: int = 0
    num_keys: int = 0
    num_pairs: int = 0  # unmasked (query, key) pairs, summed over the Bm mask rows
    in_place: bool = False  # the block is the local k itself, of which num_keys rows are needed, and nothing travels
    incoming: tuple[Transfer, ...] = ()  # together the block, whose keys are in the order of their runs' positions
    outgoing: tuple[Transfer, ...] = ()  # of the local k
    _tables: dict[Transfer, DeviceTensors] = field(default_factory=dict, init=False)
    _chunks: dict[tuple[int, int], Round] = field(default_factory=dict, init=False)
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False)  # what kernels of others take of the mask

    @property
    def is_idle(self) -> bool:
        """Return whether this rank has nothing to compute, to send or to receive."""
        return self.num_keys == 0 and not any(each.num_keys for each in self.outgoing)

    def of_queries(self, tokens: slice) -> Round:
        """Return the round of some of the queries."""
        key = tokens.start, tokens.stop
        if key not in self._chunks:
            with _disable_current_modes():  # of fake tensors: masks are real
                bounds, positions = (
                    DeviceTensors(of.device, *(x[..., tokens].contiguous() for x in of.host))
                    for of in (self.bounds, self.positions)
                )
                self._chunks[key] = replace(self, bounds=bounds, positions=positions)
        return self._chunks[key]

    def table(self, transfer: Transfer) -> Tensor | None:
        """Return the runs of one of the transfers on the device, for `ops.rows_*`; None where they need none there."""
        if self.bounds.device.type != "cuda" or len(transfer.runs) <= ops.MAX_RUNS_WITHOUT_TABLE:
            return None
        if transfer not in self._tables:
            self._tables[transfer] = DeviceTensors(self.bounds.device, transfer.runs)
        (table,) = self._tables[transfer].read()
        return table


@dataclass(frozen=True, eq=False)
class RankPlan:
    """All rounds of one rank, empty ones included, in the ring of all ranks, or, where ranks share heads, of those with
    the same shares."""

    mask: IntervalMask
    layout: Layout  # of the ring: where ranks share heads, each has the tokens of all of them
    rank: int  # in the ring
    ranks: tuple[int, ...]  # of the ring, as the group numbers them
    heads: HeadGroup | None  # None: this rank works on all heads of its own queries
    rounds: tuple[Round, ...]  # on the CPU
    _on_devices: dict[torch.device, tuple[Round, ...]] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        mask: IntervalMask,
        layout: Layout,
        rank: int,
        *,
        at_once: bool = False,
        ranks: Sequence[int] = (),
        heads: HeadGroup | None = None,
    ) -> RankPlan:
        """Return the plan of `rank`. mask and layout are of one length; at_once: there is one round. ranks: all."""
        positions = layout.positions(rank)
        of_queries = (
            DeviceTensors(_CPU, mask.begin[:, positions], mask.end[:, positions]),
            DeviceTensors(_CPU, positions),
        )
        rounds, transfers, runs = ops.plan_rank(*mask.bounds, layout.tensor, rank, at_once)
        incoming, outgoing = (
            tuple(
                Transfer(other, runs[first : first + num_runs], num_keys, bool(is_head))
                for other, num_keys, first, num_runs, is_head in side
            )
            for side in transfers.tolist()
        )
        planned = []
        for i, (num_keys, num_pairs, first, num_runs, in_place) in enumerate(rounds.tolist()):
            k_runs, of_keys = runs[first : first + num_runs], None
            of_round = slice(0, 0) if in_place else slice(None) if at_once else slice(i, i + 1)
            if mask.loose_key_bounds:
                of_block = positions if in_place else ops.run_positions(k_runs)
                of_keys = DeviceTensors(_CPU, *(x[:, of_block] for x in mask.loose_key_bounds))
            travels = incoming[of_round], outgoing[of_round]
            planned.append(Round(*of_queries, k_runs, of_keys, i, num_keys, num_pairs, bool(in_place), *travels))
        return cls(mask, layout, rank, tuple(ranks or range(layout.world_size)), heads, tuple(planned))

    def on(self, device: torch.device) -> tuple[Round, ...]:
        """Return the rounds on a device, made once: those that are not idle, and the first in any case."""
        if device not in self._on_devices:
            bounds, positions = (x.on(device) for x in (self.rounds[0].bounds, self.rounds[0].positions))
            self._on_devices[device] = tuple(
                replace(x, bounds=bounds, positions=positions, key_bounds=x.key_bounds and x.key_bounds.on(device))
                for x in self.rounds
                if x.index == 0 or not x.is_idle
            )
        return self._on_devices[device]


# ---- bytes, from every rank to every other ------------------------------------------------------


class Counts:
    """Keys, pairs and heads, from which the costs of all ranks follow; `size` ranks share heads in each of n groups."""

    def __init__(self, mask: IntervalMask, layout: Layout, shape: Shape, scheme: Scheme) -> None:
        self.shape, self.layout, self.scheme = shape, layout, scheme
        self.size = size = scheme.ranks_per_group(layout.world_size)
        num_groups = layout.world_size // size
        # (n, n): of the keys of a group (second index), those that another (first) attends.
        self.keys, pairs = ops.plan_counts(*mask.bounds, join(layout, size)[0].tensor)
        self.pairs = pairs * (shape.batch // mask.begin.size(0))  # (n, n)
        shares = shares_of(size, shape.num_heads, shape.num_kv_heads)

        def by_rank(counts: list[int]) -> Tensor:
            return torch.tensor(counts).repeat(num_groups)

        self.heads = by_rank([len(share.heads) for share in shares])  # (W,)
        self.kv_heads = by_rank([len(share.kv_heads) for share in shares])
        self.ring_kv_heads = by_rank([len(share.kv_of_heads or share.kv_heads) for share in shares])
        self.copies_kv_heads = int(self.kv_heads[:size].sum()) > shape.num_kv_heads

    def sent_bytes(self) -> tuple[Tensor, Tensor]:
        """Return those of the forward and of the backward: int64 (W, W), from and to."""
        shape, size, ranks = self.shape, self.size, torch.arange(self.layout.world_size)
        element, state = shape.dtype.itemsize, ops.state_dtype(shape.dtype).itemsize
        key, value = shape.batch * shape.head_dim, shape.batch * shape.v_head_dim  # elements of a head
        others = ranks[:, None] != ranks
        in_ring = others & (ranks[:, None] % size == ranks % size)
        keys = self.keys.repeat_interleave(size, 0).repeat_interleave(size, 1) * in_ring  # by worker and owner
        if shape.latent_dim and size == 1:
            keys = keys * shape.batch * shape.latent_dim
        else:
            keys = keys * self.ring_kv_heads[:, None] * (key + value)
        forward, backward = keys.T * element, keys.T * element + keys * state
        tokens = torch.tensor([self.layout.local_len(int(rank)) for rank in ranks])
        shared = tokens[:, None] * (others & (ranks[:, None] // size == ranks // size))  # by owner and worker
        of_heads, of_kv_heads = shared * self.heads, shared * self.kv_heads * (key + value)
        gradient = state if self.copies_kv_heads else element
        forward = forward + (of_heads * key + of_kv_heads) * element + (of_heads * value).T * element
        backward = backward + of_heads * value * element
        return forward, backward + (of_heads * key).T * element + of_kv_heads.T * gradient


def cheapest(mask: IntervalMask, layout: Layout, shape: Shape, hosts: tuple[int, ...]) -> str:
    """Return what `auto` is: the scheme whose busiest rank receives the fewest bytes over the slowest link.

    That is, forward and backward, between hosts if there are several, else within the one; the ring when equal. All
    ranks have these integers, so that every rank and every run finds the same. hosts: by rank, as in `Transport`.
    """
    host = torch.tensor(hosts, device="cpu")
    is_slow = host[:, None] != host if len({*hosts}) > 1 else torch.ones(len(hosts), len(hosts), dtype=torch.bool)

    def received(scheme: str) -> int:
        forward, backward = Counts(mask, layout, shape, Scheme.parse(scheme)).sent_bytes()
        return int(((forward + backward) * is_slow).sum(0).max())

    return min(candidates(hosts, shape.num_heads, shape.num_kv_heads), key=received)  # the first of equal ones
