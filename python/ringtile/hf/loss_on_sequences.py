"""Trainers with a loss of their own: the model runs on shards, and the Trainer sees the outputs of full sequences.

Whatever the Trainer computes from the outputs (DPO's sigmoid of a sum over the sequence, a reward at the last token, a
custom loss) it computes as one process does. Each rank computes the loss of the full batch, as the one process of a
data-parallel rank would: inside, the accelerator counts a group as one process, and so does the number of items. The
backward of unshard sums the gradients of all ranks of the group, so the engine's mean over all ranks is the gradient of
one process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ringtile.errors import RefusedError
from ringtile.first_batch.outputs import sum_of_outputs
from ringtile.hf import model
from ringtile.hf.batch import ShardedBatch, active, main_input
from ringtile.hf.model_loss import watch_loss
from ringtile.hf.random_draws import RandomDraws
from ringtile.hf.strategy import Strategy
from ringtile.hf.unsharded_outputs import UnshardedOutputs, has_score, named_arguments
from ringtile.tiled.tiles import at_most


class LossOnSequences(Strategy):
    """Shards the inputs of every model that the Trainer's loss or evaluation calls, and unshards the outputs."""

    def check(self) -> None:
        if self.trainer.args.torch_compile:
            raise RefusedError(
                f"{type(self.trainer).__name__} computes its loss from the outputs of full sequences and uses "
                f"torch_compile; expected only one of the two: the hooks that shard and unshard have not been shown to "
                f"survive compilation"
            )
        model.check_model(self.base, classifier=has_score(self.base), proved=self.config.first_batch_check)

    @property
    def entry(self) -> nn.Module:
        assert self.trainer.model is not None  # base_model has refused it otherwise
        return self.base.base_model if has_score(self.base) else model.receiver(self.trainer.model)

    def install_loss(self) -> None:
        trainer = self.trainer
        self.in_step = False  # inside compute_loss or prediction_step
        self.hooks: list[UnshardedOutputs] = []
        for name in ("compute_loss", "prediction_step"):
            self.patches.wrap(trainer, name, self._in_step)
        assert trainer.model is not None  # base_model has refused it otherwise
        self.proved = self.hook(trainer.model)
        if (reference := getattr(trainer, "ref_model", None)) is not None:
            self.hook(reference)

    def hook(self, wrapped: nn.Module) -> nn.Module:
        """Makes a model run on shards where the Trainer's loss calls it. Returns the module that is called."""
        wrapped = model.receiver(self.trainer.accelerator.unwrap_model(wrapped))
        base = model.base_model(wrapped)
        self.switch_model(wrapped, base)
        if not has_score(base):
            watch_loss(wrapped, base, self.patches)
        hooks = UnshardedOutputs(self._shard_in_step, self.check_used, self.group, RandomDraws(base))
        if hasattr(base, "generate"):
            self.patches.wrap(base, "generate", functools.partial(self._generate_whole, base))
        called = self.called(wrapped, base)
        hooks.install(called, base, self.patches)
        self.hooks.append(hooks)
        return called

    def called(self, wrapped: nn.Module, base: PreTrainedModel) -> nn.Module:
        """The module of a model that the loss calls."""
        return wrapped

    def _in_step(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """compute_loss or prediction_step, inside which the models' hooks shard and unshard."""
        self.prepare_training(model)
        if self.in_step:
            return original(model, *args, **kwargs)
        with active(None), self.as_one_process(), self.step(True), self._proving_first_call():
            return original(model, *args, **kwargs)

    @contextlib.contextmanager
    def _proving_first_call(self) -> Iterator[None]:
        """Inside, the first call of the trained model proves itself before it runs.

        Its hook comes before those of FSDP2 and ZeRO-3, inside which the model cannot be called.
        """
        if self.proof is None or not self.proof.waits:
            yield
            return
        hook = self.proved.register_forward_pre_hook(self._prove_call, with_kwargs=True, prepend=True)
        try:
            yield
        finally:
            hook.remove()

    def _prove_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.proof is not None
        inputs = named_arguments(module, args, kwargs)
        if self.in_step and main_input((), inputs) is not None:
            loss_of = functools.partial(_sum_of_outputs, uses_loss=not self.config.shared_prefix)
            self.proof.before(module, inputs, loss_of, named="what the model returns")

    def _generate_whole(self, base: PreTrainedModel, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """generate() inside a loss: on the whole rows of every rank, with a cache, as in one process."""
        if not self.in_step:
            return original(*args, **kwargs)
        with self.step(False), model.own_attention(base), at_most(0):
            return original(*args, **kwargs)

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
        """None for a batch of other code, such as generate(), on which the model runs as it is.

        In a backward, it is that of a step: the loss has checkpointed the model, which runs again.
        """
        return self.shard(inputs) if self.in_step or torch._C._current_graph_task_id() != -1 else None


def _sum_of_outputs(model: nn.Module, inputs: dict[str, Any], *, uses_loss: bool) -> Tensor | None:
    """What a proof compares of the outputs of a model, whose loss is the Trainer's. A tree of rows has no loss."""
    main, attention_mask = main_input((), inputs), inputs.get("attention_mask")
    assert main is not None
    counted = main.new_ones(main.shape[:2], dtype=torch.bool)
    if attention_mask is not None and attention_mask.shape == counted.shape:
        counted = attention_mask.ne(0)
    outputs = model(**inputs)
    if not isinstance(outputs, Mapping):
        return None
    return sum_of_outputs({name: x for name, x in outputs.items() if uses_loss or name != "loss"}, counted)
