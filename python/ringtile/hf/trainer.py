"""`ringtile.enable` and `ringtile.restore`: exact context parallelism and tiling for one Trainer.

Every rank of a context-parallel group gets the same batch, `compute_loss` cuts it once, and the model runs on the
shard. With T targets in the accumulation window over all different batches and N ranks, each rank's loss is
N * (its sum of token losses) / T, so the engine's mean over N ranks is the loss, and the gradient, of one process.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accelerate.utils import recursively_apply
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from ringtile.config import Config
from ringtile.errors import ConfigError, InputError, Refused
from ringtile.hf import checks, data, joined, model
from ringtile.hf.cut import Cut
from ringtile.hf.garbage import CollectGarbage
from ringtile.hf.group import ContextParallelGroup
from ringtile.hf.inputs import cut_batch
from ringtile.hf.loss import install_tiled_loss
from ringtile.hf.mlp import install_tiled_mlp
from ringtile.hf.offload import OffloadActivations
from ringtile.hf.patches import Ledger

_SESSION = "_ringtile_session"  # the attribute under which an enabled Trainer keeps its session


def enable(trainer: Trainer, config: Config | Mapping[str, Any] | str | os.PathLike[str]) -> Ledger:
    """Switches on what `config` asks for, on this Trainer only; call it before train() or evaluate(), on every rank.

    config: a Config, a mapping of its keys, or the path of a YAML file. Without context_parallel_size, that of
    accelerate's ParallelismConfig(cp_size=...) holds. Returns the ledger of everything replaced; enabling again with
    the same config changes nothing.
    Raises ConfigError (also for a second, different config), Refused for what would not be exact, InputError.
    """
    if not isinstance(trainer, Trainer):
        raise InputError(f"trainer is a {type(trainer).__name__}; expected a transformers.Trainer")
    config = _with_accelerate_size(Config.load(config), trainer)
    enabled: _Session | None = vars(trainer).get(_SESSION)
    if enabled is not None:
        if enabled.config != config:
            raise ConfigError(f"this Trainer is enabled with {enabled.config}; call ringtile.restore(trainer) first")
        return enabled.ledger
    session = _Session(trainer, config)
    try:
        session.install()
    except BaseException:
        session.ledger.restore()
        raise
    return session.ledger


def restore(trainer: Trainer) -> None:
    """Puts back every object that `enable` replaced. Does nothing on a Trainer that is not enabled."""
    session: _Session | None = vars(trainer).get(_SESSION)
    if session is not None:
        session.ledger.restore()


def _with_accelerate_size(config: Config, trainer: Trainer) -> Config:
    """The configuration with ParallelismConfig.cp_size as its context_parallel_size, unless it names one itself."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if parallelism is None or not parallelism.cp_enabled or "context_parallel_size" in config.model_fields_set:
        return config
    return config.model_copy(update={"context_parallel_size": parallelism.cp_size})


