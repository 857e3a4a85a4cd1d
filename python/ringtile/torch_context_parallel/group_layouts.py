"""The layouts in which a group's tokens were sharded, remembered so that attention deep inside a model finds them.

PyTorch's interface shards tensors in one place, calls attention in another, and passes nothing between the two. So a
rank remembers, for each group, which layout gave it which number of tokens (`remember_layout`), and for the span of a
`context_parallel` block the whole sequence (`override`). If two layouts of one length gave it the same number of
tokens, looking it up raises an error: there is no guess.

Shape letters: S global tokens, N local tokens, W ranks, R runs of all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringtile.errors import InputError
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.groups import Group, transport_of
from ringtile.transport.transport import Transport

Mesh = DeviceMesh | Group


def group_of(mesh: Mesh) -> Group:
    """The group of a mesh of one dimension, or the group itself. InputError: the mesh has more dimensions."""
    if not isinstance(mesh, DeviceMesh):
        return mesh
    if mesh.ndim != 1:
        raise InputError(f"the mesh has dimensions {mesh.mesh_dim_names}; pass one of them, as in mesh['cp']")
    return mesh.get_group()


def layout_of(layout: Layout | str, seq_len: int, world_size: int) -> Layout:
    """The layout itself, or the one of that name. InputError: it has another length or number of ranks."""
    if isinstance(layout, str):
        return _named_layout(layout, seq_len, world_size)
    if (layout.seq_len, layout.world_size) != (seq_len, world_size):
        raise InputError(
            f"the layout is of {layout.seq_len} tokens over {layout.world_size} ranks; expected {seq_len} over "
            f"{world_size}"
        )
    return layout


def unmasked_sequence(layout: Layout, group: Group) -> ShardedSequence:
    """The sequence in which every query attends every key; the same object for equal layouts."""
    return ShardedSequence.of(_full_mask(layout.seq_len), layout, group)


# Cached, so that finding the sequence in force again costs nothing that grows with S.
@functools.lru_cache(maxsize=64)
def _named_layout(name: str, seq_len: int, world_size: int) -> Layout:
    return Layout.named(name, seq_len, world_size)


@functools.lru_cache(maxsize=16)
def _full_mask(seq_len: int) -> IntervalMask:
    return IntervalMask.full(seq_len)


# ---- remembering --------------------------------------------------------------------------------


@dataclass
class _Memory:
    """The layouts that one rank remembers for a group, and the sequences of the blocks that it is in."""

    # N -> S -> the layout, the last one used at the end; None if two layouts have these N and S. Among lengths S with
    # one N the last one is a guess. A wrong guess is found: N of some rank differs, and ranks compare layouts first.
    layouts: dict[int, dict[int, Layout | None]] = field(default_factory=dict)
    overrides: list[ShardedSequence] = field(default_factory=list)


_memories: weakref.WeakKeyDictionary[Transport, _Memory] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _memory(transport: Transport) -> _Memory:
    with _lock:
        return _memories.setdefault(transport, _Memory())


def remember_layout(group: Group, layout: Layout) -> None:
    """Puts this layout in force for calls over this group on as many local tokens as it gives this rank."""
    transport = transport_of(group)
    by_seq_len = _memory(transport).layouts.setdefault(layout.local_len(transport.rank), {})
    by_seq_len[layout.seq_len] = layout if by_seq_len.pop(layout.seq_len, layout) == layout else None


@contextlib.contextmanager
def override(sequence: ShardedSequence) -> Iterator[None]:
    """Inside, this sequence is in force on its group, in place of any remembered layout."""
    overrides = _memory(sequence.transport).overrides
    overrides.append(sequence)
    try:
        yield
    finally:
        overrides.remove(sequence)


# ---- looking up ---------------------------------------------------------------------------------


def layout_in_force(group: Group, layout_name: str, local_len: int) -> Layout:
    """The layout of a call on local_len local tokens: the override's, the named one, or the remembered one.

    layout_name: of a layout that gives every rank local_len tokens; "" for the remembered one. Raises InputError when
    there is none, or two; LayoutError.
    """
    transport = transport_of(group)
    memory = _memory(transport)
    if memory.overrides:
        return memory.overrides[-1].layout
    if layout_name:
        return _named_layout(layout_name, local_len * transport.world_size, transport.world_size)
    by_seq_len = memory.layouts.get(local_len)
    if by_seq_len is None:
        found = "sharded no sequence to that size"
    else:
        seq_len, layout = next(reversed(by_seq_len.items()))
        if layout is not None:
            return layout
        found = f"sharded {seq_len} tokens to that size in two layouts"
    raise InputError(
        f"rank {transport.rank} has {local_len} local tokens, but context_parallel_shard {found} over this group; name "
        "the layout: ContextParallel(..., layout=...) or context_parallel(..., layout=...)"
    )


def sequence_in_force(group: Group, layout_name: str, local_len: int) -> ShardedSequence:
    """The sequence of a call on local_len local tokens: the override, or unmasked in `layout_in_force`. O(1) if known.

    Raises as `layout_in_force` does.
    """
    overrides = _memory(transport_of(group)).overrides
    return overrides[-1] if overrides else unmasked_sequence(layout_in_force(group, layout_name, local_len), group)


@torch.library.custom_op("ringtile::sequence_of", mutates_args=())
def sequence_of(
    like: Tensor, layout: str, local_len: int, is_causal: bool, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`sequence_in_force` for graphs: its begin, end int32 (B or 1, S) and layout int64 (R, 5).

    A graph must look the sequence up on every run instead of keeping the one it was traced with. like: any tensor
    computed before the call; it keeps the op in its place in the graph.
    """
    sequence = sequence_in_force(group_name, layout, local_len)
    if is_causal:
        sequence = sequence.causal
    return sequence.begin.clone(), sequence.end.clone(), sequence.layout_tensor.clone()


@sequence_of.register_fake
def _(like: Tensor, layout: str, local_len: int, is_causal: bool, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    rows, seq_len, runs = (context.new_dynamic_size() for _ in range(3))
    bounds = torch.empty(rows, seq_len, dtype=torch.int32, device="cpu")
    return bounds, torch.empty_like(bounds), torch.empty(runs, 5, dtype=torch.int64, device="cpu")


def check_layout(group: Group, layout: Layout) -> None:
    """InputError: the group's tokens were sharded in another layout than this one of a BlockMask."""
    transport = transport_of(group)
    memory = _memory(transport)
    if memory.overrides:
        known: Layout | None = memory.overrides[-1].layout
    else:
        known = memory.layouts.get(layout.local_len(transport.rank), {}).get(layout.seq_len)
    if known is not None and known != layout:
        raise InputError(
            "the BlockMask was made for another layout than the tokens were sharded in; pass the tokens' layout: "
            "create_cp_block_mask(..., load_balancer=...)"
        )
