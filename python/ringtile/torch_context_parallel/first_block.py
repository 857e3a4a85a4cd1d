"""A loss over a `ContextParallelPlan` is computed on a cut of its tensors, whole and sharded, and compared.

Shape letters: B rows, S tokens of the whole sequence, N tokens of a shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ringtile.errors import InputError, RefusedError
from ringtile.first_batch.compare import Comparison
from ringtile.first_batch.own import own_code
from ringtile.first_batch.proof import prove
from ringtile.first_batch.quiet import without_checkpoints, without_hooks
from ringtile.first_batch.state import State
from ringtile.first_batch.trace import ModelCall, Trace
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.torch_context_parallel.buffers import pairs_of, seq_len_of
from ringtile.transport.groups import transport_of

if TYPE_CHECKING:
    from ringtile.torch_context_parallel.plan import ContextParallelPlan

compared = False  # whether this process has compared a loss, or begun to
_ALONE = ""  # the group of one rank
_TOKENS = 512  # of all rows together, in a cut


class FirstBlock:
    """A plan, and the whole tensors that a loss reads, with S tokens in their dims."""

    def __init__(self, plan: ContextParallelPlan, buffers: Sequence[Tensor], dims: Sequence[int]) -> None:
        self.plan, self.buffers, self.dims = plan, buffers, dims
        if not buffers:
            raise InputError("there are no buffers; expected those of the whole sequence, which the ranks are to share")

    def check(self, model: nn.Module, loss: Callable[[], Tensor], *, averages: bool) -> Comparison:
        """See `ringtile.check_first_batch`. loss: reads the buffers."""
        global compared
        compared, plan = True, self.plan
        with transport_of(plan.group).propagate_errors("check_first_batch"):
            _check_windows(model, plan)
        rows, seq_len = self._cut_size(transport_of(plan.group).world_size)
        mask = None if plan.mask is None else _first(plan.mask, seq_len)
        sharded, alone = (
            type(plan)(group, mask, layout, seq_len=seq_len, scheme=scheme)
            for group, layout, scheme in ((plan.group, plan.layout, plan.scheme), (_ALONE, "contiguous", "ring"))
        )
        paths = {module: path for path, module in model.named_modules()}

        @contextlib.contextmanager
        def computed(trace: Trace) -> Iterator[Tensor]:
            used = alone if trace.whole else sharded
            with used.in_place(self.buffers, self.dims):
                sequence = None if trace.whole else sharded.sequence
                trace.begin(ModelCall((rows, used.sequence.local_len), sequence, seq_len))
                yield loss()

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
                found = prove(computed, state, paths, plan.group, averages=averages, num_tokens=rows * seq_len)
            finally:
                for buffer, content in zip(self.buffers, full, strict=True):
                    set_content(buffer, content)
                state.restore()
        if found is None:
            raise InputError("the loss of one process is not finite; expected a batch of which it is a number")
        if found.refusal:
            raise RefusedError(found.refusal)
        return found

    def _cut_size(self, world_size: int) -> tuple[int, int]:
        """Rows and tokens of a cut; all tokens where a Layout says which rank holds them."""
        seq_len = seq_len_of(pairs_of(self.buffers, self.dims))
        rows = max((x.size(0) for x, dim in zip(self.buffers, self.dims, strict=True) if dim % x.dim() == 1), default=1)
        if isinstance(self.plan.layout, Layout):
            return rows, seq_len
        wanted = max(_TOKENS // max(rows, 1), 16 * world_size)
        return rows, min(seq_len, wanted - wanted % Layout.multiple(self.plan.layout, world_size))


def _first(mask: IntervalMask, seq_len: int) -> IntervalMask:
    """The mask of the first tokens."""
    return IntervalMask(*(x[:, :seq_len].clamp(max=seq_len).contiguous() for x in mask.tensors))


def _check_windows(model: nn.Module, plan: ContextParallelPlan) -> None:
    """RefusedError: a module has a window, or chunks, shorter than the sequence, that the plan's mask does not have.

    A cut may be no longer than the window, and transformers passes no mask where the window is not shorter than the
    tokens that it sees.
    """
    seq_len, mask = plan.sequence.seq_len, plan.mask
    for name, module in model.named_modules():
        kind, window = _window_of(module)
        if window is None or window >= seq_len:
            continue
        is_way = kind == "sliding_window" and mask is not None and mask.key_begin is not None  # along a tree's ways
        for each in () if mask is None else (mask, plan.sequence.causal.mask):
            if each == (each.last_keys(window) if is_way else each & getattr(IntervalMask, kind)(seq_len, window)):
                break
        else:
            words = "chunks" if kind == "chunked" else "a sliding window"
            raise RefusedError(
                f"{name} has {words} of {window} tokens, and attention gets no mask of it for the {seq_len} tokens of "
                f"the sequence; give the plan, or context_parallel, mask=IntervalMask.{kind}({seq_len}, {window}), if "
                f"all layers have it"
            )


def _window_of(module: nn.Module) -> tuple[str, Any]:
    """The sliding window of a module, or its chunk; named as the IntervalMask that it needs."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds and layer in range(len(kinds)) else "sliding_attention"
    if kind == "chunked_attention":
        return "chunked", getattr(config, "attention_chunk_size", None)
    own = getattr(module, "sliding_window", None)
    of_config = getattr(config, "sliding_window", None) if layer is not None and kind == "sliding_attention" else None
    windows = [window for window in (own, of_config) if isinstance(window, int)]
    return "sliding_window", min(windows, default=None)


@torch.no_grad()
def set_content(buffer: Tensor, content: Tensor) -> None:
    """Gives a tensor other memory, and tells autograd: a backward that still needs the old content raises."""
    buffer.set_(content)  # type: ignore[call-overload]
