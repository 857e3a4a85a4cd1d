"""What travels between ranks in a call of attention: which rows and heads go to whom, and how they come together.

All messages of a call go between the rank that owns tokens and a rank that works on them: queries to the worker and
their results back, keys and values to the worker and their gradients back. Each is one flat buffer, its tensors one
after another, so that nothing is copied where a worker's block of keys is one message.

Shape letters: B batch, N local tokens, Nq tokens of all ranks of a group, H query heads, G kv heads, D head dim,
Dv value head dim, n tokens of one message.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile import ops
from ringtile.scheme import Piece, Share
from ringtile.sequence.plan import RankPlan, Round
from ringtile.transport.messages import Kind, Message, all_to_all
from ringtile.transport.transport import Exchange, Transport


class Arriving(NamedTuple):
    """Tensors of several ranks on their way, which are put together rank by rank."""

    exchange: Exchange | None  # None: nothing travels
    parts: Sequence[tuple[Tensor, ...]]  # by rank
    dims: tuple[int, ...]  # along which each tensor is put together

    def wait(self) -> tuple[Tensor, ...]:
        if self.exchange is not None:
            self.exchange.wait()
        if len(self.parts) == 1:
            return self.parts[0]
        return tuple(torch.cat(x, dim) for x, dim in zip(zip(*self.parts, strict=True), self.dims, strict=True))


class Block(NamedTuple):
    """A round of a stage: a kernel call for each piece of the share."""

    stage: int
    i: int
    is_last: bool  # of its stage
    round: Round
    share: Share
    queries: tuple[Tensor, ...]  # as given to `Work.blocks`: for all tokens of the group, the heads of the share
    k: Tensor  # (B, n, kv heads of the share, D)
    v: Tensor

    def keys_of(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """k and v for one kernel call."""
        return of_heads(self.k, piece.kv_heads), of_heads(self.v, piece.kv_heads)


@dataclass(frozen=True)
class Work:
    """One rank's part of a pass: its tensors, its plan, and the way to its peers."""

    k: Tensor  # (B, N, G, D)
    v: Tensor  # (B, N, G, Dv)
    plan: RankPlan
    shares: tuple[tuple[Share, ...], ...]  # by stage, then by place in a group
    transport: Transport

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, plan: RankPlan, transport: Transport) -> Work:
        return cls(k, v, plan, plan.shares(q.size(2), k.size(2)), transport)

    def share(self, stage: int, rank: int) -> Share:
        of_stage = self.shares[stage]
        return of_stage[rank % len(of_stage)]

    def blocks(self, *queries: Tensor) -> Iterator[Block]:
        """The busy rounds of all stages; the messages of the next one travel until it is asked for.

        They start before the gradients of this round only where no idle round lies between, because its peers, which
        may not be idle there, start theirs later: two ranks post their messages to each other in one order.

        queries: what workers need of queries, in (B, N, H, ...) or (B, H, N).
        """
        rounds, busy = self.plan.rounds, self.plan.busy_rounds
        order = [(stage, i) for stage in range(len(self.shares)) for i in busy]
        arriving = self._fetch(0, 0, queries)
        of_stage: tuple[Tensor, ...] = ()
        for at, (stage, i) in enumerate(order):
            k, v = arriving[-1].wait()
            if i == 0:
                of_stage = arriving[0].wait()
            has_next = at + 1 < len(order)
            adjacent = has_next and order[at + 1] in ((stage, i + 1), (stage + 1, 0))
            if adjacent:
                arriving = self._fetch(*order[at + 1], queries)
            share = self.share(stage, self.plan.rank)
            yield Block(stage, i, i == busy[-1], rounds[i], share, of_stage, k, v)
            if has_next and not adjacent:
                arriving = self._fetch(*order[at + 1], queries)

    def _fetch(self, stage: int, i: int, queries: tuple[Tensor, ...]) -> list[Arriving]:
        keys = self._fetch_keys(stage, i)
        return [self._fetch_queries(stage, queries), keys] if i == 0 else [keys]

    def _place(self, stage: int) -> str:
        return f" of stage {stage}" if len(self.shares) > 1 else ""

    # ---- keys and values, and their gradients ---------------------------------------------------

    def _fetch_keys(self, stage: int, i: int) -> Arriving:
        """Starts the exchange of keys and values for a round."""
        round, me = self.plan.rounds[i], self.plan.rank
        own = self.share(stage, me).kv_heads
        if round.in_place:
            return Arriving(None, ((of_heads(self.k, own), of_heads(self.v, own)),), (1, 1))
        sends, receives, parts = {}, {}, []
        for outgoing in round.outgoing:
            heads = self.share(stage, outgoing.rank).kv_heads
            local = of_heads(self.k, heads), of_heads(self.v, heads)
            if outgoing.rank == me and outgoing.is_head:
                mine = tuple(x.narrow(1, 0, outgoing.num_keys) for x in local)
                continue
            message = self.keys(outgoing.num_keys, heads, self.k.dtype)
            for x, part in zip(local, message.parts, strict=True):
                ops.shard_seq_(x, outgoing.runs, 1, part)
            if outgoing.rank == me:
                mine = message.parts
            else:
                sends[outgoing.rank] = message.flat
        for incoming in round.incoming:
            if incoming.rank == me:
                parts.append(mine)
            else:
                message = self.keys(incoming.num_keys, own, self.k.dtype)
                receives[incoming.rank] = message.flat
                parts.append(message.parts)
        exchange = self.transport.exchange(sends, receives, f"round {i}{self._place(stage)}")
        return Arriving(exchange, parts, (1, 1))

    def give_back(self, block: Block, partial: Message) -> ReturningKeys:
        """Starts the way home of a block's gradients, and of those for the keys of this rank that others work on."""
        round, me, dtype = block.round, self.plan.rank, partial.flat.dtype
        sends, receives, returned = {}, {}, []
        for incoming in round.incoming:
            message = partial
            if len(round.incoming) > 1:
                message = self.keys(incoming.num_keys, block.share.kv_heads, dtype)
                for x, part in zip(partial.parts, message.parts, strict=True):
                    part.copy_(x.narrow(1, incoming.begin, incoming.num_keys))
            if incoming.rank == me:
                mine = message
            else:
                sends[incoming.rank] = message.flat
        for outgoing in round.outgoing:
            heads = self.share(block.stage, outgoing.rank).kv_heads
            if outgoing.rank == me:
                returned.append((outgoing.runs, heads, mine.parts))
            else:
                message = self.keys(outgoing.num_keys, heads, dtype)
                receives[outgoing.rank] = message.flat
                returned.append((outgoing.runs, heads, message.parts))
        what = f"the gradients of round {block.i}{self._place(block.stage)}"
        return ReturningKeys(self.transport.exchange(sends, receives, what), returned)

    def keys(self, num_keys: int, heads: range, dtype: torch.dtype) -> Message:
        """Keys and values of n tokens, or their gradients: k (B, n, heads, D), then v (B, n, heads, Dv)."""
        shapes = [(x.size(0), num_keys, len(heads), x.size(3)) for x in (self.k, self.v)]
        size = math.prod(shapes[0])
        flat = self.k.new_empty(size + math.prod(shapes[1]), dtype=dtype)
        return Message(flat, (flat[:size].view(shapes[0]), flat[size:].view(shapes[1])))

    # ---- queries, and their results -------------------------------------------------------------

    def _fetch_queries(self, stage: int, queries: tuple[Tensor, ...]) -> Arriving:
        """Starts the exchange of queries for a stage."""
        own = self.share(stage, self.plan.rank).heads
        mine = tuple(of_heads(x, own) for x in queries)
        if len(self.plan.group) == 1:
            return Arriving(None, (mine,), ())
        outgoing = {
            rank: mine if rank == self.plan.rank else [of_heads(x, self.share(stage, rank).heads) for x in queries]
            for rank in self.plan.group
        }
        incoming = {
            rank: [_sized(x, num_tokens, len(own)) for x in queries]
            for rank, num_tokens in zip(self.plan.group, self.plan.query_lens, strict=True)
        }
        exchange, parts = all_to_all(self.transport, outgoing, incoming, f"the queries{self._place(stage)}")
        return Arriving(exchange, parts, tuple(map(_token_dim, queries)))

    def give_back_queries(self, stage: int, results: Sequence[Tensor]) -> ReturningQueries:
        """Starts the way home of results for all tokens of the group."""
        begins = itertools.accumulate(self.plan.query_lens, initial=0)
        outgoing = {
            rank: [x.narrow(_token_dim(x), begin, num_tokens) for x in results]
            for rank, begin, num_tokens in zip(self.plan.group, begins, self.plan.query_lens, strict=False)
        }
        heads = [self.share(stage, rank).heads for rank in self.plan.group]
        incoming = {
            rank: [_sized(x, self.k.size(1), len(of_rank)) for x in results]
            for rank, of_rank in zip(self.plan.group, heads, strict=True)
        }
        exchange, parts = all_to_all(self.transport, outgoing, incoming, f"the results{self._place(stage)}")
        return ReturningQueries(exchange, list(zip(heads, parts, strict=True)))


