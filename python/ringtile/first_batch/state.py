"""What the runs of a check may write, by where it lives: in the model, in generators of random numbers and, where code
of the user's runs in the model, in the user's own Python modules. It is put back, in the same objects."""

from __future__ import annotations

import array
import builtins
import contextlib
import functools
import logging
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ringtile.first_batch.own import LIBRARIES, is_own, is_users
from ringtile.first_batch.random_states import all_random_states, set_random_states

_MOST = 10_000  # entries of a container whose content is kept
_LARGEST = 1 << 28  # bytes of all tensors that are copied
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # attributes of every module
_PLAIN = (bool, int, float, str, type(None), list, deque, set, tuple, dict, Tensor)
_LASTING = (int, float, complex, str, bytes, types.BuiltinFunctionType, torch.dtype)
_THREADS = frozenset({"_thread", "threading", "queue", "multiprocessing", "concurrent"})
_Undo = Callable[[], object]


class State:
    """The state when this is made; `restore` puts it back, as often as is asked.

    code: what `own_code` has found. Without it only the model, numbers of `holder` and default generators are kept.
    With it, also weights of the modules that it is of, and the data in the user's Python modules: in variables, classes
    and functions, and in objects of the user's classes.
    unknown: what such code holds or names and cannot be put back (a file, an iterator, an object of a library), in
    words. lost: what a run has changed for good, in words: a weight, a large tensor.
    """

    def __init__(self, model: nn.Module, code: list[Any], *, holder: object = None) -> None:
        self.unknown = self.lost = ""
        self._undo: list[_Undo] = []
        self._undo_draws: list[_Undo] = []  # of generators of random numbers
        self._seen: dict[int, Any] = {id(vars(builtins)): builtins}  # which every Python module holds
        self._bytes = 0
        self._numbers: list[tuple[str, dict[str, Any], str, Tensor]] = []  # of modules, as they were
        own, name = {*map(id, code)}, type(model).__name__
        self._watched: list[tuple[str, Tensor, int]] = [
            (path, x, x._version) for path, x in model.named_parameters() if type(x) is nn.Parameter
        ]
        for path, module in model.named_modules():
            used = {id(x) for x in (*type(module).__mro__, *vars(module).values(), *vars(type(module)).values())}
            self._module(module, f"{name}.{path}" if path else name, bool(own & used))
        for x in code:
            self._keep(x, getattr(x, "__qualname__", type(x).__name__), True)
        for name in [each for each in [*sys.modules] if code and is_users(each)]:
            self._keep(vars(sys.modules[name]), name, False)
        if holder is not None:  # a Trainer, whose other attributes are the training's
            self._attributes(vars(holder), type(holder).__name__, False, lambda name, x: _is_numbers(x))
        self._random = all_random_states()

    @torch.no_grad()
    def restore(self, *, draws: bool = True) -> None:
        """Puts all back; without draws, all but what random numbers come next."""
        for undo in self._undo + self._undo_draws * draws:
            undo()
        if draws:
            set_random_states(self._random)
        written = (path for path, x, version in self._watched if x._version != version)
        self.lost = self.lost or next(written, "")

    def written(self) -> dict[str, Tensor]:
        """By how much buffers, and tensors and numbers of the user's modules, have changed: float64 (n,), by name."""
        now = {place: (_flat(held.get(name)), before) for place, held, name, before in self._numbers}
        same = ((place, x - y) for place, (x, y) in now.items() if x is not None and x.shape == y.shape)
        return {place: change for place, change in same if change.any()}

    def _module(self, module: nn.Module, place: str, own: bool) -> None:
        self._seen[id(module)] = module
        for held in (module._buffers, *([vars(module)] if own else [])):
            flat = ((name, _flat(x)) for name, x in held.items())
            self._numbers += [(f"{place}.{name}", held, name, x) for name, x in flat if x is not None]
        self._undo += [functools.partial(module._buffers.__setitem__, *item) for item in module._buffers.items()]
        for name, x in (*module._buffers.items(), *(module._parameters.items() if own else ())):
            self._keep(x, f"{place}.{name}", False)

        def keeps(name: str, x: Any) -> bool:
            """Libraries and engines keep states of theirs in underscored attributes."""
            return name not in _OF_TORCH and (own or (name[0] != "_" and isinstance(x, _PLAIN)))

        self._attributes(vars(module), place, own, keeps)

    def _attributes(self, held: dict[str, Any], place: str, named: bool, keeps: Callable[[str, Any], bool]) -> None:
        kept = {name: x for name, x in held.items() if keeps(name, x)}
        self._undo.append(functools.partial(_put_back, held, kept, keeps))
        for name, x in kept.items():
            self._keep(x, f"{place}.{name}", named)

    def _keep(self, x: Any, place: str, named: bool) -> None:
        """Keeps the content of x, and of what it holds. named: by code that runs, which may write it."""
        waiting = [(x, place)]  # not by recursion: users' objects may be chained, and so are functions
        while waiting:
            x, place = waiting.pop()
            if x is None or isinstance(x, _LASTING) or id(x) in self._seen:
                continue
            self._seen[id(x)] = x
            size = int(getattr(x, "nbytes", 0)) if type(x).__module__ == "numpy" else 0
            if isinstance(x, nn.Module):
                self._module(x, place, is_own(type(x)))
                waiting += [(held, place) for held in (*x._parameters.values(), *x._modules.values())]
            elif isinstance(x, Tensor):
                self._tensor(x, place)
            elif (draws := _draws(x)) is not None:
                self._undo_draws.append(draws)
            elif self._bytes + size <= _LARGEST and (data := _data(x, named)) is not None:
                self._undo += data[0]
                self._bytes += size
                waiting += [(held, place) for held in data[1]] if len(data[1]) <= _MOST else ()
                waiting += _variables(x) if named else ()
            elif named and not _lasts(type(x)):
                self.unknown = self.unknown or f"{place} is a {type(x).__name__}"

    def _tensor(self, x: Tensor, place: str) -> None:
        self._bytes += (size := x.numel() * x.element_size())
        if x.is_meta or x.is_inference() or hasattr(x, "ds_id"):
            return
        if self._bytes <= _LARGEST and x.layout == torch.strided:
            content = x.detach().clone()
            self._undo.append(functools.partial(_refill_tensor, x, content))
            self._watched = [each for each in self._watched if each[1] is not x]
        else:
            self._bytes -= size
            self._watched.append((place, x, x._version))


