"""What travels between ranks in a call of attention: which rows and heads go to whom, and how they come together.

All messages of a call go between the rank that owns tokens and a rank that works on them: queries to the worker and
their results back, keys and values to the worker and their gradients back. Each is one flat buffer, its tensors one
after another, so that nothing is copied where a worker's block of keys is one message.

Shape letters: B batch, N local tokens, Nq tokens of all ranks of a group, H query heads, G kv heads, D head dim,
Dv value head dim, n tokens of one message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ringtile import ops
from ringtile.scheme import Piece, Share
from ringtile.sequence.plan import RankPlan, Round
from ringtile.transport.transport import Exchange, Transport

_Kind: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"  # of a tensor


@dataclass(frozen=True)
class Message:
    """Tensors one after another in one flat buffer."""

    flat: Tensor
    parts: tuple[Tensor, ...]

    @classmethod
    def empty(cls, like: Tensor, tensors: Sequence[_Kind]) -> Message:
        """Uninitialized tensors, on the device of like; the widest dtype first, so that each is aligned."""
        dtypes = {dtype for _, dtype in tensors}
        of_flat = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        sizes = [math.prod(shape) * dtype.itemsize // of_flat.itemsize for shape, dtype in tensors]
        flat = like.new_empty(sum(sizes), dtype=of_flat)
        parts = zip(flat.split_with_sizes(sizes), tensors, strict=True)
        return cls(
            flat,
            tuple((x if x.dtype == dtype else x.view(dtype)).view(shape) for x, (shape, dtype) in parts),
        )

    @classmethod
    def holding(cls, tensors: Sequence[Tensor]) -> Message:
        """Copies of tensors, the widest dtype first."""
        message = cls.empty(tensors[0], [(x.shape, x.dtype) for x in tensors])
        for part, x in zip(message.parts, tensors, strict=True):
            part.copy_(x)
        return message


@dataclass(frozen=True)
class Arriving:
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


@dataclass(frozen=True)
class Block:
    """One kernel call's worth of work for each piece of the share: a round of a stage."""

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

    num_heads: int
    k: Tensor  # (B, N, G, D)
    v: Tensor  # (B, N, G, Dv)
    plan: RankPlan
    transport: Transport

    def share(self, stage: int, rank: int | None = None) -> Share:
        return self.plan.share(stage, self.plan.rank if rank is None else rank, self.num_heads, self.k.size(2))

    def blocks(self, *queries: Tensor) -> Iterator[Block]:
        """All rounds of all stages; the messages of the next one travel until it is asked for.

        queries: what workers need of queries, in (B, N, H, ...) or (B, H, N), the widest dtype first.
        """
        rounds = self.plan.rounds
        order = [(stage, i) for stage in range(self.plan.scheme.num_stages) for i in range(len(rounds))]
        arriving = self._fetch(0, 0, queries)
        of_stage: tuple[Tensor, ...] = ()
        for at, (stage, i) in enumerate(order):
            k, v = arriving[-1].wait()
            if i == 0:
                of_stage = arriving[0].wait()
            if at + 1 < len(order):
                arriving = self._fetch(*order[at + 1], queries)
            yield Block(stage, i, i + 1 == len(rounds), rounds[i], self.share(stage), of_stage, k, v)

    def _fetch(self, stage: int, i: int, queries: tuple[Tensor, ...]) -> list[Arriving]:
        keys = self._fetch_keys(stage, i)
        return [self._fetch_queries(stage, queries), keys] if i == 0 else [keys]

    def _start(self, sends: Mapping[int, Message], receives: Mapping[int, Message], what: str) -> Exchange:
        me = self.plan.rank
        return self.transport.start(
            {rank: message.flat for rank, message in sends.items() if rank != me},
            {rank: message.flat for rank, message in receives.items() if rank != me},
            what,
        )

    def _place(self, stage: int) -> str:
        return f" of stage {stage}" if self.plan.scheme.num_stages > 1 else ""

    # ---- keys and values, and their gradients ---------------------------------------------------

    def _fetch_keys(self, stage: int, i: int) -> Arriving:
        """Starts the exchange of keys and values for a round."""
        round, own = self.plan.rounds[i], self.share(stage).kv_heads
        if round.in_place:
            return Arriving(None, [(of_heads(self.k, own), of_heads(self.v, own))], (1, 1))
        sends = {}
        for outgoing in round.outgoing:
            heads = self.share(stage, outgoing.rank).kv_heads
            sends[outgoing.rank] = message = self.keys(outgoing.num_keys, heads, self.k.dtype)
            for x, part in zip((self.k, self.v), message.parts, strict=True):
                ops.shard_seq_(of_heads(x, heads), outgoing.runs, 1, part)
        receives = {
            incoming.rank: sends[incoming.rank]
            if incoming.rank == self.plan.rank
            else self.keys(incoming.num_keys, own, self.k.dtype)
            for incoming in round.incoming
        }
        exchange = self._start(sends, receives, f"round {i}{self._place(stage)}")
        return Arriving(exchange, [message.parts for message in receives.values()], (1, 1))

    def give_back(self, block: Block, partial: Message) -> ReturningKeys:
        """Starts the way home of a block's gradients, and of those for the keys of this rank that others work on."""
        round, dtype = block.round, partial.parts[0].dtype
        if len(round.incoming) == 1:
            sends = {round.incoming[0].rank: partial}
        else:
            sends = {}
            for incoming in round.incoming:
                sends[incoming.rank] = message = self.keys(incoming.num_keys, block.share.kv_heads, dtype)
                for x, part in zip(partial.parts, message.parts, strict=True):
                    part.copy_(x.narrow(1, incoming.begin, incoming.num_keys))
        receives = {
            outgoing.rank: sends[outgoing.rank]
            if outgoing.rank == self.plan.rank
            else self.keys(outgoing.num_keys, self.share(block.stage, outgoing.rank).kv_heads, dtype)
            for outgoing in round.outgoing
        }
        exchange = self._start(sends, receives, f"the gradients of round {block.i}{self._place(block.stage)}")
        returned = [
            (outgoing.runs, self.share(block.stage, outgoing.rank).kv_heads, receives[outgoing.rank].parts)
            for outgoing in round.outgoing
        ]
        return ReturningKeys(exchange, returned)

    def keys(self, num_keys: int, heads: range, dtype: torch.dtype) -> Message:
        """Keys and values of n tokens, or their gradients: k (B, n, heads, D), then v (B, n, heads, Dv)."""
        shapes = ((x.size(0), num_keys, len(heads), x.size(3)) for x in (self.k, self.v))
        return Message.empty(self.k, [(shape, dtype) for shape in shapes])

    # ---- queries, and their results -------------------------------------------------------------

    def _fetch_queries(self, stage: int, queries: tuple[Tensor, ...]) -> Arriving:
        """Starts the exchange of queries for a stage."""
        own = self.share(stage).heads
        mine = tuple(of_heads(x, own) for x in queries)
        dims = tuple(_token_dim(x) for x in queries)
        if len(self.plan.group) == 1:
            return Arriving(None, [mine], dims)
        sends, receives, parts = {}, {}, []
        for rank, num_tokens in zip(self.plan.group, self.plan.query_lens, strict=True):
            if rank == self.plan.rank:
                parts.append(mine)
                continue
            heads = self.share(stage, rank).heads
            sends[rank] = Message.holding([of_heads(x, heads) for x in queries])
            receives[rank] = Message.empty(self.k, [_sized(x, num_tokens, len(own)) for x in queries])
            parts.append(receives[rank].parts)
        return Arriving(self._start(sends, receives, f"the queries{self._place(stage)}"), parts, dims)

    def give_back_queries(self, stage: int, results: Sequence[Tensor]) -> ReturningQueries:
        """Starts the way home of results for all tokens of the group, the widest dtype first."""
        sends, receives, returned, begin = {}, {}, [], 0
        for rank, num_tokens in zip(self.plan.group, self.plan.query_lens, strict=True):
            rows = [x.narrow(_token_dim(x), begin, num_tokens) for x in results]
            begin += num_tokens
            heads = self.share(stage, rank).heads
            if rank == self.plan.rank:
                returned.append((heads, tuple(rows)))
                continue
            sends[rank] = Message.holding(rows)
            receives[rank] = Message.empty(self.k, [_sized(x, self.k.size(1), len(heads)) for x in results])
            returned.append((heads, receives[rank].parts))
        return ReturningQueries(self._start(sends, receives, f"the results{self._place(stage)}"), returned)


@dataclass(frozen=True)
class ReturningKeys:
    """Partial gradients of local keys on their way from the ranks that work on them."""

    exchange: Exchange
    returned: Sequence[tuple[Tensor, range, tuple[Tensor, ...]]]  # runs as in Outgoing, kv heads, dk and dv; by rank

    def add_to(self, dk: Tensor, dv: Tensor) -> None:
        """In the order of the ranks, whatever arrives first."""
        self.exchange.wait()
        for runs, heads, parts in self.returned:
            for gradient, part in zip((dk, dv), parts, strict=True):
                gradient = of_heads(gradient, heads)
                for row, _, packed, length in runs.tolist():
                    gradient[:, row : row + length] += part[:, packed : packed + length]


@dataclass(frozen=True)
class ReturningQueries:
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
    dim = 3 - _token_dim(x)
    return x if len(heads) == x.size(dim) else x.narrow(dim, heads.start, len(heads))


def _sized(x: Tensor, num_tokens: int, num_heads: int) -> _Kind:
    """Of (B, N, H, ...) or (B, H, N) with other N and H."""
    if x.dim() == 4:
        return (x.size(0), num_tokens, num_heads, x.size(3)), x.dtype
    return (x.size(0), num_heads, num_tokens), x.dtype
