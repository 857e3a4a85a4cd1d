"""Puts back what a forward pass may change in a model and in the object that computes its loss."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from ringtile.random_states import all_random_states, set_random_states

_PLAIN = (int, float, str, bool, type(None))
_MOST = 10_000  # entries of a list or a mapping of numbers; what is longer is data, which no forward pass writes


class Unchanged:
    """The state of modules and of one more object, when this is made; `restore` puts it back, as often as is asked.

    Buffers, attributes that are numbers, lists and mappings of numbers, generators of random numbers, which modules are
    in training mode; torch's, Python's and numpy's own generators. Parameters and their gradients are not touched by a
    pass without a step, and are left alone.
    """

    def __init__(self, model: nn.Module, *owners: object) -> None:
        self._modules = list(model.modules())
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in self._modules
            for name, buffer in module._buffers.items()
        ]
        self._owners = [
            (owner, dict(vars(owner)), {name: copy.deepcopy(vars(owner)[name]) for name in _plain(owner)})
            for owner in (*self._modules, *owners)
        ]
        found = {id(x): x for _, held, _ in self._owners for x in held.values() if isinstance(x, torch.Generator)}
        self._generators = [(generator, generator.get_state()) for generator in found.values()]
        self._random = all_random_states()

    @torch.no_grad()
    def restore(self) -> None:
        for module, name, buffer, content in self._buffers:
            module._buffers[name] = buffer
            if buffer is not None and content is not None:
                buffer.copy_(content)
        for owner, held, contents in self._owners:
            for name in _plain(owner):
                if name not in held:
                    delattr(owner, name)
            for name, content in contents.items():
                vars(owner)[name] = _fill(held[name], content)
        for generator, state in self._generators:
            generator.set_state(state)
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


def _plain(owner: object) -> list[str]:
    """The attributes that are numbers, or hold numbers; of a module without torch's own, such as _parameters."""
    own = isinstance(owner, nn.Module)
    return [name for name, value in vars(owner).items() if not (own and name.startswith("_")) and _is_plain(value)]


def _is_plain(value: Any) -> bool:
    """Whether it is a number, or holds nothing but numbers."""
    if isinstance(value, _PLAIN):
        return True
    if type(value) in (list, deque, set, tuple):
        return len(value) <= _MOST and all(map(_is_plain, value))
    if type(value) in (dict, defaultdict):
        return len(value) <= _MOST and all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return False


def _fill(held: Any, content: Any) -> Any:
    """The object that was held, holding what it held: others may refer to it."""
    content = copy.deepcopy(content)
    if not isinstance(held, (list, deque, set, dict)):
        return content
    held.clear()
    (held.extend if isinstance(held, (list, deque)) else held.update)(content)
    return held
