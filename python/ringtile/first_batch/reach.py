"""What code can write: the objects that attributes, closures and global variables lead to, and their content.

Followed are containers, tensors, arrays, generators of random numbers, and objects of classes that are no library's.
What a list of more than 10,000 entries holds is data, which a forward pass does not write; the list itself is kept.
"""

from __future__ import annotations

import functools
import io
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ringtile.errors import RefusedError

_LIBRARIES = frozenset(
    {
        *("torch", "transformers", "peft", "trl", "accelerate", "deepspeed", "axolotl", "ringtile", "datasets"),
        *("tokenizers", "bitsandbytes", "numpy", "triton", "fla", "mamba_ssm", "causal_conv1d", "flash_attn"),
        *("liger_kernel", "tqdm", "wandb", "pydantic", "yaml", "_pytest", "pytest"),
        *(sys.stdlib_module_names - {"__main__", "argparse", "types", "queue"}),
    }
)
_MOST = 10_000  # entries of a container that are followed
_LARGEST = 1 << 28  # bytes of all tensors that are copied; any more must not change
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # attributes of every module
_FOLLOWED = ("_forward_hooks", "_forward_pre_hooks")  # of those, by what hooks hold
_MISSING: Any = object()


class Reach:
    """The content of objects, when they are added, and of what they lead to.

    unknown: the first object that may change and cannot be put back, in words.
    """

    def __init__(self) -> None:
        self.unknown = ""
        self._undo: list[Callable[[], object]] = []
        self._copied = 0  # bytes of tensors
        self._seen: dict[int, Any] = {}  # by id; the object is held, lest another one gets its id
        self._waiting: list[tuple[Any, str]] = []

    def add(self, x: Any, place: str) -> None:
        self._waiting.append((x, place))
        while self._waiting:
            self._visit(*self._waiting.pop())

    def add_numbers(self, owner: Any) -> None:
        """Adds the attributes of an object that are numbers, or hold nothing but numbers."""
        held = vars(owner)
        kept = {name: value for name, value in held.items() if _is_numbers(value)}
        self._undo.append(partial(_put_back_attributes, held, kept, lambda name, value: _is_numbers(value)))
        for name, value in kept.items():
            self.add(value, f"{type(owner).__name__}.{name}")

    @torch.no_grad()
    def restore(self) -> None:
        for undo in self._undo:
            undo()

    # ---- one object -----------------------------------------------------------------------------

    def _visit(self, x: Any, place: str) -> None:
        if x is None or isinstance(x, _CONSTANT) or id(x) in self._seen:
            return
        self._seen[id(x)] = x
        if isinstance(x, Tensor):
            self._tensor(x, place)
        elif isinstance(x, nn.Module):
            self._module(x, place)
        elif isinstance(x, dict | list | deque | set | tuple | frozenset):
            self._container(x, place)
        elif isinstance(x, types.FunctionType):
            self._function(x, place)
        elif isinstance(x, types.MethodType):
            self._follow([(x.__self__, place), (x.__func__, place)])
        elif isinstance(x, partial):
            self._follow((y, place) for y in (x.func, *x.args, *x.keywords.values()))
        elif isinstance(x, weakref.ref):
            self._follow([(x(), place)])
        elif isinstance(x, torch.Generator):
            self._undo.append(partial(x.set_state, x.get_state()))
        elif isinstance(x, random.Random):
            self._undo.append(partial(x.setstate, x.getstate()))
        elif type(x).__module__.partition(".")[0] == "numpy":
            self._of_numpy(x, place)
        elif isinstance(x, io.IOBase) or (isinstance(x, Iterator) and not _is_own(type(x))):
            self.unknown = self.unknown or f"{place} is a {type(x).__name__}"
        elif _is_own(type(x)) or isinstance(x, types.SimpleNamespace):
            self._object(x, place)
        elif callable(x):  # a library's, around a function that may be the user's
            self._follow((y, place) for y in getattr(x, "__dict__", {}).values() if callable(y))

    def _follow(self, held: Iterable[tuple[Any, str]]) -> None:
        self._waiting.extend(held)

    def _tensor(self, x: Tensor, place: str) -> None:
        if type(x) is not Tensor or x.is_meta or x.is_inference():
            return
        if self._copied + (size := x.numel() * x.element_size()) <= _LARGEST and x.layout == torch.strided:
            self._copied += size
            self._undo.append(partial(_refill, x, x.detach().clone()))
        else:
            self._undo.append(partial(_check_version, x, x._version, place))

    def _module(self, module: nn.Module, place: str) -> None:
        held, own = vars(module), _is_own(type(module))
        for name, buffer in module._buffers.items():
            self._undo.append(partial(module._buffers.__setitem__, name, buffer))
            if isinstance(buffer, Tensor) and type(buffer) is not Tensor:  # a DTensor's
                self._undo.append(partial(buffer.copy_, buffer.detach().clone()))
        cls: Any = type(module)
        named = _named_by_user(cls)

        def is_kept(name: str, value: Any) -> bool:
            """Libraries and engines keep states of theirs in underscored attributes."""
            if name in _OF_TORCH or (name.startswith("_") and name not in named):
                return False
            return own or isinstance(value, _RESTORED)

        kept = {name: value for name, value in held.items() if is_kept(name, value)}
        self._undo.append(partial(_put_back_attributes, held, kept, is_kept))
        skipped = _OF_TORCH - {"_buffers"}
        self._follow((x, f"{place}.{name}") for name, x in held.items() if name not in skipped)
        # Not the mappings of hooks: in its first forward pass, transformers adds hooks that are to stay.
        self._follow((hook, f"a hook of {place}") for name in _FOLLOWED for hook in held[name].values())
        self._follow((child, f"{place}.{name}") for name, child in module._modules.items())
        if own:
            self._class(type(module), place)

    def _container(self, x: Any, place: str) -> None:
        if isinstance(x, dict):
            self._undo.append(partial(_put_back, x, dict(x)))
            entries: Iterable[Any] = x.values()
        else:
            if isinstance(x, list | deque | set):
                self._undo.append(partial(_refill_container, x, list(x)))
            entries = x
        if len(x) <= _MOST:
            self._follow((entry, place) for entry in entries)

    def _function(self, f: types.FunctionType, place: str) -> None:
        own = _is_own(f)
        for cell in f.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if own:
                self._undo.append(partial(setattr, cell, "cell_contents", content))
            if own or isinstance(content, _CODE):
                self._follow([(content, f"{place}, in {f.__qualname__}")])
        self._follow((x, place) for x in vars(f).values() if own or isinstance(x, _CODE))
        if not own:
            return
        self._follow((x, place) for x in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()))
        names = _names(f.__code__)
        self._undo.append(partial(_put_back_names, f.__globals__, {x: f.__globals__.get(x, _MISSING) for x in names}))
        self._follow((f.__globals__[x], f"{f.__module__}.{x}") for x in names if x in f.__globals__)

    def _object(self, x: Any, place: str) -> None:
        """One of a class that is no library's."""
        if isinstance(getattr(x, "__dict__", None), dict):
            self._undo.append(partial(_put_back, vars(x), dict(vars(x))))
            self._follow((value, f"{place}.{name}") for name, value in vars(x).items())
        for name in (name for cls in type(x).__mro__ for name in _slots(cls)):
            if (value := getattr(x, name, _MISSING)) is not _MISSING:
                self._undo.append(partial(setattr, x, name, value))
                self._follow([(value, f"{place}.{name}")])
        self._class(type(x), place)

    def _class(self, cls: type, place: str) -> None:
        """What the user's methods use, and the attributes of a class."""
        for owner in cls.__mro__:
            if not _is_own(owner) or id(owner) in self._seen:
                continue
            self._seen[id(owner)] = owner
            for name, value in vars(owner).items():
                inner = getattr(value, "__func__", value)  # of a static or class method
                if isinstance(inner, types.FunctionType | property):
                    self._follow((f, place) for f in (getattr(inner, "fget", inner),))
                elif not name.startswith("__") and not hasattr(type(value), "__get__"):
                    self._undo.append(partial(setattr, owner, name, value))
                    self._follow([(value, f"{owner.__qualname__}.{name}")])

    def _of_numpy(self, x: Any, place: str) -> None:
        numpy = sys.modules["numpy"]
        if isinstance(x, numpy.ndarray) and x.flags.writeable:
            if x.nbytes > _LARGEST:
                self.unknown = self.unknown or f"{place} is an array of {x.nbytes / 2**20:.0f} MiB"
            else:
                self._undo.append(partial(x.__setitem__, ..., x.copy()))
        elif isinstance(x, numpy.random.Generator):
            self._undo.append(partial(setattr, x.bit_generator, "state", x.bit_generator.state))
        elif isinstance(x, numpy.random.RandomState):
            self._undo.append(partial(x.set_state, x.get_state()))


