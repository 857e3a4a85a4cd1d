"""`context_parallel`: cut buffers and run attention as a ring inside a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ..errors import InputError
from ..layout import Layout
from ..mask import IntervalMask
from ..transport import transport_of
from .mode import RingMode
from .sharding import Mesh, NamedSequence, Sequence, group_of, layout_of, override


@contextlib.contextmanager
def context_parallel(
    mesh: Mesh,
    *,
    buffers: Seq[Tensor] | None = None,
    buffer_seq_dims: Seq[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    layout: Layout | str = "zigzag",
    mask: IntervalMask | None = None,
) -> Iterator[None]:
    """Inside the block every buffer holds this rank's tokens, and PyTorch's attention functions run as a ring.

    Takes the place of `torch.distributed.tensor.experimental.context_parallel`, and its arguments:

    mesh: a DeviceMesh of one dimension, or a group. buffers: tensors that hold the whole sequence, the same on every
    rank, of any dtype, S tokens in dim buffer_seq_dims[i]; cut in place, and given back as they were when the block
    ends, also by an exception, but for those in no_restore_buffers. No buffer requires grad.
    layout: how the sequence is cut: "zigzag", "contiguous", "striped", or a Layout of S tokens.
    mask: who attends whom. Without one, a call of scaled_dot_product_attention says so by is_causal; with one,
    is_causal=True is met with it. Global: it knows nothing of the cut.

    Model forward and backward belong inside. Blocks may be nested (the innermost holds) and entered by several
    threads, each with a group of its own. A group of one rank does nothing, unless there is a mask.

    Raises InputError before any buffer is cut; LayoutError when the sequence is too short.
    """
    group = group_of(mesh)
    transport = transport_of(group)
    buffers, buffer_seq_dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept = list(no_restore_buffers or ())
    seq_len = _seq_len(buffers, buffer_seq_dims, kept, layout, mask)
    if transport.world_size == 1 and mask is None:
        yield
        return
    if seq_len is None:
        assert isinstance(layout, str)
        with RingMode(group, NamedSequence(layout, group)):
            yield
        return
    cut = layout_of(layout, seq_len, transport.world_size)
    sequence = Sequence(cut, mask)
    wholes = [buffer.detach() for buffer in buffers]
    try:
        for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
            _put(buffer, cut.shard(buffer, dim, transport.rank))
        with override(group, sequence), RingMode(group, sequence):
            yield
    finally:
        for buffer, whole in zip(buffers, wholes, strict=True):
            if not any(buffer is other for other in kept):
                _put(buffer, whole)


def _seq_len(
    buffers: list[Tensor], seq_dims: list[int], kept: list[Tensor], layout: Layout | str, mask: IntervalMask | None
) -> int | None:
    """S, from the buffers, else the mask, else the layout; None where nothing says it. Checks the buffers."""
    if len(buffers) != len(seq_dims):
        raise InputError(f"{len(buffers)} buffers and {len(seq_dims)} buffer_seq_dims; expected as many")
    if not all(any(x is buffer for buffer in buffers) for x in kept):
        raise InputError("no_restore_buffers has a tensor that is not in buffers; expected a subset")
    sizes = []
    for i, (buffer, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        if not -buffer.dim() <= dim < buffer.dim():
            raise InputError(f"buffer {i} is {tuple(buffer.shape)}, its sequence dim {dim}; expected one of its dims")
        if buffer.requires_grad:
            raise InputError(f"buffer {i} {tuple(buffer.shape)} requires grad; cut it with Layout.shard, or detach it")
        if any(buffer is other for other in buffers[:i]):
            raise InputError(f"buffer {i} is given twice; expected every tensor once")
        sizes.append(buffer.size(dim))
    if len(set(sizes)) > 1:
        raise InputError(f"buffers have {sizes} tokens in their sequence dims; expected one length")
    if mask is not None:
        sizes.append(mask.seq_len)
    if isinstance(layout, Layout):
        sizes.append(layout.seq_len)
    if len(set(sizes)) > 1:
        raise InputError(f"buffers, mask and layout are of {sizes} tokens; expected one length")
    return sizes[0] if sizes else None


@torch.no_grad()
def _put(buffer: Tensor, content: Tensor) -> None:
    """Gives a tensor other memory, and tells autograd so: a backward that still needs the old content raises."""
    buffer.set_(content)  # type: ignore[call-overload]
