"""Trainers with a loss of their own: the model runs on shards, and the Trainer sees the outputs of full sequences.

Whatever the Trainer computes from the outputs (DPO's sigmoid of a sum over the sequence, a reward at the last token, a
custom loss) it computes as one process does. Each rank computes the loss of the full batch, as the one process of a
data-parallel rank would: inside, the accelerator counts a group as one process, and so does the number of items. The
backward of unshard sums the gradients of all ranks of the group, so the engine's mean over all ranks is the gradient of
one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ringtile.hf import adapters, checks, data, model
from ringtile.hf.batch import ShardedBatch, active
from ringtile.hf.model_loss import watch_loss
from ringtile.hf.parallelism import accelerate_knows_groups
from ringtile.hf.random_draws import RandomDraws
from ringtile.hf.strategy import Strategy
from ringtile.hf.unsharded_outputs import UnshardedOutputs, has_score


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
            self.replace(trainer, "_get_num_items_in_batch", self._get_num_items_in_batch)
        self.gather_with(data.gather_rows)
        for wrapped in (trainer.model, getattr(trainer, "ref_model", None)):
            if wrapped is not None:
                wrapped = adapters.receiver(trainer.accelerator.unwrap_model(wrapped))
                base = model.base_model(wrapped)
                self.switch_model(wrapped, base)
                if not has_score(base):
                    watch_loss(wrapped, base, self.patches)
                draws = RandomDraws(base)
                hooks = UnshardedOutputs(self._shard_in_step, self.check_used, self.group, draws)
                hooks.install(wrapped, base, self.patches)
                self.hooks.append(hooks)

    def _in_step(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """compute_loss or prediction_step, inside which the models' hooks shard and unshard."""
        self.prepare_training(model)
        if self.in_step:
            return original(model, *args, **kwargs)
        self.in_step = True
        try:
            with active(None), self.counting_groups():
                return original(model, *args, **kwargs)
        finally:
            self.in_step = False
            for hooks in self.hooks:
                hooks.stop_watching()

    def _shard_in_step(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], ShardedBatch | None] | None:
        """None for a batch of other code, such as generate(), on which the model runs as it is."""
        return self.shard(inputs) if self.in_step else None

    def _get_num_items_in_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """T: averaged over devices, the original counts every batch once per rank of a group."""
        num_items = original(*args, **kwargs)
        counted_often = num_items is not None and self.trainer.args.average_tokens_across_devices
        return num_items // self.group.size if counted_often else num_items