class ReturningKeys(NamedTuple):
    """Partial gradients of local keys on their way from the ranks that work on them."""

    exchange: Exchange
    returned: Sequence[tuple[Tensor, range, tuple[Tensor, ...]]]  # runs as in Outgoing, kv heads, dk and dv; by rank

    def add_to(self, dk: Tensor, dv: Tensor) -> None:
        """In the order of the ranks, whatever arrives first."""
        self.exchange.wait()
        for runs, heads, (partial_dk, partial_dv) in self.returned:
            own_dk, own_dv = of_heads(dk, heads), of_heads(dv, heads)
            for row, _, packed, length in runs.tolist():
                own_dk[:, row : row + length] += partial_dk[:, packed : packed + length]
                own_dv[:, row : row + length] += partial_dv[:, packed : packed + length]


class ReturningQueries(NamedTuple):
    """Results of local queries on their way from the ranks that work on them."""

    exchange: Exchange
    returned: Sequence[tuple[range, tuple[Tensor, ...]]]  # query heads and their results

    def write_to(self, *results: Tensor) -> None:
        self.exchange.wait()
        for heads, parts in self.returned:
            for result, part in zip(results, parts, strict=True):
                of_heads(result, heads).copy_(part)


def _token_dim(x: Tensor) -> int:
    """Of (B, N, H, ...) or (B, H, N)."""
    return 1 if x.dim() == 4 else 2


def of_heads(x: Tensor, heads: range) -> Tensor:
    """A view of some heads of (B, N, H, ...) or (B, H, N)."""
    dim = 2 if x.dim() == 4 else 1
    return x if len(heads) == x.size(dim) else x.narrow(dim, heads.start, len(heads))


def _sized(x: Tensor, num_tokens: int, num_heads: int) -> Kind:
    """Of (B, N, H, ...) or (B, H, N) with other N and H."""
    if x.dim() == 4:
        return (x.size(0), num_tokens, num_heads, x.size(3)), x.dtype
    return (x.size(0), num_heads, num_tokens), x.dtype
