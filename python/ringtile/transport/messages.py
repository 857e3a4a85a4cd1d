"""Several tensors in one message, and one tensor from every rank.

A message is one flat buffer, its tensors one after another, so that nothing is copied where it is used as it arrived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ringtile.transport.transport import Transport

Kind: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"  # of a tensor


class Message(NamedTuple):
    """Tensors one after another in one flat buffer."""

    flat: Tensor  # contiguous, of any shape
    parts: tuple[Tensor, ...]

    @classmethod
    def empty(cls, like: Tensor, tensors: Sequence[Kind]) -> Message:
        """Make uninitialized tensors, on the device of like."""
        if tensors and tensors.count(tensors[0]) == len(tensors):  # two calls of torch, and not five
            shape, dtype = tensors[0]
            flat = like.new_empty((len(tensors), *shape), dtype=dtype)
            return cls(flat, flat.unbind())
        order = sorted(range(len(tensors)), key=lambda i: -tensors[i][1].itemsize)  # so that each is aligned
        sizes = [math.prod(tensors[i][0]) * tensors[i][1].itemsize for i in order]
        flat = like.new_empty(sum(sizes), dtype=torch.uint8)
        pieces = dict(zip(order, flat.split_with_sizes(sizes), strict=True))
        return cls(flat, tuple(pieces[i].view(dtype).view(shape) for i, (shape, dtype) in enumerate(tensors)))


def all_gather(x: Tensor, transport: Transport, what: str) -> Tensor:
    """Return x of all ranks, (W, *x.shape); x has the same shape on each. Inside a call. what: as in `exchange`."""
    out = x.new_empty((transport.world_size, *x.shape))
    out[transport.rank] = x
    received = {peer: part for peer, part in enumerate(out) if peer != transport.rank}
    transport.exchange(dict.fromkeys(received, x), received, what).wait()
    return out
