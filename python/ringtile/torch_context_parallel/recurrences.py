"""ringtile's recurrences and convolution inside `context_parallel`: they take its sequence if they are given none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ringtile.sequence.sharded import ShardedSequence
from ringtile.torch_context_parallel.group_layouts import sequence_in_force
from ringtile.torch_context_parallel.scope import AttentionScope

_PARTS = ("sequence", "mask", "layout", "group")


def in_scope(
    scope: AttentionScope, function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """function(*args, **kwargs), over the causal part of the scope's sequence unless the call says which."""
    call = _signature(function).bind(*args, **kwargs)
    if all(call.arguments.get(name) is None for name in _PARTS):
        call.arguments["sequence"] = _causal_sequence(scope, call.args[0])
    return function(*call.args, **call.kwargs)


def _causal_sequence(scope: AttentionScope, x: Any) -> ShardedSequence:
    """x (B, N, ...): local tokens. Raises as `sequence_in_force` does."""
    if scope.sequence is not None:
        return scope.sequence.causal
    local_len = x.size(1) if isinstance(x, Tensor) and x.dim() > 1 else 0
    return sequence_in_force(scope.group_name, scope.layout_name, local_len).causal


@functools.cache
def _signature(function: Callable[..., Tensor]) -> inspect.Signature:
    return inspect.signature(function)
