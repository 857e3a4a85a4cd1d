"""The plan: which keys every rank needs of every other, in which round, and what that costs. Integers only.

Round i of the ring: rank r works on the keys of rank (r - i) mod W, or, at once, on those of all ranks in one round.
Only needed keys travel, straight from their owner; in the backward the partial dk, dv travel straight back. Where ranks
share heads (heads.py), the ring is one of groups: each has the tokens of its ranks.

Shape letters: B batch, Bm mask rows (B or 1), S global tokens, N local tokens, H query heads, G kv heads, D head dim,
Dv value head dim, W ranks, R runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile import arguments, ops
from ringtile.errors import InputError
from ringtile.scheme import Scheme, shares_of
from ringtile.sequence.heads import join
from ringtile.sequence.layout import Layout, check_types
from ringtile.sequence.mask import IntervalMask


@dataclass(frozen=True, eq=False)
class Transfer:
    """Keys of one rank that another one works on in a round."""

    rank: int  # the other one
    runs: Tensor  # int64 CPU (R, 4): row of the block, or of the owner's k, 1, row of the message, length
    num_keys: int
    is_head: bool  # whether they are the first rows of the block, or of k, in order

    @classmethod
    def of(cls, rank: int, rows: Tensor, packed: Tensor) -> Transfer:
        """rows, packed: the runs (R, 4) of the keys in the rows of the block, or of k, and in those of the message."""
        runs = torch.stack((rows[:, 2], torch.ones_like(rows[:, 2]), packed[:, 2], packed[:, 3]), dim=1)
        return cls(rank, runs, int(packed[:, 3].sum()), torch.equal(rows[:, 2], packed[:, 2]))


@dataclass(frozen=True, eq=False)
class Round:
    """What one rank does in one round. This rank may be among the others, where its keys are part of a block."""

    k_runs: Tensor  # int64 CPU (R, 4): positions of the keys; local_begin = row of the block
    num_keys: int
    num_pairs: int  # unmasked (query, key) pairs, summed over the Bm mask rows
    in_place: bool  # the block is the local k itself, of which num_keys rows are needed, and nothing travels
    key_bounds: tuple[Tensor, ...]  # int32 CPU (Bm, rows of the block): IntervalMask.loose_key_bounds
    incoming: tuple[Transfer, ...]  # together the block, whose keys are in the order of their runs' positions
    outgoing: tuple[Transfer, ...]  # of the local k

    @property
    def is_idle(self) -> bool:
        """Whether this rank has nothing to compute, to send or to receive."""
        return self.num_keys == 0 and not any(each.num_keys for each in self.outgoing)


@dataclass(frozen=True, eq=False)
class RankPlan:
    """All rounds of one rank, empty ones included."""

    rank: int
    begin: Tensor  # int32 CPU (Bm, N): the mask of this rank's queries
    end: Tensor
    rounds: tuple[Round, ...]

    @functools.cached_property
    def busy_rounds(self) -> tuple[int, ...]:
        """All but idle ones, and the first in any case."""
        return tuple(i for i, round in enumerate(self.rounds) if i == 0 or not round.is_idle)


def rank_plan(mask: IntervalMask, layout: Layout, rank: int, *, at_once: bool = False) -> RankPlan:
    """Return the rounds of `rank`. mask and layout are of one length; at_once: there is one round."""
    world_size = layout.world_size
    needed, pairs = ops.plan(*mask.bounds, layout.tensor, rank)
    positions = layout.positions(rank)

    def keys(query_rank: int, key_rank: int) -> Tensor:
        """Return, int64 (R, 4), the runs of key_rank's tokens that query_rank attends."""
        return needed[(needed[:, 0] == query_rank) & (needed[:, 1] == key_rank), 2:]

    rounds = []
    for i in range(1 if at_once else world_size):
        key_ranks = [*range(world_size)] if at_once else [(rank - i) % world_size]
        query_ranks = [*range(world_size)] if at_once else [(rank + i) % world_size]
        runs = [keys(rank, key_rank) for key_rank in key_ranks]
        block, incoming = _merged(key_ranks, runs)
        own = [keys(query_rank, rank) for query_rank in query_ranks]
        outgoing = tuple(Transfer.of(other, each, _packed(each)) for other, each in zip(query_ranks, own, strict=True))
        travels = any(each.num_keys for each in (*incoming, *outgoing) if each.rank != rank)
        in_place = rank in key_ranks and not travels
        rounds.append(
            Round(
                k_runs=torch.cat(runs).contiguous() if in_place else block,
                num_keys=sum(each.num_keys for each in incoming),
                num_pairs=int(pairs[rank, key_ranks].sum()),
                in_place=in_place,
                key_bounds=tuple(x[:, positions if in_place else _positions(block)] for x in mask.loose_key_bounds),
                incoming=() if in_place else incoming,
                outgoing=() if in_place else outgoing,
            )
        )
    return RankPlan(rank, mask.begin[:, positions], mask.end[:, positions], tuple(rounds))


