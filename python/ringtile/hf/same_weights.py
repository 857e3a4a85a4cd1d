"""The ranks that share a sequence hold the same weights, and DDP averages the gradients of all that are trained."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments

from ringtile.checksum import checksum
from ringtile.errors import RefusedError, RingMismatchError
from ringtile.hf.group import ContextParallelGroup
from ringtile.hf.patches import Patches

logger = logging.getLogger("ringtile")


class SameWeights(TrainerCallback):
    """Compares the weights of a group at the first step and when training ends, by a checksum of each.

    Weights that an engine has split over ranks are not compared: loading and training them takes all ranks.
    """

    def __init__(self, trainer: Trainer, group: ContextParallelGroup) -> None:
        self._trainer, self._group = trainer, group
        self._frozen: list[tuple[str, nn.Parameter]] = []  # when DDP was made
        self._begins = False

    def install(self, patches: Patches) -> None:
        patches.add_callback(self._trainer, self)
        callbacks = self._trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop())  # others may freeze weights when training begins

    def on_train_begin(self, *unused: Any, **also_unused: Any) -> None:
        is_ddp = isinstance(self._trainer.model_wrapped, DistributedDataParallel)
        self._frozen = [each for each in self._weights() if is_ddp and not each[1].requires_grad]
        self._begins = True

    def on_step_begin(self, *unused: Any, **also_unused: Any) -> None:
        """RingMismatchError: the ranks of the group begin with different weights."""
        if self._begins and (difference := self._difference()):
            raise RingMismatchError(difference)
        self._begins = False

    def on_pre_optimizer_step(self, *unused: Any, **also_unused: Any) -> None:
        """RefusedError: a weight has a gradient that DDP does not average, and so another on each rank."""
        for name, weight in self._frozen:
            if weight.grad is not None:
                raise RefusedError(
                    f"{name} was frozen when train() was called and has a gradient now, which DDP does not average "
                    f"over the ranks; expected weights that will be trained to require gradients when train() is "
                    f"called: freeze them in a callback's on_train_begin"
                )

    def on_train_end(self, args: TrainingArguments, *unused: Any, **also_unused: Any) -> None:
        """Every rank gets the best model that the first one has loaded: the others may see another folder."""
        if args.load_best_model_at_end:
            for _, weight in self._weights():
                dist.broadcast(weight.detach(), 0)
        if difference := self._difference():  # an error would keep the user from saving them
            logger.error(difference)

    def _weights(self) -> list[tuple[str, nn.Parameter]]:
        """The weights by name; none where an engine has split them."""
        model: Any = self._trainer.model
        weights = list(model.named_parameters())
        split = any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for _, weight in weights)
        return [] if split else weights

    def _difference(self) -> str:
        """Which weights differ between ranks of the group, in words; "": none. A collective of 8 bytes a weight."""
        if not (weights := self._weights()):
            return ""
        mine = torch.stack([checksum(weight, device=self._group.device) for _, weight in weights])
        held: list[Tensor] = [torch.empty_like(mine) for _ in range(self._group.size)]
        dist.all_gather(held, mine, group=self._group.process_group)
        for rank, others in enumerate(held):
            if differ := (others != held[0]).nonzero().flatten().tolist():
                return (
                    f"ranks {self._group.world_rank(0)} and {self._group.world_rank(rank)} share a sequence but hold "
                    f"different weights: {len(differ)} of {len(weights)}, the first of them {weights[differ[0]][0]}; "
                    f"expected the same on all: load them from the same files, and change them alike on every rank"
                )
        return ""
