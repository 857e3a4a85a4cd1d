"""`ringtile.plan_attention`: what one attention layer over a sharded sequence costs, rank by rank, before it runs.

Shape letters: B batch, Bm mask rows (B or 1), N local tokens, H query heads, G kv heads, D head dim, Dv value head dim,
W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from ringtile import arguments, ops
from ringtile.errors import InputError
from ringtile.scheme import Scheme
from ringtile.sequence.layout import Layout, check_types
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import Counts, Shape

Row = TypeVar("Row")
_MAX_HEADS = 2**16


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
    """Bytes and flops of one attention layer; `str(plan)` is a table.

    - seq_len: tokens. scheme: as text. shape: of the layer. ranks: a RankCost each.
    - forward_bytes, backward_bytes: bytes that all ranks send. forward_flops, backward_flops: of all ranks.
    - imbalance: pairs of the busiest rank over the mean.
    """

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
        return "\n".join([*lines[:1], *shortened(lines[1:]), total])


def plan_attention(
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
    latent_dim: int = 0,
) -> Plan:
    """Return what one attention layer moves and computes, exactly, before anything runs.

    print(plan_attention(IntervalMask.causal(S), Layout.zigzag(S, 8), num_heads=32, num_kv_heads=8, head_dim=128,
                         dtype=torch.bfloat16))

    num_heads H, num_kv_heads G, head_dim D, v_head_dim Dv (D if None); dtype of q, k, v; batch B (the rows of the mask
    if None); scheme as in ShardedSequence; latent_dim: numbers of a latent of `ring_attention` with expand, sent in
    place of g (D + Dv) if they are fewer. Elements that a rank sends, of dtype, sums in the state dtype:

        ring       for n keys and g kv heads that another rank needs: forward n g (D + Dv); backward the same, and as
                   many of dk, dv back
        ulysses    for each token and query head that another rank works on: forward D (q) there, Dv (out) back;
                   backward Dv (dout) there, D (dq) back; with return_lse a float64 more each way. For each kv head:
                   forward D + Dv (k, v) there, backward D + Dv (dk, dv) back

    Raises InputError when mask, layout and numbers do not fit each other.
    """
    check_types(mask, layout)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    for name, number in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        arguments.check_int(name, number)
    arguments.check_int("v_head_dim", v_head_dim)
    if not 0 <= arguments.check_int("latent_dim", latent_dim) < num_kv_heads * (head_dim + v_head_dim):
        latent_dim = 0
    rows = mask.begin.size(0)
    batch = rows if batch is None else arguments.check_int("batch", batch)
    if mask.seq_len != layout.seq_len:
        raise InputError(f"the mask is of {mask.seq_len} tokens, the layout of {layout.seq_len}; expected one length")
    sizes = (num_heads, num_kv_heads, head_dim, v_head_dim, batch)
    fits = max(num_heads, num_kv_heads) <= _MAX_HEADS and max(head_dim, v_head_dim) <= ops.MAX_HEAD_DIM
    # Every count is below: pairs of all heads, and 4 bytes or numbers of each of q, k, v, out for every other rank.
    counts = batch * num_heads * mask.seq_len * max(mask.seq_len, 64 * (head_dim + v_head_dim) * layout.world_size)
    if min(sizes) < 1 or not fits or num_heads % num_kv_heads or counts >= 2**62:
        raise InputError(
            f"num_heads {num_heads}, num_kv_heads {num_kv_heads}, head_dim {head_dim}, v_head_dim {v_head_dim}, batch "
            f"{batch}; expected num_heads a multiple of num_kv_heads and at most {_MAX_HEADS}, head dims of 1.."
            f"{ops.MAX_HEAD_DIM}, and bytes and pairs of query and key that 62 bits can count"
        )
    if rows not in (1, batch):
        raise InputError(f"the mask has {rows} rows but batch is {batch}; expected {batch} or 1")
    if dtype not in ops.FLOAT_DTYPES:
        raise InputError(f"dtype is {dtype}; expected one of {', '.join(map(str, ops.FLOAT_DTYPES))}")

    shape = Shape(batch, num_heads, num_kv_heads, head_dim, v_head_dim, dtype, latent_dim)
    return plan_of(mask, layout, shape, scheme)


def plan_of(mask: IntervalMask, layout: Layout, shape: Shape, scheme: str) -> Plan:
    """`plan` of arguments that fit each other."""
    counts = Counts(mask, layout, shape, Scheme.parse(scheme))
    forward, backward = counts.sent_bytes()
    pairs, flops = pairs_of(counts), flops_of_pair(shape)
    ranks = tuple(
        RankCost(
            rank=rank,
            local_len=layout.local_len(rank),
            num_heads=int(counts.heads[rank]),
            rounds=_rounds(counts, rank),
            forward_bytes_sent=int(forward[rank].sum()),
            forward_bytes_received=int(forward[:, rank].sum()),
            backward_bytes_sent=int(backward[rank].sum()),
            backward_bytes_received=int(backward[:, rank].sum()),
            forward_flops=int(pairs[rank]) * flops[0],
            backward_flops=int(pairs[rank]) * flops[1],
        )
        for rank in range(layout.world_size)
    )
    return Plan(layout.seq_len, ranks, scheme, shape, (forward, backward))


def shortened(rows: Sequence[Row]) -> list[Row]:
    """Return the first and the last rows of many."""
    return [*rows] if len(rows) <= 64 else [*rows[:8], *rows[-8:]]


def pairs_of(counts: Counts) -> Tensor:
    """Return (W,): the pairs that each rank computes, those of all its heads."""
    pairs: Tensor = counts.pairs.sum(1).repeat_interleave(counts.size) * counts.heads
    return pairs


def flops_of_pair(shape: Shape) -> tuple[int, int]:
    """Return those of a query and a key of one head, forward and backward; a multiply-add is 2."""
    return 2 * (shape.head_dim + shape.v_head_dim), 2 * (3 * shape.head_dim + 2 * shape.v_head_dim)


def _rounds(counts: Counts, rank: int) -> tuple[RoundCost, ...]:
    num_groups, (group, place) = len(counts.keys), divmod(rank, counts.size)
    keys, pairs = counts.keys[group].tolist(), counts.pairs[group].tolist()
    key_groups = [(group - i) % num_groups for i in range(num_groups)]
    if counts.scheme.at_once:
        key_groups.sort()
    return tuple(RoundCost(other * counts.size + place, keys[other], pairs[other]) for other in key_groups)
