"""The ring: one rank's part of attention over keys that travel, forward and backward.

In each round a rank merges a block of keys into the running state of its queries, while the keys of the next round
travel. In the backward the keys travel again, and the partial dk, dv of a round travel straight back to their owners
while the next round computes; owners add them in the order of rounds, then ranks. Running outputs and all gradients
stay in float32 (float64 for float64 inputs) until the last round, and the running log-sum-exp in float64.

The ring knows nothing of schemes: where ranks share heads (ulysses.py), its tokens are those of all of them, and its
heads a share.

Shape letters: B batch, N tokens of a rank, H query heads, G kv heads, D head dim, Dv value head dim, n tokens of one
message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile import ops
from ringtile.attn import choose
from ringtile.attn.backend import Final, Gradients, Running
from ringtile.attn.call import Call
from ringtile.sequence.plan import Round, Transfer
from ringtile.transport.transport import Exchange, Message

# Make contiguous tensors like another. They take half of what new_empty takes of the time of a small call.
empty = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)
zeros = functools.partial(torch.zeros_like, memory_format=torch.contiguous_format)


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, N, H, D), k (B, N, G, D), v (B, N, G, Dv) -> out (B, N, H, Dv) of q's dtype, lse (B, H, N) in float64."""
    rounds, merge = call.rounds, choose.forward if call.blocks is None else call.blocks.forward
    state = first_state(call, q, is_last=len(rounds) == 1)
    for round, block_k, block_v in KeyExchange(k, v, call).blocks():
        if round is rounds[-1] and state.rounded is None and state.out.dtype != q.dtype:
            state.rounded = torch.empty_like(state.out, dtype=q.dtype)
        merge(call, round, q, block_k, block_v, state)
        state.fresh = False
    return state.out if state.rounded is None else state.rounded, state.lse


def backward(
    call: Call, final: Final, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, *, rounds_keys: bool = True
) -> tuple[Tensor, Tensor]:
    """Add to dq, of the state dtype, and return dk and dv, of k's dtype: for the forward's inputs, its outputs and
    their gradients (`final`).

    rounds_keys: False leaves dk and dv in the state dtype, for more to be added to them.
    """
    rounds, add = call.rounds, choose.backward if call.blocks is None else call.blocks.backward
    keys, first = KeyExchange(k, v, call), rounds[0]
    fresh = first.in_place and first.num_keys == k.size(1)  # round 0 writes all of dk and dv
    room = empty if fresh else zeros
    dk, dv = room(k, dtype=dq.dtype), room(v, dtype=dq.dtype)
    rounds_keys &= dq.dtype != k.dtype
    rounded = (empty(k), empty(v)) if rounds_keys and fresh and len(rounds) == 1 else None
    add_returned: Callable[[Tensor, Tensor], None] | None = None
    for round, block_k, block_v in keys.blocks():
        partial = None if round.in_place else keys.message(round.num_keys, dq.dtype)
        block_dk, block_dv = (dk, dv) if partial is None else partial.parts
        grads = Gradients(dq, block_dk, block_dv, fresh=fresh or partial is not None, rounded=rounded)
        add(call, round, q, block_k, block_v, final, grads)
        if add_returned is not None:
            add_returned(dk, dv)
        add_returned = None if partial is None else keys.give_back(round, partial)
    if add_returned is not None:
        add_returned(dk, dv)
    return rounded or ((dk.to(k.dtype), dv.to(v.dtype)) if rounds_keys else (dk, dv))


def sink_gradient(sinks: Tensor, final: Final) -> Tensor:
    """Return the gradient of sinks (H) by this rank's queries, in their dtype.

    A sink is a key with the same score for every query of its head and value 0, so that dscore = P (0 - delta).
    """
    delta = final.delta
    weights = (sinks.to(delta.dtype)[:, None] - final.lse).exp()
    unseen = sinks == -torch.inf  # a weight of 0, also where no key was attended and lse is -inf too
    return -(weights.masked_fill(unseen[:, None], 0) * delta).sum((0, 2)).to(sinks.dtype)


def first_state(call: Call, q: Tensor, *, is_last: bool) -> Running:
    """Return the state before a first block; is_last: which is the only one, so that it is rounded."""
    state, sinks, v_head_dim = call.state_dtype, call.options.sinks, call.shape.v_head_dim
    if is_last and sinks is None and state != q.dtype:
        rounded, lse = empty_outputs(q, v_head_dim, q.dtype)
        return Running(q.new_empty(0, dtype=state), lse, fresh=True, rounded=rounded)
    out, lse = empty_outputs(q, v_head_dim, state)
    if sinks is not None:  # as if a block of one key with that score and value 0 had come before
        out.zero_()
        lse.copy_(sinks[None, :, None])
    last = torch.empty_like(out, dtype=q.dtype) if is_last and state != q.dtype else None
    return Running(out, lse, fresh=sinks is None, rounded=last)


