"""Processes that the tools keep: two gloo ranks, and one that trains alone."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tools.pool import CONTEXT, Pool

_PRELOAD = ("tools.models.tiny_training", "torch.distributed")


class Workers:
    """`size` processes; a gloo world if there is more than one. They start with the first call, and again after one in
    which a process died, hung or failed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pool: Pool | None = None

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> list[Any]:
        """The results of function(*arguments) by rank. An exception is a result too; TimeoutError: no answer in time;
        EOFError: the process died."""
        if self._pool is None:
            CONTEXT.set_forkserver_preload(list(_PRELOAD))
            self._pool = Pool(self._size, prepare=functools.partial(_prepare, self._size))
            if self._size == 1:
                self._pool.run(dist.destroy_process_group)
        results = self._pool.outcomes(function, *arguments, timeout=seconds)
        if any(isinstance(result, BaseException) for result in results):
            self.close()
        raised = [getattr(result, "__cause__", None) is not None for result in results]  # by the function
        return [
            RuntimeError(f"{type(result).__name__}: {result}") if own else result
            for result, own in zip(results, raised, strict=True)
        ]

    def close(self) -> None:
        """Ends the processes; the next call starts others."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def _prepare(size: int, rank: int) -> None:
    if size > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in world.items()})
