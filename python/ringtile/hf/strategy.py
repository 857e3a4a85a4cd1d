"""Context parallelism for one Trainer: everything that does not depend on how the Trainer computes its loss.

Every rank of a context-parallel group gets the same batch, the batch is sharded once, and the model runs on the shard.
The data-parallel engine averages gradients over all ranks and knows nothing of groups. Two strategies fill in the
loss: `LossOnShards` and `LossOnSequences`.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ringtile import keep
from ringtile.config import Config
from ringtile.errors import ConfigError, MaskNotExpressibleError, RefusedError
from ringtile.first_batch.trace import ModelCall, Trace
from ringtile.hf import attention, model, one_process, trainers
from ringtile.hf.attention import attends_whole
from ringtile.hf.batch import ShardedBatch, forget_checkpoints, keep_in_checkpoints, main_input
from ringtile.hf.feature import Enabled
from ringtile.hf.features import adapters, balancing_loss, dropout, indexed, latents, recurrent, seam, towers
from ringtile.hf.features.dropout import CountedDropout
from ringtile.hf.features.trees import share, unfold
from ringtile.hf.group import ContextParallelGroup, accelerate_knows_groups, deepspeed_shards_sequences
from ringtile.hf.inputs import Reading, shard_batch
from ringtile.hf.keys import key_of_tree
from ringtile.hf.layers import layer_masks, mixers, num_layers
from ringtile.hf.masks import mask_of_batch
from ringtile.hf.model import check_training_model, has_engine
from ringtile.hf.model_loss import loss_of_its_own, shifts_labels
from ringtile.hf.one_process import COLLECTIVES, OneProcess
from ringtile.hf.packing import Packing, positions_separate
from ringtile.hf.patches import Patches
from ringtile.hf.positions import Positions, pin_rope_length
from ringtile.sequence.layout import resolved

if TYPE_CHECKING:
    from ringtile.hf.first_batch import FirstBatch

FEATURES = tuple(each.FEATURE for each in (towers, seam, recurrent, indexed, balancing_loss, adapters, latents))
LossOf = Callable[[nn.Module, dict[str, Any]], Tensor | None]


class Strategy(abc.ABC):
    """The group of one Trainer, and the functions that stand in for its methods. Every rank of the world builds it.

    Raises RefusedError, ConfigError.
    """

    def __init__(self, trainer: Trainer, base: PreTrainedModel, config: Config, patches: Patches) -> None:
        self.trainer, self.base, self.config, self.patches = trainer, base, config, patches
        assert trainer.model is not None  # base_model has refused it otherwise
        for feature in FEATURES:
            feature.refuse(Enabled(trainer, trainer.model, base, config))
        self.check()
        self.accelerator = trainer.accelerator  # which stands for the trainer's inside a loss of its own
        if trainer.train_dataset is not None:
            dropout.refuse(base)  # here, not in the first step, which may come hours later
        self.group = ContextParallelGroup(
            config.context_parallel_size, trainer.args.ddp_timeout, trainer.args.device, trainer.get_tp_size()
        )
        patches.on_restore(self.group.close)
        self.room: keep.Room | None = None  # for what checkpointed layers keep; made before each forward
        self.dropout = CountedDropout(trainer, self.group.data_index, self.group.data_size)
        self.causal, self.shifts_labels = model.attends_causally(base), shifts_labels(base)
        self.layers = set(layer_masks(base.config.get_text_config(), self.causal))
        hybrid, is_main = bool(mixers(model.text_modules(base))), trainer.args.process_index == 0
        # States are passed from stretch to stretch, of which a balanced layout makes many.
        self.layout = resolved(config.layout) if hybrid else config.layout
        self.shares_rows = trainers.shares_rows(trainer)
        self.packing = Packing(base, causal=self.causal, hybrid=hybrid, is_main_process=is_main)
        routers = getattr(base.config.get_text_config(), "output_router_logits", False)
        routers = routers or getattr(trainer, "aux_loss_enabled", False)  # TRL's fused head asks in the batch too
        self.checked = frozenset({"output_router_logits"} if routers else ())
        self.training_checked = self.shards_steps = False
        self.positions = Positions(base, patches)
        self.of_model: frozenset[str] = frozenset()  # what the model takes besides text
        self.num_batches = 0  # that were sharded
        self.proof: FirstBatch | None = None
        self.trace: Trace | None = None  # of the first batch, while it is proved
        self.calls: tuple[int, int] | None = None  # of ringtile's attention and recurrences, when it was proved
        self.call_at_seam: ModelCall | None = None  # of the first batch, before the language model
        self.proves_whole = False  # by one of the runs in which nothing is sharded

    @abc.abstractmethod
    def check(self) -> None:
        """Raises RefusedError when the loss would differ from that of one process. Runs before anything is changed."""

    @property
    @abc.abstractmethod
    def entry(self) -> nn.Module:
        """The module that receives a rank's part of a batch."""

    @abc.abstractmethod
    def install_loss(self) -> None:
        """Replaces what the strategy must: the loss, the prediction step, the number of items, the model's hooks."""

    def install(self) -> None:
        trainer, accelerator = self.trainer, self.trainer.accelerator
        self.patches.wrap(trainer, "_prepare_context_parallel_inputs", self._leave_inputs)
        if self.group.size > 1:
            self.patches.wrap(trainer, "evaluation_loop", self._evaluation_loop)
            self.patches.wrap(accelerator, "gather_for_metrics", self._gather_for_metrics)
            if trainer.args.include_num_input_tokens_seen != "no":
                self.patches.wrap(trainer, "_track_num_input_tokens", self._track_num_input_tokens)
            if accelerate_knows_groups(accelerator):
                self.patches.set(accelerator, "_prepare_cp", self._prepare_cp)
            else:
                self.patches.wrap(trainer, "get_batch_samples", self.in_one_process)
                self.patches.wrap(trainer, "get_total_train_batch_size", self._get_total_train_batch_size)
                self.patches.wrap(accelerator, "prepare_data_loader", self._prepare_data_loader)
        self.install_loss()
        self.dropout.install(self.base, self.entry, self.patches)

    def __deepcopy__(self, memo: Any) -> Strategy:
        """A copy of a model has hooks of the same strategy: it is no copy of the Trainer."""
        return self

    def switch_model(self, wrapped: nn.Module, base: PreTrainedModel) -> None:
        """Makes a model run on shards. wrapped: the model with its adapters; base: the model inside."""
        model.switch_attention(wrapped, self.patches)
        pin_rope_length(base, self.patches)
        run = Enabled(self.trainer, wrapped, base, self.config, self.group, self._entered)
        for feature in FEATURES:
            feature.install(run, self.patches)
        self.of_model |= run.keys
        self.patches.on_restore(functools.partial(forget_checkpoints, wrapped))

    @contextlib.contextmanager
    def as_one_process(self) -> Iterator[None]:
        """Inside, the Trainer and the modules of its class and of its bases see a group as one process."""
        trainer = self.trainer
        if self.group.size == 1 or isinstance(trainer.accelerator, OneProcess):
            yield
            return
        patches, one = Patches(), OneProcess(trainer.accelerator, self.group)
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
        try:
            yield
        finally:
            patches.restore()

    def in_one_process(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of the Trainer's that counts processes."""
        with self.as_one_process():
            return original(*args, **kwargs)

    # ---- one batch ------------------------------------------------------------------------------

    def shard(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], ShardedBatch | None]:
        """This rank's part of a batch, for the model. A collective.

        While the first batch is proved whole, the batch itself, and None if transformers' own code keeps its documents
        apart; else ringtile does so, on one rank.
        Raises RingMismatchError when the ranks of the group hold different batches, and whatever `shard_batch` raises.
        """
        on_host = self.group.check_same_batch(inputs)
        is_tree = key_of_tree(inputs) is not None
        given, rows, positions = dict(inputs), None, None
        if is_tree:
            given, rows = unfold(given, given.get("position_ids"))
        else:
            self.packing.check(on_host)
            positions = self.positions.of_batch(on_host)
        if self.config.shared_prefix and not is_tree and not self.proves_whole:
            if not self.shares_rows:
                raise _no_tree(self.trainer)
            given, rows = share(given, given.get("position_ids", positions))
            positions = None
        local, batch = shard_batch(
            given,
            self._reading(),
            layout=self.layout,
            group=None if self.proves_whole else self.group.process_group,
            scheme="ring" if self.proves_whole else self.config.context_parallel_scheme,
            attention_kernel=self.config.attention_kernel,
            on_host=on_host if rows is None else None,
            positions=positions,
            rows=rows,
        )
        if self.trainer.args.process_index == 0:
            self.positions.check_largest(batch.max_position)
        if self.proves_whole and not is_tree and self._is_plain(inputs):
            return self._whole(inputs), None
        self.num_batches += 1
        batch.group, batch.mean_share, batch.room = self.group, 1 / batch.sequence.world_size, self.room
        assert batch.token_weights is not None
        shape = (batch.token_weights.size(0), batch.sequence.local_len)
        places = None if batch.rows is None else batch.rows.places
        call = ModelCall(shape, batch.sequence, batch.seq_len, _tokens(inputs), places)
        self._begin_call(call, at_seam=batch.before_language_model)
        return local, batch

    def _reading(self) -> Reading:
        return Reading(
            makes_positions=self.positions.makes_ids or self.config.first_batch_check,
            positions_separate=bool(self.packing.separate),
            takes_rows=self.packing.takes_rows,
            causal=self.causal,
            shifts_labels=self.shifts_labels,
            layers=self.layers,
            besides=self.of_model,
            checked=self.checked,
        )

    # ---- the first batch ------------------------------------------------------------------------

    @contextlib.contextmanager
    def proving(self, trace: Trace, whole: bool) -> Iterator[None]:
        """Inside, batches are recorded, and not sharded if `whole`."""
        self.trace, self.proves_whole = trace, whole
        try:
            yield
        finally:
            self.trace, self.proves_whole = None, False

    def _begin_call(self, call: ModelCall, at_seam: bool) -> None:
        """Tells the trace, if there is one, which tokens enter the model now, or at the seam, its language model."""
        self.call_at_seam = call if at_seam else None
        if self.trace is not None and at_seam:
            self.trace.wait()
        elif self.trace is not None:
            self.trace.begin(call)

    def _entered(self, path: str, embeddings: Tensor) -> Tensor:
        """The embeddings that enter a language model: from there on, the first batch is compared."""
        call, self.call_at_seam = self.call_at_seam, None
        if self.trace is None or call is None:
            return embeddings
        self.trace.begin(call)
        return self.trace.source(path, embeddings)

    def _is_plain(self, inputs: Mapping[str, Any]) -> bool:
        """Whether transformers' own code computes in this batch what ringtile's does."""
        main = main_input((), dict(inputs))
        if main is None or not attends_whole(self.base):
            return False
        if mixers(model.text_modules(self.base)) or model.drops_attention(self.base):
            # Recurrent layers of transformers are less exact, and join documents; no counters drop its attention.
            return False
        rows, seq_len = main.shape[:2]
        mask = mask_of_batch(inputs, rows, seq_len, bool(self.packing.separate), self.causal)
        seen = {name: value for name, value in inputs.items() if name in ("attention_mask", "position_ids")}
        if seen.get("attention_mask") is not None:
            seen["attention_mask"] = seen["attention_mask"].ne(0).to(torch.int64)
        separate = bool(positions_separate(self.base, self.causal))
        try:
            return mask_of_batch(seen, rows, seq_len, separate, self.causal) == mask
        except (RefusedError, MaskNotExpressibleError):  # of what transformers sees of the batch
            return False

    def _whole(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The batch as one process has it."""
        main = main_input((), dict(inputs))
        assert main is not None
        call = ModelCall((main.size(0), main.size(1)), None, main.size(1), _tokens(inputs))
        self._begin_call(call, at_seam=any(inputs.get(name) is not None for name in self.of_model))
        return self.packing.kept_apart({**inputs, "use_cache": False})

    def check_used(self, batch: ShardedBatch, watches_loss: bool) -> None:
        """RefusedError: a layer did not mix its tokens through ringtile, or the loss did not get the shifted labels."""
        name, config = type(self.base).__name__, self.base.config.get_text_config()
        if self.trace is not None:  # the proof shows whether layers that call neither are right
            self.calls = batch.attention_calls, batch.recurrent_calls
        attending, recurrent_layers = self.calls or num_layers(config)
        if not _once_per_layer(batch.attention_calls, attending):
            raise RefusedError(
                f"{name} has {attending} layers but called ringtile's attention {batch.attention_calls} times in a "
                f"forward pass; expected once per layer: the other layers would attend within a shard only"
            )
        if not _once_per_layer(batch.recurrent_calls, recurrent_layers):
            raise RefusedError(
                f"{name} has {recurrent_layers} recurrent layers, of which {batch.recurrent_calls} mixed their tokens "
                f"through ringtile in a forward pass; expected all: the others would see a shard only"
            )
        if watches_loss and batch.loss_calls == 0:
            raise loss_of_its_own(self.base)

    def prepare_training(self, model: nn.Module) -> None:
        """Prepares a model to train, and checks the first one: only then has its engine wrapped it."""
        if model.training and not self.training_checked:
            self._check_attention()
            if self.group.size > 1:
                check_training_model(model)
            self.dropout.check(self.base)
            self.training_checked = True
        if model.training:
            keep_in_checkpoints(model)
            # For what the checkpointed layers of this forward and backward keep.
            self.room = keep.room_of(self.config.keep_attention, self.group.memory_bytes)

    def _check_attention(self) -> None:
        """RefusedError: the attention that `ringtile.enable` has set was set again since."""
        implementation = self.base.config.get_text_config()._attn_implementation
        if implementation != attention.NAME:
            raise RefusedError(
                f"the attention of {type(self.base).__name__} was set to {implementation} after ringtile.enable; "
                f"expected {attention.NAME}, which ringtile.enable sets: call it after set_attn_implementation"
            )

    # ---- transformers' and accelerate's own context parallelism ---------------------------------

    def _leave_inputs(
        self, original: Callable[..., Any], model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Callable[[], Any], dict[str, Any]]:
        """Leaves the inputs whole: ringtile shards once, in training and evaluation alike."""
        if deepspeed_shards_sequences(self.trainer.accelerator):
            return cast("tuple[Callable[[], Any], dict[str, Any]]", original(model, inputs))
        return functools.partial(self._around_step, model, inputs), inputs

    @contextlib.contextmanager
    def _around_step(self, model: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
        """Around the loss and the backward of a batch, of whose operations the ranks that share it count a part each.

        RefusedError: the first batch of the training was not sharded, so that each rank computed whole rows.
        """
        before = self.num_batches
        yield
        if not model.training:
            return
        if not self.shards_steps and self.num_batches == before:
            raise RefusedError(
                f"the loss of {type(self.trainer).__name__} in the first training step did not call the model that "
                f"ringtile shards, so that each rank computed whole rows; expected a compute_loss that was set before "
                f"ringtile.enable, and that calls its argument `model`, not a part of it (model.model, model.lm_head)"
            )
        self.shards_steps = True
        counted_again = self.trainer.floating_point_ops(inputs) * (1 - 1 / self.group.copies)
        self.trainer.current_flos -= counted_again  # type: ignore[assignment]

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """Leaves out accelerate's hooks on attention modules. User code may still ask for its context, a no-op."""
        if not deepspeed_shards_sequences(self.trainer.accelerator):
            self.patches.set(self.trainer.accelerator, "_cp_context", lambda **kwargs: contextlib.nullcontext())
        return args

    def _gather_for_metrics(
        self, original: Callable[..., Any], input_data: Any, use_gather_object: bool = False
    ) -> Any:
        """TRL calls it for what it logs, an evaluation for its rows."""
        if use_gather_object:
            raise one_process.refused_objects(input_data)
        return one_process.gather_for_metrics(self.accelerator, self.group, input_data)

    # ---- data and counting ----------------------------------------------------------------------

    def _prepare_data_loader(self, original: Callable[..., Any], data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        return OneProcess(self.trainer.accelerator, self.group).prepare_data_loader(data_loader, *args, **kwargs)

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keeps one copy of each row: the ranks of a group evaluate the same rows."""
        trainer = self.trainer
        previous, prepared = trainer.gather_function, list(trainer.accelerator._models)
        trainer.gather_function = trainer.accelerator.gather_for_metrics
        try:
            output = original(*args, **kwargs)
            prefix = inspect.signature(original).bind(*args, **kwargs).arguments.get("metric_key_prefix", "eval")
            metrics = one_process.EvaluationMetrics(
                output.metrics, prefix, output.num_samples, trainer.args.eval_batch_size, self.group
            )
            return output._replace(metrics=metrics)
        finally:
            trainer.gather_function = previous
            self._forget_bare_model(prepared)

    def _forget_bare_model(self, prepared: list[nn.Module]) -> None:
        """Lets train() prepare the model again. Before training, accelerate prepares it for evaluation only and then
        takes it for prepared, so that it would train without an engine. prepared: the models before the evaluation."""
        models, bare = self.trainer.accelerator._models, self.trainer.model
        if bare is not None and bare not in prepared and bare in models and not has_engine(bare):
            models.remove(bare)
            del bare._is_accelerate_prepared
            if (original := vars(bare).pop("_original_forward", None)) is not None:  # mixed precision has wrapped it
                bare.forward = original

    def _track_num_input_tokens(self, original: Callable[..., Any], inputs: dict[str, Any]) -> None:
        before = self.trainer.state.num_input_tokens_seen
        original(inputs)
        counted = self.trainer.state.num_input_tokens_seen - before
        self.trainer.state.num_input_tokens_seen = before + counted // self.group.copies

    def _get_total_train_batch_size(self, original: Callable[..., Any], args: TrainingArguments) -> int:
        """get_cp_size stays 1: later transformers divide the number of items by it, which ringtile does already."""
        rows: int = original(args) // self.group.size
        return rows


def _no_tree(trainer: Trainer) -> ConfigError:
    return ConfigError(
        f"shared_prefix: {type(trainer).__name__} may use more of its rows than log-probabilities of tokens, and the "
        f"batch is no tree; expected tree_parents and tree_lengths in it, or TRL's GRPOTrainer, RLOOTrainer, "
        f"DPOTrainer, KTOTrainer or RewardTrainer: set it to false"
    )


def _tokens(inputs: Mapping[str, Any]) -> Tensor | None:
    """bool (B, S): the tokens that are no padding; None: all."""
    attention_mask = inputs.get("attention_mask")
    return None if attention_mask is None else attention_mask.ne(0)


def _once_per_layer(calls: int, layers: int) -> bool:
    return calls % layers == 0 and calls > 0 if layers else calls == 0
