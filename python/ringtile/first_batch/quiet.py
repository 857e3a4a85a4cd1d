"""What does not run in a check: hooks of the user's, a module's hooks of the backward, and checkpoints."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn.modules import module as of_all_modules

from ringtile.first_batch.own import LIBRARIES, homes

_FORWARD, _BACKWARD = ("_forward_pre_hooks", "_forward_hooks"), ("_backward_pre_hooks", "_backward_hooks")
_NAMED = LIBRARIES | sys.stdlib_module_names - {"__main__"}


@contextlib.contextmanager
def without_hooks(model: nn.Module) -> Iterator[list[str]]:
    """Inside, no hook runs but those of the libraries that ringtile knows; their names. Of modules' backwards, none:
    DeepSpeed's would reduce gradients that are not."""
    held = [getattr(module, name) for module in model.modules() for name in (*_FORWARD, *_BACKWARD)]
    of_all = [getattr(of_all_modules, f"_global{name}") for name in (*_FORWARD, *_BACKWARD)]
    names, before = [], [(mapping, dict(mapping)) for mapping in (*held, *of_all) if mapping]
    backward = {id(getattr(module, name)) for module in model.modules() for name in _BACKWARD}
    off = set()
    for mapping, hooks in before:
        for key, hook in hooks.items():
            is_known = all(home.partition(".")[0] in _NAMED for home in homes(hook))
            if not is_known:
                names.append(getattr(hook, "__qualname__", type(hook).__name__))
            if not is_known or id(mapping) in backward:
                off.add(key)
                del mapping[key]
    try:
        yield names
    finally:
        for mapping, hooks in before:
            now = dict(mapping)  # in its first forward pass, transformers adds hooks that are to stay
            mapping.clear()
            mapping.update({key: hook for key, hook in hooks.items() if key in now or key in off} | now)


@contextlib.contextmanager
def without_checkpoints(model: nn.Module) -> Iterator[None]:
    """Inside, no layer is computed again in a backward: autograd.grad does not pass reentrant checkpoints."""
    switched: list[Any] = [x for x in model.modules() if getattr(x, "gradient_checkpointing", False) is True]
    wrapped: list[Any] = [x for x in model.modules() if isinstance(x, CheckpointWrapper)]
    functions = [module.checkpoint_fn for module in wrapped]
    for module in switched:
        module.gradient_checkpointing = False
    for module in wrapped:
        module.checkpoint_fn = _call
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True
        for module, function in zip(wrapped, functions, strict=True):
            module.checkpoint_fn = function


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
