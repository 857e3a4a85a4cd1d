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
    """`Accelerator.prepare_data_loader` with the data-parallel groups in the place of the processes.

    An iterable dataset is read by every rank: accelerate's dispatching loader would hand each rank a batch of its own.
    Raises Refused for a loader that dispatches already.
    """
    if isinstance(loader, DataLoaderDispatcher):
        raise Refused(
            "the data loader dispatches batches from rank 0, one to each rank; expected a loader that every rank reads "
            "(accelerator_config dispatch_batches false or unset)"
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
    """`Accelerator.gather_for_metrics` with one copy of what the ranks of a group all hold.

    data: tensors (n, ...), nested in tuples, lists or mappings -> (n * data_size, ...), at the end of a data set less
    the rows that only filled its last batch.
    """
    state = accelerator.gradient_state
    surplus = state.end_of_dataloader and state.remainder > 0

    def one_copy(rows: Tensor) -> Tensor:
        rows = rows.reshape(group.data_size, group.size, -1, *rows.shape[1:])[:, 0].flatten(0, 1)
        return rows[: state.remainder] if surplus else rows

    with torch.no_grad():
        return recursively_apply(one_copy, accelerator.gather(data))
