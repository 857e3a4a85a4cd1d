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
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop
from torch.distributed.tensor import DTensor
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from ringtile.errors import RefusedError
from ringtile.recurrent.functions import PUBLIC
from ringtile.torch_context_parallel.flex import FlexCall, flex_attention, flex_hop_in_ring, flex_in_mode
from ringtile.torch_context_parallel.group_layouts import sequence_in_force
from ringtile.torch_context_parallel.noticing import Noticing, ShardedBuffer
from ringtile.torch_context_parallel.scope import AttentionScope
from ringtile.torch_context_parallel.sdpa import sdpa, sdpa_of_dtensors

Enter = Callable[[], AbstractContextManager[Any]]


class RingMode(TorchFunctionMode):
    """While it is entered, scaled_dot_product_attention and flex_attention on this thread run over the scope's group.

    PyTorch keeps function modes per thread and passes them on to the threads of a backward pass; a checkpointed layer
    enters the mode again when it is recomputed. So do ringtile's recurrences. buffers: those that
    `context_parallel` sharded. enter: what enters the mode, if that is more than `with mode`. is_alone: one rank, whose
    attention stays PyTorch's.
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
        self.is_before = False  # in a model with a language model inside, which has not begun: nothing is sharded yet
        self.scope = scope
        self.enter: Enter = enter or (lambda: self)
        self.noticing = Noticing(scope, buffers)

    def __torch_function__(
        self, func: Callable[..., Any], classes: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        eager = not torch.compiler.is_compiling()
        if self.is_before:
            return func(*args, **kwargs)
        if func in PUBLIC:
            return _recur(self.scope, func, args, kwargs)
        if func is Tensor.unflatten:  # dynamo cannot trace its Python body under a mode (torch 2.13)
            return torch.unflatten(*args, **kwargs)
        if self.is_alone:
            return func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            query = args[0] if args else kwargs.get("query")
            if eager and len(args) < 4 and kwargs.get("attn_mask") is None and isinstance(query, Tensor):
                self.noticing.check_window(sys._getframe(1), query.size(-2), bool(kwargs.get("is_causal")))
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
        if not eager:
            return func(*args, **kwargs)
        result = self.noticing.before(func, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
            self.noticing.after(func, args, result)
        return result

    def again(self) -> AbstractContextManager[Any]:
        """Enters the mode for a checkpoint that recomputes, if the backward does not run inside."""
        return contextlib.nullcontext() if self in entered() else self.enter()

    @contextlib.contextmanager
    def before(self) -> Iterator[None]:
        was, self.is_before = self.is_before, True
        try:
            yield
        finally:
            self.is_before = was


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
        contexts = [mode.before if mode.is_before else mode.again for mode in entered()]

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
            sequence = sequence_in_force(scope.group_name, scope.layout_name, local_len)
        call.arguments["sequence"] = sequence.causal
    return function(*call.args, **call.kwargs)


@functools.cache
def _signature(function: Callable[..., Tensor]) -> inspect.Signature:
    return inspect.signature(function)
