"""What travels in a ring: keys and values to the ranks that work on them, and their gradients back.

Shape letters: B batch, N local tokens, G kv heads, D head dim, Dv value head dim, n tokens of one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringtile import ops
from ringtile.sequence.plan import Transfer
from ringtile.sequence.sharded import Ring
from ringtile.transport.messages import Message
from ringtile.transport.transport import Transport


@dataclass(eq=False)
class Keys:
    """One rank's keys and values, and the way to its peers."""

    k: Tensor  # (B, N, G, D)
    v: Tensor  # (B, N, G, Dv)
    ring: Ring
    transport: Transport
    _sent: dict[object, Message] = field(default_factory=dict)  # the last one, by the places of its keys

    def blocks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each busy round i, and its block of keys k (B, n, G, D) and values v (B, n, G, Dv).

        Those of the next round travel until they are asked for. They start before the gradients of this round only
        where no idle round lies between, because its peers, which may not be idle there, start theirs later: two ranks
        post their messages to each other in one order.
        """
        busy = self.ring.plan.busy_rounds
        wait = self._fetch(0)
        for i, after in zip(busy, [*busy[1:], None], strict=True):
            k, v = wait()
            if after == i + 1:
                wait = self._fetch(after)
            yield i, k, v
            if after is not None and after != i + 1:
                wait = self._fetch(after)

    def _fetch(self, i: int) -> Callable[[], tuple[Tensor, ...]]:
        """Start the exchange of a round; return a function that waits for its keys and values."""
        round, me, own = self.ring.plan.rounds[i], self.ring.plan.rank, (self.k, self.v)
        if round.in_place:
            return lambda: own
        sends, receives, parts = {}, {}, []
        for transfer in round.outgoing:
            if transfer.rank == me and transfer.is_head:
                mine = tuple(x[:, : transfer.num_keys] for x in own)
                continue
            if (message := self._sent.get(transfer.places)) is None:  # most rounds send the same rows to another rank
                self._sent.clear()
                message = self._sent[transfer.places] = self._packed(own, transfer)
            if transfer.rank == me:
                mine = message.parts
            else:
                sends[self.ring.ranks[transfer.rank]] = message.flat
        for transfer in round.incoming:
            if transfer.rank == me:
                parts.append(mine)
            else:
                message = self.message(transfer.num_keys, self.k.dtype)
                receives[self.ring.ranks[transfer.rank]] = message.flat
                parts.append(message.parts)
        exchange = self.transport.exchange(sends, receives, f"round {i}")

        def wait() -> tuple[Tensor, ...]:
            exchange.wait()
            if len(parts) == 1:
                return parts[0]
            block = self.message(round.num_keys, self.k.dtype).parts
            for transfer, part in zip(round.incoming, parts, strict=True):
                for x, y in zip(part, block, strict=True):
                    ops.unshard_seq_(x, transfer.runs, 1, y)
            return block

        return wait

    def give_back(self, i: int, partial: Message) -> Callable[[Tensor, Tensor], None]:
        """Start the way home of a block's gradients, and of those for the keys of this rank that others work on.

        Return a function that waits for these and adds them to dk and dv in the order of ranks, whatever arrives first.
        """
        round, me, dtype = self.ring.plan.rounds[i], self.ring.plan.rank, partial.parts[0].dtype
        sends, receives, returned = {}, {}, []
        for transfer in round.incoming:
            message = partial if len(round.incoming) == 1 else self._packed(partial.parts, transfer)
            if transfer.rank == me:
                mine = message
            else:
                sends[self.ring.ranks[transfer.rank]] = message.flat
        for transfer in round.outgoing:
            if transfer.rank == me:
                returned.append(mine.parts)
            else:
                message = self.message(transfer.num_keys, dtype)
                receives[self.ring.ranks[transfer.rank]] = message.flat
                returned.append(message.parts)
        exchange = self.transport.exchange(sends, receives, f"the gradients of round {i}")

        def add_to(dk: Tensor, dv: Tensor) -> None:
            exchange.wait()
            for transfer, parts in zip(round.outgoing, returned, strict=True):
                sums, terms = [], []
                for row, packed, length in transfer.places:
                    sums += [_rows(x, row, length) for x in (dk, dv)]
                    terms += [_rows(part, packed, length) for part in parts]
                torch._foreach_add_(sums, terms)  # on a GPU one launch

        return add_to

    def message(self, num_keys: int, dtype: torch.dtype) -> Message:
        """Make room for keys and values of n tokens, or their gradients: k (B, n, G, D), then v (B, n, G, Dv)."""
        batch, _, heads, k_dim = self.k.shape  # a shape costs what one size does
        kinds = [((batch, num_keys, heads, dim), dtype) for dim in (k_dim, self.v.shape[3])]
        return Message.empty(self.k, kinds)

    def _packed(self, tensors: Sequence[Tensor], transfer: Transfer) -> Message:
        """Copy the rows of a transfer out of tensors like k and v."""
        message = self.message(transfer.num_keys, tensors[0].dtype)
        for x, part in zip(tensors, message.parts, strict=True):
            ops.shard_seq_(x, transfer.runs, 1, part)
        return message


def _rows(x: Tensor, first: int, count: int) -> Tensor:
    """Return rows of x (B, N, ...)."""
    return x if count == x.size(1) else x.narrow(1, first, count)