def _positions(block: Tensor) -> Tensor:
    """int64: of the keys in each row of a block, whose runs are given in any order."""
    runs = block[block[:, 2].argsort()].tolist()
    return torch.cat(
        [torch.arange(begin, begin + stride * length, stride, device="cpu") for begin, stride, _, length in runs]
        or [torch.empty(0, dtype=torch.int64, device="cpu")]
    )


def _merged(key_ranks: list[int], runs: list[Tensor]) -> tuple[Tensor, tuple[Transfer, ...]]:
    """Return the runs of all ranks in the rows of one block, in the order of their positions, and what each sends."""
    packed = [_packed(each) for each in runs]
    every = torch.cat(packed)
    order = every[:, 0].argsort() if len(runs) > 1 else slice(None)
    block = torch.empty_like(every)
    block[order] = _packed(every[order])
    rows = block.split_with_sizes([*map(len, packed)])
    return block[order], tuple(map(Transfer.of, key_ranks, rows, packed))


def _packed(runs: Tensor) -> Tensor:
    """Return the same runs in the rows of a buffer that holds them one after another."""
    begins = runs[:, 3].cumsum(0) - runs[:, 3]
    return torch.stack((runs[:, 0], runs[:, 1], begins, runs[:, 3]), dim=1)


# ---- what it costs ------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Of q (B, N, H, D), k (B, N, G, D) and v (B, N, G, Dv), whatever N is."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Shape:
        batch, _, num_heads, head_dim = q.shape  # a shape costs what one size does
        return cls(batch, num_heads, k.shape[2], head_dim, v.shape[3], q.dtype)


@dataclass(frozen=True)
class RoundCost:
    """What one rank computes in one round."""

    key_rank: int  # whose keys; where ranks share heads, those of its whole group
    num_keys: int
    num_pairs: int  # unmasked (query, key) pairs of a head, summed over the batch


@dataclass(frozen=True)
class RankCost:
    """What one rank does for one attention layer. Bytes are payload; num_heads are the query heads it works on."""

    rank: int
    local_len: int
    num_heads: int
    rounds: tuple[RoundCost, ...]
    forward_bytes_sent: int
    forward_bytes_received: int
    backward_bytes_sent: int
    backward_bytes_received: int
    forward_flops: int  # 2 pairs num_heads (D + Dv): Q K^T, P V
    backward_flops: int  # 2 pairs num_heads (3 D + 2 Dv): Q K^T again, dO V^T, P^T dO, dS^T Q, dS K


