"""Losses that a model divides by the targets that it sees (BERT, and every token classifier): the mean over a shard.

A model that hands `num_items_in_batch` to transformers' loss function returns the sum over its shard divided by that
number. All others return a mean, in whose place each rank puts its part of the mean over the batch. Whether the loss is
a cross entropy at all, the first batch shows.

Shape letters: B batch, N local tokens, C classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ringtile.hf.batch import active_batch
from ringtile.hf.feature import Enabled, Feature
from ringtile.hf.model import shifts_labels
from ringtile.hf.patches import Patches
from ringtile.ops import state_dtype


def _install(run: Enabled, patches: Patches) -> None:
    if not shifts_labels(run.base):
        patches.set(run.base, "_loss_function", functools.partial(_watched, run.base.loss_function))
        patches.on_restore(run.wrapped.register_forward_hook(_replace_mean, with_kwargs=True).remove)


def _watched(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    batch = active_batch()
    if batch is not None and kwargs.get("num_items_in_batch") is not None:
        batch.is_counted = True
    return original(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _replace_mean(module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
    """Forward hook. logits (B, N, C), labels (B, N)."""
    batch, labels = active_batch(), kwargs.get("labels")
    if batch is None or batch.is_counted or labels is None or not isinstance(outputs, dict):
        return
    logits = outputs.get("logits")
    if outputs.get("loss") is None or not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
        return
    assert batch.num_targets is not None
    scores = logits.flatten(0, 1).to(state_dtype(logits.dtype))
    total = functional.cross_entropy(scores, labels.flatten(), reduction="sum")
    outputs["loss"] = batch.mean_share * batch.sequence.world_size * total / batch.num_targets


FEATURE = Feature(frozenset({"_loss_function", "_forward_hooks"}), _install)
