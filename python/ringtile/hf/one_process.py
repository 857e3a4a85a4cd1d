"""The ranks of a context-parallel group count as one process, in accelerate and in the Trainer.

Trainers count processes: they divide by their number, take the slice of the world's rows that belongs to them, and add
up what all of them hold. The ranks of a group hold the same rows, so each row must count once.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import AcceleratorState
from accelerate.utils import operations, recursively_apply
from torch import Tensor
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import seed_worker

from ringtile.errors import RefusedError
from ringtile.hf.batch import active_batch
from ringtile.hf.group import ContextParallelGroup, accelerate_knows_groups, deepspeed_shards_sequences
from ringtile.hf.model import has_engine
from ringtile.hf.patches import Patches

_ABSENT: Any = object()
_Values = list[tuple[Any, str, Any]]  # owner, attribute, value


def as_groups(group: ContextParallelGroup) -> _Values:
    """What makes all of accelerate count each group as one process; the main process is still one rank.

    Every Accelerator and PartialState reads the two dicts that are changed here, and every import of gather,
    gather_object and reduce calls what is replaced. They still need every rank of the world. Raises RefusedError.
    """
    process, state = PartialState(), AcceleratorState()
    is_main = process.is_main_process
    counts = ("num_processes", group.data_size), ("process_index", group.data_index)
    values: _Values = [
        *[(each, name, count) for each in (process, state) for name, count in counts],
        (state, "parallelism_config", None),  # by which accelerate would count groups itself
        (PartialState, "is_main_process", property(lambda state: is_main)),
        (PartialState, "use_distributed", property(lambda state: True)),  # also where there is one group
        (operations, "_gpu_gather_object", functools.partial(gathered_objects, copies=group.copies)),
    ]
    # accelerate decorates these: modules that have imported them hold the decorated function, which calls the other.
    for decorated, function in ((operations.gather, gathered), (operations.reduce, _reduced)):
        cells = dict(zip(decorated.__code__.co_freevars, decorated.__closure__ or (), strict=True))
        if "function" not in cells or not hasattr(operations, "_gpu_gather_object"):
            raise RefusedError(
                f"accelerate {accelerate.__version__} does not decorate {decorated.__name__}, or gathers objects in "
                f"another way, so not all who have imported it could be served; expected accelerate >= 1.15, which "
                f"ringtile is tested with"
            )
        values.append((cells["function"], "cell_contents", functools.partial(function, copies=group.copies)))
    return values


def _swap(values: _Values) -> None:
    """Give each attribute its value, and take in return what its owner itself held: a second call puts that back."""
    for i, (owner, name, value) in enumerate(values):
        held = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else getattr(owner, name)
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
        values[i] = owner, name, held


def gathered(tensor: Any, copies: int) -> Any:
    """Tensors (n, ...) or () -> (n * groups, ...) or (groups,), nested: of each `copies` ranks, those of the first.

    A collective of the world. Raises TypeError for anything but tensors.
    """

    def of_tensor(rows: Tensor) -> Tensor:
        rows = rows.contiguous() if rows.dim() else rows.clone()[None]
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows)
        return torch.cat(parts[::copies])

    return recursively_apply(of_tensor, tensor, error_on_other_type=True)


def gathered_objects(rows: list[Any], copies: int) -> list[Any]:
    """The objects of the first of each `copies` ranks, one list after another. A collective of the world."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rows)
    return [row for part in parts[::copies] for row in part]


def _reduced(tensor: Any, reduction: str = "mean", scale: float = 1.0, *, copies: int) -> Any:
    """The mean, the sum or the largest of tensors over the groups, nested. scale: for TPUs alone."""
    over: dict[str, Callable[..., Tensor]] = {"mean": torch.mean, "max": torch.amax}
    return recursively_apply(
        lambda x: over.get(reduction, torch.sum)(gathered(x[None], copies), dim=0), tensor, error_on_other_type=True
    )


# ---- a Trainer -----------------------------------------------------------------------------------


_FLAGS = "should_training_stop", "should_epoch_stop", "should_evaluate", "should_save", "should_log"


