"""An accelerator in whose eyes the ranks of a context-parallel group are one process.

Trainers count processes: they divide by their number, take the slice of the world's rows that belongs to them, and add
up what all of them hold. The ranks of a group hold the same rows, so each row must count once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import operations, recursively_apply
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size

from ringtile.errors import RefusedError
from ringtile.hf.batch import active_batch
from ringtile.hf.group import ContextParallelGroup, accelerate_knows_groups, deepspeed_shards_sequences
from ringtile.hf.model import has_engine
from ringtile.hf.patches import Patches

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

    dispatch_batches = False  # accelerate's dispatching loader would give each rank another batch
    parallelism_config = None  # by which accelerate and the Trainer would count groups themselves

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """The same batch on every rank of a group, which reads an iterable dataset itself.

        Raises RefusedError for a loader that already dispatches.
        """
        if isinstance(data_loader, DataLoaderDispatcher):
            raise RefusedError(
                "the data loader dispatches batches from rank 0, one to each rank; expected a loader that every rank "
                "reads itself (dispatch_batches false or unset in accelerator_config)"
            )
        return Accelerator.prepare_data_loader(self, data_loader, *args, **kwargs)

    def _prepare_device_mesh(self) -> None:
        """None: by a mesh, accelerate would count groups itself."""

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
        return one_copy(self._accelerator.gather(tensor), self._group.copies)

    def gather_object(self, rows: Any) -> list[Any]:
        """The objects of the first ranks of all groups, one list after another."""
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, rows)
        return [row for part in parts[:: self._group.copies] for row in part]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, the mean or the largest of a tensor over the groups, nested. scale: for TPUs alone."""
        over: dict[str, Callable[..., Tensor]] = {"mean": torch.mean, "max": torch.amax}
        return recursively_apply(lambda x: over.get(reduction, torch.sum)(self.gather(x[None]), dim=0), tensor)


class OneState(OneProcess):
    """The same of the PartialState that a Trainer's arguments count by. Who writes files stays one rank."""

    process_index = property(lambda self: self._accelerator.process_index)


# ---- a Trainer -----------------------------------------------------------------------------------


_FLAGS = "should_training_stop", "should_epoch_stop", "should_evaluate", "should_save", "should_log"


