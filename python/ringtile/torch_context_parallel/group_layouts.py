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
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringtile.errors import InputError, RefusedError, RingtileError
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.groups import Group, group_of_mesh, transport_of
from ringtile.transport.loopback import LoopbackGroup
from ringtile.transport.transport import NOT_IN_CUDA_GRAPHS, Transport

Mesh = DeviceMesh | Group


def group_of(mesh: Mesh) -> Group:
    """Return the group of a mesh of one dimension, or the group itself. InputError: anything else."""
    if not isinstance(mesh, (dist.ProcessGroup, DeviceMesh, LoopbackGroup, str)):
        raise InputError(
            f"mesh is a {type(mesh).__name__}; expected a DeviceMesh of one dimension, as in mesh['cp'], or a group"
        )
    return group_of_mesh(mesh)


def layout_of(layout: Layout | str, seq_len: int, world_size: int) -> Layout:
    """The layout itself, or the one of that name. InputError: it has another length or number of ranks."""
    if isinstance(layout, str):
        return _named_layout(layout, seq_len, world_size)
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
    return ShardedSequence.of(_full_mask(layout.seq_len), layout, group, scheme=scheme)


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

    # Of context_parallel_shard. N -> S -> the layout, the last one used at the end; None if two layouts have these N
    # and S. Among lengths S with one N the last one is a guess. A wrong guess is found: N of some rank differs, and
    # ranks compare layouts first.
    layouts: dict[int, dict[int, Layout | None]] = field(default_factory=dict)
    of_blocks: dict[int, dict[int, Layout | None]] = field(default_factory=dict)  # the same, of `context_parallel`
    overrides: list[ShardedSequence | str] = field(default_factory=list)  # the innermost one last


_memories: weakref.WeakKeyDictionary[Transport, _Memory] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _memory(transport: Transport) -> _Memory:
    with _lock:
        return _memories.setdefault(transport, _Memory())


def remember_layout(group: Group, layout: Layout) -> None:
    """Puts this layout in force for calls over this group on as many local tokens as it gives this rank."""
    transport = transport_of(group)
    _remember(_memory(transport).layouts, layout, transport.rank)


def _remember(layouts: dict[int, dict[int, Layout | None]], layout: Layout, rank: int) -> None:
    by_seq_len = layouts.setdefault(layout.local_len(rank), {})
    known = by_seq_len.pop(layout.seq_len, layout)
    by_seq_len[layout.seq_len] = layout if known is layout or known == layout else None


@contextlib.contextmanager
def override(group: Group, sequence: ShardedSequence | str) -> Iterator[None]:
    """Inside, this sequence is in force on its group, in place of any remembered layout; or the layout of that name,
    for calls of any length. Afterwards `layout_to_unshard` still knows the layout."""
    transport = transport_of(group)
    memory = _memory(transport)
    if isinstance(sequence, ShardedSequence):
        _remember(memory.of_blocks, sequence.layout, transport.rank)
    memory.overrides.append(sequence)
    try:
        yield
    finally:
        del memory.overrides[_last_index(memory.overrides, sequence)]


def _last_index(items: list[ShardedSequence | str], item: ShardedSequence | str) -> int:
    return next(i for i in reversed(range(len(items))) if items[i] is item)


# ---- looking up ---------------------------------------------------------------------------------


def layout_in_force(group: Group, layout_name: str, local_len: int) -> Layout:
    """The layout of a call on local_len local tokens: the innermost block's, the named one, or the remembered one.

    layout_name: of a layout that gives every rank local_len tokens; "" for the remembered one. Raises InputError when
    there is none, or two; LayoutError.
    """
    transport = transport_of(group)
    memory = _memory(transport)
    if memory.overrides:
        return _of_block(memory, transport, local_len)
    if layout_name:
        return _named_layout(layout_name, local_len * transport.world_size, transport.world_size)
    return _remembered(transport, memory.layouts.get(local_len), local_len, _NAME_IN_CALL)


_NAME_IN_CALL = "name the layout: ContextParallel(..., layout=...) or context_parallel(..., layout=...)"
_NAME_IN_UNSHARD = "name the layout: context_parallel_unshard(..., load_balancer='zigzag'), or a Layout"


def _of_block(memory: _Memory, transport: Transport, local_len: int) -> Layout:
    """The layout of the innermost block. A block that names no length is about tokens of any length; InputError where
    it names another layout than the block around it, which may have sharded these very tokens."""
    innermost, world_size = memory.overrides[-1], transport.world_size
    if isinstance(innermost, ShardedSequence):
        return innermost.layout
    layout = _named_layout(innermost, local_len * world_size, world_size)
    if not isinstance(memory.overrides[0], str):
        around = next(block for block in reversed(memory.overrides) if isinstance(block, ShardedSequence)).layout
        if around != layout and around.local_len(transport.rank) == local_len:
            raise InputError(
                f"a context_parallel block of layout {innermost!r} inside one whose layout is another, and rank "
                f"{transport.rank} has {local_len} tokens in both; pass the inner block a Layout, such as "
                f"Layout.{innermost}({layout.seq_len}, {world_size}), or the layout of the outer one"
            )
    return layout


