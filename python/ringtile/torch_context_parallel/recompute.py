"""Checkpointed layers are recomputed by the ring, wherever their backward runs.

A checkpoint calls its function again in the backward. If that runs after the `context_parallel` block has ended, the
function would meet PyTorch's own attention, of local tokens only. So a call of attention in the ring looks for the
checkpoints that it is called from, and makes them enter the modes around them again when they recompute.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from ringtile.errors import RefusedError

Enter = Callable[[], AbstractContextManager[Any]]

_REENTRANT = torch_checkpoint.CheckpointFunction.forward.__code__
_NON_REENTRANT = getattr(torch_checkpoint.checkpoint, "__wrapped__", torch_checkpoint.checkpoint).__code__


class _Recompute:
    """A checkpoint's function, inside the contexts that were entered when the checkpoint was made."""

    def __init__(self, function: Callable[..., Any], contexts: list[Enter]) -> None:
        self._function = function
        self._contexts = contexts

    def __call__(self, *args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for enter in self._contexts:
                stack.enter_context(enter())
            return self._function(*args)


def recompute_in(modes: dict[int, Enter], frame: types.FrameType | None, of_module: types.CodeType) -> None:
    """Makes every checkpoint in the call stack, from `frame` on, recompute its function inside these contexts.

    modes: by the id of a function mode, outermost first, how to enter it. of_module: the function that enters a mode
    around a module, its local variable `mode`; if a checkpoint calls it, it does so in recomputing too.
    Raises RefusedError where a checkpoint is not made as this code expects.
    """
    modes = dict(modes)
    while frame is not None and modes:
        code = frame.f_code
        if code is of_module:
            modes.pop(id(frame.f_locals["mode"]), None)
        elif code is _REENTRANT:
            _replace(frame.f_locals["ctx"], "run_function", modes)
        elif code is _NON_REENTRANT and "gen" in frame.f_locals:
            variables = getattr(frame.f_locals["gen"].gi_frame, "f_locals", {})
            _replace(variables.get("new_frame"), "recompute_fn", modes)
        frame = frame.f_back


def _replace(checkpoint: Any, name: str, modes: dict[int, Enter]) -> None:
    function = getattr(checkpoint, name, None)
    if function is None:
        raise RefusedError(
            "torch.utils.checkpoint of this torch keeps its function elsewhere; run the backward inside "
            "context_parallel with use_reentrant=False in another torch, or without checkpoints"
        )
    if not isinstance(function, _Recompute):
        setattr(checkpoint, name, _Recompute(function, list(modes.values())))