def _flat(x: Any) -> Tensor | None:
    """A tensor, or a number, as float64 (n,) of the CPU; None: it is another object, or large."""
    if isinstance(x, int | float) and not isinstance(x, bool):
        return torch.tensor([float(x)], dtype=torch.float64)
    if type(x) is not Tensor or x.layout != torch.strided or x.is_complex() or x.is_meta or x.numel() > _MOST**2 // 100:
        return None
    return x.detach().double().flatten().cpu()


def _variables(x: Any) -> Iterator[tuple[Any, str]]:
    """The variables of the user's Python modules that a function of theirs names, with their names."""
    if isinstance(x, types.FunctionType) and is_own(x):
        names, of_file = {*_names(x.__code__)}, x.__globals__
        named = [of_file.get(name) for name in names]
        spaces = [vars(y) for y in named if isinstance(y, types.ModuleType) and is_users(y.__name__)]
        for space in (of_file, *spaces):
            yield from ((space[name], f"{space['__name__']}.{name}") for name in names & space.keys())


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _draws(x: Any) -> _Undo | None:
    """What makes a generator of random numbers give the same ones again; None: it is none."""
    cls, home = type(x), type(x).__module__.partition(".")[0]
    if home == "numpy" and hasattr(cls, "bit_generator"):
        return functools.partial(setattr, x.bit_generator, "state", x.bit_generator.state)
    if isinstance(x, random.Random):
        return functools.partial(x.setstate, x.getstate())
    if home in ("torch", "numpy") and hasattr(cls, "set_state"):
        return functools.partial(x.set_state, x.get_state())
    return None


