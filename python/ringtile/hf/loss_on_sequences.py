"""Trainers with a loss of their own: the model runs on shards, and the Trainer sees the outputs of full sequences.

Whatever the Trainer computes from the outputs (DPO's sigmoid of a sum over the sequence, a reward at the last token, a
custom loss) it computes as one process does. Each rank computes the loss of the full batch, as the one process of a
data-parallel rank would: inside, the accelerator counts a group as one process, and so does the number of items. The
backward of unshard sums the gradients of all ranks of the group, so the engine's mean over all ranks is the gradient of
one process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ringtile.hf import adapters, checks, data, model
from ringtile.hf.batch import ShardedBatch, active
from ringtile.hf.model_loss import watch_loss
from ringtile.hf.one_process import OneProcess
from ringtile.hf.parallelism import accelerate_knows_groups
from ringtile.hf.patches import Patches
from ringtile.hf.random_draws import RandomDraws
from ringtile.hf.strategy import Strategy
from ringtile.hf.unsharded_outputs import UnshardedOutputs, has_score

_GATHERS = {"gather", "gather_object"}  # functions of accelerate that modules of TRL import by name


class LossOnSequences(Strategy):
    """Shards the inputs of every model that the Trainer's loss or evaluation calls, and unshards the outputs."""

    def check(self) -> None:
        checks.check_not_compiled(self.trainer)
        checks.check_model(self.base, classifier=has_score(self.base), proved=self.config.first_batch_check)

    @property
    def entry(self) -> nn.Module:
        assert self.trainer.model is not None  # base_model has refused it otherwise
        return self.base.base_model if has_score(self.base) else adapters.receiver(self.trainer.model)

    def install_loss(self) -> None:
        trainer = self.trainer
        self.in_step = False  # inside compute_loss or prediction_step
        self.hooks: list[UnshardedOutputs] = []
        for name in ("compute_loss", "prediction_step"):
            self.replace(trainer, name, self._in_step)
        if not accelerate_knows_groups(trainer.accelerator):
            self.replace(trainer, "_get_num_items_in_batch", self.in_one_process)
        self.gather_with(data.gather_rows)
        for wrapped in (trainer.model, getattr(trainer, "ref_model", None)):
            if wrapped is not None:
                self.hook(wrapped)

    def hook(self, wrapped: nn.Module) -> None:
        """Makes a model run on shards where the Trainer's loss calls it."""
        wrapped = adapters.receiver(self.trainer.accelerator.unwrap_model(wrapped))
        base = model.base_model(wrapped)
        self.switch_model(wrapped, base)
        if not has_score(base):
            watch_loss(wrapped, base, self.patches)
        hooks = UnshardedOutputs(self._shard_in_step, self.check_used, self.group, RandomDraws(base))
        hooks.install(self.called(wrapped, base), base, self.patches)
        self.hooks.append(hooks)

    def called(self, wrapped: nn.Module, base: PreTrainedModel) -> nn.Module:
        """The module of a model that the loss calls."""
        return wrapped

    @contextlib.contextmanager
    def as_one_process(self) -> Iterator[None]:
        """Inside, the Trainer and the modules of TRL that it is of see a group as one process."""
        trainer = self.trainer
        if self.group.size == 1 or isinstance(trainer.accelerator, OneProcess):
            yield
            return
        patches, one = Patches(), OneProcess(trainer.accelerator, self.group)
        vllm = getattr(trainer, "vllm_generation", None)
        for owner in [trainer] + [vllm] * (vllm is not None):
            patches.set(owner, "accelerator", one)
        names = {cls.__module__ for owner in (trainer, vllm) for cls in type(owner).__mro__}
        for module in [sys.modules[name] for name in names if name.startswith("trl.")]:
            for name in _GATHERS & vars(module).keys():
                patches.set(module, name, getattr(one, name))
        try:
            yield
        finally:
            patches.restore()

    def _in_step(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """compute_loss or prediction_step, inside which the models' hooks shard and unshard."""
        self.prepare_training(model)
        if self.in_step:
            return original(model, *args, **kwargs)
        with active(None), self.as_one_process(), self.step(True):
            return original(model, *args, **kwargs)

    @contextlib.contextmanager
    def step(self, inside: bool) -> Iterator[None]:
        """Inside, the models shard what they are given, or, in other code such as generate(), they do not."""
        was_inside, self.in_step = self.in_step, inside
        try:
            yield
        finally:
            self.in_step = was_inside
            for hooks in self.hooks:
                hooks.stop_watching()

    def _shard_in_step(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], ShardedBatch | None] | None:
        """None for a batch of other code, such as generate(), on which the model runs as it is."""
        return self.shard(inputs) if self.in_step else None

    def in_one_process(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of the Trainer's that counts processes."""
        with self.as_one_process():
            return original(*args, **kwargs)
