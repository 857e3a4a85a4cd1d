"""A block of `context_parallel` is computed on a cut of its buffers, whole and sharded, and compared.

Shape letters: B rows, S tokens of the whole sequence, N tokens of a shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringtile.errors import InputError, RefusedError
from ringtile.first_batch.compare import Comparison
from ringtile.first_batch.own import own_code
from ringtile.first_batch.proof import prove
from ringtile.first_batch.quiet import without_checkpoints, without_hooks
from ringtile.first_batch.run import LossRun, record
from ringtile.first_batch.state import State
from ringtile.first_batch.trace import ModelCall, Trace
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.torch_context_parallel.buffers import pairs_of, seq_len_of
from ringtile.torch_context_parallel.group_layouts import layout_of, unmasked_sequence
from ringtile.transport.groups import Group, transport_of

_ALONE = ""  # the group of one rank
_TOKENS = 512  # of all rows together, in a cut


class FirstBlock:
    """The arguments of a block, whose buffers are whole. enter: `context_parallel`."""

    def __init__(
        self,
        enter: Callable[..., contextlib.AbstractContextManager[None]],
        group: Group,
        buffers: Sequence[Tensor],
        dims: Sequence[int],
        layout: Layout | str,
        mask: IntervalMask | None,
        scheme: str,
    ) -> None:
        self.enter, self.group, self.buffers, self.dims = enter, group, buffers, dims
        self.layout, self.mask, self.scheme = layout, mask, scheme
        if not buffers:
            raise InputError("there are no buffers; expected those of the whole sequence, which the ranks are to share")

    def check(self, model: nn.Module, loss: Callable[[], Tensor], *, averages: bool) -> Comparison:
        """See `ringtile.check_first_batch`. loss: reads the buffers."""
        world_size = transport_of(self.group).world_size
        rows, seq_len = self._cut_size(world_size)
        mask = None if self.mask is None else _first(self.mask, seq_len)
        sequence = unmasked_sequence(layout_of(self.layout, seq_len, world_size), self.group)
        paths = {module: path for path, module in model.named_modules()}

        @contextlib.contextmanager
        def within(whole: bool, trace: Trace) -> Iterator[None]:
            group, scheme = (_ALONE, "ring") if whole else (self.group, self.scheme)
            layout: Layout | str = "contiguous" if whole else self.layout
            shape = (rows, seq_len) if whole else (rows, sequence.local_len)
            with self.enter(
                group, buffers=self.buffers, buffer_seq_dims=self.dims, layout=layout, mask=mask, scheme=scheme
            ):
                trace.begin(ModelCall(shape, None if whole else sequence, seq_len))
                yield

        def run(whole: bool, *, restores: bool = True, draws: bool = False, **options: Any) -> LossRun:
            if restores:
                state.restore(draws=not draws)
            return record(loss, paths, lambda trace: within(whole, trace), written=state.written, **options)

        full = [buffer.detach() for buffer in self.buffers]
        with without_checkpoints(model), without_hooks(model), torch.compiler.set_stance("force_eager"):
            state = State(model, own_code(model, [loss]))
            if state.unknown:
                raise RefusedError(
                    f"the loss runs more than once in this check, and {state.unknown}, which cannot be put back; "
                    f"expected a loss without it"
                )
            try:
                for buffer, dim in zip(self.buffers, self.dims, strict=True):
                    set_content(buffer, buffer.detach().narrow(dim, 0, seq_len).contiguous())
                found = prove(run, self.group, averages=averages, num_tokens=rows * seq_len)
            finally:
                for buffer, content in zip(self.buffers, full, strict=True):
                    set_content(buffer, content)
                state.restore()
        if found is None:
            raise InputError("the loss of one process is not finite; expected a batch of which it is a number")
        return found

    def _cut_size(self, world_size: int) -> tuple[int, int]:
        """Rows and tokens of a cut; all tokens where a Layout says which rank holds them."""
        seq_len = seq_len_of(pairs_of(self.buffers, self.dims))
        rows = max((x.size(0) for x, dim in zip(self.buffers, self.dims, strict=True) if dim % x.dim() == 1), default=1)
        if isinstance(self.layout, Layout):
            return rows, seq_len
        wanted = max(_TOKENS // max(rows, 1), 16 * world_size)
        return rows, min(seq_len, wanted - wanted % Layout.multiple(self.layout, world_size))


def _first(mask: IntervalMask, seq_len: int) -> IntervalMask:
    """The mask of the first tokens."""
    return IntervalMask(*(x[:, :seq_len].clamp(max=seq_len).contiguous() for x in mask.tensors))


@torch.no_grad()
def set_content(buffer: Tensor, content: Tensor) -> None:
    """Gives a tensor other memory, and tells autograd: a backward that still needs the old content raises."""
    buffer.set_(content)  # type: ignore[call-overload]
