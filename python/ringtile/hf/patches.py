"""A record of every attribute that ringtile replaced on other libraries' objects, and the way back."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

import accelerate
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback

from ringtile.errors import RefusedError

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Patches:
    """What `ringtile.enable` returns: every attribute it replaced (`entries`); `restore()` puts them back, last first.

    An inherited attribute (a method of the class) is deleted from the owner again; an attribute of the owner itself
    is set back to the identical object.
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self._entries: list[tuple[object, str]] = []

    @classmethod
    def of(cls, install: Callable[[Patches], None]) -> Patches:
        """What install replaces; if it raises, all of that is put back."""
        patches = cls()
        try:
            install(patches)
        except BaseException:
            patches.restore()
            raise
        return patches

    @property
    def entries(self) -> tuple[tuple[object, str], ...]:
        """(owner, attribute name) of every replacement in force, oldest first."""
        return tuple(self._entries)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replaces `owner.name` by `value` and remembers what the owner itself held."""
        held = {**vars(owner), **(owner._modules if isinstance(owner, nn.Module) else {})}  # which keeps children apart
        if name in held:
            self._undo.callback(setattr, owner, name, held[name])
        else:
            self._undo.callback(_delete, owner, name)
        self._entries.append((owner, name))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Replaces a function `owner.name` by replacement(original, ...).

        A module gets a method, and `original` is one: in a deep copy of the model both are the copy's.
        """
        original = getattr(owner, name, None)
        if not isinstance(owner, nn.Module):
            self.set(owner, name, _around(_touch_point(owner, name, original, replacement), replacement))
            return
        assert original is not None
        is_method = getattr(original, "__self__", None) is owner
        method = original.__func__ if is_method else _ignoring_self(original)
        self.set(owner, name, MethodType(_around_method(method, replacement), owner))

    def add_callback(self, trainer: Trainer, callback: TrainerCallback) -> None:
        """Adds a callback to a Trainer."""
        trainer.add_callback(callback)

        def remove() -> None:
            if callback in trainer.callback_handler.callbacks:
                trainer.remove_callback(callback)

        self.on_restore(remove)

    def share(self, owner: ModuleType, name: str, replacement: Callable[..., Any]) -> None:
        """Does so with a function of a module, until the last record that shares its replacement is restored."""
        original, users = _shared.get((owner, name), (getattr(owner, name), 0))
        if users == 0:
            setattr(owner, name, _around(original, replacement))
        _shared[owner, name] = original, users + 1
        self._entries.append((owner, name))
        self.on_restore(functools.partial(_unshare, owner, name))

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Runs `undo` when everything is restored, for changes that are more than one attribute."""
        self._undo.callback(undo)

    def restore(self) -> None:
        """Undoes every change, last first. A second call does nothing.

        An undo that fails does not stop the others; its error is raised after the last one.
        """
        self._entries.clear()
        self._undo.close()


def _delete(owner: Any, name: str) -> None:
    if name in vars(owner):
        delattr(owner, name)


def _touch_point(owner: object, name: str, original: Any, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """The original, if it takes the arguments that its replacement names, all but the first. RefusedError: versions of
    the libraries in which it is not there, or takes others."""
    _, *parameters = inspect.signature(replacement).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind in _NAMED]
    taken = inspect.signature(original).parameters if callable(original) else {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    if callable(original) and (takes_any or taken.keys() >= {*named}):
        found: Callable[..., Any] = original
        return found
    raise RefusedError(
        f"{type(owner).__name__}.{name}({', '.join(named)}) is not there (torch {torch.__version__}, transformers "
        f"{transformers.__version__}, accelerate {accelerate.__version__}); expected transformers >= 5.17 and "
        f"accelerate >= 1.15, which ringtile is tested with"
    )


def _around(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def around(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return around


def _around_method(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def around(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return replacement(MethodType(original, self), *args, **kwargs)

    return around


def _ignoring_self(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method


_shared: dict[tuple[ModuleType, str], tuple[Any, int]] = {}  # the original, and how many records share it


def _unshare(owner: ModuleType, name: str) -> None:
    original, users = _shared.pop((owner, name))
    if users > 1:
        _shared[owner, name] = original, users - 1
    else:
        setattr(owner, name, original)
