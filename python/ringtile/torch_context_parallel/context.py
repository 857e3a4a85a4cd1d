"""`context_parallel`: PyTorch's manager, which shards buffers in place, over a `ContextParallelPlan`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

from torch import Tensor, nn

from ringtile.errors import InputError
from ringtile.first_batch.compare import Comparison
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.torch_context_parallel.buffers import as_list, pairs_of, seq_len_of
from ringtile.torch_context_parallel.first_block import FirstBlock
from ringtile.torch_context_parallel.group_layouts import Mesh, group_of
from ringtile.torch_context_parallel.plan import ContextParallelPlan, alone, warn_if_unchecked
from ringtile.transport.groups import transport_of

_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the models of first blocks that were checked


@contextlib.contextmanager
def context_parallel(
    mesh: Mesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    layout: Layout | str = "zigzag",
    mask: IntervalMask | None = None,
    scheme: str = "ring",
    check: tuple[nn.Module, Callable[[], Tensor]] | None = None,
) -> Iterator[None]:
    """Inside the block every buffer holds this rank's tokens, and PyTorch's attention functions run as a ring.

    Replaces `torch.distributed.tensor.experimental.context_parallel` and takes its arguments:

    - mesh: a DeviceMesh of one dimension, or a group.
    - buffers: tensors of the whole sequence, the same on every rank, of any dtype, with S tokens in dim
      buffer_seq_dims[i]. They are sharded in place, and restored when the block ends, also by an exception, except for
      those in no_restore_buffers. No buffer requires grad.
    - layout, mask, scheme: as of a `ContextParallelPlan`. Buffers, a Layout or a mask tell S.
    - check: a model and a function of no arguments that runs it on the buffers and returns a loss (), whose mean over
      the ranks is that of one process. Before the first block with this model it is computed on a cut of the buffers,
      whole and sharded, as `ringtile.check_first_batch` does. Without any check the first block warns.

    Run the model's forward and backward inside. Blocks may be nested (the innermost one counts) and entered by several
    threads, each with a group of its own. A group of one rank leaves attention to PyTorch unless there is a mask.
    ringtile's recurrences inside that are given no sequence run over the block's, under the causal part of its mask.

    Raises InputError before any buffer is sharded; LayoutError when the sequence is too short. RefusedError inside for
    attention that the ring cannot serve (docs/guide/pytorch.md), and at the end if random numbers were drawn.
    """
    group = group_of(mesh)
    transport = transport_of(group)
    with transport.propagate_errors("context_parallel"):
        buffers, dims = as_list(buffers, "buffers"), as_list(buffer_seq_dims, "buffer_seq_dims")
        kept = as_list(no_restore_buffers, "no_restore_buffers")
        seq_len = _seq_len(buffers, dims, kept)
        if check is not None and not (
            isinstance(check, tuple) and len(check) == 2 and isinstance(check[0], nn.Module) and callable(check[1])
        ):
            raise InputError("check is not a pair; expected (model, function), where function() returns a loss")
    if transport.world_size == 1 and mask is None and not buffers:
        with alone(group):
            yield
        return
    plan = ContextParallelPlan(group, mask, layout, seq_len=seq_len, scheme=scheme)
    if transport.world_size > 1:
        if check is not None and check[0] not in _checked:
            _checked.add(check[0])
            FirstBlock(plan, buffers, dims).check(*check, averages=True)
        warn_if_unchecked()
    with plan.in_place(buffers, dims, kept):
        yield


def check_first_batch(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor],
    mesh: Mesh,
    *,
    seq_dim: int = 1,
    layout: Layout | str = "zigzag",
    mask: IntervalMask | None = None,
    scheme: str = "ring",
    reduction: Literal["mean", "sum"] = "mean",
) -> Comparison:
    """Prove that a loss computed over the ranks of a mesh is that of one process, module by module; call it once,
    before the first step, on every rank of the mesh.

    model: its modules are compared; under DDP, FSDP2 or bare. batch: tensors of the whole sequence, the same on every
    rank, with S tokens in seq_dim: what `ContextParallelPlan.shard` takes, or the buffers of `context_parallel`, whose
    other arguments mesh, layout, mask and scheme are. loss(model, batch): runs the model on the batch, which is whole
    or sharded, and returns a loss (). reduction: "mean" if the engine averages gradients over the ranks (DDP, FSDP2),
    "sum" if it adds them.

    A cut of some 512 tokens is computed whole, whole with other rounding, and sharded. Nothing changes: no weight, no
    gradient, no buffer, no generator of random numbers. Returns a `Comparison`: the largest difference over that of
    rounding, and the number of modules.
    Raises RefusedError, naming the first module or gradient that differs, or a window of the model that the mask does
    not have; InputError; what `context_parallel` raises.
    """
    if not batch:
        raise InputError("there are no buffers; expected those of the whole sequence, which the ranks are to share")
    seq_len = seq_len_of(pairs_of(batch, dict.fromkeys(batch, seq_dim)))
    plan = ContextParallelPlan(mesh, mask, layout, seq_len=seq_len, scheme=scheme)
    return plan.check(model, loss, batch, seq_dim=seq_dim, reduction=reduction)


def _seq_len(buffers: list[Tensor], seq_dims: list[int], kept: list[Tensor]) -> int | None:
    """S of the buffers, which it checks; None if there are none."""
    if not all(any(x is buffer for buffer in buffers) for x in kept):
        raise InputError("no_restore_buffers has a tensor that is not in buffers; expected a subset")
    pairs = pairs_of(buffers, seq_dims) if buffers or seq_dims else {}
    for i, buffer in enumerate(buffers):
        if not isinstance(buffer, Tensor) or buffer.requires_grad:
            raise InputError(f"buffer {i} is a BlockMask or requires grad; use Layout.shard, or detach it")
        if any(buffer is other for other in buffers[:i]):
            raise InputError(f"buffer {i} is given twice; expected every tensor once")
    return seq_len_of(pairs) if pairs else None
