"""Attention functions that users register with transformers: which of them ringtile may replace, and which it may run.

Nothing of transformers is imported here: where it is not loaded, nothing is registered.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ringtile.errors import RefusedError

# The modules that define the functions in whose place ringtile's may stand.
_OWN = {
    "transformers.masking_utils",
    *(f"transformers.integrations.{name}_attention" for name in ("sdpa", "flash", "flex")),
    *(f"transformers.integrations.{name}_paged" for name in ("sdpa", "flash", "eager")),
}
DECLARED = "ringtile_computes_sdpa"  # the attribute of a user's attention function that says so


def is_replaceable(function: Any) -> bool:
    """Return whether an attention or mask function is transformers' own, or ringtile's, or says that it computes what
    sdpa does."""
    while isinstance(function, functools.partial):
        function = function.func
    # By where its code is: functools.wraps copies the name of the module.
    home = getattr(function, "__globals__", {}).get("__name__", "")
    is_own = home in _OWN or home.startswith(("transformers.models.", "ringtile."))
    return is_own or bool(getattr(function, DECLARED, False))


def shown_function(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"


def refuse_inside(is_inside: Callable[[], bool]) -> None:
    """Make every function of a user that is registered now raise RefusedError where is_inside().

    It may attend without scaled_dot_product_attention, or count a shard's tokens. It stays registered, in a wrapper.
    """
    utils = sys.modules.get("transformers.modeling_utils")
    mapping: dict[str, Any] = {} if utils is None else utils.AttentionInterface._global_mapping
    for name, function in [*mapping.items()]:
        if not is_replaceable(function) and not isinstance(function, _Refusing):
            mapping[name] = _Refusing(name, function, is_inside)


class _Refusing:
    def __init__(self, name: str, function: Callable[..., Any], is_inside: Callable[[], bool]) -> None:
        functools.update_wrapper(self, function)
        self._name, self._function, self._is_inside = name, function, is_inside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside():
            raise RefusedError(
                f"the model attends by {shown_function(self._function)}, registered as {self._name!r}, inside "
                f"context_parallel, which sees its calls of scaled_dot_product_attention only; expected "
                f"attn_implementation='sdpa', or a function that computes what sdpa does and says so, by an attribute "
                f"{DECLARED} = True"
            )
        return self._function(*args, **kwargs)
