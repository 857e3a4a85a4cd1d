"""A callback that runs Python's garbage collector at the same steps on every rank."""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import TrainerCallback

from ringtile.errors import InputError, shown


class CollectGarbageCallback(TrainerCallback):
    """Collects when training begins, at the start of step 0, and at the end of every `steps`-th step.

    Objects in reference cycles keep their memory until a collection. By default Python collects once it has created
    enough objects, which each rank does at a different moment, while the others wait for it in a collective.
    """

    def __init__(self, steps: int = 100) -> None:
        if type(steps) is not int or steps < 1:
            raise InputError(f"steps is {shown(steps)}; expected an integer of at least 1")
        self.steps = steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        collect()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:  # frees what wrapping the model and loading the first batch left behind
            collect()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            collect()


def collect() -> None:
    """Frees unreachable objects, then returns cached device memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
