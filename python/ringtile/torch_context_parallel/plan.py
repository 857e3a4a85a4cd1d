"""`ContextParallelPlan`: a sequence that ranks share, from whole tensors to a loss, in one object.

Shape letters: B batch, S tokens of the whole sequence, N tokens of a shard.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringtile.errors import InputError, RefusedError
from ringtile.first_batch.compare import Comparison
from ringtile.hf.registered_attention import refuse_inside
from ringtile.scheme import Scheme
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.tiled.module_state import drawn_since, random_states
from ringtile.torch_context_parallel import first_block
from ringtile.torch_context_parallel.buffers import pairs_of, seq_len_of
from ringtile.torch_context_parallel.group_layouts import Mesh, group_of, layout_of, override, unmasked_sequence
from ringtile.torch_context_parallel.mode import RingMode, ShardedBuffer, entered, keep_modes
from ringtile.torch_context_parallel.scope import AttentionScope
from ringtile.transport.groups import Group, transport_of

logger = logging.getLogger(__name__)


class ContextParallelPlan:
    """A sequence of S tokens over the ranks of a mesh: make one for each batch, on every rank; it sends nothing.

        plan = ContextParallelPlan(mesh["cp"], IntervalMask.causal(S))
        local = plan.shard({"input_ids": input_ids, "position_ids": position_ids, "labels": shifted_labels})
        with plan.attention():
            loss = loss_of(model, local)
            loss.backward()

    - mesh: a DeviceMesh of one dimension, or a group.
    - mask: which keys each query attends, in global positions; is_causal=True of a call narrows it to its causal part.
      Without one, is_causal decides alone; then a Layout or seq_len tells S.
    - layout: "zigzag", "contiguous", "striped", or a Layout of S tokens.
    - scheme: how the ranks share the work (docs/guide/sharing.md).

    sequence is its `ShardedSequence`. Raises InputError, LayoutError.
    """

    def __init__(
        self,
        mesh: Mesh,
        mask: IntervalMask | None = None,
        layout: Layout | str = "zigzag",
        *,
        seq_len: int | None = None,
        scheme: str = "ring",
    ) -> None:
        self.group: Group = group_of(mesh)
        self.mask, self.layout, self.scheme = mask, layout, scheme
        transport = transport_of(self.group)
        with transport.propagate_errors("context_parallel"):
            found = _seq_len_of_all(seq_len, mask, layout)
            Scheme.parse(scheme).check(transport.world_size)
            if transport.world_size == 1 and isinstance(layout, str):
                layout = "contiguous"
            layout = layout_of(layout, found, transport.world_size)
            self.sequence = (
                unmasked_sequence(layout, self.group, scheme)
                if mask is None
                else ShardedSequence.of(mask, layout, self.group, scheme=scheme)
            )
        self._sharded: list[ShardedBuffer] = []

    def shard(self, batch: Mapping[str, Tensor], seq_dim: int = 1) -> dict[str, Tensor]:
        """Return this rank's tokens of each tensor of a batch, whole and the same on every rank, with S tokens in
        seq_dim. Labels are shifted before. Differentiable. Raises InputError."""
        with transport_of(self.group).propagate_errors("context_parallel"):
            pairs = pairs_of(batch, dict.fromkeys(batch, seq_dim))
            if (got := seq_len_of(pairs)) != self.sequence.seq_len:
                raise InputError(f"the batch has {got} tokens in dim {seq_dim}, the plan {self.sequence.seq_len}")
        local = {name: self.sequence.shard(x, seq_dim) for name, x in batch.items()}
        self._sharded = [ShardedBuffer(local[name], x, seq_dim) for name, x in batch.items()]
        return local

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the whole tensor of local tokens, on every rank; each calls it. Differentiable."""
        return self.sequence.unshard(x, dim)

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """Inside, PyTorch's attention functions on this thread run over all ranks, and so do ringtile's recurrences.

        Run forward and backward inside. Raises RefusedError for attention that the ring cannot serve, and at the end
        if random numbers were drawn. Warns once where nothing has been compared with one process (`check`).
        """
        if transport_of(self.group).world_size > 1:
            warn_if_unchecked()
        with self.entered(self._sharded):
            yield

    @contextlib.contextmanager
    def entered(self, buffers: list[ShardedBuffer]) -> Iterator[None]:
        """`attention`, without the warning. buffers: what holds local tokens inside."""
        if self.is_alone:
            with alone(self.group):
                yield
            return

        @contextlib.contextmanager
        def enter() -> Iterator[None]:
            with override(self.group, self.sequence), mode:
                yield

        keep_modes()
        _ = self.sequence.causal  # made here: a compiled call of attention can read it but not make it
        scope = AttentionScope(self.group, sequence=self.sequence, is_masked=self.mask is not None)
        mode = RingMode(scope, buffers, enter)
        refuse_inside(lambda: any(not each.is_alone for each in entered()))
        before = random_states()
        with enter():
            yield
        drawn, transport = drawn_since(before), transport_of(self.group)
        if drawn and transport.world_size > 1:
            with transport.propagate_errors("context_parallel"):
                raise RefusedError(
                    f"random numbers were drawn from the default generator of {' and '.join(drawn)} inside "
                    "context_parallel: dropout, noise or sampling of local tokens is not what one process draws. "
                    "Switch it off, or draw before the block and pass the numbers as buffers"
                )

    @contextlib.contextmanager
    def in_place(self, buffers: Sequence[Tensor], dims: Sequence[int], kept: Collection[Tensor] = ()) -> Iterator[None]:
        """`entered`, and the buffers hold local tokens inside; those that are kept, afterwards too."""
        full = [] if self.is_alone else [buffer.detach() for buffer in buffers]
        sharded = [ShardedBuffer(*each) for each in zip(buffers, full, dims, strict=not self.is_alone)]
        try:
            for buffer, _, dim in sharded:
                first_block.set_content(buffer, self.sequence.shard(buffer, dim))
            with self.entered(sharded):
                yield
        finally:
            for buffer, content, _ in sharded:
                if not any(buffer is other for other in kept):
                    first_block.set_content(buffer, content)

    @property
    def is_alone(self) -> bool:
        """Whether attention is left to PyTorch."""
        return self.mask is None and transport_of(self.group).world_size == 1

    def check(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor],
        batch: Mapping[str, Tensor],
        *,
        seq_dim: int = 1,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Comparison:
        """`ringtile.check_first_batch` with this plan. batch: whole, as `shard` takes it."""
        if reduction not in ("mean", "sum"):
            raise InputError(f"reduction is {reduction!r}; expected 'mean' or 'sum'")
        tensors = dict(batch)
        block = first_block.FirstBlock(self, list(tensors.values()), [seq_dim] * len(tensors))
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        return block.check(inner, lambda: loss(inner, tensors), averages=reduction == "mean")


