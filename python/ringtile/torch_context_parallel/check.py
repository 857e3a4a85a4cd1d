"""`ringtile.check_first_batch`: the ranks of a plain PyTorch loop compute on a first batch what one process computes.

Shape letters: B rows, S tokens of the whole sequence, N tokens of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringtile.errors import InputError
from ringtile.first_batch.compare import Comparison
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.torch_context_parallel.context import context_parallel
from ringtile.torch_context_parallel.first_block import FirstBlock
from ringtile.torch_context_parallel.group_layouts import Mesh, group_of


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
    """Prove that a loss computed inside `context_parallel` is that of one process, module by module; call it once,
    before the first step, on every rank of the mesh.

    model: its modules are compared; under DDP, FSDP2 or bare. batch: tensors of the whole sequence, the same on every
    rank, with S tokens in seq_dim: the buffers of `context_parallel`, whose other arguments mesh, layout, mask and
    scheme are. loss(model, batch): runs the model on the batch, which is whole or sharded, and returns a loss ().
    reduction: "mean" if the engine averages gradients over the ranks (DDP, FSDP2), "sum" if it adds them.

    A cut of some 512 tokens is computed whole, whole with other rounding, and sharded. Nothing changes: no weight, no
    gradient, no buffer, no generator of random numbers. Returns a `Comparison`: the largest difference over that of
    rounding, and the number of modules.
    Raises RefusedError, naming the first module or gradient that differs; InputError; what `context_parallel` raises.
    """
    if reduction not in ("mean", "sum"):
        raise InputError(f"reduction is {reduction!r}; expected 'mean' or 'sum'")
    tensors = dict(batch)
    dims = [seq_dim] * len(tensors)
    block = FirstBlock(context_parallel, group_of(mesh), list(tensors.values()), dims, layout, mask, scheme)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return block.check(inner, lambda: loss(inner, tensors), averages=reduction == "mean")
