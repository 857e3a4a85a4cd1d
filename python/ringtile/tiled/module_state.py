"""What a forward may change that is called only to see what it computes, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ringtile.random_states import drawn_since, random_states, set_torch_states


class ModuleState:
    """Attributes and buffers of a module and of what is in it, and torch's generators."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = [(part, dict(vars(part))) for part in module.modules()]
        self._registered = [(part._buffers, dict(part._buffers)) for part, _ in self._attributes]
        self._buffers = [(x, x._version, x.detach().clone()) for x in module.buffers() if not x.is_inference()]
        captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        self._random = None if captures else random_states()  # a graph that is captured forbids to read them

    def put_back(self) -> bool:
        """Puts back what has changed since. Returns whether anything had."""
        held_before = [*self._registered, *((vars(part), was) for part, was in self._attributes)]
        changed = [(held, was) for held, was in held_before if not _same(held, was)]
        for held, was in changed:
            held.clear()
            held.update(was)
        written = [(x, value) for x, version, value in self._buffers if x._version != version]
        with torch.no_grad():
            for x, value in written:
                x.copy_(value)
        with _disable_current_modes():  # of fake tensors: generators are real
            drawn = [] if self._random is None else drawn_since(self._random)
            if self._random is not None and drawn:
                set_torch_states(self._random)
        return bool(changed or written or drawn)


def _same(held: Mapping[str, Any], was: Mapping[str, Any]) -> bool:
    return held.keys() == was.keys() and all(value is was[name] for name, value in held.items())
