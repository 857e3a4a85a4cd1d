"""`context_parallel_shard` and `context_parallel_unshard`: from global buffers to local ones and back, by function.

Shape letters: B batch, S global tokens, N local tokens, W ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, overload, runtime_checkable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ringtile.errors import InputError, RefusedError
from ringtile.sequence.layout import Layout
from ringtile.torch_context_parallel.flex import shard_block_mask
from ringtile.torch_context_parallel.group_layouts import Mesh, group_of, layout_of, note_layout, sequence_in_force
from ringtile.transport.groups import Group, transport_of

Buffer: TypeAlias = Tensor | BlockMask


@runtime_checkable
class LoadBalancer(Protocol):
    """PyTorch's load balancers."""

    def _generate_indices(self, restore: bool = False) -> Tensor | None: ...


Balance: TypeAlias = Layout | str | LoadBalancer | None


@overload
def context_parallel_shard(
    mesh: Mesh, buffers: Mapping[str, Buffer], seq_dims: Mapping[str, int], load_balancer: Balance = None
) -> dict[str, Buffer]: ...


@overload
def context_parallel_shard(
    mesh: Mesh, buffers: Sequence[Buffer], seq_dims: Sequence[int], load_balancer: Balance = None
) -> list[Buffer]: ...


def context_parallel_shard(
    mesh: Mesh,
    buffers: Sequence[Buffer] | Mapping[str, Buffer],
    seq_dims: Sequence[int] | Mapping[str, int],
    load_balancer: Balance = None,
) -> list[Buffer] | dict[str, Buffer]:
    """Return this rank's shard of every buffer, as a list; as a dict for a mapping. The buffers stay unchanged.

    buffers: tensors of one sequence, with S tokens in their dims of seq_dims; and BlockMasks of that sequence, whose
    entries in seq_dims are ignored. load_balancer: the layout, by name or as a `Layout` ("zigzag" is head-tail;
    `Layout.per_document`, `Layout.balanced`), or one of PyTorch's load balancers with one order for all batch rows;
    None is contiguous. Differentiable.
    Raises InputError, LayoutError; RefusedError for a balancer with an order per batch row.
    """
    group = group_of(mesh)
    transport = transport_of(group)
    with transport.propagate_errors("context_parallel_shard"):
        pairs = pairs_of(buffers, seq_dims)
        layout = _layout(load_balancer, seq_len_of(pairs), transport.world_size)
        note_layout(group, layout)
        shards: dict[Any, Buffer] = {}
        for name, (buffer, dim) in pairs.items():
            if isinstance(buffer, Tensor):
                shards[name] = layout.shard(buffer, dim, transport.rank)
            else:
                shards[name] = shard_block_mask(buffer, group, layout)
    return shards if isinstance(buffers, Mapping) else list(shards.values())


def context_parallel_unshard(
    mesh: Mesh, buffers: Sequence[Tensor], seq_dims: Sequence[int], load_balancer: Balance = None
) -> list[Tensor]:
    """Return the global tensors of local ones, on every rank: the inverse of `context_parallel_shard`. Differentiable.

    load_balancer: as there; None is the layout of the block around the call. By name the ranks tell each other how many
    tokens they hold. Every rank of the group calls it.
    Raises InputError, LayoutError, RingMismatchError, PeerLostError.
    """
    group = group_of(mesh)
    transport = transport_of(group)
    with transport.propagate_errors("context_parallel_unshard"):
        pairs = pairs_of(buffers, seq_dims)
        for name, (buffer, _) in pairs.items():
            if not isinstance(buffer, Tensor):
                raise InputError(f"buffer {name} is a BlockMask, which cannot be unsharded; keep the global one")
        full = []
        for buffer, dim in pairs.values():
            assert isinstance(buffer, Tensor)
            local_len = buffer.size(dim)
            if load_balancer is None:
                layout = sequence_in_force(group, local_len).layout
            elif isinstance(load_balancer, str):
                layout = layout_of(load_balancer, _tokens_of_all_ranks(local_len, group), transport.world_size)
            else:
                layout = _layout(load_balancer, local_len * transport.world_size, transport.world_size)
            full.append((layout, buffer, dim))
    return [layout.unshard(buffer, dim, group) for layout, buffer, dim in full]


