"""What a forward may change that is called only to see what it computes, and the way back; torch's random states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


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


def random_states() -> dict[str, Tensor]:
    """Return the states of the default generators by device: the CPU, and every GPU once the process has initialized
    CUDA.

    A GPU's is a seed and an offset, which the host keeps: reading it neither waits for the device nor uses it.
    """
    states = {"cpu": torch.default_generator.get_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index, generator in enumerate(torch.cuda.default_generators):
            states[f"cuda:{index}"] = generator.get_state()
    return states


def drawn_since(before: dict[str, Tensor]) -> list[str]:
    """Return the devices whose default generators have drawn, or were seeded, since `random_states` returned
    `before`."""
    return [
        device
        for device, state in random_states().items()
        # CUDA was initialized since: a generator that has not drawn has offset 0, the second half of its state.
        if (state[8:].any() if device not in before else not torch.equal(state, before[device]))
    ]


def set_torch_states(states: dict[str, Tensor]) -> None:
    """Puts back what `random_states` returned."""
    for device, state in states.items():
        generator = torch.default_generator if device == "cpu" else torch.cuda.default_generators[int(device[5:])]
        generator.set_state(state)
