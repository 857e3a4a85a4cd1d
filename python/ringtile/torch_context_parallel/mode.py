"""The mode that turns PyTorch's attention calls into ring attention, and gives ringtile's recurrences its sequence.

Checkpointed layers are recomputed by the ring, wherever their backward runs. A checkpoint calls its function again in
the backward. If that runs after the `context_parallel` block has ended, the function would meet PyTorch's own
attention, of local tokens only. So a checkpoint that is made inside modes enters them again when it recomputes:
`torch.utils.checkpoint` hands each function that it will call again to one of two names, which are replaced once the
first mode is made. Outside of all modes both do what they did.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop
from torch.distributed.tensor import DTensor
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from ringtile.errors import RefusedError
from ringtile.recurrent.functions import PUBLIC
from ringtile.sequence.mask import IntervalMask
from ringtile.torch_context_parallel.flex import FlexCall, flex_attention, flex_hop_in_ring, flex_in_mode
from ringtile.torch_context_parallel.group_layouts import sequence_in_force
from ringtile.torch_context_parallel.scope import AttentionScope
from ringtile.torch_context_parallel.sdpa import sdpa, sdpa_of_dtensors
from ringtile.transport.groups import transport_of

Enter = Callable[[], AbstractContextManager[Any]]
# The functions that a mode does not pass on as they are, beside ringtile's recurrences and kernels as torch ops.
_SERVED = {
    *(scaled_dot_product_attention, flex_attention, flex_attention_hop, multi_head_attention_forward),
    torch.diff,
}
_KERNELS = ("scaled_dot_product_", "flash_att", "_efficient_attention", "_cudnn_attention", "varlen_attn")


class ShardedBuffer(NamedTuple):
    """Local tokens of a block, and their global content."""

    local: Tensor
    full: Tensor
    seq_dim: int


class RingMode(TorchFunctionMode):
    """While it is entered, scaled_dot_product_attention and flex_attention on this thread run over the scope's group.

    PyTorch keeps function modes per thread and passes them on to the threads of a backward pass; a checkpointed layer
    enters the mode again when it is recomputed. So do ringtile's recurrences. buffers: what the block sharded. enter:
    what enters the mode, if that is more than `with mode`. is_alone: one rank, whose attention stays PyTorch's.
    """

    def __init__(
        self,
        scope: AttentionScope,
        buffers: Sequence[ShardedBuffer] = (),
        enter: Enter | None = None,
        is_alone: bool = False,
    ) -> None:
        super().__init__()
        self.is_alone = is_alone
        self.shards_attention = not is_alone  # for streamed layers, which attend in another way
        self.scope, self.buffers = scope, buffers
        self.enter: Enter = enter or (lambda: self)

    def __torch_function__(
        self, func: Callable[..., Any], classes: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:  # dynamo can trace neither its Python body under a mode, nor find it in a set
            return torch.unflatten(*args, **kwargs)
        if func not in _SERVED and func not in PUBLIC:
            if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
                self._check_kernel(func)
            return func(*args, **kwargs)
        if func in PUBLIC:
            return _recur(self.scope, func, args, kwargs)
        if self.is_alone:
            return func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            query = args[0] if args else kwargs.get("query")
            return (sdpa_of_dtensors if isinstance(query, DTensor) else sdpa)(self.scope, *args, **kwargs)
        if func is flex_attention_hop:
            return flex_hop_in_ring(self.scope, *args, **kwargs)
        if func is flex_attention:
            return flex_in_mode(self.scope, FlexCall(*args, **kwargs))
        if func is multi_head_attention_forward:
            error = RefusedError(
                "multi_head_attention_forward (nn.MultiheadAttention) hides its attention from the ring; project q, k, "
                "v in the model and call scaled_dot_product_attention"
            )
            raise self.scope.told(error)
        steps = None
        if "prepend" in kwargs and not torch.compiler.is_compiling():
            steps = self._position_steps(args[0] if args else kwargs["input"])
        return func(*args, **kwargs) if steps is None else steps

    def _check_kernel(self, op: Any) -> None:
        """Refuse a fused attention kernel by its own name, which would attend this rank's tokens only."""
        if not self.is_alone and not torch.compiler.is_compiling() and any(name in str(op) for name in _KERNELS):
            raise self.scope.told(
                RefusedError(f"{op} attends this rank's tokens only; call nn.functional.scaled_dot_product_attention")
            )

    def _position_steps(self, position_ids: Tensor) -> Tensor | None:
        """The steps between positions, by which transformers finds packed documents: of the global sequence.

        Those of a shard jump where its runs meet. Steps of 1 make transformers call attention with is_causal and no
        mask, which is right where the positions go on by 1, or the block's mask keeps the documents apart. None: the
        positions are no buffer's, or of one rank.
        """
        found = [x for x in self.buffers if x.local.data_ptr() == position_ids.data_ptr()]
        buffer, scope = next(iter(found), None), self.scope
        if buffer is None or buffer.full.dim() > 2 or buffer.local.size(buffer.seq_dim) != position_ids.size(-1):
            return None
        if transport_of(scope.group).world_size == 1:
            return None
        positions = buffer.full.movedim(buffer.seq_dim, -1)
        documents = IntervalMask.from_position_ids(positions.reshape(-1, positions.size(-1)))
        if documents.begin.count_nonzero():
            mask = scope.sequence.causal.mask if scope.is_masked and scope.sequence is not None else None
            if mask is None or not _keeps_apart(mask, documents):
                raise scope.told(
                    RefusedError(
                        "position_ids of packed documents, which context_parallel must know of: pass it "
                        "mask=IntervalMask.from_position_ids(position_ids)"
                    )
                )
        return torch.ones_like(position_ids)

    def again(self) -> AbstractContextManager[Any]:
        """Enters the mode for a checkpoint that recomputes, if the backward does not run inside."""
        return contextlib.nullcontext() if self in entered() else self.enter()


