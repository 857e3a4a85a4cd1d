"""The same batch on every rank of a context-parallel group, and each batch counted once in evaluation."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader

from ringtile.errors import RefusedError
from ringtile.hf.group import ContextParallelGroup


def prepare_loader(accelerator: Accelerator, group: ContextParallelGroup, loader: DataLoader[Any]) -> DataLoader[Any]:
    """`Accelerator.prepare_data_loader` with context-parallel groups in place of processes.

    Every rank reads an iterable dataset itself: accelerate's dispatching loader would give each rank another batch.
    Raises RefusedError for a loader that already dispatches.
    """
    if isinstance(loader, DataLoaderDispatcher):
        raise RefusedError(
            "the data loader dispatches batches from rank 0, one to each rank; expected a loader that every rank reads "
            "itself (dispatch_batches false or unset in accelerator_config)"
        )
    if not getattr(loader, "_is_accelerate_prepared", False):
        loader = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=group.data_size,
            process_index=group.data_index,
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
    if loader not in accelerator._dataloaders:
        accelerator._dataloaders.append(loader)
    return loader


def gather_rows(accelerator: Accelerator, group: ContextParallelGroup, data: Any) -> Any:
    """`Accelerator.gather_for_metrics`, where the ranks of a group all hold the same rows and one copy is kept.

    data: tensors (n, ...) -> (n * data_size, ...), or () -> (data_size,), nested in tuples, lists or mappings. At the
    end of a data set the rows that only fill up the last batch are dropped.
    Raises RefusedError for anything but tensors.
    """
    if group.data_size > 1:
        return _without_surplus(accelerator, 1, one_copy(group, _gather(accelerator, data)))
    try:  # all ranks hold all rows: no rank is waited for
        rows = recursively_apply(lambda x: x.detach().reshape(x.shape or (1,)), data, error_on_other_type=True)
    except TypeError as error:
        raise refused_objects(data) from error
    return _without_surplus(accelerator, 1, rows)


def one_copy(group: ContextParallelGroup, data: Any) -> Any:
    """Tensors (n * ranks, ...) of all ranks -> (n * data_size, ...): of each group, the rows of its first rank."""

    def of_tensor(rows: Tensor) -> Tensor:
        each = rows.size(0) // (group.data_size * group.size)
        return rows.reshape(group.data_size, group.size, each, *rows.shape[1:])[:, 0].flatten(0, 1)

    return data if group.size == 1 else recursively_apply(of_tensor, data)


def gather_parts(accelerator: Accelerator, group: ContextParallelGroup, data: Any) -> Any:
    """`Accelerator.gather_for_metrics`, where each rank of a group holds the part of its shard in a number.

    data: tensors () -> (ranks,), nested. accelerate takes each number for a row, and drops some at the end of a data
    set; here the ranks of a group are kept or dropped together, so that a sum, and a mean of numbers that are equal on
    a group, are those of as many processes as there are groups.
    Raises RefusedError for anything but tensors.
    """
    return _without_surplus(accelerator, group.size, _gather(accelerator, data))


def _gather(accelerator: Accelerator, data: Any) -> Any:
    try:
        with torch.no_grad():
            return accelerator.gather(data)
    except TypeError as error:
        raise refused_objects(data) from error


def refused_objects(data: Any) -> RefusedError:
    return RefusedError(
        f"gather_for_metrics of objects, of a {type(data).__name__}; expected tensors: from nothing else does ringtile "
        f"drop the copies of the ranks that share a sequence"
    )


def _without_surplus(accelerator: Accelerator, copies: int, data: Any) -> Any:
    state = accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0:
        return data
    return recursively_apply(lambda rows: rows[: copies * state.remainder], data)


class EvaluationMetrics(dict[str, Any]):
    """The metrics of an evaluation, to which evaluate() or predict() adds its speeds, once: it counts the steps as if
    each rank had a batch of its own. What is put into it later stays as it is."""

    def __init__(
        self, metrics: dict[str, Any], prefix: str, num_samples: int, batch_size: int, group: ContextParallelGroup
    ) -> None:
        """prefix: of transformers' keys. batch_size: of one rank."""
        super().__init__(metrics)
        ranks = group.size * group.data_size
        steps, counted = (math.ceil(num_samples / (batch_size * batches)) for batches in (group.data_size, ranks))
        self._speed: str | None = f"{prefix}_steps_per_second"  # None: it is there
        self._steps_counted = steps / max(counted, 1)

    def update(self, *args: Any, **kwargs: Any) -> None:
        more = dict(*args, **kwargs)
        if self._speed in more:
            more[self._speed] = round(more[self._speed] * self._steps_counted, 3)
            self._speed = None
        super().update(more)
