"""Weights on the ranks that share a sequence, which hold them alike, and their gradients before the engine has averaged
them: of a rank, they are those of its shard."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments

from ringtile.checksum import checksum
from ringtile.errors import RefusedError, RingMismatchError
from ringtile.hf.group import ContextParallelGroup
from ringtile.hf.patches import Patches
from ringtile.transport.groups import transport_of

logger = logging.getLogger("ringtile")

# Libraries whose hooks on accumulated gradients are an engine's own.
_ENGINES = ("torch", "deepspeed", "accelerate")
# Of DDP, hooks that communicate a sum: any other compresses what each rank has.
_SUMS = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")
_COMPRESSING = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")  # optimizers of DeepSpeed


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


# ---- gradients of users -----------------------------------------------------------------------------


def refuse_inside_loss(model: nn.Module, *, passes_inputs: bool) -> None:
    """In a hook of a model's output, while a loss is computed. RefusedError: the loss takes the gradient of weights, or
    of something else inside the model, by torch.autograd.grad.

    A backward that accumulates is the engine's, which averages. passes_inputs: the model was given inputs whose
    gradient is made whole.
    """
    accumulates = is_asked = is_gathered = False
    for weight in model.parameters():
        is_gathered |= isinstance(weight, DTensor)
        if weight.requires_grad and not is_gathered:
            try:
                accumulates |= torch._C._will_engine_execute_node(get_gradient_edge(weight).node)
            except RuntimeError:  # torch says so of a leaf whose gradient is to be returned
                is_asked = True
    if is_gathered:
        accumulates = _accumulates_below(torch._C._current_autograd_node())
    if is_asked or not (accumulates or passes_inputs):
        raise RefusedError(
            "the loss takes a gradient of its own inside of the model (torch.autograd.grad), of which a rank has the "
            "part of its shard; expected gradients of the model's inputs alone, or gradients that are read when the "
            "backward is over (on_pre_optimizer_step of a callback): else train with one rank a sequence"
        )


def _accumulates_below(node: Any) -> bool:
    """Whether the backward that runs accumulates the gradient of a leaf below a node: of the first one that is found.
    The weights that FSDP2 gathers are leaves which no module holds."""
    waiting, seen = [node], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        with contextlib.suppress(RuntimeError):  # of a leaf whose gradient is to be returned
            if hasattr(node, "variable"):
                return bool(torch._C._will_engine_execute_node(node))
    return False


def make_whole_for_hooks(model: nn.Module, group: ContextParallelGroup, patches: Patches) -> None:
    """Give each hook on the gradient of a weight the mean over the group, which is the gradient of whole sequences; the
    engine's mean over all ranks stays the same. Call it before each forward pass: hooks may be new."""
    for name, weight in model.named_parameters():
        hooks: Any = weight._backward_hooks
        # Of a DTensor torch calls no hook in a backward of FSDP2.
        accumulated = getattr(weight, "_post_accumulate_grad_hooks", None)
        if isinstance(weight, DTensor) or not (hooks or (accumulated and _users(accumulated.values()))):
            continue
        if not hooks or not isinstance(next(iter(hooks.values())), _Mean):
            handle = weight.register_hook(_Mean(name, group))  # type: ignore[no-untyped-call]
            hooks, others = weight._backward_hooks, dict(hooks or {})
            others.pop(handle.id, None)
            for number, hook in others.items():  # behind ours; torch ignores OrderedDict.move_to_end
                del hooks[number]
                hooks[number] = hook
            patches.on_restore(handle.remove)


def refuse_compression(engine: Any) -> None:
    """RefusedError: an engine communicates something else than the sum of the ranks' gradients."""
    hooks = [getattr(hook, "__name__", type(hook).__name__) for hook, _ in getattr(engine, "_comm_hooks", ())]
    optimizer: Any = getattr(engine, "optimizer", None)
    optimizers = {type(optimizer).__name__, type(getattr(optimizer, "optimizer", None)).__name__}
    wrong = [name for name in hooks if name not in _SUMS] + [name for name in _COMPRESSING if name in optimizers]
    if wrong:
        raise RefusedError(
            f"{wrong[0]} compresses the gradients of each rank, of which those that share a sequence have a part each; "
            f"expected the sum of gradients, or {', '.join(_SUMS)}"
        )


@dataclass(frozen=True)
class _Mean:
    name: str  # of the weight
    group: ContextParallelGroup

    def __call__(self, gradient: Tensor) -> Tensor:
        # Named, so that ranks whose backward reaches other weights (of experts, say) do not add those.
        op = f"the gradient of {self.name}, which has a hook"
        with transport_of(self.group.process_group).agree(op, {}, gradient.device):
            return self.group.mean(gradient)


def _users(hooks: Iterable[Any]) -> bool:
    """Whether a hook that is no engine's reads the gradient that was accumulated."""
    return any((getattr(hook, "__module__", None) or "").partition(".")[0] not in _ENGINES for hook in hooks)
