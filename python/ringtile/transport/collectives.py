"""All-gather and reduce-scatter of a sharded sequence, each the adjoint of the other: one differentiable op.

Every rank of the group calls them, forward and backward. Layouts are tensors here, int64 (R, 5): rank, global_begin,
stride, local_begin, length, rank after rank.

Shape letters: S global tokens, N local tokens, R runs of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringtile import arguments, derivatives, ops
from ringtile.errors import InputError
from ringtile.transport.agreement import HeaderValue
from ringtile.transport.groups import Group, group_name, propagate_errors, transport_of
from ringtile.transport.transport import NOT_IN_CUDA_GRAPHS, Transport


def all_gather_seq(local: Tensor, layout: Tensor, dim: int, seq_len: int, group: Group | None) -> Tensor:
    """Return the shards of all ranks in global order: size N in `dim` -> size S. Any dtype; differentiable.

    The gradient of a rank's shard is the sum over all ranks, added in rank order in at least float32.
    The last ranks may hold none. InputError: local has not N tokens in `dim`, or the layout is for more ranks.
    RingMismatchError, PeerLostError.
    """
    if not torch.compiler.is_compiling():
        with propagate_errors(group, "unshard", local):
            dim = arguments.check_dim("local", local, dim)
            if local.device.type == "meta" and transport_of(group).world_size > 1:  # would not get as far as the op
                raise InputError("local is on meta, which holds no data for the other ranks; expected a real device")
            derivatives.check_once("unshard", local)
    full: Tensor = unshard_op(local, layout, dim % local.dim(), seq_len, False, group_name(group))
    return full


_NAMES = "unshard", "gradient of unshard"


@torch.library.custom_op("ringtile::unshard", mutates_args=(), tags=NOT_IN_CUDA_GRAPHS)
def unshard_op(x: Tensor, layout: Tensor, dim: int, size: int, is_gradient: bool, group_name: str) -> Tensor:
    """Return the shards of all ranks in global order; or the adjoint: this rank's shard of x, summed over all ranks.

    The sum is in rank order, in at least float32. size: of the result in dim.
    """
    op, transport = _NAMES[is_gradient], transport_of(group_name)
    rank, ranks = transport.rank, range(transport.world_size)
    with transport.propagate_errors(op):
        runs = _runs_of_ranks(layout, int(layout[:, 4].sum()) if is_gradient else size, transport)
        lens = [int(each[:, 3].sum()) for each in runs]
        _check(op, x, dim, sum(lens) if is_gradient else lens[rank], rank)
    terms: dict[str, HeaderValue] = {
        "layout digest": ops.digest(layout, layout[:0], layout[:0]),
        "dtype": str(x.dtype),
        "dim": dim,
        "the other sizes": str([*x.shape[:dim], *x.shape[dim + 1 :]]),
    }
    with transport.agree(op, terms, x.device):
        if is_gradient:
            sends = [_resized(x, dim, num) for num in lens]
            for shard, of_rank in zip(sends, runs, strict=True):
                ops.rows_pack_([x], of_rank, dim, [shard])
        else:
            sends = [x.contiguous()] * len(ranks)
        shards = [_resized(x, dim, lens[rank if is_gradient else peer]) for peer in ranks if peer != rank]
        shards.insert(rank, sends[rank])
        # As bytes, because gloo does not know every dtype. Flat: a tensor without numbers is contiguous whatever its
        # strides, and no bytes if the last is not 1.
        there, back = (
            {peer: x.flatten().view(torch.uint8) for peer, x in enumerate(parts) if peer != rank}
            for parts in (sends, shards)
        )
        transport.exchange(there, back, op).wait()
    if not is_gradient:
        full = _resized(x, dim, size)
        for shard, of_rank in zip(shards, runs, strict=True):
            ops.rows_unpack_([full], of_rank, dim, [shard])
        return full
    total = torch.zeros_like(shards[rank], dtype=torch.promote_types(x.dtype, torch.float32))
    for shard in shards:
        total += shard
    return total.to(x.dtype)


def _runs_of_ranks(layout: Tensor, seq_len: int, transport: Transport) -> list[Tensor]:
    """Return the runs (R, 4) of each rank. The last ranks may have none."""
    world_size = int(layout[:, 0].max()) + 1 if layout.numel() else 0
    if not 0 < world_size <= transport.world_size:
        raise InputError(
            f"the layout is for {world_size} ranks, the group has {transport.world_size}; expected the same number"
        )
    ops.layout_check(layout, seq_len, world_size)
    return [layout[layout[:, 0] == rank, 1:].contiguous() for rank in range(transport.world_size)]


def _check(op: str, x: Tensor, dim: int, size: int, rank: int) -> None:
    arguments.check_device("the tensor", x)
    arguments.check_storage("the tensor", x)
    if x.size(dim) != size:
        raise InputError(f"{op} of a tensor {tuple(x.shape)}, dim {dim}; expected size {size} in dim on rank {rank}")


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    """Return an uninitialized tensor like x, of another size in dim."""
    return x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])


@unshard_op.register_fake
def _(x: Tensor, layout: Tensor, dim: int, size: int, is_gradient: bool, group_name: str) -> Tensor:
    return _resized(x, dim, size)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, int, int, bool, str], output: Tensor) -> None:
    x, layout, ctx.dim, _, ctx.is_gradient, ctx.group_name = inputs
    ctx.size = x.size(ctx.dim)
    ctx.save_for_backward(layout)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    is_gradient = not ctx.is_gradient
    with propagate_errors(ctx.group_name, _NAMES[is_gradient], upstream):
        if is_gradient:
            derivatives.check_once("the backward of unshard", upstream)
        (layout,) = ctx.saved_tensors
        of_x = unshard_op(upstream, layout, ctx.dim, ctx.size, is_gradient, ctx.group_name)
    return of_x, *[None] * 5


unshard_op.register_autograd(_backward, setup_context=_setup)