def _keeps_apart(mask: IntervalMask, documents: IntervalMask) -> bool:
    """Whether no query of a mask attends another document; of a tree, the token before the restart of its positions."""
    if mask.key_begin is None or mask.key_end is None:
        return (mask & documents) == mask
    before = torch.arange(-1, mask.seq_len - 1)  # of each query, the key before it
    restarts = documents.begin == before + 1
    attends = (mask.begin <= before) & (before < mask.end) & (mask.key_end.roll(1, 1) > before + 1)
    return not bool((restarts & attends)[:, 1:].any())


def entered() -> list[RingMode]:
    """Those of this thread, outermost first."""
    modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return [mode for mode in modes if isinstance(mode, RingMode)]


_GENERATOR = "_checkpoint_without_reentrant_generator"


@functools.cache
def keep_modes() -> None:
    """Makes checkpoints that are made inside modes enter them again when they recompute.

    RefusedError: this torch makes checkpoints in another way.
    """
    make: Any = getattr(torch_checkpoint, _GENERATOR, None)
    if make is None:
        raise RefusedError(
            f"torch.utils.checkpoint of this torch has no {_GENERATOR}, by which checkpoints inside context_parallel "
            "are recomputed; expected torch 2.11 to 2.15"
        )
    function: Any = torch_checkpoint.CheckpointFunction
    apply = function.apply.__func__

    def kept(run: Callable[..., Any]) -> Callable[..., Any]:
        contexts = [mode.again for mode in entered()]

        def again(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for enter in contexts:
                    stack.enter_context(enter())
                return run(*args, **kwargs)

        return again if contexts else run

    setattr(torch_checkpoint, _GENERATOR, lambda run, *args, **kwargs: make(kept(run), *args, **kwargs))
    function.apply = classmethod(lambda cls, run, *args: apply(cls, kept(run), *args))


_PARTS = ("sequence", "mask", "layout", "group")


def _recur(
    scope: AttentionScope, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """A recurrence or convolution, over the causal part of the scope's sequence unless the call says which.

    Raises as `sequence_in_force` does.
    """
    call = _signature(function).bind(*args, **kwargs)
    if all(call.arguments.get(name) is None for name in _PARTS):
        x, sequence = call.args[0], scope.sequence
        if sequence is None:
            local_len = x.size(1) if isinstance(x, Tensor) and x.dim() > 1 else 0
            sequence = sequence_in_force(scope.group_name, local_len)
        call.arguments["sequence"] = sequence.causal
    return function(*call.args, **call.kwargs)


@functools.cache
def _signature(function: Callable[..., Tensor]) -> inspect.Signature:
    return inspect.signature(function)
