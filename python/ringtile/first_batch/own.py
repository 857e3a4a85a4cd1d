"""Which code is the user's: of Python modules whose file is outside of site-packages and of the standard library."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

LIBRARIES = frozenset({"torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "ringtile"})
_PATHS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@functools.cache
def is_users(name: str) -> bool:
    """Whether the Python module of this name is the user's."""
    if name == "__main__" or name not in sys.modules:
        return name not in ("", "builtins")
    file = getattr(sys.modules[name], "__file__", None)
    if file is None or name.partition(".")[0] in LIBRARIES | sys.stdlib_module_names:
        return False
    return not file.startswith(_PATHS) and not {"site-packages", "dist-packages"} & {*Path(file).parts}


def homes(code: Any) -> set[str]:
    """The Python modules of a function, a class or another callable, and of what it wraps."""
    if isinstance(code, functools.partial | MethodType):
        return homes(code.func if isinstance(code, functools.partial) else code.__func__)
    if isinstance(code, FunctionType):
        inner = getattr(code, "__wrapped__", None)
        return {code.__globals__.get("__name__") or ""} | (set() if inner is None else homes(inner))
    cls = code if isinstance(code, type) else type(code)
    inner = getattr(code, "hook", None) if cls.__module__ == "torch.nn.modules.module" else None  # in torch's wrapper
    return {str(cls.__module__)} | (set() if inner is None else homes(inner))


def is_own(code: Any) -> bool:
    """Whether a function, a class or another callable is the user's, or wraps something that is."""
    return any(map(is_users, homes(code)))


def own_code(model: nn.Module, functions: Iterable[Any] = ()) -> list[Any]:
    """The user's classes and functions that run in a model: of modules, put in place of a library's, and of
    `functions`."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    spaces = [vars(x) for x in (*model.modules(), *classes)]
    spaces += [vars(sys.modules.get(cls.__module__, sys)) for cls in classes if not is_own(cls)]
    put = (x for space in spaces for x in [*space.values()] if isinstance(x, FunctionType | MethodType))
    return [*{id(x): x for x in (*classes, *put, *functions) if is_own(x)}.values()]


def names_in(code: Iterable[Any]) -> set[tuple[str, str]]:
    """The variables of Python modules, (module, name), that these functions and classes name, and what they call."""
    found, seen, waiting = set[tuple[str, str]](), set[int](), [*code]
    while waiting:
        x = waiting.pop()
        x = getattr(x, "fget", None) or getattr(x, "__func__", x)
        if id(x) in seen or not isinstance(x, type | FunctionType) or not is_own(x):
            continue
        seen.add(id(x))
        if isinstance(x, type):
            waiting += [value for cls in x.__mro__ for value in vars(cls).values()]
            continue
        spaces, names = [x.__globals__], {*_names(x.__code__)}
        spaces += [vars(y) for name in names if isinstance(y := x.__globals__.get(name), ModuleType) and is_users(name)]
        for space in spaces:
            found |= {(space["__name__"], name) for name in names & space.keys()}
            waiting += [space[name] for name in names & space.keys()]
        waiting += [y for cell in x.__closure__ or () if (y := _content(cell)) is not None]
    return found


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
