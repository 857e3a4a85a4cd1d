"""How a group's sequence is cut, and how a call of attention deep inside a model learns of it.

PyTorch's interface cuts tensors in one place and calls attention in another, with nothing passed between them. What
was cut is therefore remembered per group (never globally): `remember` by the number of local tokens, `override` for
the span of a context. Where two cuts leave a rank with equally many tokens, the answer is an error, not a guess.

Shape letters: S global tokens, N local tokens, W ranks, R runs of all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from ..layout import Layout
from ..mask import IntervalMask
from ..transport import Group, Transport, group_name, transport_of

Mesh = DeviceMesh | Group


def group_of(mesh: Mesh) -> Group:
    """The group of a mesh of one dimension, or the group itself. InputError: the mesh has more dimensions."""
    if not isinstance(mesh, DeviceMesh):
        return mesh
    if mesh.ndim != 1:
        raise InputError(f"the mesh has dimensions {mesh.mesh_dim_names}; pass one of them, as in mesh['cp']")
    return mesh.get_group()


def layout_of(layout: Layout | str, seq_len: int, world_size: int) -> Layout:
    """A layout by its name or as it is. InputError: it is of another length or for another number of ranks."""
    if isinstance(layout, str):
        return Layout.named(layout, seq_len, world_size)
    if (layout.seq_len, layout.world_size) != (seq_len, world_size):
        raise InputError(
            f"the layout is of {layout.seq_len} tokens over {layout.world_size} ranks; expected {seq_len} over "
            f"{world_size}"
        )
    return layout


class Sequence:
    """A global sequence cut over a group: its layout and who attends whom, as the ring op takes them.

    mask: who attends whom where the call says nothing (all attend all if None). A call with is_causal meets it with
    the causal mask.
    """

    def __init__(self, layout: Layout, mask: IntervalMask | None) -> None:
        if mask is not None and mask.seq_len != layout.seq_len:
            raise InputError(f"the mask is of {mask.seq_len} tokens, the layout of {layout.seq_len}; must agree")
        self.layout, self.is_masked = layout, mask is not None
        mask = IntervalMask.full(layout.seq_len) if mask is None else mask
        causal = mask & IntervalMask.causal(layout.seq_len)
        self.layout_tensor = layout.tensor
        self.begin, self.end = mask.begin, mask.end
        self.causal_begin, self.causal_end = causal.begin, causal.end

    def arguments(self, like: Tensor, local_len: int, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        """begin, end int32 (B or 1, S) and the layout int64 (R, 5). like, local_len: see `NamedSequence`."""
        if is_causal:
            return self.causal_begin, self.causal_end, self.layout_tensor
        return self.begin, self.end, self.layout_tensor


@dataclass
class _Memory:
    """What one rank knows of its group's sequences."""

    # N -> S -> the layout, the latest cut last; None: there were two for these numbers. A wrong guess among lengths S
    # does not stay silent, because ranks compare their layouts before a key travels, and N of some rank differs.
    by_local_len: dict[int, dict[int, Layout | None]] = field(default_factory=dict)
    overrides: list[Sequence] = field(default_factory=list)


_memories: weakref.WeakKeyDictionary[Transport, _Memory] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _memory(transport: Transport) -> _Memory:
    with _lock:
        return _memories.setdefault(transport, _Memory())


def remember(group: Group, layout: Layout) -> None:
    """From now on attention over this group, on this many local tokens, is attention over this layout."""
    transport = transport_of(group)
    known = _memory(transport).by_local_len.setdefault(layout.local_len(transport.rank), {})
    known[layout.seq_len] = layout if known.pop(layout.seq_len, layout) == layout else None


@contextlib.contextmanager
def override(group: Group, sequence: Sequence) -> Iterator[None]:
    """Inside, attention over this group is attention over this sequence."""
    overrides = _memory(transport_of(group)).overrides
    overrides.append(sequence)
    try:
        yield
    finally:
        overrides.remove(sequence)


def layout_for(group: Group, local_len: int, name: str = "") -> Layout:
    """The layout in force for so many local tokens, named or remembered. InputError: there is none, or two."""
    transport = transport_of(group)
    memory = _memory(transport)
    if memory.overrides:
        return memory.overrides[-1].layout
    if name:
        return Layout.named(name, local_len * transport.world_size, transport.world_size)
    known = memory.by_local_len.get(local_len, {0: None})
    seq_len, layout = next(reversed(known.items()))
    if layout is not None:
        return layout
    found = f"{seq_len} tokens in two layouts" if seq_len else "nothing"
    raise InputError(
        f"rank {transport.rank} has {local_len} local tokens, and context_parallel_shard has cut {found} "
        "to that size for this group; name it: ContextParallel(..., layout=...) or context_parallel(..., layout=...)"
    )


def check_cut(group: Group, layout: Layout) -> None:
    """InputError where the tokens of this group, of that length, are known to be cut in another layout."""
    transport = transport_of(group)
    memory = _memory(transport)
    if memory.overrides:
        cut: Layout | None = memory.overrides[-1].layout
    else:
        cut = memory.by_local_len.get(layout.local_len(transport.rank), {}).get(layout.seq_len)
    if cut is not None and cut != layout:
        raise InputError(
            "the BlockMask was made for another layout than the one in which the tokens were cut; pass that one to "
            "create_cp_block_mask(..., load_balancer=...)"
        )


@torch.library.custom_op("ringtile::sequence_of", mutates_args=())
def sequence_of(
    like: Tensor, layout: str, local_len: int, is_causal: bool, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """begin, end int32 (1, S) and the layout int64 (R, 5) of the sequence in force on a group.

    layout: a name, of a sequence of which all ranks hold local_len tokens; "" for what was cut last. An op, because it
    looks at what no compiled graph may hold on to; `like` (any tensor) keeps it in the place where it was called.
    """
    memory = _memory(transport_of(group_name))
    if memory.overrides:
        arguments = memory.overrides[-1].arguments(like, local_len, is_causal)
    else:
        found = layout_for(group_name, local_len, layout)
        arguments = Sequence(found, None).arguments(like, local_len, is_causal)
    begin, end, runs = arguments
    return begin.clone(), end.clone(), runs.clone()


@sequence_of.register_fake
def _(like: Tensor, layout: str, local_len: int, is_causal: bool, group_name: str) -> tuple[Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    rows, seq_len, runs = (context.new_dynamic_size() for _ in range(3))
    bounds = torch.empty(rows, seq_len, dtype=torch.int32)
    return bounds, torch.empty_like(bounds), torch.empty(runs, 5, dtype=torch.int64)


class NamedSequence:
    """Stands for a `Sequence` whose length only the call of attention tells, from its local tokens."""

    def __init__(self, layout: str, group: Group) -> None:
        self.layout_name, self.group_name = layout, group_name(group)

    def arguments(self, like: Tensor, local_len: int, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        begin, end, runs = sequence_of(like, self.layout_name, local_len, is_causal, self.group_name)
        return begin, end, runs