def _remembered(
    transport: Transport, by_seq_len: dict[int, Layout | None] | None, local_len: int, remedy: str
) -> Layout:
    if by_seq_len is None:
        found = "sharded no sequence to that size"
    else:
        seq_len, layout = next(reversed(by_seq_len.items()))
        if layout is not None:
            return layout
        found = f"sharded {seq_len} tokens to that size in two layouts"
    raise InputError(
        f"rank {transport.rank} has {local_len} local tokens, but context_parallel_shard {found} over this group; "
        f"{remedy}"
    )


def layout_to_unshard(group: Group, local_len: int) -> Layout:
    """`layout_in_force`, and if no block is entered and nothing was sharded to that size, the layout of ended blocks.

    InputError: there is none, or both are known and differ.
    """
    transport = transport_of(group)
    memory = _memory(transport)
    if memory.overrides:
        return _of_block(memory, transport, local_len)
    found = [
        _remembered(transport, layouts[local_len], local_len, _NAME_IN_UNSHARD)
        for layouts in (memory.layouts, memory.of_blocks)
        if local_len in layouts
    ]
    if len(found) == 2 and found[0] != found[1]:
        raise InputError(
            f"rank {transport.rank} has {local_len} local tokens, and context_parallel_shard and context_parallel "
            f"sharded to that size in two layouts over this group; {_NAME_IN_UNSHARD}"
        )
    return found[0] if found else _remembered(transport, None, local_len, _NAME_IN_UNSHARD)


def sequence_in_force(group: Group, layout_name: str, local_len: int) -> ShardedSequence:
    """The sequence of a call on local_len local tokens: the override, or unmasked in `layout_in_force`. O(1) if known.

    Raises as `layout_in_force` does, after telling the other ranks, which may have found theirs.
    """
    transport = transport_of(group)
    overrides = _memory(transport).overrides
    if overrides and isinstance(overrides[-1], ShardedSequence):
        return overrides[-1]
    try:
        return unmasked_sequence(layout_in_force(group, layout_name, local_len), group)
    except RingtileError as error:
        transport.fail("attention", error)
        raise


@torch.library.custom_op("ringtile::sequence_of", mutates_args=(), tags=NOT_IN_CUDA_GRAPHS)
def sequence_of(
    like: Tensor, layout: str, local_len: int, is_causal: bool, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`sequence_in_force` for graphs: its mask (1 or 2, B or 1, S) and layout int64 (R, 5).

    A graph must look the sequence up on every run instead of keeping the one it was traced with. like: any tensor
    computed before the call; it keeps the op in its place in the graph.
    """
    _check_ring(group_name, "a compiled call of attention under ContextParallel", "attention")
    sequence = sequence_in_force(group_name, layout, local_len)
    if is_causal:
        sequence = sequence.causal
    begin, end = (bound.reshape(-1, *bound.shape[-2:]).clone() for bound in (sequence.begin, sequence.end))
    return begin, end, sequence.layout_tensor.clone()


@sequence_of.register_fake
def _(like: Tensor, layout: str, local_len: int, is_causal: bool, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    sides, rows, seq_len, runs = (context.new_dynamic_size() for _ in range(4))
    bounds = torch.empty(sides, rows, seq_len, dtype=torch.int32, device="cpu")
    return bounds, torch.empty_like(bounds), torch.empty(runs, 5, dtype=torch.int64, device="cpu")


def _check_ring(group: Group, what: str, op: str) -> None:
    """RefusedError: the block around has another scheme, but this is a ring whatever the block says."""
    transport = transport_of(group)
    overrides = _memory(transport).overrides
    scheme = overrides[-1].scheme if overrides and isinstance(overrides[-1], ShardedSequence) else "ring"
    if scheme != "ring":
        error = RefusedError(
            f"{what} runs as a ring, but the context_parallel block around it has the scheme {scheme}; expected ring"
        )
        transport.fail(op, error)
        raise error


def check_layout(group: Group, layout: Layout) -> None:
    """InputError: the group's tokens were sharded in another layout than this one of a BlockMask.

    RefusedError: the block around has another scheme than the ring.
    """
    _check_ring(group, "flex_attention of local tokens", "flex_attention")
    transport = transport_of(group)
    memory = _memory(transport)
    local_len = layout.local_len(transport.rank)
    if memory.overrides:
        known: Layout | None = _of_block(memory, transport, local_len)
    else:
        known = memory.layouts.get(local_len, {}).get(layout.seq_len)
    if known is not None and known != layout:
        error = InputError(
            "the BlockMask was made for another layout than the tokens were sharded in; pass the tokens' layout: "
            "create_cp_block_mask(..., load_balancer=...)"
        )
        transport.fail("flex_attention", error)
        raise error
