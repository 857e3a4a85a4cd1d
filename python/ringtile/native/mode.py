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

from ..errors import Refused
from ..transport import Group, group_name, transport_of
from .attention import sdpa
from .flex import flex_attention, flex_hop_in_ring, flex_in_mode
from .sharding import NamedSequence, Sequence


class RingMode(TorchFunctionMode):
    """While it is entered, scaled_dot_product_attention and flex_attention on this thread run over all of `group`.

    PyTorch keeps function modes per thread and hands them on to the threads that run a backward pass, so a
    checkpointed layer that is computed again inside the mode meets it again.
    """

    def __init__(self, group: Group, sequence: Sequence | NamedSequence) -> None:
        super().__init__()
        self.group_name = group_name(group)
        self.sequence = sequence

    def __torch_function__(
        self, func: Callable[..., Any], classes: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return sdpa(self.group_name, self.sequence, *args, **kwargs)
        if func is flex_attention_hop:
            return flex_hop_in_ring(self.group_name, self.sequence, *args, **kwargs)
        if func is flex_attention:
            return flex_in_mode(self.group_name, self.sequence, *args, **kwargs)
        if func is multi_head_attention_forward:
            error = Refused(
                "multi_head_attention_forward (nn.MultiheadAttention) hides its attention from the ring; project q, k, "
                "v in the model and call scaled_dot_product_attention"
            )
            transport_of(self.group_name).refuse("multi_head_attention_forward", error)
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
    """The function without its first lines, which ask whether a mode wants to handle it.

    A mode is put aside while it handles a function. A backward pass would then compute checkpointed layers again
    without it; run like this, inside the mode, it keeps it.
    """
    unasked = {name: lambda *_: False for name in ("has_torch_function", "has_torch_function_unary")}
    body = types.FunctionType(function.__code__, {**function.__globals__, **unasked}, argdefs=function.__defaults__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body
