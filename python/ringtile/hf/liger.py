"""Liger's kernels in a Trainer (`use_liger_kernel: true`): when they are put in, and their fused loss on shards.

Norms, RoPE and GLUs work on each token by itself, so that a shard needs nothing more; the first batch proves them. The
fused loss computes logits and cross entropy in one, from `shift_labels` if it gets them, as a sum divided by
`num_items_in_batch`: on shards, the ranks' sum of that is the loss of one process.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import transformers.trainer
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.integrations.liger import apply_liger_kernel

from ringtile.errors import RefusedError
from ringtile.hf.patches import Patches

_PACKAGE = "liger_kernel"
_FUSED_LOSS = "LigerForCausalLMLoss"  # in the file of each forward pass that calls it
_applied: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def from_liger(module: nn.Module) -> bool:
    """Whether Liger has replaced the module's class or its forward."""
    homes = (type(module).__module__, getattr(module.forward, "__module__", None) or "")
    return any(home.split(".")[0] == _PACKAGE for home in homes)


def apply_liger(trainer: Trainer, patches: Patches) -> None:
    """Puts in the kernels that the Trainer's arguments ask for, and keeps `train()` from doing so again.

    The Trainer does it when training begins, which would replace the forward of modules that run in tiles. They stay
    when the patches are restored, as they do after a training.
    """
    if not trainer.args.use_liger_kernel:
        return
    assert trainer.model is not None  # base_model has refused it otherwise
    apply_liger_kernel(trainer.model, trainer.args.liger_kernel_config)  # type: ignore[no-untyped-call]
    _applied.add(trainer.model)
    patches.share(transformers.trainer, "apply_liger_kernel", _unless_applied)


def _unless_applied(original: Callable[..., Any], model: nn.Module, *args: Any) -> None:
    if model not in _applied:
        original(model, *args)


def check_liger(trainer: Trainer) -> None:
    """Raises RefusedError where a loss of TRL's would be Liger's: it reads hidden states and labels of a shard."""
    config, name = trainer.args.liger_kernel_config or {}, type(trainer).__name__
    is_trls = any(cls.__module__.startswith("trl.") for cls in type(trainer).__mro__)
    if not trainer.args.use_liger_kernel or not is_trls:
        return
    if getattr(trainer, "use_liger_kernel", False) or config.get("fused_linear_cross_entropy", True):
        raise RefusedError(
            f"{name} uses use_liger_kernel with a fused loss of Liger's, which would see a shard only; expected "
            f"Liger's other kernels alone: set liger_kernel_config={{'fused_linear_cross_entropy': False}}, and use "
            f"trl >= 1.15, whose trainers leave the loss to TRL"
        )


def has_fused_loss(model: PreTrainedModel) -> bool:
    """Whether the model's forward is Liger's, or another library's (axolotl's) that calls its fused loss."""
    return from_liger(model) or hasattr(sys.modules.get(model.forward.__module__), _FUSED_LOSS)