class _Session:
    """What one enabled Trainer needs to remember, and the functions that stand in for its methods."""

    group: ContextParallelGroup

    def __init__(self, trainer: Trainer, config: Config) -> None:
        self.trainer = trainer
        self.config = config
        self.ledger = Ledger()
        self.active_cut: Cut | None = None  # of the batch that is inside the model now
        self.last_cut: Cut | None = None
        self.training_checked = False
        self.in_step = False  # inside compute_loss or prediction_step of a Trainer that sees whole outputs

    def install(self) -> None:
        self.base = model.base_model(self.trainer.model)
        if self.config.tiled_mlp:
            install_tiled_mlp(self.base, self.config, self.ledger)
        if self.config.tiled_loss:
            install_tiled_loss(self.base, self.config, self.ledger)
        if self.config.activation_offload:
            offload = OffloadActivations()
            self._add_callback(offload)
            self.ledger.on_restore(offload.ledger.restore)
        if self.config.gc_steps is not None:
            self._add_callback(CollectGarbage(self.config.gc_steps))
        checks.check_sizes(self.trainer, self.config)
        if self.config.context_parallel_size > 1 and not self._stands_back():
            self._install_context_parallel()
        self.ledger.set(self.trainer, _SESSION, self)

    def _install_context_parallel(self) -> None:
        trainer, accelerator, config = self.trainer, self.trainer.accelerator, self.config
        whole = checks.check_trainer(trainer)
        if not whole:
            checks.check_mean_over_targets(trainer, self.base)
        checks.check_model(self.base, classifier=whole and joined.has_score(self.base))
        self.group = ContextParallelGroup(config.context_parallel_size, config.timeout_seconds, trainer.args.device)
        self.ledger.on_restore(self.group.close)
        self.makes_positions = model.makes_positions(self.base)
        self._replace(trainer, "_prepare_context_parallel_inputs", self._leave_inputs)
        self._replace(trainer, "evaluation_loop", self._evaluation_loop)
        self._replace(trainer, "_track_num_input_tokens", self._track_num_input_tokens)
        self._replace(trainer, "floating_point_ops", self._floating_point_ops)
        self.ledger.set(accelerator, "_prepare_cp", self._prepare_cp)
        if not self._accelerate_has_context_parallel():
            self._replace(trainer, "get_total_train_batch_size", self._get_total_train_batch_size)
            self._replace(accelerator, "prepare_data_loader", self._prepare_data_loader)
        if whole:
            self._install_whole_outputs()
        else:
            self._install_shards()

    def _install_shards(self) -> None:
        """The Trainer computes its loss on a shard."""
        trainer = self.trainer
        self.watches_loss = checks.uses_the_models_loss(trainer)
        self._replace(trainer, "compute_loss", self._compute_loss)
        self._replace(trainer, "prediction_step", self._prediction_step)
        if not self._accelerate_has_context_parallel():
            self._replace(trainer, "_get_num_items_in_batch", self._get_num_items_in_batch)
        if trainer.label_smoother is not None:
            self._replace(trainer, "label_smoother", self._smooth_labels)
        self._switch_model(trainer.model, self.base)
        if self.watches_loss:
            model.watch_loss(self.base, self.ledger)

    def _install_whole_outputs(self) -> None:
        """The Trainer computes its loss on the outputs of whole sequences, on every rank of the group."""
        trainer = self.trainer
        for name in ("compute_loss", "prediction_step"):
            self._replace(trainer, name, self._with_whole_outputs)
        if self._accelerate_has_context_parallel():
            self._replace(trainer, "_get_num_items_in_batch", self._get_num_copies_of_items)
        if hasattr(trainer, "_tp_size"):  # TRL's word for how often a token is counted
            self.ledger.set(trainer, "_tp_size", self.group.size)
        for wrapped in (trainer.model, getattr(trainer, "ref_model", None)):
            if wrapped is not None:
                wrapped = trainer.accelerator.unwrap_model(wrapped)
                base = model.base_model(wrapped)
                self._switch_model(wrapped, base)
                if not joined.has_score(base):
                    model.watch_loss(base, self.ledger)
                joined.Joined(self._begin_whole, self._check_used).install(wrapped, base, self.ledger)

    def _switch_model(self, wrapped: nn.Module | None, base: PreTrainedModel) -> None:
        assert wrapped is not None  # or base_model had refused it
        model.switch_attention(wrapped, self.ledger)
        model.pin_rope_length(base, self.ledger, lambda: self.active_cut)

    def _add_callback(self, callback: TrainerCallback) -> None:
        self.trainer.add_callback(callback)
        self.ledger.on_restore(functools.partial(self.trainer.remove_callback, callback))

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Sets `owner.name` to replacement(original, ...), or to the original while another engine cuts sequences."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if self._stands_back():
                return original(*args, **kwargs)
            return replacement(original, *args, **kwargs)

        self.ledger.set(owner, name, patched)

    def _stands_back(self) -> bool:
        """Whether DeepSpeed cuts the sequence (ALST / Ulysses through accelerate's ParallelismConfig)."""
        parallelism = getattr(self.trainer.accelerator, "parallelism_config", None)
        return parallelism is not None and (
            getattr(parallelism, "cp_backend", "torch") == "deepspeed" or bool(parallelism.sp_enabled)
        )

    def _accelerate_has_context_parallel(self) -> bool:
        """Whether a ParallelismConfig already gives the ranks of a group the same batches, and counts them once."""
        parallelism = getattr(self.trainer.accelerator, "parallelism_config", None)
        return parallelism is not None and bool(parallelism.cp_enabled)

    # ---- the cut --------------------------------------------------------------------------------

    def _leave_inputs(
        self, original: Callable[..., Any], model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """transformers' own cut, made a no-op: `compute_loss` cuts, once, for training and evaluation alike."""
        return contextlib.nullcontext, inputs

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """accelerate's own hooks on attention modules, left out; user code may still ask for its context."""
        if not self._stands_back():
            self.ledger.set(self.trainer.accelerator, "_cp_context", lambda **kwargs: contextlib.nullcontext())
        return args

    @contextlib.contextmanager
    def _cut(self, inputs: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Cut]]:
        """The local part of a batch for the model to run on inside the context, and how it was cut."""
        local, cut = self._begin_cut(inputs)
        try:
            yield local, cut
        finally:
            self.active_cut = None
        self._check_used(cut, self.watches_loss and cut.num_targets is not None)

    def _begin_cut(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Cut]:
        self.group.check_same_batch(inputs)
        local, cut = cut_batch(
            inputs,
            layout=self.config.layout,
            group=self.group.process_group,
            rank=self.group.rank,
            world_size=self.group.size,
            makes_positions=self.makes_positions,
        )
        cut.block_kernel = self.config.block_kernel
        self.active_cut = self.last_cut = cut
        return local, cut

    def _begin_whole(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Cut] | None:
        """The cut of a batch that the Trainer's loss or evaluation hands to a model; others are left whole."""
        return self._begin_cut(inputs) if self.in_step else None

    def _check_used(self, cut: Cut, watches_loss: bool) -> None:
        """Raises Refused unless every layer attended through the ring and the loss saw the shifted labels."""
        name, num_layers = type(self.base).__name__, self.base.config.get_text_config().num_hidden_layers
        if cut.attention_calls == 0 or cut.attention_calls % num_layers:
            raise Refused(
                f"{name} has {num_layers} layers but called ringtile's attention {cut.attention_calls} times in a "
                f"forward pass; expected once per layer: the others would attend within a shard only"
            )
        if watches_loss and cut.loss_calls == 0:
            raise Refused(
                f"{name} does not hand shift_labels to self.loss_function(..., **kwargs); expected it to: it would "
                f"shift the labels again, within each shard"
            )

    # ---- training and evaluation ----------------------------------------------------------------

    def _compute_loss(
        self,
        original: Callable[..., Any],
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Any:
        """The loss of this rank's shard, scaled so that the mean over all ranks is the loss. Outputs stay local."""
        self._check_training(model)
        with self._cut(inputs) as (local, cut):
            if num_items_in_batch is None and cut.num_targets is not None:
                num_items_in_batch = self._targets_per_rank(cut.num_targets)
                if not self.trainer.model_accepts_loss_kwargs:  # a mean per batch: the Trainer hands its model nothing
                    local["num_items_in_batch"] = num_items_in_batch
            return original(model, local, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)

    def _with_whole_outputs(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """compute_loss or prediction_step, in which the models cut their inputs and join their outputs."""
        self._check_training(model)
        outermost, self.in_step = not self.in_step, True
        try:
            return original(model, *args, **kwargs)
        finally:
            self.in_step = not outermost
            self.active_cut = None

    def _check_training(self, model: nn.Module) -> None:
        if model.training and not self.training_checked:
            checks.check_training_model(model, self.base)
            self.training_checked = True

    def _smooth_labels(self, original: Callable[..., Any], outputs: Any, labels: Tensor, **kwargs: Any) -> Any:
        """Label smoothing is a mean over targets like the loss itself; the labels were shifted before the cut."""
        return original(outputs, labels, **{**kwargs, "shift_labels": False})

    def _targets_per_rank(self, num_targets: Tensor) -> Tensor:
        """What makes a sum over shards the mean over one batch, where the Trainer asked for that mean.

        The mean over the group of N * local_sum / num_items is local_sums / num_targets; N only where it is applied.
        """
        scales = self.trainer.args.average_tokens_across_devices and self.trainer.model_accepts_loss_kwargs
        return num_targets * (self.trainer.accelerator.num_processes if scales else 1) / self.group.size

    def _prediction_step(
        self,
        original: Callable[..., Any],
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss of the whole batch, and outputs in global order, their padding dropped. Labels were never cut."""
        labels_given = bool(self.trainer.label_names) and all(
            inputs.get(name) is not None for name in self.trainer.label_names
        )
        # With labels the original asks compute_loss, which cuts; without, it calls the model.
        with contextlib.nullcontext((inputs, None)) if labels_given else self._cut(inputs) as (local, _):
            loss, logits, labels = original(model, local, prediction_loss_only, ignore_keys=ignore_keys)
        cut = self.last_cut
        assert cut is not None
        if loss is not None:
            loss = self.group.mean(loss)
        return loss, recursively_apply(functools.partial(self._join, cut), logits), labels

    def _join(self, cut: Cut, output: Tensor) -> Tensor:
        if output.dim() < 2 or output.size(1) != cut.layout.local_len(self.group.rank):
            raise Refused(
                f"{type(self.base).__name__} returns a tensor {tuple(output.shape)} whose second dimension is not that "
                f"of the tokens; name its key in ignore_keys"
            )
        return cut.join(output)

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The ranks of a group evaluate the same rows: keep one copy of each, then drop what filled the last batch."""
        trainer = self.trainer
        previous = trainer.gather_function
        trainer.gather_function = functools.partial(data.gather_for_metrics, trainer.accelerator, self.group)
        try:
            return original(*args, **kwargs)
        finally:
            trainer.gather_function = previous

    # ---- counting and data ----------------------------------------------------------------------

    def _get_num_items_in_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """T: the original counts every batch once per rank of a group. Not rounded: without averaging it is a share."""
        num_items = original(*args, **kwargs)
        return None if num_items is None else num_items / self.group.size

    def _get_num_copies_of_items(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """T times the size of the group: each of its ranks computes the loss of the whole batch."""
        num_items = original(*args, **kwargs)
        return None if num_items is None else num_items * self.group.size

    def _track_num_input_tokens(self, original: Callable[..., Any], inputs: dict[str, Any]) -> None:
        before = self.trainer.state.num_input_tokens_seen
        original(inputs)
        counted = self.trainer.state.num_input_tokens_seen - before
        self.trainer.state.num_input_tokens_seen = before + counted // self.group.size

    def _floating_point_ops(self, original: Callable[..., Any], inputs: dict[str, Any]) -> float:
        flops: float = original(inputs) / self.group.size
        return flops

    def _get_total_train_batch_size(self, original: Callable[..., Any], args: TrainingArguments) -> int:
        """get_cp_size stays 1: later transformers divide the number of items by it, which we do already."""
        rows: int = original(args) // self.group.size
        return rows

    def _prepare_data_loader(self, original: Callable[..., Any], data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        return data.prepare_loader(self.trainer.accelerator, self.group, data_loader)
