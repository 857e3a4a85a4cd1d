"""The mode that turns PyTorch's attention calls into ring attention."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ringtile.errors import Refused
from ringtile.torch_context_parallel.flex import FlexCall, flex_attention, flex_hop_in_ring, flex_in_mode
from ringtile.torch_context_parallel.scope import AttentionScope
from ringtile.torch_context_parallel.sdpa import sdpa
from ringtile.transport.groups import transport_of


class RingMode(TorchFunctionMode):
    """While it is entered, scaled_dot_product_attention and flex_attention on this thread run over the scope's group.

    PyTorch keeps function modes per thread and passes them on to the threads of a backward pass, so a checkpointed
    layer that is recomputed inside the mode runs as a ring again.
    """

    def __init__(self, scope: AttentionScope) -> None:
        super().__init__()
        self.scope = scope

    def __torch_function__(
        self, func: Callable[..., Any], classes: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return sdpa(self.scope, *args, **kwargs)
        if func is flex_attention_hop:
            return flex_hop_in_ring(self.scope, *args, **kwargs)
        if func is flex_attention:
            return flex_in_mode(self.scope, FlexCall(*args, **kwargs))
        if func is multi_head_attention_forward:
            error = Refused(
                "multi_head_attention_forward (nn.MultiheadAttention) hides its attention from the ring; project q, k, "
                "v in the model and call scaled_dot_product_attention"
            )
            transport_of(self.scope.group_name).refuse("multi_head_attention_forward", error)
            raise error
        if func in _BACKWARDS:
            with self:
                return _body(func)(*args, **kwargs)
        if func is Tensor.unflatten:  # dynamo cannot trace its Python body under a mode (torch 2.13)
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)


_BACKWARDS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


@functools.cache
def _body(function: types.FunctionType) -> types.FunctionType:
    """The function with has_torch_function always False, so that it runs its body instead of asking the modes.

    PyTorch leaves a mode while the mode handles a function. A backward pass handled that way would recompute
    checkpointed layers outside the mode; this body can be run inside it.
    """
    unasked = {name: lambda *_: False for name in ("has_torch_function", "has_torch_function_unary")}
    body = types.FunctionType(function.__code__, {**function.__globals__, **unasked}, argdefs=function.__defaults__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body