class Groups:
    """Makes one Trainer count a group as one process: in its data, its items, its rows and what it gathers."""

    def __init__(self, trainer: Trainer, group: ContextParallelGroup, patches: Patches) -> None:
        self.trainer, self.group, self.patches = trainer, group, patches
        self.accelerator = trainer.accelerator  # which stands for the trainer's inside a loss of its own
        self._evaluated_rows = -1  # of the last batch of an evaluation
        self._evaluated = 0  # batches of it
        self._evaluates = False  # inside prediction_step

    def install(self) -> None:
        trainer, accelerator = self.trainer, self.accelerator
        self.patches.wrap(trainer, "evaluation_loop", self._evaluation_loop)
        self.patches.wrap(trainer, "prediction_step", self._prediction_step)
        self.patches.wrap(accelerator, "gather_for_metrics", self._gather_for_metrics)
        if trainer.args.include_num_input_tokens_seen != "no":
            self.patches.wrap(trainer, "_track_num_input_tokens", self.in_one_process)
        self.patches.wrap(trainer, "_get_num_items_in_batch", self._count_items)
        self.patches.wrap(trainer, "_maybe_log_save_evaluate", self._follow_flags)
        self.patches.wrap(trainer, "get_total_train_batch_size", self.in_one_process)
        self.patches.wrap(accelerator, "prepare_data_loader", self._prepare_data_loader)
        if accelerate_knows_groups(accelerator):
            self.patches.set(accelerator, "_prepare_cp", self._prepare_cp)

    @contextlib.contextmanager
    def as_one_process(self) -> Iterator[None]:
        """Inside, the Trainer and the modules of its class and of its bases see a group as one process."""
        if isinstance(self.trainer.accelerator, OneProcess):
            yield
            return
        self._counting = Patches.of(self._count_groups)
        try:
            yield
        finally:
            self._counting.restore()

    @contextlib.contextmanager
    def as_ranks(self) -> Iterator[None]:
        """Inside `as_one_process`, for code that is given the rows of one rank: it sees each rank again."""
        self._counting.restore()
        yield
        self._counting = Patches.of(self._count_groups)

    def _count_groups(self, patches: Patches) -> None:
        if self.group.size == 1:
            return
        trainer, one = self.trainer, OneProcess(self.trainer.accelerator, self.group)
        patches.set(trainer.args, "distributed_state", OneState(trainer.args.distributed_state, self.group))
        if self.group.tp_size > 1:  # by which the Trainer divides what it takes for a count of all ranks
            patches.set(trainer, "get_tp_size", lambda: 1)
        vllm = getattr(trainer, "vllm_generation", None)
        for owner in [trainer] + [vllm] * (vllm is not None):
            patches.set(owner, "accelerator", one)
        homes = {cls.__module__ for owner in (trainer, vllm) for cls in type(owner).__mro__} & sys.modules.keys()
        for module in [sys.modules[home] for home in homes]:
            for name, value in list(vars(module).items()):
                if isinstance(value, FunctionType) and value in COLLECTIVES:
                    patches.set(module, name, one.function(value))

    def in_one_process(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of the Trainer's that counts processes."""
        with self.as_one_process():
            return original(*args, **kwargs)

    def _count_items(
        self, original: Callable[..., Any], batch_samples: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Counts each item once. The ranks meet when each has loaded the batches of a step."""
        if not self._evaluates:
            self.group.meet("a step of training", self.trainer.state.global_step + 1, batches=len(batch_samples))
        return self.in_one_process(original, batch_samples, *args, **kwargs)

    def _follow_flags(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Does what callbacks have asked for, by flags of the Trainer's that must be the same on all ranks."""
        flags = {name: int(getattr(self.trainer.control, name)) for name in _FLAGS}
        self.group.meet("what follows a step", self.trainer.state.global_step, **flags)
        return original(*args, **kwargs)

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """Leaves out accelerate's hooks on attention modules. User code may still ask for its context, a no-op."""
        if not deepspeed_shards_sequences(self.trainer.accelerator):
            self.patches.set(self.trainer.accelerator, "_cp_context", lambda **kwargs: contextlib.nullcontext())
        return args

    def _gather_for_metrics(
        self, original: Callable[..., Any], input_data: Any, use_gather_object: bool = False
    ) -> Any:
        """What ranks of a group hold counts once: TRL calls it for what it logs, an evaluation for its rows.

        input_data: tensors, nested in tuples, lists or mappings. In a loss on shards, numbers () of which each rank has
        the part of its shard -> (ranks,): those of a group are kept or dropped together at the end of a data set, so
        that a sum, and a mean of numbers that are equal on a group, are those of as many processes as there are groups.
        Elsewhere rows (n, ...), or (), that the ranks of a group all hold -> (n * data_size, ...), without those that
        only fill up the last batch. Raises RefusedError for anything but tensors.
        """
        group, in_parts = self.group, active_batch() is not None
        all_there = group.data_size == 1 and not in_parts  # no rank is waited for
        try:
            if use_gather_object:
                raise TypeError
            with torch.no_grad():
                found = (
                    recursively_apply(
                        lambda x: x.detach().reshape(x.shape or (1,)), input_data, error_on_other_type=True
                    )
                    if all_there
                    else self.accelerator.gather(input_data)
                )
        except TypeError as error:
            raise RefusedError(
                f"gather_for_metrics of objects, of a {type(input_data).__name__}; expected tensors: from nothing else "
                f"does ringtile drop the copies of the ranks that share a sequence"
            ) from error
        if not all_there:
            found = one_copy(found, group.tp_size if in_parts else group.copies)
        state = self.accelerator.gradient_state
        # A stream does not say how many rows are left. In one process accelerate counts those of its last batch.
        left = self._evaluated_rows if state.remainder < 0 and group.data_size == 1 else state.remainder
        if not state.end_of_dataloader or left <= 0:
            return found
        kept = left * (group.size if in_parts else 1)
        return recursively_apply(lambda rows: rows[:kept], found)

    def _prepare_data_loader(self, original: Callable[..., Any], data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        return OneProcess(self.trainer.accelerator, self.group).prepare_data_loader(data_loader, *args, **kwargs)

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keeps one copy of each row: the ranks of a group evaluate the same rows."""
        trainer = self.trainer
        previous, prepared = trainer.gather_function, list(trainer.accelerator._models)
        trainer.gather_function = trainer.accelerator.gather_for_metrics
        try:
            return original(*args, **kwargs)
        finally:
            trainer.gather_function, self._evaluated_rows, self._evaluated = previous, -1, 0
            self._forget_bare_model(prepared)

    def _prediction_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._evaluated_rows = find_batch_size(inputs) or -1  # type: ignore[no-untyped-call]
        self._evaluated += 1
        self.group.meet("a step of evaluation", self._evaluated)
        self._evaluates = True
        try:
            return original(model, inputs, *args, **kwargs)
        finally:
            self._evaluates = False

    def _forget_bare_model(self, prepared: list[nn.Module]) -> None:
        """Lets train() prepare the model again. Before training, accelerate prepares it for evaluation only and then
        takes it for prepared, so that it would train without an engine. prepared: the models before the evaluation."""
        models, bare = self.trainer.accelerator._models, self.trainer.model
        if bare is not None and bare not in prepared and bare in models and not has_engine(bare):
            models.remove(bare)
            del bare._is_accelerate_prepared
            if (original := vars(bare).pop("_original_forward", None)) is not None:  # mixed precision has wrapped it
                bare.forward = original


def one_copy(data: Any, copies: int) -> Any:
    """Tensors (n * ranks, ...) of all ranks -> (n * ranks / copies, ...): of each `copies` ranks, the rows of the
    first."""

    def of_tensor(rows: Tensor) -> Tensor:
        different = dist.get_world_size() // copies
        each = rows.size(0) // (different * copies)
        return rows.reshape(different, copies, each, *rows.shape[1:])[:, 0].flatten(0, 1)

    return data if copies == 1 else recursively_apply(of_tensor, data)