class Groups:
    """Makes one Trainer count a group as one process: in its data, its items, its rows and what it gathers."""

    def __init__(self, trainer: Trainer, group: ContextParallelGroup, patches: Patches) -> None:
        self.trainer, self.group, self.patches = trainer, group, patches
        self._ranks: _Values = []  # inside `as_one_process`, what counts ranks
        self._evaluated_rows = -1  # of the last batch of an evaluation
        self._evaluated = 0  # batches of it
        self._evaluates = False  # inside prediction_step
        # As a data loader gave them, on the host: those of a step, and the next, which accelerate asks for before.
        self.loaded = collections.deque[Any](maxlen=trainer.args.gradient_accumulation_steps + 1)

    def install(self) -> None:
        trainer, accelerator = self.trainer, self.trainer.accelerator
        self.patches.wrap(trainer, "prediction_step", self._prediction_step)
        self.patches.wrap(accelerator, "gather_for_metrics", self._gather_for_metrics)
        if trainer.args.include_num_input_tokens_seen != "no":
            self.patches.wrap(trainer, "_track_num_input_tokens", self.in_one_process)
        self.patches.wrap(trainer, "_get_num_items_in_batch", self._count_items)
        if type(trainer).get_batch_samples is not Trainer.get_batch_samples:  # a user's may count items itself
            self.patches.wrap(trainer, "get_batch_samples", self.in_one_process)
        self.patches.wrap(trainer, "_maybe_log_save_evaluate", self._follow_flags)
        if type(trainer).get_train_dataloader is not Trainer.get_train_dataloader:  # a user's may share rows itself
            self.patches.wrap(trainer, "get_train_dataloader", self.in_one_process)
        self.patches.wrap(trainer, "get_total_train_batch_size", self.in_one_process)
        self.patches.wrap(accelerator, "prepare_data_loader", self._prepare_data_loader)
        self.patches.on_restore(functools.partial(setattr, trainer, "gather_function", trainer.gather_function))
        self.patches.on_restore(self._forget_bare_model)
        if accelerate_knows_groups(accelerator):
            self.patches.set(accelerator, "_prepare_cp", self._prepare_cp)

    @contextlib.contextmanager
    def as_one_process(self) -> Iterator[None]:
        """Inside, accelerate and the Trainer see a group as one process."""
        if self._ranks or self.group.size == 1:
            yield
            return
        values, trainer = as_groups(self.group), self.trainer
        is_first = trainer.is_world_process_zero()
        values.append((trainer, "is_world_process_zero", lambda: is_first))  # who writes files stays one rank
        if self.group.tp_size > 1:  # by which the Trainer divides what it takes for a count of all ranks
            values.append((trainer, "get_tp_size", lambda: 1))
        _swap(values)
        self._ranks = values
        try:
            yield
        finally:
            _swap(values)
            self._ranks = []

    @contextlib.contextmanager
    def as_ranks(self) -> Iterator[None]:
        """Inside `as_one_process`, for code that is given the rows of one rank: it sees each rank again."""
        _swap(self._ranks)
        try:
            yield
        finally:
            _swap(self._ranks)

    def in_one_process(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of the Trainer's that counts processes."""
        with self.as_one_process():
            return original(*args, **kwargs)

    def _count_items(
        self, original: Callable[..., Any], batch_samples: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Counts each item once. The ranks meet when each has loaded the batches of a step."""
        if not self._evaluates:
            self._evaluated_rows = -1
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
                    else gathered(input_data, group.tp_size if in_parts else group.copies)
                )
        except TypeError as error:
            raise RefusedError(
                f"gather_for_metrics of objects, of a {type(input_data).__name__}; expected tensors: from nothing else "
                f"does ringtile drop the copies of the ranks that share a sequence"
            ) from error
        state = self.trainer.accelerator.gradient_state
        # A stream does not say how many rows are left. In one process accelerate counts those of its last batch.
        left = self._evaluated_rows if state.remainder < 0 and group.data_size == 1 else state.remainder
        if not state.end_of_dataloader or left <= 0:
            return found
        kept = left * (group.size if in_parts else 1)
        return recursively_apply(lambda rows: rows[:kept], found)

    def _prepare_data_loader(self, original: Callable[..., Any], data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """The same batch on every rank of a group, which reads an iterable dataset itself, and draws alike in workers.

        Raises RefusedError for a loader that already dispatches.
        """
        self._evaluated = 0
        self._forget_bare_model()
        if isinstance(data_loader, DataLoaderDispatcher):
            raise RefusedError(
                "the data loader dispatches batches from rank 0, one to each rank; expected a loader that every rank "
                "reads itself (dispatch_batches false or unset in accelerator_config)"
            )
        seed = getattr(data_loader, "worker_init_fn", None)
        if isinstance(seed, functools.partial) and seed.func is seed_worker:  # by the index of the process
            data_loader.worker_init_fn = functools.partial(seed, rank=self.group.data_index)
        accelerator: Accelerator = self.trainer.accelerator
        with self.as_one_process(), contextlib.ExitStack() as stack:
            stack.callback((for_call := Patches()).restore)
            for_call.set(accelerator.dataloader_config, "dispatch_batches", False)  # each rank would get another batch
            for_call.set(accelerator, "_prepare_device_mesh", lambda: None)  # by a mesh, it would count groups itself
            prepared = original(data_loader, *args, **kwargs)
        base = getattr(prepared, "base_dataloader", None)
        if base is not None and self.group.device.type == "cuda":  # a patch would keep each evaluation's loader alive
            base.__iter__ = functools.partial(self._noted, base.__iter__)
        return prepared

    def _noted(self, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        for batch in batches():
            self.loaded.append(batch)
            yield batch

    def _prediction_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # Keeps one copy of each row. Until a first evaluation has ended, the Trainer's is the one it was made with.
        self.trainer.gather_function = self.trainer.accelerator.gather_for_metrics
        self._evaluated_rows = find_batch_size(inputs) or -1  # type: ignore[no-untyped-call]
        self._evaluated += 1
        self.group.meet("a step of evaluation", self._evaluated)
        self._evaluates = True
        try:
            return original(model, inputs, *args, **kwargs)
        finally:
            self._evaluates = False

    def _forget_bare_model(self) -> None:
        """Lets train() prepare the model again, behind its data loader. Before training, accelerate prepares it for
        evaluation only and then takes it for prepared, so that it would train without an engine."""
        accelerator, bare = cast(Any, self.trainer.accelerator), cast(Any, self.trainer.model)
        if getattr(bare, "_is_accelerate_prepared", False) and not has_engine(bare):
            accelerator._models = [model for model in accelerator._models if model is not bare]
            del bare._is_accelerate_prepared
            if (original := vars(bare).pop("_original_forward", None)) is not None:  # mixed precision has wrapped it
                bare.forward = original
