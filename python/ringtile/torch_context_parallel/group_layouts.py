"""The sequence in force for a group: that of the innermost block, which attention deep inside a model finds.

`context_parallel_shard` leaves a note of what it gave a rank, by which a BlockMask of another layout is refused; no
call finds its layout there.

Shape letters: S global tokens, N local tokens, W ranks, R runs of all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringtile.errors import InputError, RefusedError
from ringtile.sequence.layout import Layout, named_layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.groups import Group, group_of_mesh, transport_of
from ringtile.transport.transport import NOT_IN_CUDA_GRAPHS, Transport, VirtualGroup

Mesh = DeviceMesh | Group


def group_of(mesh: Mesh) -> Group:
    """Return the group of a mesh of one dimension, or the group itself. InputError: anything else."""
    if not isinstance(mesh, (dist.ProcessGroup, DeviceMesh, VirtualGroup, str)):
        raise InputError(
            f"mesh is a {type(mesh).__name__}; expected a DeviceMesh of one dimension, as in mesh['cp'], or a group"
        )
    return group_of_mesh(mesh)


def layout_of(layout: Layout | str, seq_len: int, world_size: int) -> Layout:
    """The layout itself, or the one of that name. InputError: it has another length or number of ranks."""
    if isinstance(layout, str):
        return named_layout(layout, seq_len, world_size)
    if not isinstance(layout, Layout):
        raise InputError(f"layout is a {type(layout).__name__}; expected a Layout, or the name of one")
    if (layout.seq_len, layout.world_size) != (seq_len, world_size):
        raise InputError(
            f"the layout is of {layout.seq_len} tokens over {layout.world_size} ranks; expected {seq_len} over "
            f"{world_size}"
        )
    return layout


def unmasked_sequence(layout: Layout, group: Group, scheme: str = "ring") -> ShardedSequence:
    """The sequence in which every query attends every key; the same object for equal layouts and schemes."""
    return ShardedSequence.of(IntervalMask.whole(layout.seq_len, causal=False), layout, group, scheme=scheme)


@dataclass
class _Memory:
    """Of one rank for a group: what it sharded by function, and the sequences of the blocks that it is in."""

    sharded: dict[tuple[int, int], Layout | None] = field(default_factory=dict)  # by N and S; None: in two layouts
    blocks: list[ShardedSequence] = field(default_factory=list)  # the innermost one last


_memories: weakref.WeakKeyDictionary[Transport, _Memory] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _memory(transport: Transport) -> _Memory:
    with _lock:
        return _memories.setdefault(transport, _Memory())


def note_layout(group: Group, layout: Layout) -> None:
    """Remember that tokens of this group were sharded so."""
    transport = transport_of(group)
    sharded, size = _memory(transport).sharded, (layout.local_len(transport.rank), layout.seq_len)
    sharded[size] = layout if sharded.get(size, layout) == layout else None


@contextlib.contextmanager
def override(group: Group, sequence: ShardedSequence) -> Iterator[None]:
    """Inside, this sequence is in force on its group."""
    blocks = _memory(transport_of(group)).blocks
    blocks.append(sequence)
    try:
        yield
    finally:
        del blocks[next(i for i in reversed(range(len(blocks))) if blocks[i] is sequence)]


# ---- looking up ---------------------------------------------------------------------------------


def sequence_in_force(group: Group, local_len: int) -> ShardedSequence:
    """The sequence of the innermost block; of one rank without a block, unmasked and of local_len tokens.

    Raises InputError where there is no block, after telling the other ranks, which may be in one.
    """
    transport = transport_of(group)
    if blocks := _memory(transport).blocks:
        return blocks[-1]
    if transport.world_size > 1:
        error = InputError(
            f"rank {transport.rank} has {local_len} local tokens of an unknown layout; expected the call inside `with "
            "plan.attention():` of a ContextParallelPlan, which knows it, or context_parallel_unshard(..., "
            "load_balancer='zigzag')"
        )
        raise transport.refuse("attention", error)
    return unmasked_sequence(named_layout("contiguous", local_len, 1), group)


@torch.library.custom_op("ringtile::sequence_of", mutates_args=(), tags=NOT_IN_CUDA_GRAPHS)
def sequence_of(like: Tensor, local_len: int, is_causal: bool, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    """`sequence_in_force` for graphs: its mask (1 or 2, B or 1, S) and layout int64 (R, 5).

    A graph must look the sequence up on every run instead of keeping the one it was traced with. like: any tensor
    computed before the call; it keeps the op in its place in the graph.
    """
    _check_ring(group_name, "a compiled call of attention under ContextParallel", "attention")
    sequence = sequence_in_force(group_name, local_len)
    if is_causal:
        sequence = sequence.causal
    begin, end = (bound.reshape(-1, *bound.shape[-2:]).clone() for bound in (sequence.begin, sequence.end))
    return begin, end, sequence.layout_tensor.clone()


@sequence_of.register_fake
def _(like: Tensor, local_len: int, is_causal: bool, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    sides, rows, seq_len, runs = (context.new_dynamic_size() for _ in range(4))
    bounds = torch.empty(sides, rows, seq_len, dtype=torch.int32, device="cpu")
    return bounds, torch.empty_like(bounds), torch.empty(runs, 5, dtype=torch.int64, device="cpu")


def _check_ring(group: Group, what: str, op: str) -> None:
    """RefusedError: the block around has another scheme, but this is a ring whatever the block says."""
    transport = transport_of(group)
    blocks = _memory(transport).blocks
    if blocks and (scheme := blocks[-1].scheme) != "ring":
        error = RefusedError(
            f"{what} runs as a ring, but the context_parallel block around it has the scheme {scheme}; expected ring"
        )
        raise transport.refuse(op, error)


def check_layout(group: Group, layout: Layout) -> None:
    """InputError: the group's tokens were sharded in another layout than this one of a BlockMask.

    RefusedError: the block around has another scheme than the ring.
    """
    _check_ring(group, "flex_attention of local tokens", "flex_attention")
    transport = transport_of(group)
    memory = _memory(transport)
    if memory.blocks:
        known: Layout | None = memory.blocks[-1].layout
    else:  # gave context_parallel_shard as many tokens of as many in another layout alone?
        known = memory.sharded.get((layout.local_len(transport.rank), layout.seq_len))
    if known is not None and known != layout:
        error = InputError(
            "the BlockMask was made for another layout (create_cp_block_mask(..., load_balancer=...)) than that of the "
            f"{known.seq_len} tokens of the block, or of context_parallel_shard; expected one layout"
        )
        raise transport.refuse("flex_attention", error)
