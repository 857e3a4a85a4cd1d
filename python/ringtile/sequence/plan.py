"""The plan: which keys every rank needs of every other, in which round, and what that costs. Integers only.

The ranks of a scheme's groups share heads: each works on the queries of its whole group. Round i: a rank of group a
works on the keys of group (a - i) mod n, or, at once, on those of all ranks in one round. Only needed keys travel,
straight from their owner; in the backward the partial dk, dv travel straight back. The ring has groups of one rank.

Shape letters: B batch, Bm mask rows (B or 1), S global tokens, N local tokens, Nq tokens of all ranks of a group,
H query heads, G kv heads, D head dim, Dv value head dim, W ranks, R runs.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile import arguments, ops
from ringtile.errors import InputError
from ringtile.scheme import Scheme, Share, share
from ringtile.sequence.layout import Layout, Run, check_types
from ringtile.sequence.mask import IntervalMask


@dataclass(frozen=True)
class Incoming:
    """The keys of one rank in a round's block."""

    rank: int
    begin: int  # their first row of the block
    num_keys: int


@dataclass(frozen=True, eq=False)
class Outgoing:
    """The keys of this rank that a rank works on in a round."""

    rank: int
    runs: Tensor  # int64 CPU (R, 4) for ops.shard_seq_: row of the local k, 1, row of the message, length
    num_keys: int
    is_head: bool  # whether they are the first rows of the local k, in order


@dataclass(frozen=True, eq=False)
class Round:
    """What one rank does in one round. This rank may be among the others, where its keys are part of a block."""

    k_runs: Tensor  # int64 CPU (R, 4): positions of the keys; local_begin = row of the block
    num_keys: int
    num_pairs: int  # unmasked (query, key) pairs, summed over the Bm mask rows
    in_place: bool  # the block is the local k itself, of which num_keys rows are needed, and nothing travels
    incoming: tuple[Incoming, ...]  # one after another, these are the block
    outgoing: tuple[Outgoing, ...]

    @property
    def is_idle(self) -> bool:
        """Whether this rank has nothing to compute, to send or to receive."""
        return self.num_keys == 0 and not any(each.num_keys for each in self.outgoing)


@dataclass(frozen=True, eq=False)
class RankPlan:
    """All rounds of one rank, empty ones included. Each stage of the scheme runs all of them."""

    rank: int
    world_size: int
    seq_len: int
    local_len: int
    begin: Tensor  # int32 CPU (Bm, Nq): the mask of the queries that this rank works on
    end: Tensor
    rounds: tuple[Round, ...]
    scheme: Scheme
    group: range  # the ranks whose queries those are, rank by rank
    query_lens: tuple[int, ...]  # how many each of them has

    @property
    def is_whole(self) -> bool:
        """Whether this rank works on all heads of its own queries, at once: then no query travels."""
        return len(self.group) == self.scheme.num_stages == 1

    @functools.cached_property
    def busy_rounds(self) -> tuple[int, ...]:
        """All but idle ones, and the first in any case."""
        return tuple(i for i, round in enumerate(self.rounds) if i == 0 or not round.is_idle)

    def shares(self, num_heads: int, num_kv_heads: int) -> tuple[tuple[Share, ...], ...]:
        """By stage, then by a rank's place in its group: the heads that it works on."""
        return shares_of(self.scheme.num_stages, len(self.group), num_heads, num_kv_heads)


