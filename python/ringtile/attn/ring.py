"""The ring: one rank's part of attention over keys that travel, forward and backward.

In each round a rank merges a block of keys into the running state of its queries, while the keys of the next round
travel. In the backward the keys travel again, and the partial dk, dv of a round travel straight back to their owners
while the next round computes; owners add them in the order of rounds, then ranks. Running outputs and all gradients
stay in float32 (float64 for float64 inputs) until the last round, and the running log-sum-exp in float64.

The ring knows nothing of schemes: where ranks share heads (ulysses.py), its tokens are those of all of them, and its
heads a share.

Shape letters: B batch, N tokens of a rank, H query heads, G kv heads, D head dim, Dv value head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringtile import ops
from ringtile.attn import choose
from ringtile.attn.backend import Final, Gradients, Running
from ringtile.attn.call import AttentionCall
from ringtile.attn.exchange import Keys


def forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, N, H, D), k (B, N, G, D), v (B, N, G, Dv) -> out (B, N, H, Dv) of q's dtype, lse (B, H, N) in float64."""
    out, lse = empty_outputs(q, v, ops.state_dtype(q.dtype))
    if call.sinks is not None:  # as if a block of one key with that score and value 0 had come before
        out.zero_()
        lse.copy_(call.sinks[None, :, None])
    rounded: Tensor | None = None
    ring = call.sequence.ring
    for i, block_k, block_v in Keys(k, v, ring, call.sequence.transport).blocks():
        if i == ring.plan.busy_rounds[-1] and out.dtype != q.dtype:
            rounded = torch.empty_like(out, dtype=q.dtype)
        state = Running(out, lse, fresh=i == 0 and call.sinks is None, rounded=rounded)
        choose.forward(call, i, q, block_k, block_v, state)
    return out if rounded is None else rounded, lse


def backward(
    call: AttentionCall, final: Final, q: Tensor, k: Tensor, v: Tensor, *, rounds_keys: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """What `forward` took and gave, and the gradients of what it gave -> dq, dk, dv of the inputs' dtype.

    rounds_keys: False leaves dk and dv in the state dtype, for more to be added to them.
    """
    state = ops.state_dtype(q.dtype)
    ring = call.sequence.ring
    keys, first = Keys(k, v, ring, call.sequence.transport), ring.plan.rounds[0]
    fresh = first.in_place and first.num_keys == k.size(1)  # round 0 writes all of dk and dv
    dk, dv = ((x.new_empty if fresh else x.new_zeros)(x.shape, dtype=state) for x in (k, v))
    rounded: tuple[Tensor, Tensor] | None = None
    if rounds_keys and fresh and len(ring.plan.busy_rounds) == 1 and state != k.dtype:
        rounded = k.new_empty(k.shape), v.new_empty(v.shape)
    dq = q.new_zeros(q.shape, dtype=state)
    add_returned: Callable[[Tensor, Tensor], None] | None = None
    for i, block_k, block_v in keys.blocks():
        round = ring.plan.rounds[i]
        partial = None if round.in_place else keys.message(round.num_keys, state)
        block_dk, block_dv = (dk, dv) if partial is None else partial.parts
        grads = Gradients(dq, block_dk, block_dv, fresh=fresh or partial is not None, rounded=rounded)
        choose.backward(call, i, q, block_k, block_v, final, grads)
        if add_returned is not None:
            add_returned(dk, dv)
        add_returned = None if partial is None else keys.give_back(i, partial)
    if add_returned is not None:
        add_returned(dk, dv)
    if not rounds_keys:
        return dq.to(q.dtype), dk, dv
    return dq.to(q.dtype), *(rounded or (dk.to(k.dtype), dv.to(v.dtype)))


def sink_gradient(sinks: Tensor, final: Final) -> Tensor:
    """Return the gradient of sinks (H) by this rank's queries, in their dtype.

    A sink is a key with the same score for every query of its head and value 0, so that dscore = P (0 - delta).
    """
    delta = final.delta
    weights = (sinks.to(delta.dtype)[:, None] - final.lse).exp()
    unseen = sinks == -torch.inf  # a weight of 0, also where no key was attended and lse is -inf too
    return -(weights.masked_fill(unseen[:, None], 0) * delta).sum((0, 2)).to(sinks.dtype)


def empty_outputs(q: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out (B, N, H, Dv) of dtype; lse (B, H, N) in float64, because float32 would lose a few ulp of every weight."""
    batch, num_queries, num_heads, _ = q.shape
    return (
        q.new_empty((batch, num_queries, num_heads, v.size(3)), dtype=dtype),
        q.new_empty((batch, num_heads, num_queries), dtype=torch.float64),
    )