_CODE = (types.FunctionType, types.MethodType, partial)
_CONSTANT = (int, float, complex, str, bytes, type, types.ModuleType, torch.dtype, torch.device, torch.Size)
_RESTORED = (bool, int, float, str, type(None), list, deque, set, tuple, dict, Tensor)  # attributes of library modules


def _is_numbers(value: Any) -> bool:
    """Whether it is a number, or holds nothing but numbers."""
    if isinstance(value, dict):
        return len(value) <= _MOST and all(_is_numbers(x) for pair in value.items() for x in pair)
    if isinstance(value, list | deque | set | tuple):
        return len(value) <= _MOST and all(_is_numbers(x) for x in value)
    return isinstance(value, bool | int | float | str | None)


def _is_own(x: Any) -> bool:
    """Whether a class, or one that it extends, or a function is no library's."""
    homes = [cls.__module__ for cls in x.__mro__] if isinstance(x, type) else [getattr(x, "__module__", None) or ""]
    return any(home.partition(".")[0] not in _LIBRARIES and home != "builtins" for home in homes)


def _names(code: types.CodeType) -> set[str]:
    """The names of global variables, and of attributes, in a function and those inside it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {*code.co_names}.union(*map(_names, inner))


@functools.cache
def _named_by_user(cls: type) -> frozenset[str]:
    """The names in the methods of a class, and of those that it extends, that are no library's."""
    methods = [x for owner in cls.__mro__ if _is_own(owner) for x in vars(owner).values()]
    return frozenset(x for f in methods if isinstance(f, types.FunctionType) for x in _names(f.__code__))


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(x for x in slots if not x.startswith("__"))


