"""Which code is the user's: of Python modules whose file is outside of site-packages and of the standard library."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from torch import nn

LIBRARIES = frozenset({"torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "ringtile"})
_PATHS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_WRAPPED = {
    "partial": "func",
    "method": "__func__",
    "_WrappedHook": "hook",
}  # by the name of a type; the last is torch's
_WRAPPED |= dict.fromkeys(("function", "_lru_cache_wrapper"), "__wrapped__")


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
    found = set[str]()
    while code is not None:
        is_function = isinstance(code, FunctionType)
        cls = code if isinstance(code, type) else type(code)
        found.add(code.__globals__.get("__name__") or "" if is_function else str(cls.__module__))
        code = getattr(code, _WRAPPED.get(type(code).__name__, ""), None)
    return found


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
