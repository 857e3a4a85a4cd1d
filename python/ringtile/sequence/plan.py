"""The plan: which keys every rank needs of every other, in which round, and what that costs. Integers only.

Round i of the ring: rank r works on the keys of rank (r - i) mod W, and its own keys serve rank (r + i) mod W.
Only needed keys travel, straight from their owner; in the backward the partial dk, dv travel straight back.

Shape letters: B batch, Bm mask rows (B or 1), S global tokens, N local tokens, H query heads, G kv heads,
D head dim, Dv value head dim, W ranks, R runs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile import arguments, ops
from ringtile.errors import InputError
from ringtile.sequence.layout import Layout, Run, check_types
from ringtile.sequence.mask import IntervalMask


@dataclass(frozen=True, eq=False)
class Round:
    """What one rank does in one round. In round 0 both peers are the rank itself and nothing travels."""

    key_rank: int  # (rank - i) mod W: whose keys this rank works on
    k_runs: (
        Tensor  # int64 CPU (R, 4): positions of those keys; local_begin = row of the received k (round 0: of k itself)
    )
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
    rounds: tuple[Round, ...]


def rank_plan(mask: IntervalMask, layout: Layout, rank: int) -> RankPlan:
    """The rounds of `rank`. mask and layout are of one length."""
    needed, pairs = ops.plan(mask.begin, mask.end, layout.tensor, rank)
    rounds = []
    for i in range(layout.world_size):
        key_rank, query_rank = (rank - i) % layout.world_size, (rank + i) % layout.world_size
        k_runs, sent = _runs_between(needed, rank, key_rank), _runs_between(needed, query_rank, rank)
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
        world_size=layout.world_size,
        seq_len=layout.seq_len,
        local_len=layout.local_len(rank),
        begin=mask.begin[:, positions],
        end=mask.end[:, positions],
        rounds=tuple(rounds),
    )


def _runs_between(needed: Tensor, query_rank: int, key_rank: int) -> Tensor:
    """int64 (R, 4): the runs of key_rank's tokens that query_rank attends, from what `ops.plan` returned."""
    return needed[(needed[:, 0] == query_rank) & (needed[:, 1] == key_rank), 2:]


def _packed(runs: Tensor) -> Tensor:
    """(R,) first row of each run in a buffer that holds the runs one after another."""
    lengths = runs[:, 3]
    return lengths.cumsum(0) - lengths


# ---- what it costs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundCost:
    """One round of one rank."""

    key_rank: int
    runs: tuple[Run, ...]  # the keys needed: global positions, and rows of key_rank's local tokens
    num_keys: int
    num_pairs: int  # unmasked (query, key) pairs, summed over the batch


@dataclass(frozen=True)
class RankCost:
    """What one rank does for one attention layer. Bytes are payload: keys, values and their gradients."""

    rank: int
    local_len: int
    rounds: tuple[RoundCost, ...]
    forward_bytes_sent: int
    forward_bytes_received: int
    backward_bytes_sent: int
    backward_bytes_received: int
    forward_flops: int  # 2 pairs H (D + Dv): Q K^T, P V
    backward_flops: int  # 2 pairs H (3 D + 2 Dv): Q K^T again, dO V^T, P^T dO, dS^T Q, dS K


@dataclass(frozen=True)
class Plan:
    """What one attention layer costs, rank by rank. `str(plan)` is a table."""

    seq_len: int
    ranks: tuple[RankCost, ...]

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
            "rounds",
            "keys",
            "fwd MB out",
            "fwd MB in",
            "bwd MB out",
            "bwd MB in",
            "GFLOP fwd+bwd",
        )
        rows: list[tuple[str, ...]] = [header]
        for cost in self.ranks:
            received = [round.num_keys for round in cost.rounds[1:] if round.num_keys]
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
            f"{self.seq_len} tokens over {len(self.ranks)} ranks: {self.forward_bytes / 1e6:.3f} MB forward, "
            f"{self.backward_bytes / 1e6:.3f} MB backward, {flops / 1e9:.3f} GFLOP, busiest rank "
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
) -> Plan:
    """What one attention layer moves and computes, exactly, before anything runs.

    num_heads H, num_kv_heads G, head_dim D, v_head_dim Dv (D if None); dtype of q, k, v; batch B (the rows of the
    mask if None). n needed keys of another rank cost B n G (D + Dv) elements of dtype in the forward; in the backward
    the same again, and as many elements of dk, dv in the state dtype the other way.
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
    if min(num_heads, num_kv_heads, head_dim, v_head_dim, batch) < 1 or num_heads % num_kv_heads:
        raise InputError(
            f"num_heads {num_heads}, num_kv_heads {num_kv_heads}, head_dim {head_dim}, v_head_dim {v_head_dim}, batch "
            f"{batch}; expected at least 1 each and num_heads a multiple of num_kv_heads"
        )
    if rows not in (1, batch):
        raise InputError(f"the mask has {rows} rows but batch is {batch}; expected {batch} or 1")
    if dtype not in ops.FLOAT_DTYPES:
        raise InputError(f"dtype is {dtype}; expected one of {', '.join(map(str, ops.FLOAT_DTYPES))}")

    needed, pairs = ops.plan(mask.begin, mask.end, layout.tensor)
    world_size = layout.world_size

    runs_between: dict[tuple[int, int], list[Run]] = defaultdict(list)
    for query_rank, key_rank, *run in needed.tolist():
        runs_between[query_rank, key_rank].append(Run(*run))

    def round_cost(query_rank: int, key_rank: int) -> RoundCost:
        runs = tuple(runs_between[query_rank, key_rank])
        num_pairs = int(pairs[query_rank, key_rank]) * (batch // rows)
        return RoundCost(key_rank, runs, sum(run.length for run in runs), num_pairs)

    rounds = [tuple(round_cost(rank, (rank - i) % world_size) for i in range(world_size)) for rank in range(world_size)]
    elements = batch * num_kv_heads * (head_dim + v_head_dim)  # of one key and its value
    key_bytes, grad_bytes = elements * dtype.itemsize, elements * ops.state_dtype(dtype).itemsize
    ranks = []
    for rank in range(world_size):
        received = sum(rounds[rank][i].num_keys for i in range(1, world_size))
        sent = sum(rounds[(rank + i) % world_size][i].num_keys for i in range(1, world_size))
        num_pairs = sum(cost.num_pairs for cost in rounds[rank])
        ranks.append(
            RankCost(
                rank=rank,
                local_len=layout.local_len(rank),
                rounds=rounds[rank],
                forward_bytes_sent=sent * key_bytes,
                forward_bytes_received=received * key_bytes,
                backward_bytes_sent=sent * key_bytes + received * grad_bytes,
                backward_bytes_received=received * key_bytes + sent * grad_bytes,
                forward_flops=2 * num_pairs * num_heads * (head_dim + v_head_dim),
                backward_flops=2 * num_pairs * num_heads * (3 * head_dim + 2 * v_head_dim),
            )
        )
    return Plan(layout.seq_len, tuple(ranks))
