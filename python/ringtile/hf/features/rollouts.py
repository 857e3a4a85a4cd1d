"""Trainers that generate what they train on (TRL's GRPO, RLOO and distillation): a group of ranks is one process.

The rows of a group are dealt to its ranks. Each generates its rows on the unsharded model, with random numbers of its
own. Then every rank holds all rows of the group, and the log-probs of policy and reference are those of sharded models.
Reward functions run on the first rank of a group; reward models score the rows that a rank was dealt.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ringtile.errors import ConfigError, RefusedError
from ringtile.first_batch.random_states import (
    all_random_states,
    host_random_states,
    random_digest,
    random_numbers_of,
    set_random_states,
)
from ringtile.hf.batch import ShardedBatch
from ringtile.hf.group import of_a_collective
from ringtile.hf.loss_on_sequences import LossOnSequences
from ringtile.transport.groups import transport_of


class LossOnRollouts(LossOnSequences):
    """Deals the rows of a group to its ranks to generate, and shards what computes their log-probs."""

    def check(self) -> None:
        super().check()
        args, name = self.trainer.args, type(self.trainer).__name__
        trainer: Any = self.trainer
        if getattr(trainer, "tools", None) or getattr(trainer, "environment_factories", None) is not None:
            raise RefusedError(
                f"{name} has tools or environments; expected none under context parallelism: every rank of a group "
                f"would call them. Call them in a rollout_func, which is given the rows of one rank"
            )
        groups = args.world_size // self.config.context_parallel_size
        asked = {"num_generations": self._rows_at_once(groups)}
        if trainer.eval_dataset is not None:
            asked["num_generations_eval"] = args.per_device_eval_batch_size * groups
        for key, rows in asked.items():
            if rows % (number := getattr(trainer, key, None) or 1):
                raise ConfigError(
                    f"{rows} rows are generated at once, since {self.config.context_parallel_size} ranks count as one "
                    f"process, but {key} is {number}; expected a multiple of it: raise "
                    + ("per_device_eval_batch_size" if key.endswith("eval") else "gradient_accumulation_steps")
                )

    def _rows_at_once(self, groups: int) -> int:
        """Rows of all groups that are generated together for training."""
        args = self.trainer.args
        steps = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
        return int(args.per_device_train_batch_size * groups * steps)

    def loss_entry(self, wrapped: nn.Module, base: PreTrainedModel) -> nn.Module:
        """Distillation multiplies the last hidden states by the head itself."""
        return base.base_model if hasattr(self.trainer, "teacher_model") else wrapped

    def shard_in_step(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], ShardedBatch | None] | None:
        """Without the number of last tokens whose logits distillation wants: it cuts the hidden states itself."""
        return super().shard_in_step({name: value for name, value in inputs.items() if name != "logits_to_keep"})

    def install_loss(self) -> None:
        super().install_loss()
        trainer: Any = self.trainer
        patches, rows = self.patches, self._rows_at_once(self.group.data_size)
        if (teacher := getattr(trainer, "teacher_model", None)) is not None:
            self.hook(teacher)
        self.patches.wrap(trainer, "_prepare_inputs", self._score)
        self.patches.wrap(trainer, "_generate_and_score_completions", self._share_random_numbers)
        self.patches.wrap(trainer, "_generate_single_turn", self._generate)
        if getattr(trainer, "rollout_func", None) is not None:
            self.patches.wrap(trainer, "rollout_func", self._roll_out)
        if hasattr(trainer, "_calculate_rewards"):
            self.patches.wrap(trainer, "_calculate_rewards", self._check_rewards)
        if hasattr(trainer.args, "generation_batch_size"):
            patches.set(trainer.args, "generation_batch_size", rows)
        patches.set(trainer, "_logs", _with_length(trainer._logs, rows))
        if hasattr(trainer, "reward_funcs"):
            patches.set(trainer, "reward_funcs", [self._reward(function) for function in trainer.reward_funcs])
        before = all_random_states()
        set_seed(trainer.args.seed + self.group.data_index)  # as TRL does with the index of a process
        seeded = random_digest()
        patches.on_restore(lambda: set_random_states(before) if random_digest() == seeded else None)

    def _score(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`_prepare_inputs`, which generates completions and computes old and reference log-probs of them."""
        with self.groups.as_one_process(), self.step(True):
            batch = original(*args, **kwargs)
        self.group.check_same_batch(batch)
        return batch

    def _share_random_numbers(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Generates; then all ranks go on after what callbacks and reward functions drew on the first."""
        batch = original(*args, **kwargs)
        if self.group.size > 1:
            states = [host_random_states()]
            dist.broadcast_object_list(states, group_src=0, group=self.group.process_group)
            set_random_states(states[0])
        return batch

    # ---- rows that are dealt --------------------------------------------------------------------

    def _generate(
        self,
        original: Callable[..., Any],
        prompt_ids: Sequence[Any],
        images: Any,
        multimodal_fields: Mapping[str, Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        trainer: Any = self.trainer
        has_images = images is not None or bool(multimodal_fields)
        rows = _rows(trainer, prompt_ids, images, multimodal_fields) if has_images else prompt_ids

        def generate(some: Sequence[Any]) -> Any:
            given = _unsplit(trainer, some) if has_images else (some, images, multimodal_fields)
            return self.on_whole_rows(self.base, original, *given, *args, **kwargs)

        if getattr(trainer, "use_vllm", False) and trainer.vllm_mode == "server":
            return generate(rows)  # one rank of the world asks, for the rows of all
        return self._deal(rows, generate)

    def _roll_out(self, original: Callable[..., Any], prompts: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
        """The user's function gets the rows of one rank, and sees each rank, as in one process without ringtile."""
        with self.groups.as_ranks():
            return self._deal(prompts, lambda rows: self.on_whole_rows(self.base, original, rows, *args, **kwargs))

    def _deal(self, rows: Sequence[Any], generate: Callable[[Sequence[Any]], Any]) -> Any:
        """Returns what `generate` answers to all rows; each rank asks it about its part of them. A collective.

        Raises RingMismatchError where the ranks hold other rows; RefusedError where TRL's vLLM takes as many of each.
        """
        group, trainer = self.group, cast(Any, self.trainer)
        if group.size == 1:
            return generate(rows)
        in_one = trainer.args.vllm_mode == "server" or trainer.args.vllm_tensor_parallel_size > 1
        if trainer.args.use_vllm and in_one and len(rows) % group.size:
            raise RefusedError(
                f"{len(rows)} rows for {group.size} ranks, which ask vLLM together; expected as many for each: change "
                f"per_device_train_batch_size or steps_per_generation"
            )
        (counts, mine), answer, op = self._dealt(len(rows)), None, "the rows to generate"
        shared, transport = _hash(repr(_without_pixels(rows))), transport_of(group.process_group)
        plugin = trainer.accelerator.state.deepspeed_plugin
        is_sharded = isinstance(trainer.model, FSDPModule) or isinstance(self.base, FSDPModule)
        gathers = is_sharded or (plugin is not None and plugin.zero_stage == 3)
        if rows[mine] or gathers:  # a rank without rows helps the others to gather weights
            of_rank = (shared, random_digest(), trainer.state.global_step, self.base.training, group.rank)
            with transport.propagate_errors(op), random_numbers_of(_hash(repr(of_rank))):
                answer = generate(rows[mine] or rows[:1])
        held: list[Any] = [None] * group.size
        with transport.agree(op, {}, data=shared):
            pass
        dist.all_gather_object(held, answer, group=group.process_group)
        return _joined([answer for answer, count in zip(held, counts, strict=True) if count], counts)

    def _dealt(self, rows: int) -> tuple[list[int], slice]:
        """How many rows each rank gets: as many as another, or one more; and which this one gets."""
        counts = [rows // self.group.size + (rank < rows % self.group.size) for rank in range(self.group.size)]
        first = sum(counts[: self.group.rank])
        return counts, slice(first, first + counts[self.group.rank])

    # ---- rewards --------------------------------------------------------------------------------

    def _reward(self, function: Any) -> Any:
        """A reward model that scores this rank's rows; a function that runs on the first rank of a group, which alone
        is heard."""
        if isinstance(function, nn.Module) and self.group.size > 1:
            self.patches.wrap(function, "forward", self._score_rows)
        if isinstance(function, nn.Module) or self.group.size == 1:
            return function
        first = self.group.rank == 0
        called = function.func if isinstance(function, functools.partial) else function
        if inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__):

            async def nothing(prompts: Sequence[Any], **kwargs: Any) -> list[float]:
                return [0.0] * len(prompts)

            return function if first else functools.wraps(function)(nothing)
        name = getattr(function, "__name__", type(function).__name__)
        op = f"{name[:99]}, which the first rank of a group alone calls, without collectives"

        @functools.wraps(function)
        def reward(*args: Any, **kwargs: Any) -> Any:
            """The others wait here: in TRL's next collective, they would answer one of the function's own."""
            transport = transport_of(self.group.process_group)
            with transport.propagate_errors(op):
                try:
                    rewards = (
                        function(*args, **kwargs) if first else [0.0] * len(args[0] if args else kwargs["prompts"])
                    )
                except Exception as error:
                    if of_a_collective(error):
                        raise RefusedError(
                            f"a collective of torch.distributed failed in {op}; expected a function of its arguments"
                        ) from error
                    raise
            with transport.agree(op, {}):
                return rewards

        return reward

    def _check_rewards(self, original: Callable[..., Any], inputs: Sequence[Any], /, *args: Any, **kwargs: Any) -> Any:
        """RefusedError: rewards of other rows than those of all groups, which an own method has gathered by torch."""
        rewards = original(inputs, *args, **kwargs)
        if len(rewards) != (rows := len(inputs) * self.group.data_size):
            raise RefusedError(
                f"{type(self.trainer).__name__}._calculate_rewards returns {len(rewards)} rows; expected {rows}, "
                f"{len(inputs)} of each of {self.group.data_size} groups of ranks: gather them by accelerate, which "
                f"counts a group as one process, not by torch.distributed"
            )
        return rewards

    def _score_rows(self, original: Callable[..., Any], **inputs: Tensor) -> Any:
        """The reward model on the rows of this rank, and the logits of all rows of the group."""
        counts, mine = self._dealt(next(iter(inputs.values())).size(0))
        rows = mine if counts[self.group.rank] else slice(0, 1)
        with self.step(False):
            output = original(**{name: value[rows] for name, value in inputs.items()})
        most = output.logits.new_zeros(max(counts), *output.logits.shape[1:])
        most[: output.logits.size(0)] = output.logits
        parts = [torch.empty_like(most) for _ in counts]
        dist.all_gather(parts, most, group=self.group.process_group)
        output.logits = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        return output


def _rows(trainer: Any, prompt_ids: Sequence[Any], images: Any, fields: Mapping[str, Any]) -> list[Any]:
    """Of each row to generate its prompt, its images, and its part of what the processor has made of all.

    RefusedError: images in tiles, whose number in each row TRL does not count before it has generated.
    """
    counts = [len(of_row or ()) for of_row in images or [()] * len(prompt_ids)]
    lengths = [len(ids) for ids in prompt_ids]
    kept = {name for name, x in fields.items() if isinstance(x, Tensor) or _is_of_tokens(x, lengths)}
    fields = {name: x if name in kept else torch.tensor(np.array(x)) for name, x in fields.items()}  # as TRL does
    pixels = fields.get("pixel_values")
    in_rows = isinstance(pixels, Tensor) and pixels.dim() == 5 and pixels.size(0) == len(counts)
    in_tiles = "image_grid_thw" not in fields and not in_rows and pixels is not None and len(pixels) != sum(counts)
    if in_tiles or "spatial_shapes" in fields:
        raise RefusedError(
            f"{type(trainer).__name__} was given images in tiles; expected whole images, since it is not known which "
            f"tiles a rank's rows have: turn them off in the image processor"
        )
    of_rows = _of_trl(trainer, "split_pixel_values_by_grid")({**fields, "num_images": counts})
    for name, parts in of_rows.items():
        if len(parts) != len(counts):
            raise RefusedError(
                f"{type(trainer).__name__} generates with {name} of {len(parts)} entries for {len(counts)} rows; "
                f"expected one for each row, or for each image, of which there are {counts}"
            )
    return [
        (ids, None if images is None else images[row], {name: parts[row : row + 1] for name, parts in of_rows.items()})
        for row, ids in enumerate(prompt_ids)
    ]


def _is_of_tokens(value: Any, lengths: Sequence[int]) -> bool:
    """Whether it is a list with an entry for each token of each row."""
    return isinstance(value, list) and [len(x) if isinstance(x, list) else -1 for x in value] == [*lengths]


def _unsplit(trainer: Any, rows: Sequence[Any]) -> tuple[list[Any], Any, dict[str, Any]]:
    """Prompts, images, and what the processor has made, of some rows."""
    ids, images, of_rows = ([row[part] for row in rows] for part in range(3))
    joined: dict[str, Any] = {}
    for name in of_rows[0]:
        parts = [part[name] for part in of_rows]
        joined[name] = torch.cat(parts) if isinstance(parts[0], Tensor) else [x for part in parts for x in part]
    if joined:
        joined = _of_trl(trainer, "unsplit_pixel_values_by_grid")(joined)
    counts = joined.pop("num_images", [])
    if not any(counts):  # processors make no tensors of no images
        joined = {name: x for name, x in joined.items() if not isinstance(x, Tensor)}
    return ids, None if all(x is None for x in images) else images, joined


def _of_trl(trainer: Any, name: str) -> Callable[..., Any]:
    """A function of the module of TRL that the Trainer is of."""
    modules = [sys.modules[cls.__module__] for cls in type(trainer).__mro__]
    function: Callable[..., Any] = next(vars(module)[name] for module in modules if name in vars(module))
    return function


def _without_pixels(value: Any) -> Any:
    """Rows, with digests of the images and tensors in them."""
    if isinstance(value, Mapping):
        return {name: _without_pixels(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_pixels(x) for x in value)
    if isinstance(value, Tensor):
        held = value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
        return tuple(value.shape), hashlib.sha256(held).hexdigest()
    if hasattr(value, "tobytes"):  # an image, or an array
        return getattr(value, "mode", None), value.size, hashlib.sha256(value.tobytes()).hexdigest()
    return value


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _joined(answers: Sequence[Any], counts: Sequence[int]) -> Any:
    """One answer for all rows from those for a few rows each: lists of rows one after another, in tuples and mappings;
    of anything else the first."""
    first = answers[0]
    if isinstance(first, tuple):
        return tuple(_joined(parts, counts) for parts in zip(*answers, strict=True))
    if isinstance(first, Mapping) and all(answer.keys() == first.keys() for answer in answers):
        return {key: _joined([answer[key] for answer in answers], counts) for key in first}
    lengths = [len(answer) if isinstance(answer, list) else None for answer in answers]
    if lengths == [count for count in counts if count]:
        return [row for answer in answers for row in answer]
    if isinstance(first, Mapping | Tensor) or any(answer != first for answer in answers):
        raise RefusedError(
            "a rollout_func returned something else than a list of one entry for each row, which differs between the "
            "ranks of a group; expected lists as long as the prompts that it was given"
        )
    return first


def _with_length(logs: Any, rows: int) -> Any:
    """TRL's logs of the last generation, empty, for so many rows."""
    if isinstance(logs, deque):
        return deque(maxlen=rows)
    kept = {name: _with_length(log, rows) for name, log in logs.items()}
    return defaultdict(functools.partial(deque, maxlen=rows), kept) if isinstance(logs, defaultdict) else kept
