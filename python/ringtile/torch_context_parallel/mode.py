"""The mode that turns PyTorch's attention calls into ring attention."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ringtile.errors import InputError, RefusedError
from ringtile.recurrent.functions import PUBLIC
from ringtile.torch_context_parallel.flex import FlexCall, flex_attention, flex_hop_in_ring, flex_in_mode
from ringtile.torch_context_parallel.noticing import Noticing, ShardedBuffer, caller_of
from ringtile.torch_context_parallel.recompute import Enter, keep_in_checkpoints
from ringtile.torch_context_parallel.recurrences import in_scope
from ringtile.torch_context_parallel.scope import AttentionScope
from ringtile.torch_context_parallel.sdpa import sdpa


class RingMode(TorchFunctionMode):
    """While it is entered, scaled_dot_product_attention and flex_attention on this thread run over the scope's group.

    PyTorch keeps function modes per thread and passes them on to the threads of a backward pass; a checkpointed layer
    enters the mode again when it is recomputed (recompute.py). So do ringtile's recurrences. buffers: those that
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
            return in_scope(self.scope, func, args, kwargs)
        if func is Tensor.unflatten:  # dynamo cannot trace its Python body under a mode (torch 2.13)
            return torch.unflatten(*args, **kwargs)
        if self.is_alone:
            return func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            if eager and len(args) < 4 and kwargs.get("attn_mask") is None and args:
                self.noticing.check_window(caller_of(1), args[0].size(-2), bool(kwargs.get("is_causal")))
            return sdpa(self.scope, *args, **kwargs)
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

    def again(self) -> contextlib.AbstractContextManager[Any]:
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


def keep_modes() -> None:
    """Makes checkpoints that are made inside modes enter them again when they recompute."""
    keep_in_checkpoints(_modes)


def _modes() -> list[Enter]:
    return [mode.before if mode.is_before else mode.again for mode in entered()]


@contextlib.contextmanager
def refusals_on_the_surface() -> Iterator[None]:
    """Raises the RefusedError or InputError that dynamo met in tracing a call inside, instead of dynamo's own error."""
    try:
        yield
    except torch._dynamo.exc.Unsupported as error:
        match = re.search(r"raised exception (RefusedError|InputError)\((.*)\)$", str(error), re.MULTILINE)
        if match is None:
            raise
        kind, text = match.groups()
        with contextlib.suppress(ValueError, SyntaxError):
            text = ast.literal_eval(text)
        raise {"RefusedError": RefusedError, "InputError": InputError}[kind](text) from error


def run_in_mode(mode: TorchFunctionMode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A module's forward inside a mode of its own."""
    with refusals_on_the_surface(), mode:
        return function(*args, **kwargs)
