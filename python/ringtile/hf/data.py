"""The same batch on every rank of a context-parallel group, and each batch counted once in evaluation."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader

from ringtile.errors import Refused
from ringtile.hf.group import ContextParallelGroup


def prepare_loader(accelerator: Accelerator, group: ContextParallelGroup, loader: DataLoader[Any]) -> DataLoader[Any]:
    """`Accelerator.prepare_data_loader` with context-parallel groups in place of processes.

    Every rank reads an iterable dataset itself: accelerate's dispatching loader would give each rank another batch.
    Raises Refused for a loader that already dispatches.
    """
    if isinstance(loader, DataLoaderDispatcher):
        raise Refused(
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


def gather_for_metrics(accelerator: Accelerator, group: ContextParallelGroup, data: Any) -> Any:
    """`Accelerator.gather_for_metrics`, where the ranks of a group all hold the same rows and one copy is kept.

    data: tensors (n, ...), nested in tuples, lists or mappings -> (n * data_size, ...). At the end of a data set the
    rows that only fill up the last batch are dropped.
    """
    state = accelerator.gradient_state
    surplus = state.end_of_dataloader and state.remainder > 0

    def one_copy(rows: Tensor) -> Tensor:
        rows = rows.reshape(group.data_size, group.size, -1, *rows.shape[1:])[:, 0].flatten(0, 1)
        return rows[: state.remainder] if surplus else rows

    with torch.no_grad():
        return recursively_apply(one_copy, accelerator.gather(data))