@dataclass(frozen=True)
class Plan:
    """What one attention layer costs, rank by rank. `str(plan)` is a table."""

    seq_len: int
    ranks: tuple[RankCost, ...]
    scheme: str
    shape: Shape
    # The bytes that each rank sends to each other, forward and backward: int64 (W, W), from and to.
    sent_bytes: tuple[Tensor, Tensor] = field(compare=False, repr=False)

    @property
    def forward_bytes(self) -> int:
        """Sent by all ranks together, which is also what they receive."""
        return sum(cost.forward_bytes_sent for cost in self.ranks)

    @property
    def backward_bytes(self) -> int:
        return sum(cost.backward_bytes_sent for cost in self.ranks)

    @property
    def forward_flops(self) -> int:
        return sum(cost.forward_flops for cost in self.ranks)

    @property
    def backward_flops(self) -> int:
        return sum(cost.backward_flops for cost in self.ranks)

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean: 1 is perfect, W is one rank doing everything; 1 if there is none."""
        busiest = max(cost.forward_flops for cost in self.ranks)
        return busiest * len(self.ranks) / self.forward_flops if busiest else 1.0

    def __str__(self) -> str:
        header = (
            "rank",
            "tokens",
            "from",
            "keys",
            "fwd MB out",
            "fwd MB in",
            "bwd MB out",
            "bwd MB in",
            "GFLOP fwd+bwd",
        )
        rows: list[tuple[str, ...]] = [header]
        for cost in self.ranks:
            received = [round.num_keys for round in cost.rounds if round.num_keys and round.key_rank != cost.rank]
            bytes_moved = (
                cost.forward_bytes_sent,
                cost.forward_bytes_received,
                cost.backward_bytes_sent,
                cost.backward_bytes_received,
            )
            rows.append(
                (
                    str(cost.rank),
                    str(cost.local_len),
                    str(len(received)),
                    str(sum(received)),
                    *(f"{count / 1e6:.3f}" for count in bytes_moved),
                    f"{(cost.forward_flops + cost.backward_flops) / 1e9:.3f}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        flops = self.forward_flops + self.backward_flops
        total = (
            f"{self.seq_len} tokens over {len(self.ranks)} ranks: {self.forward_bytes / 1e6:.3f} MB "
            f"forward, {self.backward_bytes / 1e6:.3f} MB backward, {flops / 1e9:.3f} GFLOP, busiest rank "
            f"{self.imbalance:.2f} x the mean"
        )
        return "\n".join([*lines, total])


def plan(
    mask: IntervalMask,
    layout: Layout,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    dtype: torch.dtype,
    batch: int | None = None,
    scheme: str = "ring",
) -> Plan:
    """Return what one attention layer moves and computes, exactly, before anything runs.

    num_heads H, num_kv_heads G, head_dim D, v_head_dim Dv (D if None); dtype of q, k, v; batch B (the rows of the
    mask if None); scheme as in ShardedSequence. n needed keys of another rank cost B n g (D + Dv) elements of dtype in
    the forward, for the g kv heads that the rank works on; in the backward the same again, and as many elements of dk,
    dv in the state dtype the other way. Where ranks share heads, each token costs, for each head that another rank
    works on, D elements there (q) and Dv back (out), and D + Dv there for each kv head (k, v); in the backward Dv there
    (dout) and D back (dq), and D + Dv back for each kv head (dk, dv; in the state dtype where several ranks add to
    one). With return_lse each token and head costs a float64 more: lse back, its gradient there.
    Raises InputError when mask, layout and numbers do not fit each other.
    """
    check_types(mask, layout)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    for name, number in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        arguments.check_int(name, number)
    arguments.check_int("v_head_dim", v_head_dim)
    rows = mask.begin.size(0)
    batch = rows if batch is None else arguments.check_int("batch", batch)
    if mask.seq_len != layout.seq_len:
        raise InputError(f"the mask is of {mask.seq_len} tokens, the layout of {layout.seq_len}; expected one length")
    sizes = (num_heads, num_kv_heads, head_dim, v_head_dim, batch)
    if not 1 <= min(sizes) <= max(sizes) < 2**31 or num_heads % num_kv_heads:
        raise InputError(
            f"num_heads {num_heads}, num_kv_heads {num_kv_heads}, head_dim {head_dim}, v_head_dim {v_head_dim}, batch "
            f"{batch}; expected 1..2^31 - 1 each and num_heads a multiple of num_kv_heads"
        )
    if rows not in (1, batch):
        raise InputError(f"the mask has {rows} rows but batch is {batch}; expected {batch} or 1")
    if dtype not in ops.FLOAT_DTYPES:
        raise InputError(f"dtype is {dtype}; expected one of {', '.join(map(str, ops.FLOAT_DTYPES))}")

    shape = Shape(batch, num_heads, num_kv_heads, head_dim, v_head_dim, dtype)
    return plan_of(mask, layout, shape, scheme)


def plan_of(mask: IntervalMask, layout: Layout, shape: Shape, scheme: str) -> Plan:
    """`plan` of arguments that fit each other."""
    counts = _Counts(mask, layout, shape, Scheme.parse(scheme))
    forward, backward = counts.sent_bytes()
    # By a rank for each head; a multiply-add is 2.
    pairs = counts.pairs.sum(1).repeat_interleave(counts.size) * counts.heads
    dim, v_dim = shape.head_dim, shape.v_head_dim
    ranks = tuple(
        RankCost(
            rank=rank,
            local_len=layout.local_len(rank),
            num_heads=int(counts.heads[rank]),
            rounds=counts.rounds(rank),
            forward_bytes_sent=int(forward[rank].sum()),
            forward_bytes_received=int(forward[:, rank].sum()),
            backward_bytes_sent=int(backward[rank].sum()),
            backward_bytes_received=int(backward[:, rank].sum()),
            forward_flops=2 * int(pairs[rank]) * (dim + v_dim),
            backward_flops=2 * int(pairs[rank]) * (3 * dim + 2 * v_dim),
        )
        for rank in range(layout.world_size)
    )
    return Plan(layout.seq_len, ranks, scheme, shape, (forward, backward))


class _Counts:
    """Keys, pairs and heads, from which the costs of all ranks follow. n groups of M ranks share heads."""

    def __init__(self, mask: IntervalMask, layout: Layout, shape: Shape, scheme: Scheme) -> None:
        self.shape, self.layout, self.scheme = shape, layout, scheme
        self.size = size = scheme.ranks_per_group(layout.world_size)
        num_groups = layout.world_size // size
        needed, pairs = ops.plan(*mask.bounds, join(layout, size)[0].tensor)
        self.pairs = pairs * (shape.batch // mask.begin.size(0))  # (n, n)
        # (n, n): of the keys of a group (second index), those that another (first) attends.
        self.keys = torch.zeros(num_groups, num_groups, dtype=torch.int64)
        self.keys.index_put_((needed[:, 0], needed[:, 1]), needed[:, 5], accumulate=True)
        stages = shares_of(scheme.num_stages, size, shape.num_heads, shape.num_kv_heads)
        shares = [[stage[place] for stage in stages] for place in range(size)]

        def by_rank(counts: list[list[int]]) -> Tensor:
            return torch.tensor([*map(sum, counts)]).repeat(num_groups)

        self.heads = by_rank([[len(share.heads) for share in each] for each in shares])  # (W,)
        self.kv_heads = by_rank([[len(share.kv_heads) for share in each] for each in shares])
        self.ring_kv_heads = by_rank([[len(share.kv_of_heads or share.kv_heads) for share in each] for each in shares])
        self.copies_kv_heads = int(self.kv_heads[:size].sum()) > shape.num_kv_heads

    def rounds(self, rank: int) -> tuple[RoundCost, ...]:
        num_groups, (group, place) = len(self.keys), divmod(rank, self.size)
        key_groups = [(group - i) % num_groups for i in range(num_groups)]
        if self.scheme.at_once:
            key_groups.sort()
        return tuple(
            RoundCost(other * self.size + place, int(self.keys[group, other]), int(self.pairs[group, other]))
            for other in key_groups
        )

    def sent_bytes(self) -> tuple[Tensor, Tensor]:
        """Return those of the forward and of the backward: int64 (W, W), from and to."""
        shape, size, ranks = self.shape, self.size, torch.arange(self.layout.world_size)
        element, state = shape.dtype.itemsize, ops.state_dtype(shape.dtype).itemsize
        key, value = shape.batch * shape.head_dim, shape.batch * shape.v_head_dim  # elements of a head
        others = ranks[:, None] != ranks
        in_ring = others & (ranks[:, None] % size == ranks % size)
        keys = self.keys.repeat_interleave(size, 0).repeat_interleave(size, 1) * in_ring  # by worker and owner
        keys = keys * self.ring_kv_heads[:, None] * (key + value)
        forward, backward = keys.T * element, keys.T * element + keys * state
        tokens = torch.tensor([self.layout.local_len(int(rank)) for rank in ranks])
        shared = tokens[:, None] * (others & (ranks[:, None] // size == ranks // size))  # by owner and worker
        of_heads, of_kv_heads = shared * self.heads, shared * self.kv_heads * (key + value)
        gradient = state if self.copies_kv_heads else element
        forward = forward + (of_heads * key + of_kv_heads) * element + (of_heads * value).T * element
        backward = backward + of_heads * value * element
        return forward, backward + (of_heads * key).T * element + of_kv_heads.T * gradient
