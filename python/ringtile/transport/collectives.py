"""All-gather and reduce-scatter of a sharded sequence, each the adjoint of the other, as differentiable ops.

Every rank of the group calls them, forward and backward. Layouts are tensors here, int64 (R, 5): rank, global_begin,
stride, local_begin, length, rank after rank.

Shape letters: S global tokens, N local tokens, R runs of all ranks.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringtile import arguments, derivatives, ops
from ringtile.errors import InputError
from ringtile.transport.agreement import HeaderValue
from ringtile.transport.groups import Group, group_name, propagate_errors, transport_of
from ringtile.transport.transport import NOT_IN_CUDA_GRAPHS, Transport

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


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
    full: Tensor = _all_gather_seq(local, layout, dim % local.dim(), seq_len, group_name(group))
    return full


def _runs_of_ranks(op: str, layout: Tensor, seq_len: int, transport: Transport) -> list[Tensor]:
    """Return the runs (R, 4) of each rank. The last ranks may have none."""
    with transport.propagate_errors(op):
        world_size = int(layout[:, 0].max()) + 1 if layout.numel() else 0
        if not 0 < world_size <= transport.world_size:
            raise InputError(
                f"the layout is for {world_size} ranks, the group has {transport.world_size}; expected the same number"
            )
        ops.layout_check(layout, seq_len, world_size)
    return [layout[layout[:, 0] == rank, 1:].contiguous() for rank in range(transport.world_size)]


def _call(
    op: str, x: Tensor, dim: int, size: int, layout: Tensor, transport: Transport
) -> contextlib.AbstractContextManager[None]:
    """Check x on this rank, then that every other rank makes the same call."""
    with transport.propagate_errors(op):
        arguments.check_device("the tensor", x)
        arguments.check_storage("the tensor", x)
        if x.size(dim) != size:
            raise InputError(
                f"{op} of a tensor {tuple(x.shape)}, dim {dim}; expected size {size} in dim on rank {transport.rank}"
            )
        terms: dict[str, HeaderValue] = {
            "layout digest": ops.digest(layout, layout[:0], layout[:0]),
            "dtype": str(x.dtype),
            "dim": dim,
            "the other sizes": str([*x.shape[:dim], *x.shape[dim + 1 :]]),
        }
    return transport.agree(op, terms, x.device)


def _exchange(op: str, transport: Transport, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> None:
    """Send and receive contiguous tensors, as bytes: gloo does not know every dtype. Flat: a tensor without numbers is
    contiguous whatever its strides, and no bytes if the last is not 1."""
    as_bytes = [{peer: x.flatten().view(torch.uint8) for peer, x in messages.items()} for messages in (sends, receives)]
    transport.exchange(as_bytes[0], as_bytes[1], op).wait()


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    """Return an uninitialized tensor like x, of another size in dim."""
    return x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])


def _shard(x: Tensor, runs: Tensor, dim: int) -> Tensor:
    local = _resized(x, dim, int(runs[:, 3].sum()))
    ops.rows_pack_([x], runs, dim, [local])
    return local


@torch.library.custom_op("ringtile::all_gather_seq", mutates_args=(), tags=NOT_IN_CUDA_GRAPHS)
def _all_gather_seq(local: Tensor, layout: Tensor, dim: int, seq_len: int, group_name: str) -> Tensor:
    transport = transport_of(group_name)
    runs = _runs_of_ranks("unshard", layout, seq_len, transport)
    num_local = int(runs[transport.rank][:, 3].sum())
    with _call("unshard", local, dim, num_local, layout, transport):
        local = local.contiguous()
        peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
        shards = {peer: _resized(local, dim, int(runs[peer][:, 3].sum())) for peer in peers}
        _exchange("unshard", transport, dict.fromkeys(peers, local), shards)
    full = _resized(local, dim, seq_len)
    for rank, shard in {**shards, transport.rank: local}.items():
        ops.rows_unpack_([full], runs[rank], dim, [shard])
    return full


@torch.library.custom_op("ringtile::reduce_scatter_seq", mutates_args=(), tags=NOT_IN_CUDA_GRAPHS)
def _reduce_scatter_seq(x: Tensor, layout: Tensor, dim: int, local_len: int, group_name: str) -> Tensor:
    """Return this rank's shard, summed over all ranks in rank order, in at least float32."""
    transport = transport_of(group_name)
    seq_len = int(layout[:, 4].sum())
    runs = _runs_of_ranks("gradient of unshard", layout, seq_len, transport)
    with _call("gradient of unshard", x, dim, seq_len, layout, transport):
        own = _shard(x, runs[transport.rank], dim)
        sends = {peer: _shard(x, runs[peer], dim) for peer in range(transport.world_size) if peer != transport.rank}
        shards = {peer: torch.empty_like(own) for peer in sends}
        _exchange("gradient of unshard", transport, sends, shards)
    total = torch.zeros_like(own, dtype=torch.promote_types(x.dtype, torch.float32))
    for rank in range(transport.world_size):
        total += shards.get(rank, own)
    return total.to(x.dtype)


@_all_gather_seq.register_fake
def _(local: Tensor, layout: Tensor, dim: int, seq_len: int, group_name: str) -> Tensor:
    return _resized(local, dim, seq_len)


@_reduce_scatter_seq.register_fake
def _(x: Tensor, layout: Tensor, dim: int, local_len: int, group_name: str) -> Tensor:
    return _resized(x, dim, local_len)


def _setup(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor, int, int, str], output: Tensor) -> None:
    x, layout, ctx.dim, _, ctx.group_name = inputs  # type: ignore[attr-defined]
    ctx.size = x.size(inputs[2])  # type: ignore[attr-defined]
    ctx.save_for_backward(layout)


def _all_gather_backward(ctx: FunctionCtx, dfull: Tensor) -> tuple[Tensor, None, None, None, None]:
    with propagate_errors(ctx.group_name, "gradient of unshard", dfull):  # type: ignore[attr-defined]
        derivatives.check_once("the backward of unshard", dfull)
        (layout,) = ctx.saved_tensors  # type: ignore[attr-defined]
        dlocal: Tensor = _reduce_scatter_seq(dfull, layout, ctx.dim, ctx.size, ctx.group_name)  # type: ignore[attr-defined]
    return dlocal, None, None, None, None


def _reduce_scatter_backward(ctx: FunctionCtx, dlocal: Tensor) -> tuple[Tensor, None, None, None, None]:
    with propagate_errors(ctx.group_name, "unshard", dlocal):  # type: ignore[attr-defined]
        (layout,) = ctx.saved_tensors  # type: ignore[attr-defined]
        dx: Tensor = _all_gather_seq(dlocal, layout, ctx.dim, ctx.size, ctx.group_name)  # type: ignore[attr-defined]
    return dx, None, None, None, None


_all_gather_seq.register_autograd(_all_gather_backward, setup_context=_setup)
_reduce_scatter_seq.register_autograd(_reduce_scatter_backward, setup_context=_setup)
