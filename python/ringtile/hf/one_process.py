"""An accelerator in whose eyes the ranks of a context-parallel group are one process.

Trainers count processes: they divide by their number, take the slice of the world's rows that belongs to them, and add
up what all of them hold. The ranks of a group hold the same rows, so each row must count once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import operations, recursively_apply
from torch import Tensor

from ringtile.hf import data
from ringtile.hf.group import ContextParallelGroup

# Functions of accelerate that count processes: modules import them by name, or by another one.
COLLECTIVES = {getattr(operations, name): name for name in ("gather", "gather_object", "reduce")}


class OneProcess:
    """Everything that an Accelerator is, but for its processes: one for each group. The main process is still one rank.

    Its collectives need every rank of the world, as those of the accelerator do.
    """

    def __init__(self, accelerator: Accelerator, group: ContextParallelGroup) -> None:
        vars(self).update(_accelerator=accelerator, _group=group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._accelerator, name, value)

    @property
    def num_processes(self) -> int:
        return int(self._group.data_size)

    @property
    def process_index(self) -> int:
        return int(self._group.data_index)

    def function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """One of COLLECTIVES, for these processes. Its arguments have the names and defaults of the original."""
        method, signature = getattr(self, COLLECTIVES[original]), inspect.signature(original)

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return method(*bound.args)

        return function

    def gather(self, tensor: Any) -> Any:
        """Tensors (n, ...) or () -> (n * groups, ...) or (groups,), nested. Of a group, what its first rank holds."""
        return data.one_copy(self._group, self._accelerator.gather(tensor))

    def gather_object(self, rows: Any) -> list[Any]:
        """The objects of the first ranks of all groups, one list after another."""
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, rows)
        return [row for part in parts[:: self._group.size] for row in part]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, the mean or the largest of a tensor over the groups, nested. scale: for TPUs alone."""
        over: dict[str, Callable[..., Tensor]] = {"mean": torch.mean, "max": torch.amax}
        return recursively_apply(lambda x: over.get(reduction, torch.sum)(self.gather(x[None]), dim=0), tensor)
