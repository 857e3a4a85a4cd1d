"""Checkpointed layers are recomputed by the ring, wherever their backward runs.

A checkpoint calls its function again in the backward. If that runs after the `context_parallel` block has ended, the
function would meet PyTorch's own attention, of local tokens only. So a checkpoint that is made inside function modes
enters them again when it recomputes: `torch.utils.checkpoint` hands each function that it will call again to one of two
names, which are replaced once the first mode is made. Outside of all modes both do what they did.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from ringtile.errors import RefusedError

Enter = Callable[[], AbstractContextManager[Any]]
_GENERATOR = "_checkpoint_without_reentrant_generator"


@functools.cache
def keep_in_checkpoints(around: Callable[[], list[Enter]]) -> None:
    """Make every checkpoint from now on recompute its function inside around(), the modes where it is made, outermost
    first: how to enter each, if it is not entered. RefusedError: this torch makes checkpoints in another way.
    """
    make: Any = getattr(torch_checkpoint, _GENERATOR, None)
    if make is None:
        raise RefusedError(
            f"torch.utils.checkpoint of this torch has no {_GENERATOR}, by which checkpoints inside context_parallel "
            "are recomputed; expected torch >= 2.11, < 2.16"
        )
    function: Any = torch_checkpoint.CheckpointFunction
    apply = function.apply.__func__

    def kept(run: Callable[..., Any]) -> Callable[..., Any]:
        contexts = around()

        def again(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for enter in contexts:
                    stack.enter_context(enter())
                return run(*args, **kwargs)

        return again if contexts else run

    setattr(torch_checkpoint, _GENERATOR, lambda run, *args, **kwargs: make(kept(run), *args, **kwargs))
    function.apply = classmethod(lambda cls, run, *args: apply(cls, kept(run), *args))