# ---- the way back -------------------------------------------------------------------------------


def _put_back(held: dict[Any, Any], kept: dict[Any, Any]) -> None:
    if held.keys() != kept.keys() or any(held[name] is not kept[name] for name in kept):
        held.clear()
        held.update(kept)


def _put_back_attributes(held: dict[str, Any], kept: dict[str, Any], is_kept: Callable[[str, Any], bool]) -> None:
    """Of the attributes of an object, those of a kind."""
    for name in [name for name, value in held.items() if name not in kept and is_kept(name, value)]:
        del held[name]
    held.update(kept)


def _put_back_names(names: dict[str, Any], kept: dict[str, Any]) -> None:
    """Global variables of a module: those that a function names."""
    for name, value in kept.items():
        if value is _MISSING:
            names.pop(name, None)
        elif names.get(name, _MISSING) is not value:
            names[name] = value


def _refill_container(held: Any, content: list[Any]) -> None:
    if len(held) != len(content) or any(x is not y for x, y in zip(held, content, strict=True)):
        held.clear()
        (held.update if isinstance(held, set) else held.extend)(content)


def _refill(x: Tensor, content: Tensor) -> None:
    """Gives a tensor its content again; a backward that needs it finds the same numbers, and is not told."""
    if x.shape != content.shape:
        x.data = content.clone()
        return
    with torch.autograd._unsafe_preserve_version_counter(x):  # type: ignore[attr-defined]
        x.copy_(content)


def _check_version(x: Tensor, version: int, place: str) -> None:
    if x._version != version:
        raise RefusedError(
            f"a forward pass writes {place}, a tensor {tuple(x.shape)} that is too large to copy, so that the check of "
            f"the first batch would change it; set first_batch_check: false, and run ringtile verify"
        )
