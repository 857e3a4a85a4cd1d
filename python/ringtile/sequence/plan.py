"""The plan: which keys a rank needs of every other, and in which round. Integers only; cost.py has what that costs.

Round i of the ring: rank r works on the keys of rank (r - i) mod W, or, at once, on those of all ranks in one round.
Only needed keys travel, straight from their owner; in the backward the partial dk, dv travel straight back. Where ranks
share heads (heads.py), the ring is one of groups: each has the tokens of its ranks.

Shape letters: B batch, Bm mask rows (B or 1), S global tokens, N local tokens, H query heads, G kv heads, D head dim,
Dv value head dim, W ranks, R runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile import ops
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

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """Where they are: rows in a row, by the first one in the block, or in k, that in the message, and length."""
        if self.is_head:
            return ((0, 0, self.num_keys),)
        return tuple((row, packed, length) for row, _, packed, length in self.runs.tolist())

    @classmethod
    def of(cls, rank: int, rows: Tensor, packed: Tensor) -> Transfer:
        """Make it from the runs (R, 4) of the keys in the rows of the block, or of k, and in those of the message."""
        runs = torch.stack((rows[:, 2], torch.ones_like(rows[:, 2]), packed[:, 2], packed[:, 3]), dim=1)
        return cls(rank, runs, int(packed[:, 3].sum()), torch.equal(rows[:, 2], packed[:, 2]))


@dataclass(frozen=True, eq=False)
class PlannedRound:
    """What one rank does in one round. This rank may be among the others, where its keys are part of a block."""

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
        """Whether this rank has nothing to compute, to send or to receive."""
        return self.num_keys == 0 and not any(each.num_keys for each in self.outgoing)


@dataclass(frozen=True, eq=False)
class RankPlan:
    """All rounds of one rank, empty ones included."""

    rank: int
    begin: Tensor  # int32 CPU (Bm, N): the mask of this rank's queries
    end: Tensor
    positions: Tensor  # int64 CPU (N): of these queries
    rounds: tuple[PlannedRound, ...]

    @functools.cached_property
    def busy_rounds(self) -> tuple[PlannedRound, ...]:
        """All but idle ones, and the first in any case."""
        return tuple(round for round in self.rounds if round.index == 0 or not round.is_idle)


def rank_plan(mask: IntervalMask, layout: Layout, rank: int, *, at_once: bool = False) -> RankPlan:
    """Return the rounds of `rank`. mask and layout are of one length; at_once: there is one round."""
    world_size = layout.world_size
    needed, pairs = ops.plan(*mask.bounds, layout.tensor, rank)
    positions = layout.positions(rank)

    def keys(query_rank: int, key_rank: int) -> Tensor:
        """Return the runs, int64 (R, 4), of key_rank's tokens that query_rank attends."""
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
            PlannedRound(
                index=i,
                k_runs=torch.cat(runs).contiguous() if in_place else block,
                num_keys=sum(each.num_keys for each in incoming),
                num_pairs=int(pairs[rank, key_ranks].sum()),
                in_place=in_place,
                key_bounds=tuple(x[:, positions if in_place else _positions(block)] for x in mask.loose_key_bounds),
                incoming=() if in_place else incoming,
                outgoing=() if in_place else outgoing,
            )
        )
    return RankPlan(rank, mask.begin[:, positions], mask.end[:, positions], positions, tuple(rounds))


def _positions(block: Tensor) -> Tensor:
    """Return int64: the position of the key in each row of a block, whose runs are given in any order."""
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
