"""The plan: which keys every rank needs of every other, in which round, and what that costs. Integers only.

Round i of the ring: rank r works on the keys of rank (r - i) mod W, and its own keys serve rank (r + i) mod W.
Only needed keys travel, straight from their owner; in the backward the partial dk, dv travel straight back.

Shape letters: B batch, Bm mask rows (B or 1), S global tokens, N local tokens, H query heads, G kv heads,
D head dim, Dv value head dim, W ranks, R runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .layout import Layout


@dataclass(frozen=True, eq=False)
class Round:
    """What one rank does in one round. In round 0 both peers are the rank itself and nothing travels."""

    key_rank: int  # (rank - i) mod W: whose keys this rank works on
    k_runs: Tensor  # int64 CPU (R, 4): positions of those keys; local_begin = row of the received k (round 0: of k itself)
    num_keys: int  # rows received: the packed length of k_runs (round 0: keys needed of itself)
    num_pairs: int  # unmasked (query, key) pairs, summed over the Bm mask rows
    query_rank: int  # (rank + i) mod W: whose queries need this rank's keys
    send_runs: Tensor  # int64 CPU (R, 4) for ops.shard_seq_: row of the local k, 1, row of the sent k, length
    num_sent: int  # rows sent


@dataclass(frozen=True, eq=False)
class RankPlan:
    """All rounds of one rank: `rounds[i]` for i = 0..W-1, empty ones included."""

    rank: int
    world_size: int
    seq_len: int
    local_len: int
    begin: Tensor  # int32 CPU (Bm, N): the mask of the local queries
    end: Tensor
    digest: int  # of mask and layout; ranks that disagree have different digests
    rounds: tuple[Round, ...]


class _MaskAndLayout:
    """The content of three tensors as a key of a cache: hashed by digest, compared in full."""

    def __init__(self, begin: Tensor, end: Tensor, layout: Tensor) -> None:
        self.begin, self.end, self.layout = begin, end, layout
        self.digest = ops.digest(begin, end, layout)

    def __hash__(self) -> int:
        return self.digest

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _MaskAndLayout)
            and torch.equal(self.begin, other.begin)
            and torch.equal(self.end, other.end)
            and torch.equal(self.layout, other.layout)
        )


def rounds_of(begin: Tensor, end: Tensor, layout: Tensor, rank: int) -> RankPlan:
    """The rounds of `rank`. A model asks for the same few masks in every layer, so the last ones are remembered.

    begin, end: int32 CPU (Bm, S), the global mask; layout: int64 CPU (R, 5), `Layout.tensor`.
    Raises LayoutError when the runs are not a partition of 0..S-1.
    """
    return _rounds_of(_MaskAndLayout(begin, end, layout), rank)


@functools.lru_cache(maxsize=64)
def _rounds_of(key: _MaskAndLayout, rank: int) -> RankPlan:
    layout = Layout.from_tensor(key.layout)
    world_size = layout.world_size
    needed, pairs = ops.plan(key.begin, key.end, key.layout)

    def runs_between(query_rank: int, key_rank: int) -> Tensor:
        return needed[(needed[:, 0] == query_rank) & (needed[:, 1] == key_rank), 2:]

    rounds = []
    for i in range(world_size):
        key_rank, query_rank = (rank - i) % world_size, (rank + i) % world_size
        k_runs, sent = runs_between(rank, key_rank), runs_between(query_rank, rank)
        send_runs = torch.stack((sent[:, 2], torch.ones_like(sent[:, 2]), _packed(sent), sent[:, 3]), dim=1)
        if i > 0:
            k_runs = torch.stack((k_runs[:, 0], k_runs[:, 1], _packed(k_runs), k_runs[:, 3]), dim=1)
        rounds.append(
            Round(
                key_rank=key_rank,
                k_runs=k_runs.contiguous(),
                num_keys=int(k_runs[:, 3].sum()),
                num_pairs=int(pairs[rank, key_rank]),
                query_rank=query_rank,
                send_runs=send_runs,
                num_sent=int(sent[:, 3].sum()),
            )
        )
    positions = layout.positions(rank)
    return RankPlan(
        rank=rank,
        world_size=world_size,
        seq_len=layout.seq_len,
        local_len=layout.local_len(rank),
        begin=key.begin[:, positions],
        end=key.end[:, positions],
        digest=key.digest,
        rounds=tuple(rounds),
    )


def _packed(runs: Tensor) -> Tensor:
    """(R,) first row of each run in a buffer that holds the runs one after another."""
    lengths = runs[:, 3]
    return lengths.cumsum(0) - lengths
