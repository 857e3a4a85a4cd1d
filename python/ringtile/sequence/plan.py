"""The plan: which keys a rank needs of every other, in which round, and what that sends. Integers only.

Round i of the ring: rank r works on the keys of rank (r - i) mod W, or, at once, on those of all ranks in one round.
Only needed keys travel, straight from their owner; in the backward the partial dk, dv travel straight back. Where ranks
share heads (heads.py), the ring is one of groups: each has the tokens of its ranks.

Shape letters: B batch, Bm mask rows (B or 1), S global tokens, N local tokens, H query heads, G kv heads, D head dim,
Dv value head dim, W ranks, R runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile import ops
from ringtile.scheme import Scheme, candidates, shares_of
from ringtile.sequence.heads import HeadGroup, join
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask


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


@dataclass(frozen=True, eq=False)
class Transfer:
    """Keys of one rank that another one works on in a round."""

    rank: int  # the other one
    runs: Tensor  # int64 CPU (R, 4): row of the block, or of the owner's k, 1, row of the message, length
    num_keys: int
    is_head: bool  # whether they are the first rows of the block, or of k, in order


@dataclass(frozen=True, eq=False)
class PlannedRound:
    """The part of one rank in one round. This rank may be among the others, where its keys are part of a block."""

    index: int
    k_runs: Tensor  # int64 CPU (R, 4): positions of the keys; local_begin = row of the block
    num_keys: int
    num_pairs: int  # unmasked (query, key) pairs, summed over the Bm mask rows
    in_place: bool  # the block is the local k itself, of which num_keys rows are needed, and nothing travels
    key_bounds: tuple[Tensor, ...]  # int32 CPU (Bm, rows of the block): IntervalMask.loose_key_bounds
    incoming: tuple[Transfer, ...]  # together the block, whose keys are in the order of their runs' positions
    outgoing: tuple[Transfer, ...]  # of the local k

    @property
    def is_idle(self) -> bool:
        """Return whether this rank has nothing to compute, to send or to receive."""
        return self.num_keys == 0 and not any(each.num_keys for each in self.outgoing)


@dataclass(frozen=True, eq=False)
class RankPlan:
    """All rounds of one rank, empty ones included, in the ring of all ranks, or, where ranks share heads, of those with
    the same shares."""

    mask: IntervalMask
    layout: Layout  # of the ring: where ranks share heads, each has the tokens of all of them
    rank: int  # in the ring
    ranks: tuple[int, ...]  # of the ring, as the group numbers them
    heads: HeadGroup | None  # None: this rank works on all heads of its own queries
    begin: Tensor  # int32 CPU (Bm, N): the mask of this rank's queries
    end: Tensor
    positions: Tensor  # int64 CPU (N): of these queries
    rounds: tuple[PlannedRound, ...]
    on_devices: dict[torch.device, Any] = field(default_factory=dict)  # Round.all_of

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
        positions, rounds = layout.positions(rank), _rounds(mask, layout, rank, at_once)
        bounds = mask.begin[:, positions], mask.end[:, positions]
        return cls(mask, layout, rank, tuple(ranks or range(layout.world_size)), heads, *bounds, positions, rounds)

    @functools.cached_property
    def busy_rounds(self) -> tuple[PlannedRound, ...]:
        """Return the rounds that are not idle, and the first in any case."""
        return tuple(round for round in self.rounds if round.index == 0 or not round.is_idle)


def _rounds(mask: IntervalMask, layout: Layout, rank: int, at_once: bool) -> tuple[PlannedRound, ...]:
    positions = layout.positions(rank)
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
        k_runs = runs[first : first + num_runs]
        of_round = slice(0, 0) if in_place else slice(None) if at_once else slice(i, i + 1)
        of_keys: tuple[Tensor, ...] = ()
        if mask.loose_key_bounds:
            of_block = positions if in_place else ops.run_positions(k_runs)
            of_keys = tuple(x[:, of_block] for x in mask.loose_key_bounds)
        planned.append(
            PlannedRound(
                i, k_runs, num_keys, num_pairs, bool(in_place), of_keys, incoming[of_round], outgoing[of_round]
            )
        )
    return tuple(planned)


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