def _tokens_of_all_ranks(local_len: int, group: Group) -> int:
    """S. The ranks exchange N."""
    world_size = transport_of(group).world_size
    lengths = Layout.contiguous(world_size, world_size).unshard(torch.tensor([local_len], device="cpu"), 0, group)
    return int(lengths.sum())


def as_list(items: Any, name: str) -> list[Any]:
    """The items of a list, tuple or set; none for None. InputError: it is something else, such as one tensor."""
    if items is None:
        return []
    if isinstance(items, (Tensor, str, BlockMask)) or not isinstance(items, Collection):
        raise InputError(f"{name} is a {type(items).__name__}; expected a list")
    return list(items)


def pairs_of(
    buffers: Sequence[Buffer] | Mapping[str, Buffer], seq_dims: Sequence[int] | Mapping[str, int]
) -> dict[Any, tuple[Buffer, int]]:
    """Each buffer with its sequence dim, by name or index. InputError: they are not buffers, or not dims of them."""
    named, dims = _by_name(buffers, "buffers"), _by_name(seq_dims, "seq_dims")
    if named.keys() != dims.keys() or not named:
        raise InputError(f"buffers {list(named)} and seq_dims {list(dims)}; expected one dim for every buffer")
    for name, buffer in named.items():
        if not isinstance(buffer, (Tensor, BlockMask)) or type(dims[name]) is not int:
            raise InputError(
                f"buffer {name!r} is a {type(buffer).__name__}, its sequence dim a {type(dims[name]).__name__}; "
                "expected a tensor or BlockMask, and an int"
            )
        if isinstance(buffer, Tensor) and not -buffer.dim() <= dims[name] < buffer.dim():
            raise InputError(f"buffer {name!r} is {tuple(buffer.shape)}, its sequence dim {dims[name]}; no such dim")
    return {name: (buffer, dims[name]) for name, buffer in named.items()}


def _by_name(items: Any, name: str) -> dict[Any, Any]:
    return dict(items) if isinstance(items, Mapping) else dict(enumerate(as_list(items, name)))


def seq_len_of(pairs: Mapping[Any, tuple[Buffer, int]]) -> int:
    """S. InputError: the buffers have different numbers of tokens."""
    sizes = [x.size(dim) if isinstance(x, Tensor) else x.seq_lengths[0] for x, dim in pairs.values()]
    if len(set(sizes)) > 1:
        raise InputError(f"buffers have {sizes} tokens in their sequence dims; expected one length")
    return int(sizes[0])


def _layout(balance: Balance, seq_len: int, world_size: int) -> Layout:
    if balance is None or isinstance(balance, str):
        return layout_of(balance or "contiguous", seq_len, world_size)
    if isinstance(balance, Layout):
        return balance  # local sizes do not tell S in uneven layouts; `shard` and `unshard` check them
    if not isinstance(balance, LoadBalancer):
        raise InputError(
            f"load_balancer is a {type(balance).__name__}; expected a Layout, the name of one, or one of PyTorch's"
        )
    indices = balance._generate_indices()
    return layout_of("contiguous" if indices is None else _of_order(indices, world_size), seq_len, world_size)


def _of_order(indices: Tensor, world_size: int) -> Layout:
    """The layout that gives every rank an equal chunk of the reordered sequence; indices (1 or B, S)."""
    order = indices.cpu().long()
    if bool((order != order[:1]).any()):
        raise RefusedError(
            "a load balancer with an order of its own for every batch row; a Layout is for all rows: use "
            "Layout.balanced(mask, world_size), which balances the work of all rows together"
        )
    if order.size(1) % world_size:
        raise InputError(f"a load balancer of {order.size(1)} tokens over {world_size} ranks; expected a multiple")
    ranks = []
    for chunk in order[0].chunk(world_size):
        starts = torch.cat((torch.tensor([0], device="cpu"), (chunk.diff() != 1).nonzero()[:, 0] + 1)).tolist()
        ends = [*starts[1:], len(chunk)]
        ranks.append([(int(chunk[a]), 1, a, b - a) for a, b in zip(starts, ends, strict=True)])
    return Layout.from_runs(ranks)
