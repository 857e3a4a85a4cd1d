"""Puts back what a forward pass may change in a model and in the object that computes its loss."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from ringtile.first_batch.reach import Reach
from ringtile.random_states import all_random_states, set_random_states


class Unchanged:
    """The state of all that a model's forward pass can reach, when this is made; `restore` puts it back, in the same
    objects, as often as is asked.

    Of modules: buffers, tensors and numbers, which are in training mode. Of the user's own code (modules, hooks,
    losses): whatever its attributes, closures and global variables hold, objects of the user's classes too. Random
    numbers: torch's, Python's and numpy's, and generators that are held. Parameters and their gradients are not touched
    by a pass without a step, and are left alone; so are objects of libraries.
    loss: a function of the user's. numbers_of: an object whose attributes that are numbers may change.
    unknown: something held that cannot be put back (an open file, an iterator), in words; "" if there is nothing.
    """

    def __init__(self, model: nn.Module, *, loss: object = None, numbers_of: object = None) -> None:
        self._reach = Reach()
        self._reach.add(model, type(model).__name__)
        self._reach.add(loss, "the loss")
        if numbers_of is not None:
            self._reach.add_numbers(numbers_of)
        self.unknown = self._reach.unknown
        self._random = all_random_states()

    def restore(self) -> None:
        """Raises RefusedError if a tensor that was too large to copy has changed."""
        self._reach.restore()
        set_random_states(self._random)


@contextlib.contextmanager
def without_checkpoints(model: nn.Module) -> Iterator[None]:
    """Inside, no layer is computed again in a backward, and no module's backward hook runs.

    autograd.grad does not pass reentrant checkpoints. DeepSpeed's backward hooks would reduce gradients that are not.
    """
    modules = list(model.modules())
    switched = [module for module in modules if getattr(module, "gradient_checkpointing", False) is True]
    wrapped = [module for module in modules if isinstance(module, CheckpointWrapper)]
    functions: list[Any] = [module.checkpoint_fn for module in wrapped]
    hooks = [(module, module._backward_hooks) for module in modules if module._backward_hooks]
    for module in switched:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    for module in wrapped:
        module.checkpoint_fn = _call  # type: ignore[assignment]
    for module, _ in hooks:
        module._backward_hooks = OrderedDict()
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True  # type: ignore[assignment]
        for module, function in zip(wrapped, functions, strict=True):
            module.checkpoint_fn = function
        for module, held in hooks:
            module._backward_hooks = held


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
