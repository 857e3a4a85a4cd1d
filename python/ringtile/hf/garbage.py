"""`gc_steps`: Python's garbage collector at steps that are the same on every rank."""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import TrainerCallback


class CollectGarbage(TrainerCallback):
    """Collects when training begins, at the beginning of step 0, and at the end of every `gc_steps`-th step.

    What lies in reference cycles keeps its memory until a collection; left to itself Python collects when enough
    objects were made, on each rank at another moment, while the others wait in a collective.
    """

    def __init__(self, gc_steps: int) -> None:
        self.gc_steps = gc_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        collect()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:  # the model is wrapped and the first batch loaded: what that needed can go
            collect()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.gc_steps == 0:
            collect()


def collect() -> None:
    """Frees what is unreachable, and gives device memory that is cached and unused back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
