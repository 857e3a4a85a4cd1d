"""Trainers whose loss is a sum over tokens, wherever the tokens are: each rank computes it on its shard.

With T targets in the accumulation window over all different batches and N ranks, each rank's loss is
N * (its sum of token losses) / T, so the engine's mean over N ranks is the loss, and the gradient, of one process. The
factor is the Trainer's own: SFTTrainer adds its balancing loss behind it, which each rank has in full.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from ringtile.errors import RefusedError
from ringtile.first_batch.trace import runs_whole
from ringtile.hf import trainers
from ringtile.hf.batch import ShardedBatch, active, active_batch
from ringtile.hf.group import exchanged
from ringtile.hf.keys import OWN
from ringtile.hf.loss import ShardedLoss
from ringtile.hf.model import check_model
from ringtile.hf.patches import Patches


class LossOnShards(ShardedLoss):
    """Shards the batch on the way into `compute_loss`, and scales the loss of the shard."""

    def check(self) -> None:
        trainer, reason = self.trainer, "a mean over each shard is not the mean over the sequence"
        takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.base.forward).parameters.values())
        if not takes_any and not getattr(self.base, "accepts_loss_kwargs", False):
            raise RefusedError(
                f"{type(self.base).__name__} does not take num_items_in_batch (its forward has no **kwargs); expected "
                f"a model that hands **kwargs to self.loss_function: {reason}"
            )
        # Others (axolotl's) may set it to false: ringtile hands the model the number of targets.
        if not trainer.model_accepts_loss_kwargs and trainers.home(trainer, "compute_loss").__module__ == trainers.SFT:
            raise RefusedError(
                f"{type(trainer).__name__} sets model_accepts_loss_kwargs to false; expected true: {reason}"
            )
        check_model(self.base)

    def install_loss(self) -> None:
        trainer = self.trainer
        self.last_batch: ShardedBatch | None = None
        self.patches.wrap(trainer, "compute_loss", self._compute_loss)
        self.patches.wrap(trainer, "prediction_step", self._prediction_step)
        if trainer.label_smoother is not None:
            self.patches.wrap(trainer, "label_smoother", self._smooth_labels)
        self.switch_model(self.model, self.base)

    @contextlib.contextmanager
    def _sharded(
        self, model: nn.Module, inputs: Mapping[str, Any]
    ) -> Iterator[tuple[dict[str, Any], ShardedBatch | None]]:
        """This rank's part of a batch, on which the model runs inside the context."""
        local, batch = self.sharding.shard(inputs)
        self.last_batch = batch
        with active(batch), self.draws.of(batch, model):
            yield local, batch

    # ---- training -------------------------------------------------------------------------------

    def _compute_loss(
        self,
        original: Callable[..., Any],
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Any:
        """The loss of the batch, with the gradient of this rank's shard, scaled so that the mean over all ranks is that
        of the batch. Outputs stay local."""
        self.prepare_training(model)
        if self.proof is not None:
            self.proof.before(
                model,
                inputs,
                lambda model, cut: self._compute_loss(original, model, cut, False, num_items_in_batch),
                num_items=num_items_in_batch,
                numbers_of=self.trainer,
            )
        # As one process, on the whole batch, or as one of the ranks that share it.
        ways = 1 if runs_whole() else self.group.size
        # Whether the count that the Trainer gives is of all devices; else it is of one batch.
        counts_all = self.trainer.args.average_tokens_across_devices and self.trainer.model_accepts_loss_kwargs
        if counted := num_items_in_batch is not None:
            num_items_in_batch = num_items_in_batch if counts_all else self._items_of_all(num_items_in_batch, ways)
        with self._sharded(model, inputs) as (local, batch), contextlib.ExitStack() as stack:
            if ways < self.group.size:
                stack.enter_context(self.groups.as_one_process())
            if batch is not None:
                # With one process per batch, the Trainer would multiply the loss by their number where items were
                # counted over all devices, and by 1 elsewhere; here it multiplies by the number of ranks.
                of_ranks = ways if counted and counts_all else self.group.data_size * ways
                batch.mean_share = 1 / of_ranks if self.trainer.model_accepts_loss_kwargs else 1.0
            stack.callback((for_call := Patches()).restore)
            if not self.trainer.args.average_tokens_across_devices:
                # Of all devices: SFTTrainer would raise to 1 what a shard has of a small count.
                for_call.set(self.trainer.args, "average_tokens_across_devices", True)
            if batch is not None and num_items_in_batch is None and batch.num_targets is not None:
                num_items_in_batch = self._items_of_all(batch.num_targets, ways)
                if not self.trainer.model_accepts_loss_kwargs:  # the Trainer hands the model no count: add it here
                    local["num_items_in_batch"] = num_items_in_batch
                # Given a count, SFTTrainer divides its balancing loss by the steps of the last accumulation.
                for_call.set(self.trainer, "current_gradient_accumulation_steps", 1)
            found = original(model, local, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
            loss, *outputs = found if return_outputs else (found,)
            if ways > 1:
                # What the Trainer logs, and leaves out since it is not finite, is the same on all ranks.
                loss = exchanged(loss, self.group.mean, lambda gradient: gradient)
            return (loss, *outputs) if return_outputs else loss

    def _items_of_all(self, of_batch: Any, ways: int) -> Any:
        """By what the loss of a shard is divided: the Trainer multiplies it by the number of ranks where its model
        takes a count of items; elsewhere the engine's mean over the ways remains."""
        return of_batch * self.group.data_size if self.trainer.model_accepts_loss_kwargs else of_batch / ways

    def _smooth_labels(self, original: Callable[..., Any], outputs: Any, labels: Tensor, /, **kwargs: Any) -> Any:
        """The original without its shift: the labels were shifted before they were sharded.

        On a whole batch, to prove the first one, as in one process: by the name that FSDP2 gives the model's class, the
        Trainer takes it for one that does not shift.
        """
        shifts = active_batch() is None and self.sharding.reading.shifts_labels
        return original(outputs, labels, **{**kwargs, "shift_labels": shifts})

    # ---- evaluation -----------------------------------------------------------------------------

    def _prediction_step(
        self,
        original: Callable[..., Any],
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """The loss of the batch, its unsharded outputs without padding, and its labels, which were never sharded."""
        labels_given = bool(self.trainer.label_names) and all(
            inputs.get(name) is not None for name in self.trainer.label_names
        )
        if self.proof is not None and not labels_given:
            with torch.no_grad():
                self.proof.before(
                    model,
                    self.trainer._prepare_inputs(dict(inputs)),
                    lambda model, cut: self._prediction_step(original, model, cut, True, ignore_keys)[0],
                    numbers_of=self.trainer,
                )
        # With labels the original calls compute_loss, which shards; without, it calls the model.
        with contextlib.nullcontext((inputs, None)) if labels_given else self._sharded(model, inputs) as (local, _):
            loss, logits, labels = original(model, local, prediction_loss_only, ignore_keys=ignore_keys)
        batch = self.last_batch
        if batch is None:
            return loss, logits, labels
        return loss, recursively_apply(functools.partial(self._unshard, batch), logits), labels

    def _unshard(self, batch: ShardedBatch, output: Tensor) -> Tensor:
        if (whole := batch.unshard_output(output)) is not None:
            return whole
        reading = self.sharding.reading
        if reading.per_row:
            return self.group.check_same(f"{type(self.base).__name__} returns a tensor, which", output)
        if not reading.besides:  # else it is of images, which are whole
            raise RefusedError(
                f"{type(self.base).__name__} returns a tensor {tuple(output.shape)}; expected one with its tokens: "
                f"{OWN}, or its key in ignore_keys"
            )
        return output
