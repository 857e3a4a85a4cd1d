"""Which of torch's default generators have drawn: what a shard draws is not what the full sequence would."""

from __future__ import annotations

import torch
from torch import Tensor


def random_states() -> dict[str, Tensor]:
    """The states of the default generators by device: the CPU, and every GPU once the process has initialized CUDA.

    A GPU's is a seed and an offset, which the host keeps: reading it neither waits for the device nor uses it.
    """
    states = {"cpu": torch.default_generator.get_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index, generator in enumerate(torch.cuda.default_generators):
            states[f"cuda:{index}"] = generator.get_state()
    return states


def drawn_since(before: dict[str, Tensor]) -> list[str]:
    """The devices whose default generators have drawn, or were seeded, since `random_states` returned `before`."""
    return [
        device
        for device, state in random_states().items()
        # CUDA was initialized since: a generator that has not drawn has offset 0, the second half of its state.
        if (state[8:].any() if device not in before else not torch.equal(state, before[device]))
    ]
