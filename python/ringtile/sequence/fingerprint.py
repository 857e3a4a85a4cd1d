"""Fingerprints of data: how ranks notice that they work on different batches of equal shape.

What a rank shards is global, and the same on every rank. `Layout.shard` leaves a fingerprint of it on the local tensor,
`ShardedSequence.shard` one on the sequence, and every attention call compares what it finds there over the group. Data
on a GPU has none: reading it would make the host wait.
"""

from __future__ import annotations

import ctypes
import zlib

import torch
from torch import Tensor

_ATTRIBUTE = "_ringtile_fingerprint"
_MAX_TOKENS, _MAX_OTHER = 512, 2  # the sample: so many places in the sequence dim, and in each of the others


def fingerprint(x: Tensor, dim: int) -> int:
    """32 bits from a sample of x, spread over dim. 0: x is not on the CPU, or torch.compile or vmap traces it."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or type(x) not in (Tensor, torch.nn.Parameter):
        return 0
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return 0
    most = [_MAX_TOKENS if i == dim % x.dim() else _MAX_OTHER for i in range(x.dim())]
    sample = x.detach()[tuple(slice(None, None, -(-size // n) or 1) for size, n in zip(x.shape, most, strict=True))]
    sample = sample.contiguous()
    return zlib.crc32(ctypes.string_at(sample.data_ptr(), sample.nbytes)) if sample.numel() else 0


def leave_on(local: Tensor, number: int) -> None:
    """Remembers with a local tensor what it is a shard of."""
    if number:
        setattr(local, _ATTRIBUTE, number)


def found_on(*locals_: Tensor) -> int:
    """What `leave_on` left on these tensors, together; 0: nothing on any of them."""
    numbers = [getattr(local, _ATTRIBUTE, 0) for local in locals_]
    return zlib.crc32(repr(numbers).encode()) if any(numbers) else 0
