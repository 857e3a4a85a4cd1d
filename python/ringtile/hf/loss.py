"""What every way to compute a Trainer's loss on shards has in common; `LossOnShards` and `LossOnSequences` are two.

Every rank of a context-parallel group gets the same batch, the batch is sharded once, and the model runs on the shard.
The data-parallel engine averages gradients over all ranks and knows nothing of groups.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ringtile import keep
from ringtile.errors import RefusedError
from ringtile.hf import model
from ringtile.hf.batch import forget_checkpoints, keep_in_checkpoints
from ringtile.hf.feature import Enabled
from ringtile.hf.features import adapters, balancing_loss, dynamic, float8, latents, means, recurrent, seam, towers
from ringtile.hf.features.dropout import Draws
from ringtile.hf.first_batch import FirstBatch
from ringtile.hf.group import ContextParallelGroup, deepspeed_shards_sequences
from ringtile.hf.model import check_training_model
from ringtile.hf.one_process import Groups
from ringtile.hf.patches import Patches
from ringtile.hf.shard import Sharding
from ringtile.hf.weights import SameWeights, make_whole_for_hooks, refuse_compression

FEATURES = tuple(each.FEATURE for each in (towers, seam, recurrent, balancing_loss, adapters, latents, means, float8))


class ShardedLoss(abc.ABC):
    """The group of one Trainer, and what stands in for its loss. Every rank of the world builds it.

    Raises RefusedError, ConfigError.
    """

    def __init__(self, run: Enabled, patches: Patches) -> None:
        self.trainer, self.model, self.base, self.config = run.trainer, run.wrapped, run.base, run.config
        self.patches, trainer, base, config = patches, run.trainer, run.base, run.config
        for feature in FEATURES:
            feature.refuse(run)
        self.check()
        self.group = ContextParallelGroup(
            config.context_parallel_size, trainer.args.ddp_timeout, trainer.args.device, trainer.get_tp_size()
        )
        patches.on_restore(self.group.close)
        self.groups = Groups(trainer, self.group, patches)
        self.sharding = Sharding(trainer, base, config, self.group, patches)
        self.draws = Draws(trainer, base, self.group)
        self.proof = FirstBatch(self) if config.first_batch_check else None
        self.training_checked = self.shards_steps = False

    @abc.abstractmethod
    def check(self) -> None:
        """Raises RefusedError when the loss would differ from that of one process. Runs before anything is changed."""

    def _same_tiles_of_head(self) -> None:
        """The tiles of TRL's fused head, of all tokens and not of the labels, are chunks or even parts of one."""
        if not any(cls.__module__.startswith("trl.") for cls in type(self.trainer).__mro__):
            return
        if (kernels := sys.modules.get("trl.kernels.chunked_logprob")) is None:
            raise RefusedError(
                f"reproducible: {type(self.trainer).__name__} has no trl.kernels.chunked_logprob, whose tiles would be "
                f"chunks; expected trl >= 1.16"
            )
        count = -(-self.config.tile_tokens // kernels.TOKEN_CHUNK_SIZE)
        while self.config.tile_tokens % count:
            count += 1
        self.patches.set(kernels, "TOKEN_CHUNK_SIZE", self.config.tile_tokens // count)
        self.patches.set(sys.modules["trl.trainer.utils"], "_use_triton", lambda device: False)

    @abc.abstractmethod
    def install_loss(self) -> None:
        """Replaces what it must: the loss, the prediction step, the number of items, the model's hooks."""

    def install(self) -> None:
        self.patches.wrap(self.trainer, "_prepare_context_parallel_inputs", self._leave_inputs)
        if self.config.reproducible:
            self._same_tiles_of_head()
        if self.group.size > 1:
            self.groups.install()
            if self.config.dynamic_context_parallel:
                dynamic.batch_rows_of(self.group.size, self.trainer, self.patches)
            SameWeights(self.trainer, self.group).install(self.patches)
        self.install_loss()

    def __deepcopy__(self, memo: Any) -> ShardedLoss:
        """A copy of a model has the hooks of the same one: it is no copy of the Trainer."""
        return self

    def switch_model(self, wrapped: nn.Module, base: PreTrainedModel) -> None:
        """Makes a model run on shards. wrapped: the model with its adapters; base: the model inside."""
        model.switch_attention(wrapped, self.patches)
        model.pin_rope_length(base, self.patches)
        run = Enabled(self.trainer, wrapped, base, self.config, self.group)
        for feature in FEATURES:
            feature.install(run, self.patches)
        self.sharding.takes(run.keys)
        self.patches.on_restore(functools.partial(forget_checkpoints, wrapped))

    def prepare_training(self, model: nn.Module) -> None:
        """Prepares a model to train, and checks the first one: only then has its engine wrapped it."""
        if not model.training:
            return
        if not self.training_checked and self.group.size > 1:
            check_training_model(model)
            refuse_compression(model)
        self.training_checked = True
        if self.group.size > 1:
            make_whole_for_hooks(model, self.group, self.patches)
        keep_in_checkpoints(model)
        # For what the checkpointed layers of this forward and backward keep.
        self.sharding.budget = keep.checkpoint_budget(self.config.keep_attention, self.group.memory_bytes)

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

        RefusedError: the first batch of the training was not sharded, or DDP not called, which averages the gradients.
        """
        before, calls = self.sharding.num_batches, list[None]()
        watched = isinstance(model, DistributedDataParallel) and not self.shards_steps
        with model.register_forward_pre_hook(lambda *_: calls.append(None)) if watched else contextlib.nullcontext():
            self.sharding.written.begin_step()
            yield
        self.sharding.written.end_step()
        if not model.training:
            return
        if len(loaded := self.groups.loaded) > 1:  # this batch and the next
            loaded.popleft()
            self.sharding.look_ahead(loaded[0])
        if not self.shards_steps and (self.sharding.num_batches == before or (watched and not calls)):
            raise RefusedError(
                f"the loss of {type(self.trainer).__name__} in the first training step did not call the model that "
                f"ringtile shards, or not by its engine; expected a compute_loss set before ringtile.enable, "
                f"that calls its argument `model`, not a part of it (model.model, model.lm_head) nor self.model"
            )
        self.shards_steps = True
        counted_again = self.trainer.floating_point_ops(inputs) * (1 - 1 / self.group.copies)
        self.trainer.current_flos -= counted_again  # type: ignore[assignment]
