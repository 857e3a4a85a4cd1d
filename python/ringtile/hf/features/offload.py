"""`activation_offloading: true`: the inputs saved by a model's checkpointed layers wait in host memory."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import TrainerCallback

from ringtile.errors import ConfigError, RefusedError
from ringtile.hf.batch import CHECKPOINTING, STREAMED
from ringtile.hf.feature import Enabled, Feature
from ringtile.hf.offload import ActivationOffload
from ringtile.hf.patches import Patches
from ringtile.tiled.host import HostCopies, PinnedCopies

logger = logging.getLogger(__name__)


def offload_activations(model: nn.Module, transfer: HostCopies | None = None) -> Patches:
    """Move the hidden state (B, N, E) that each checkpointed layer saves to pinned host memory.

    Of streamed layers (`stream_layers`) inputs and outputs, and their gradients, are there, and a chunk on the device.
    Results do not change.
    Call it after turning it on: transformers' `activation_checkpointing_enable` (`gradient_...` up to 5.22),
    reentrant or not, or torch's `checkpoint_wrapper`, which FSDP's `activation_checkpointing` uses. `.restore()` on the
    result undoes it. Tensors on the CPU stay where they are. transfer: how to copy; None: CUDA.

    RefusedError: no layer is checkpointed; raised in the forward or backward: a hidden state was modified in place.
    """
    patches = Patches()
    _install(model, transfer or PinnedCopies(), patches)
    return patches


def _install(model: nn.Module, transfer: HostCopies, patches: Patches) -> None:
    offload = ActivationOffload(transfer)
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    layers: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    streamed = _streamed(model)
    if not wrappers and not layers and not streamed:
        raise RefusedError(
            f"activation_offloading: {type(model).__name__} has no checkpointed layer, and only their inputs move; "
            f"set {CHECKPOINTING}: true (under FSDP, activation_checkpointing: true in fsdp_config)"
        )
    for wrapper in wrappers:
        patches.set(wrapper, "checkpoint_fn", offload.wrap(wrapper.checkpoint_fn))
    for layer in streamed:
        patches.set(layer, STREAMED, transfer)
    for layer in layers:
        patches.set(layer, "_gradient_checkpointing_func", offload.wrap(layer._gradient_checkpointing_func))


def _streamed(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if STREAMED in vars(module)]


class OffloadActivations(TrainerCallback):
    """Turns offload on while a Trainer trains: before that, layers may lack their checkpoints or their engine."""

    def __init__(self, transfer: HostCopies | None = None) -> None:
        self.transfer = transfer
        self.patches = Patches()  # holds entries while training

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.patches.restore()  # in case an earlier training ended with an error
        if args.torch_compile:
            raise RefusedError(
                "activation_offloading: torch_compile is true, but a compiled graph decides which tensors it saves; "
                "set one of the two to false"
            )
        # A test's transfer copies from any device; streamed layers take the same path on all of them.
        if self.transfer is None and args.device.type != "cuda" and not _streamed(model):
            logger.warning(
                "activation_offloading: the model is on the %s, so nothing is offloaded: only CUDA devices have memory"
                " apart from the host's",
                args.device.type,
            )
            return
        _install(model, self.transfer or PinnedCopies(), self.patches)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.patches.restore()


def _refuse(run: Enabled) -> None:
    """ConfigError: transformers moves what checkpointed layers save itself."""
    setting = f"{CHECKPOINTING}_kwargs"
    if (getattr(run.trainer.args, setting) or {}).get("offload"):
        raise ConfigError(
            f"activation_offloading is true and {setting} has offload: true; expected one of the two: both move what "
            f"checkpointed layers save to the host. Take offload out, which copies on the stream that computes"
        )


def _install_callback(run: Enabled, patches: Patches) -> None:
    offload = OffloadActivations()
    patches.add_callback(run.trainer, offload)
    patches.on_restore(offload.patches.restore)


FEATURE = Feature(frozenset({"callbacks"}), _install_callback, _refuse, key="activation_offloading")
