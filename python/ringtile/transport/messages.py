"""Several tensors in one message, and a message from every rank to every other.

A message is one flat buffer, its tensors one after another, so that nothing is copied where it is used as it arrived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ringtile.transport.transport import Exchange, Transport

Kind: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"  # of a tensor


class Message(NamedTuple):
    """Tensors one after another in one flat buffer."""

    flat: Tensor
    parts: tuple[Tensor, ...]

    @classmethod
    def empty(cls, like: Tensor, tensors: Sequence[Kind]) -> Message:
        """Uninitialized tensors, on the device of like."""
        order = sorted(range(len(tensors)), key=lambda i: -tensors[i][1].itemsize)  # so that each is aligned
        sizes = [math.prod(tensors[i][0]) * tensors[i][1].itemsize for i in order]
        flat = like.new_empty(sum(sizes), dtype=torch.uint8)
        pieces = dict(zip(order, flat.split_with_sizes(sizes), strict=True))
        return cls(flat, tuple(pieces[i].view(dtype).view(shape) for i, (shape, dtype) in enumerate(tensors)))

    @classmethod
    def holding(cls, tensors: Sequence[Tensor]) -> Message:
        """Copies of tensors."""
        message = cls.empty(tensors[0], [(x.shape, x.dtype) for x in tensors])
        for part, x in zip(message.parts, tensors, strict=True):
            part.copy_(x)
        return message


def all_to_all(
    transport: Transport, outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[Kind]], what: str
) -> tuple[Exchange, list[tuple[Tensor, ...]]]:
    """Starts a message to every other rank, and one from it; both by rank.

    Returns the tensors from each rank of incoming, to be read after `wait`; this rank's are the outgoing ones
    themselves.
    """
    sends, receives, arriving = {}, {}, []
    for rank, kinds in incoming.items():
        tensors = tuple(outgoing[rank])
        if rank != transport.rank:
            sends[rank] = Message.holding(tensors).flat
            message = Message.empty(tensors[0], kinds)
            receives[rank], tensors = message.flat, message.parts
        arriving.append(tensors)
    return transport.exchange(sends, receives, what), arriving