def _seq_len_of_all(seq_len: int | None, mask: IntervalMask | None, layout: Layout | str) -> int:
    """S, of buffers, mask and layout. InputError: nothing tells it; they differ, or have other types."""
    sizes = [] if seq_len is None else [seq_len]
    if mask is not None:
        if not isinstance(mask, IntervalMask):
            raise InputError(
                f"mask is a {type(mask).__name__}; expected an IntervalMask, such as IntervalMask.causal(S)"
            )
        sizes.append(mask.seq_len)
    if not isinstance(layout, (Layout, str)):
        raise InputError(f"layout is a {type(layout).__name__}; expected a Layout, or the name of one")
    if isinstance(layout, Layout):
        sizes.append(layout.seq_len)
    if not sizes:
        raise InputError("nothing tells the length of the sequence; expected buffers or seq_len, a mask, or a Layout")
    if len(set(sizes)) > 1:
        raise InputError(f"buffers, mask and layout are of {sizes} tokens; expected one length")
    return sizes[0]


_unwarned = threading.Lock()  # taken for good by the thread that says it


def warn_if_unchecked() -> None:
    """Say once a process that no loop was compared with one process."""
    if not first_block.compared and _unwarned.acquire(blocking=False):
        logger.warning(
            "context_parallel: nothing has compared this loop with one process. Eager attention, windows, and what a "
            "model derives from a shard (positions, labels, means) go unseen; call ringtile.check_first_batch first"
        )


def alone(group: Group) -> RingMode:
    """The mode of one rank without a mask, whose attention stays PyTorch's."""
    keep_modes()
    return RingMode(AttentionScope(group), is_alone=True)
