"""The bytes that attention over a sharded sequence sends, from every rank to every other, before anything runs.

Shape letters: H query heads, G kv heads, W ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringtile import ops
from ringtile.scheme import Scheme, shares_of
from ringtile.sequence.heads import join
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import Shape


class Counts:
    """Keys, pairs and heads, from which the costs of all ranks follow; `size` ranks share heads in each of n groups."""

    def __init__(self, mask: IntervalMask, layout: Layout, shape: Shape, scheme: Scheme) -> None:
        self.shape, self.layout, self.scheme = shape, layout, scheme
        self.size = size = scheme.ranks_per_group(layout.world_size)
        num_groups = layout.world_size // size
        # (n, n): of the keys of a group (second index), those that another (first) attends.
        self.keys, pairs = ops.plan_counts(*mask.bounds, join(layout, size)[0].tensor)
        self.pairs = pairs * (shape.batch // mask.begin.size(0))  # (n, n)
        shares = shares_of(size, shape.num_heads, shape.num_kv_heads)

        def by_rank(counts: list[int]) -> Tensor:
            return torch.tensor(counts).repeat(num_groups)

        self.heads = by_rank([len(share.heads) for share in shares])  # (W,)
        self.kv_heads = by_rank([len(share.kv_heads) for share in shares])
        self.ring_kv_heads = by_rank([len(share.kv_of_heads or share.kv_heads) for share in shares])
        self.copies_kv_heads = int(self.kv_heads[:size].sum()) > shape.num_kv_heads

    def sent_bytes(self) -> tuple[Tensor, Tensor]:
        """Return those of the forward and of the backward: int64 (W, W), from and to."""
        shape, size, ranks = self.shape, self.size, torch.arange(self.layout.world_size)
        element, state = shape.dtype.itemsize, ops.state_dtype(shape.dtype).itemsize
        key, value = shape.batch * shape.head_dim, shape.batch * shape.v_head_dim  # elements of a head
        others = ranks[:, None] != ranks
        in_ring = others & (ranks[:, None] % size == ranks % size)
        keys = self.keys.repeat_interleave(size, 0).repeat_interleave(size, 1) * in_ring  # by worker and owner
        keys = keys * self.ring_kv_heads[:, None] * (key + value)
        forward, backward = keys.T * element, keys.T * element + keys * state
        tokens = torch.tensor([self.layout.local_len(int(rank)) for rank in ranks])
        shared = tokens[:, None] * (others & (ranks[:, None] // size == ranks // size))  # by owner and worker
        of_heads, of_kv_heads = shared * self.heads, shared * self.kv_heads * (key + value)
        gradient = state if self.copies_kv_heads else element
        forward = forward + (of_heads * key + of_kv_heads) * element + (of_heads * value).T * element
        backward = backward + of_heads * value * element
        return forward, backward + (of_heads * key).T * element + of_kv_heads.T * gradient