def _data(x: Any, named: bool) -> tuple[list[_Undo], list[Any]] | None:
    """What puts the content of x back, and what x holds; None: it is no data."""
    cls, later = type(x), functools.partial
    home = cls.__module__.partition(".")[0]
    if isinstance(x, dict | list) and home in LIBRARIES:
        return None  # a mapping of transformers imports what it is asked for
    if isinstance(x, dict):
        return [later(_put_back, x, dict(x))], [*x.values()]
    if isinstance(x, list | deque | set):
        return [later(_refill, x, [*x])], [*x]
    if isinstance(x, bytearray | array.array):
        return [later(x.__setitem__, slice(None), x[:])], []
    if isinstance(x, tuple | frozenset):
        return [], [*x]
    if isinstance(x, types.ModuleType):
        return [], [vars(x)] if x.__name__ not in sys.modules else []
    if isinstance(x, types.MethodType):
        return [], [x.__self__, x.__func__]
    if isinstance(x, property | staticmethod | classmethod):
        return [], [getattr(x, "fget", None), getattr(x, "fset", None), getattr(x, "__func__", None)]
    if isinstance(x, functools.partial):
        return [], [x.func, x.args, x.keywords, vars(x)]
    if isinstance(x, logging.Logger):
        return [], [*x.handlers]
    if isinstance(x, types.FunctionType):
        return [], [vars(x), x.__defaults__, x.__kwdefaults__, x.__closure__] if is_own(x) else []
    if isinstance(x, types.CellType):
        with contextlib.suppress(ValueError):  # not assigned yet
            return [later(setattr, x, "cell_contents", x.cell_contents)], [x.cell_contents]
        return [], []
    if isinstance(x, functools._lru_cache_wrapper):
        return [] if x.cache_info().currsize else [x.cache_clear], [x.__wrapped__]
    if isinstance(x, type):
        if not is_own(x):
            return [], []
        kept = {name: value for name, value in vars(x).items() if not name.startswith("__")}
        methods = [value for value in vars(x).values() if isinstance(value, types.FunctionType)]
        return [later(_put_back_class, x, kept)], [*kept.values(), *methods, *x.__bases__]
    if home == "numpy":
        if hasattr(cls, "spawn"):
            return None
        return [later(x.__setitem__, ..., x.copy())] if hasattr(x, "flags") and x.flags.writeable else [], []
    is_simple = named and home in sys.stdlib_module_names - {"logging", "_io", "ctypes"}
    if not (is_own(cls) or is_simple or hasattr(cls, "to_dict")):  # a configuration of a library
        return None
    held = getattr(x, "__dict__", None)
    slots = [
        slot for each in cls.__mro__ for slot in vars(each).values() if isinstance(slot, types.MemberDescriptorType)
    ]
    content = {slot: slot.__get__(x) for slot in slots if hasattr(x, slot.__name__)} if is_own(cls) else {}
    # Threads may have a part in it.
    is_threads = any(type(y).__module__.partition(".")[0] in _THREADS for y in (held or {}).values())
    if (not isinstance(held, dict) and not content) or is_threads:
        return None
    return [later(slot.__set__, x, value) for slot, value in content.items()], [cls, held, *content.values()]


def _lasts(cls: type) -> bool:
    """Whether what code does with an object of a library leaves it as it is: it is compared by its value, or code."""
    hashes: Any = cls.__hash__
    by_value = hashes not in (None, object.__hash__) and cls.__module__ != "ctypes"
    of_library = cls.__module__.partition(".")[0] in LIBRARIES and not cls.__module__.startswith("torch.utils")
    of_library = of_library or cls.__module__ == "torch.utils.hooks"  # handles, which transformers keeps
    return by_value or of_library or hasattr(cls, "__get__") or cls.__module__ in ("logging", "torch", "_abc")


def _is_numbers(x: Any) -> bool:
    """Whether it is a number, or holds no more than some thousand numbers and nothing else."""
    waiting, count = [x], 0
    while waiting and count < _MOST:
        x, count = waiting.pop(), count + 1
        if isinstance(x, dict | list | deque | set | tuple):
            waiting += [*x.values()] if isinstance(x, dict) else [*x]
        elif not isinstance(x, bool | int | float | str | None):
            return False
    return not waiting


# ---- the way back -------------------------------------------------------------------------------


def _put_back(held: dict[Any, Any], kept: dict[Any, Any], keeps: Callable[[Any, Any], bool] = lambda *_: True) -> None:
    """Of a mapping, the entries of a kind, in their order."""
    for name in [name for name, x in held.items() if name not in kept and keeps(name, x)]:
        del held[name]
    for name, x in kept.items():
        if held.get(name, held) is not x:
            held[name] = x
    if [name for name in held if name in kept] != [*kept]:
        for name in kept:
            del held[name]
        held.update(kept)


def _put_back_class(cls: type, kept: dict[str, Any]) -> None:
    for name in [name for name in vars(cls) if name not in kept and not name.startswith("__")]:
        delattr(cls, name)
    for name, x in kept.items():
        if vars(cls).get(name) is not x:
            setattr(cls, name, x)


def _refill(held: Any, content: list[Any]) -> None:
    if len(held) != len(content) or not all(map(operator.is_, held, content)):
        held.clear()
        (held.update if isinstance(held, set) else held.extend)(content)


def _refill_tensor(x: Tensor, content: Tensor) -> None:
    """Gives a tensor its content again; a backward that needs it finds the same numbers, and is not told."""
    if x.shape != content.shape:
        x.data = content.clone()
        return
    with torch.autograd._unsafe_preserve_version_counter(x):  # type: ignore[attr-defined]
        x.copy_(content)
