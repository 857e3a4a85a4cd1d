"""What travels in a ring: keys and values to the ranks that work on them, and their gradients back.

Each message is one flat buffer, its tensors one after another, so that nothing is copied where a rank's block of keys
is one message.

Shape letters: B batch, N local tokens, G kv heads, D head dim, Dv value head dim, n tokens of one message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile import ops
from ringtile.sequence.plan import Outgoing, Round
from ringtile.sequence.sharded import Ring
from ringtile.transport.messages import Message
from ringtile.transport.transport import Exchange, Transport


class KeyBlock(NamedTuple):
    """A busy round, and the keys of it."""

    i: int
    is_last: bool
    round: Round
    k: Tensor  # (B, n, G, D)
    v: Tensor  # (B, n, G, Dv)


class _Arriving(NamedTuple):
    """The keys of several ranks on their way."""

    exchange: Exchange | None  # None: nothing travels
    round: Round
    parts: Sequence[tuple[Tensor, ...]]  # k and v; by rank

    def wait(self) -> tuple[Tensor, ...]:
        if self.exchange is not None:
            self.exchange.wait()
        if len(self.parts) == 1:
            return self.parts[0]
        block = tuple(x.new_empty((x.size(0), self.round.num_keys, *x.shape[2:])) for x in self.parts[0])
        for incoming, parts in zip(self.round.incoming, self.parts, strict=True):
            for x, part in zip(block, parts, strict=True):
                ops.unshard_seq_(part, incoming.runs, 1, x)
        return block


class ReturningKeys(NamedTuple):
    """Partial gradients of local keys on their way from the ranks that work on them."""

    exchange: Exchange
    returned: Sequence[tuple[Outgoing, tuple[Tensor, ...]]]  # which keys they are of, dk and dv; by rank

    def add_to(self, dk: Tensor, dv: Tensor) -> None:
        """Add them in the order of the ranks, whatever arrives first."""
        self.exchange.wait()
        for keys, partials in self.returned:
            for row, _, packed, length in [(0, 1, 0, keys.num_keys)] if keys.is_head else keys.runs.tolist():
                for x, partial in zip((dk, dv), partials, strict=True):
                    x[:, row : row + length].add_(partial[:, packed : packed + length])  # += would copy it onto itself


class Keys(NamedTuple):
    """One rank's keys and values, and the way to its peers."""

    k: Tensor  # (B, N, G, D)
    v: Tensor  # (B, N, G, Dv)
    ring: Ring
    transport: Transport

    def blocks(self) -> Iterator[KeyBlock]:
        """Give the keys of all busy rounds; those of the next one travel until it is asked for.

        They start before the gradients of this round only where no idle round lies between, because its peers, which
        may not be idle there, start theirs later: two ranks post their messages to each other in one order.
        """
        plan = self.ring.plan
        busy = plan.busy_rounds
        arriving = self._fetch(0)
        for i, after in zip(busy, [*busy[1:], None], strict=True):
            k, v = arriving.wait()
            if after == i + 1:
                arriving = self._fetch(after)
            yield KeyBlock(i, after is None, plan.rounds[i], k, v)
            if after is not None and after != i + 1:
                arriving = self._fetch(after)

    def _fetch(self, i: int) -> _Arriving:
        """Start the exchange of keys and values for a round."""
        round, me = self.ring.plan.rounds[i], self.ring.plan.rank
        if round.in_place:
            return _Arriving(None, round, [(self.k, self.v)])
        sends, receives, parts = {}, {}, []
        for outgoing in round.outgoing:
            if outgoing.rank == me and outgoing.is_head:
                mine = tuple(x[:, : outgoing.num_keys] for x in (self.k, self.v))
                continue
            message = self.message(outgoing.num_keys, self.k.dtype)
            for x, part in zip((self.k, self.v), message.parts, strict=True):
                ops.shard_seq_(x, outgoing.runs, 1, part)
            if outgoing.rank == me:
                mine = message.parts
            else:
                sends[self.ring.ranks[outgoing.rank]] = message.flat
        for incoming in round.incoming:
            if incoming.rank == me:
                parts.append(mine)
            else:
                message = self.message(incoming.num_keys, self.k.dtype)
                receives[self.ring.ranks[incoming.rank]] = message.flat
                parts.append(message.parts)
        return _Arriving(self.transport.exchange(sends, receives, f"round {i}"), round, parts)

    def give_back(self, block: KeyBlock, partial: Message) -> ReturningKeys:
        """Start the way home of a block's gradients, and of those for the keys of this rank that others work on."""
        round, me, dtype = block.round, self.ring.plan.rank, partial.flat.dtype
        sends, receives, returned = {}, {}, []
        for incoming in round.incoming:
            message = partial
            if len(round.incoming) > 1:
                message = self.message(incoming.num_keys, dtype)
                for x, part in zip(partial.parts, message.parts, strict=True):
                    ops.shard_seq_(x, incoming.runs, 1, part)
            if incoming.rank == me:
                mine = message
            else:
                sends[self.ring.ranks[incoming.rank]] = message.flat
        for outgoing in round.outgoing:
            if outgoing.rank == me:
                returned.append((outgoing, mine.parts))
            else:
                message = self.message(outgoing.num_keys, dtype)
                receives[self.ring.ranks[outgoing.rank]] = message.flat
                returned.append((outgoing, message.parts))
        what = f"the gradients of round {block.i}"
        return ReturningKeys(self.transport.exchange(sends, receives, what), returned)

    def message(self, num_keys: int, dtype: torch.dtype) -> Message:
        """Make room for keys and values of n tokens, or their gradients: k (B, n, G, D), then v (B, n, G, Dv)."""
        if self.k.size(3) == self.v.size(3):  # two calls of torch, and not five, in each round and direction
            both = self.k.new_empty((2, self.k.size(0), num_keys, *self.k.shape[2:]), dtype=dtype)
            return Message(both, tuple(both.unbind()))
        shapes = [(x.size(0), num_keys, *x.shape[2:]) for x in (self.k, self.v)]
        size = math.prod(shapes[0])
        flat = self.k.new_empty(size + math.prod(shapes[1]), dtype=dtype)
        return Message(flat, (flat[:size].view(shapes[0]), flat[size:].view(shapes[1])))