def rank_plan(mask: IntervalMask, layout: Layout, rank: int, scheme: Scheme | None = None) -> RankPlan:
    """The rounds of `rank`. mask and layout are of one length; no scheme is the ring."""
    scheme = scheme or Scheme.parse("ring")
    groups = scheme.groups(layout.world_size)
    joined = joined_layout(layout, groups)
    mine = rank // len(groups[0])
    needed, pairs = ops.plan(mask.begin, mask.end, joined.tensor, mine)

    def keys(query_group: int, key_rank: int) -> Tensor:
        """int64 (R, 4): the runs of key_rank's tokens that a group attends."""
        of_group = needed[(needed[:, 0] == query_group) & (needed[:, 1] == key_rank // len(groups[0])), 2:]
        return _of_rank(of_group, layout, groups, key_rank)

    rounds = []
    for i, key_groups in enumerate(_key_groups(scheme, len(groups), mine)):
        key_ranks = [key_rank for group in key_groups for key_rank in groups[group]]
        runs = [keys(mine, key_rank) for key_rank in key_ranks]
        lens = [int(each[:, 3].sum()) for each in runs]
        k_runs = torch.cat(runs)
        query_groups = range(len(groups)) if scheme.at_once else [(mine + i) % len(groups)]
        outgoing = tuple(
            _outgoing(query_rank, keys(group, rank)) for group in query_groups for query_rank in groups[group]
        )
        needs_own_alone = not any(length for key_rank, length in zip(key_ranks, lens, strict=True) if key_rank != rank)
        is_needed = any(each.num_keys for each in outgoing if each.rank != rank)
        in_place = len(groups[0]) == 1 and rank in key_ranks and needs_own_alone and not is_needed
        rounds.append(
            Round(
                k_runs=k_runs.contiguous() if in_place else _packed(k_runs),
                num_keys=sum(lens),
                num_pairs=int(pairs[mine, key_groups].sum()),
                in_place=in_place,
                incoming=()
                if in_place
                else tuple(map(Incoming, key_ranks, itertools.accumulate(lens, initial=0), lens)),
                outgoing=() if in_place else outgoing,
            )
        )
    positions = joined.positions(mine)
    return RankPlan(
        rank=rank,
        world_size=layout.world_size,
        seq_len=layout.seq_len,
        local_len=layout.local_len(rank),
        begin=mask.begin[:, positions],
        end=mask.end[:, positions],
        rounds=tuple(rounds),
        scheme=scheme,
        group=groups[mine],
        query_lens=tuple(map(layout.local_len, groups[mine])),
    )


def _key_groups(scheme: Scheme, num_groups: int, group: int) -> list[list[int]]:
    """Whose keys a group works on, round by round."""
    return [[*range(num_groups)]] if scheme.at_once else [[(group - i) % num_groups] for i in range(num_groups)]


@functools.cache
def shares_of(num_stages: int, group_size: int, num_heads: int, num_kv_heads: int) -> tuple[tuple[Share, ...], ...]:
    num_parts = num_stages * group_size
    parts = [share(num_heads, num_kv_heads, num_parts, part) for part in range(num_parts)]
    return tuple(tuple(parts[at : at + group_size]) for at in range(0, num_parts, group_size))


def joined_layout(layout: Layout, groups: Sequence[range]) -> Layout:
    """The layout of the groups: each holds the tokens of its ranks, rank by rank."""
    if len(groups) == layout.world_size:
        return layout
    runs = []
    for group in groups:
        begins = row_begins(layout, group)
        runs.append(
            [run._replace(local_begin=run.local_begin + begins[rank]) for rank in group for run in layout.runs(rank)]
        )
    return Layout(layout.seq_len, tuple(map(tuple, runs)))


def row_begins(layout: Layout, group: range) -> dict[int, int]:
    """The first row of each rank of a group among the rows of all."""
    return dict(zip(group, itertools.accumulate(map(layout.local_len, group), initial=0), strict=False))


def _of_rank(runs: Tensor, layout: Layout, groups: Sequence[range], rank: int) -> Tensor:
    """The part of a group's runs, int64 (R, 4), that lies in the rows of one of its ranks, counted from its first."""
    group = groups[rank // len(groups[0])]
    if len(group) == 1:
        return runs
    begin, length = row_begins(layout, group)[rank], layout.local_len(rank)
    cut = (_cut(Run(*run), begin, length) for run in runs.tolist())
    return ops.runs_tensor([run for run in cut if run.length > 0])


def _outgoing(rank: int, runs: Tensor) -> Outgoing:
    packed = _packed(runs)
    send_runs = torch.stack((runs[:, 2], torch.ones_like(runs[:, 2]), packed[:, 2], runs[:, 3]), dim=1)
    return Outgoing(rank, send_runs, int(runs[:, 3].sum()), is_head=torch.equal(runs[:, 2], packed[:, 2]))


def _packed(runs: Tensor) -> Tensor:
    """The same runs in the rows of a buffer that holds them one after another."""
    begins = runs[:, 3].cumsum(0) - runs[:, 3]
    return torch.stack((runs[:, 0], runs[:, 1], begins, runs[:, 3]), dim=1)


# ---- what it costs ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundCost:
    """What one rank computes with the keys of one rank."""

    key_rank: int
    runs: tuple[Run, ...]  # the keys needed: global positions, and rows of key_rank's local tokens
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
    scheme: str = "ring"

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
    """What one attention layer moves and computes, exactly, before anything runs.

    num_heads H, num_kv_heads G, head_dim D, v_head_dim Dv (D if None); dtype of q, k, v; batch B (the rows of the
    mask if None); scheme as in ShardedSequence. n needed keys of another rank cost B n g (D + Dv) elements of dtype in
    the forward, for the g kv heads that the rank works on; in the backward the same again, and as many elements of dk,
    dv in the state dtype the other way. Where ranks share heads, each query of another rank costs, for each head,
    D elements there and Dv elements and a float64 back; in the backward D + Dv elements, a float64 and a number of the
    state dtype there, and D elements back.
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

    parsed = Scheme.parse(scheme)
    costs = _Costs(mask, layout, parsed, num_heads, num_kv_heads)
    world_size = layout.world_size
    unit = UnitBytes.of(batch, head_dim, v_head_dim, dtype)
    ranks = []
    for rank in range(world_size):
        others = [other for other in range(world_size) if other != rank]
        # kv heads times keys of rank, and query heads times its queries, that others work on; and the other way.
        keys_out, keys_in = (
            sum(costs.num_keys(*pair) * costs.num_kv_heads(pair[0]) for pair in pairs)
            for pairs in ([(other, rank) for other in others], [(rank, other) for other in others])
        )
        group = [other for other in costs.group(rank) if other != rank]
        queries_out = layout.local_len(rank) * sum(map(costs.num_heads, group))
        queries_in = sum(map(layout.local_len, group)) * costs.num_heads(rank)
        rounds = costs.rounds(rank, batch // rows)
        num_pairs = sum(cost.num_pairs for cost in rounds) * costs.num_heads(rank)
        ranks.append(
            RankCost(
                rank=rank,
                local_len=layout.local_len(rank),
                num_heads=costs.num_heads(rank),
                rounds=rounds,
                forward_bytes_sent=keys_out * unit.key + queries_out * unit.query + queries_in * unit.result,
                forward_bytes_received=keys_in * unit.key + queries_in * unit.query + queries_out * unit.result,
                backward_bytes_sent=keys_out * unit.key
                + keys_in * unit.gradient
                + queries_out * unit.query_again
                + queries_in * unit.result_again,
                backward_bytes_received=keys_in * unit.key
                + keys_out * unit.gradient
                + queries_in * unit.query_again
                + queries_out * unit.result_again,
                forward_flops=2 * num_pairs * (head_dim + v_head_dim),
                backward_flops=2 * num_pairs * (3 * head_dim + 2 * v_head_dim),
            )
        )
    return Plan(layout.seq_len, tuple(ranks), parsed.text)


class UnitBytes(NamedTuple):
    """What a token of one head takes in a message, over the batch."""

    key: int  # and its value
    gradient: int  # of both
    query: int  # forward
    result: int
    query_again: int  # backward: with lse, delta and dout
    result_again: int

    @classmethod
    def of(cls, batch: int, head_dim: int, v_head_dim: int, dtype: torch.dtype) -> UnitBytes:
        key, value = batch * head_dim, batch * v_head_dim  # elements of a head
        element, state = dtype.itemsize, ops.state_dtype(dtype).itemsize
        return cls(
            key=(key + value) * element,
            gradient=(key + value) * state,
            query=key * element,
            result=value * element + 8 * batch,
            query_again=(key + value) * element + (8 + state) * batch,
            result_again=key * element,
        )


class _Costs:
    """Counts from which the costs of all ranks follow."""

    def __init__(self, mask: IntervalMask, layout: Layout, scheme: Scheme, num_heads: int, num_kv_heads: int) -> None:
        self._groups = groups = scheme.groups(layout.world_size)
        self._size = len(groups[0])
        self._scheme = scheme
        joined = joined_layout(layout, groups)
        needed, self._pairs = ops.plan(mask.begin, mask.end, joined.tensor)
        if joined is not layout:
            self._pairs = ops.plan(mask.begin, mask.end, layout.tensor)[1]
        self._runs: defaultdict[tuple[int, int], list[Run]] = defaultdict(list)  # by query group and key rank
        begins = {rank: begin for group in groups for rank, begin in row_begins(layout, group).items()}
        for query_group, key_group, *of_group in needed.tolist():
            run = Run(*of_group)
            for rank in groups[key_group]:
                if (cut := _cut(run, begins[rank], layout.local_len(rank))).length > 0:
                    self._runs[query_group, rank].append(cut)
        self._shares = shares_of(scheme.num_stages, self._size, num_heads, num_kv_heads)

    def group(self, rank: int) -> range:
        return self._groups[rank // self._size]

    def num_heads(self, rank: int) -> int:
        return sum(len(of_stage[rank % self._size].heads) for of_stage in self._shares)

    def num_kv_heads(self, rank: int) -> int:
        """Each as often as it travels: in every stage that works on it."""
        return sum(len(of_stage[rank % self._size].kv_heads) for of_stage in self._shares)

    def num_keys(self, query_rank: int, key_rank: int) -> int:
        return sum(run.length for run in self._runs[query_rank // self._size, key_rank])

    def rounds(self, rank: int, rows: int) -> tuple[RoundCost, ...]:
        """Of one rank, for a batch of that many rows for each of the mask's."""
        key_groups = _key_groups(self._scheme, len(self._groups), rank // self._size)
        return tuple(
            RoundCost(
                key_rank,
                tuple(self._runs[rank // self._size, key_rank]),
                self.num_keys(rank, key_rank),
                int(self._pairs[[*self.group(rank)], key_rank].sum()) * rows,
            )
            for group in itertools.chain(*key_groups)
            for key_rank in self._groups[group]
        )


def _cut(run: Run, begin: int, length: int) -> Run:
    """The part of a run that lies in these rows, counted from the first of them; its length may be negative."""
    low, high = max(run.local_begin, begin), min(run.local_begin + run.length, begin + length)
    return Run(run.global_begin + (low - run.local_begin) * run.stride, run.stride, low - begin, high - low)