def empty_outputs(q: Tensor, v_head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out (B, N, H, Dv) of dtype; lse (B, H, N) in float64, because float32 would lose a few ulp of every weight."""
    batch, num_queries, num_heads, head_dim = q.shape
    lse = q.new_empty(batch, num_heads, num_queries, dtype=torch.float64)
    if v_head_dim == head_dim:
        return empty(q, dtype=dtype), lse
    return q.new_empty(batch, num_queries, num_heads, v_head_dim, dtype=dtype), lse


# ---- what travels -------------------------------------------------------------------------------


@dataclass(eq=False)
class KeyExchange:
    """One rank's keys and values, and the way to its peers: what travels in a ring, and when."""

    k: Tensor  # (B, N, G, D)
    v: Tensor  # (B, N, G, Dv)
    call: Call
    _sent: tuple[Transfer, Message] | None = None  # the last one

    def blocks(self) -> Iterator[tuple[Round, Tensor, Tensor]]:
        """Yield each round, and its block of keys k (B, n, G, D) and values v (B, n, G, Dv).

        Those of the next round travel until they are asked for. They start before the gradients of this round only
        where no idle round lies between, because its peers, which may not be idle there, start theirs later: two ranks
        post their messages to each other in one order.
        """
        rounds = self.call.rounds
        exchange, parts = self._fetch(rounds[0])
        for round, after in zip(rounds, [*rounds[1:], None], strict=True):
            if exchange is not None:
                exchange.wait()
            k, v = parts[0] if len(parts) == 1 else self._joined(round, parts)
            exchange, parts = None, []  # the memory of what was joined
            follows = after is not None and after.index == round.index + 1
            if after is not None and follows:
                exchange, parts = self._fetch(after)
            yield round, k, v
            if after is not None and not follows:
                exchange, parts = self._fetch(after)

    def _fetch(self, round: Round) -> tuple[Exchange | None, list[Sequence[Tensor]]]:
        """Start the exchange of a round; return it, and the keys and values that it brings, by rank."""
        own: Sequence[Tensor] = (self.k, self.v)
        if round.in_place:
            return None, [own]
        plan, sends, mine = self.call.plan, {}, own
        for transfer in round.outgoing:
            if transfer.rank == plan.rank and transfer.is_head:
                mine = tuple([x[:, : transfer.num_keys] for x in own])
                continue
            if self._sent is None or not _same_rows(self._sent[0], transfer):
                self._sent = None  # the memory of the last one, before there is another
                message = self.message(transfer.num_keys, self.k.dtype)
                ops.rows_pack_(own, transfer.runs, 1, message.parts, round.table(transfer))
                self._sent = transfer, message
            message = self._sent[1]
            if transfer.rank == plan.rank:
                mine = message.parts
            else:
                sends[plan.ranks[transfer.rank]] = message.flat
        return self._start(sends, round.incoming, mine, f"round {round.index}")

    def _start(
        self, sends: dict[int, Tensor], transfers: Sequence[Transfer], mine: Sequence[Tensor], what: str
    ) -> tuple[Exchange, list[Sequence[Tensor]]]:
        """Start an exchange; return it, and what the transfers bring, in their order. mine: of this rank itself."""
        plan, receives, parts = self.call.plan, {}, []
        for transfer in transfers:
            if transfer.rank == plan.rank:
                parts.append(mine)
            else:
                message = self.message(transfer.num_keys, mine[0].dtype)
                receives[plan.ranks[transfer.rank]] = message.flat
                parts.append(message.parts)
        return self.call.transport.exchange(sends, receives, what), parts

    def _joined(self, round: Round, parts: list[Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return the block of a round from the keys and values of several ranks, or of none."""
        block = self.message(round.num_keys, self.k.dtype).parts
        for transfer, part in zip(round.incoming, parts, strict=True):
            ops.rows_unpack_(block, transfer.runs, 1, part, round.table(transfer))
        return block

    def give_back(self, round: Round, partial: Message) -> Callable[[Tensor, Tensor], None]:
        """Start the way home of a block's gradients, and of those for the keys of this rank that others work on.

        Return a function that waits for these and adds them to dk and dv in the order of ranks, whatever arrives first.
        """
        plan, sends, mine = self.call.plan, {}, partial
        for transfer in round.incoming:
            message = partial
            if len(round.incoming) > 1:
                message = self.message(transfer.num_keys, partial.parts[0].dtype)
                ops.rows_pack_(partial.parts, transfer.runs, 1, message.parts, round.table(transfer))
            if transfer.rank == plan.rank:
                mine = message
            else:
                sends[plan.ranks[transfer.rank]] = message.flat
        what = f"the gradients of round {round.index}"
        exchange, returned = self._start(sends, round.outgoing, mine.parts, what)

        def add_to(dk: Tensor, dv: Tensor) -> None:
            exchange.wait()
            for transfer, parts in zip(round.outgoing, returned, strict=True):
                ops.rows_add_((dk, dv), transfer.runs, 1, parts, round.table(transfer))

        return add_to

    def message(self, num_keys: int, dtype: torch.dtype) -> Message:
        """Make room for keys and values of n tokens, or their gradients: k (B, n, G, D), then v (B, n, G, Dv)."""
        (batch, _, heads, k_dim), v_dim = self.k.shape, self.v.shape[3]  # a shape costs what one size does
        if k_dim == v_dim:  # two calls of torch, and not five
            flat = self.k.new_empty((2, batch, num_keys, heads, k_dim), dtype=dtype)
            return Message(flat, flat.unbind())
        return Message.empty(self.k, [((batch, num_keys, heads, dim), dtype) for dim in (k_dim, v_dim)])


def _same_rows(one: Transfer, other: Transfer) -> bool:
    """Return whether two ranks get the same keys of a third, as in most rounds."""
    if one.num_keys != other.num_keys:
        return False
    return (one.is_head and other.is_head) or torch.equal(one.runs, other.runs)
