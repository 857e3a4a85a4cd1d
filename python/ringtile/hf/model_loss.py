"""The loss that a transformers model computes itself, on a shard: which labels it wants, and what it is divided by.

A causal language model shifts its labels, models of masked words and of classes of tokens do not. A model that hands
`num_items_in_batch` to transformers' loss function returns the sum over its shard divided by that number. All others
return a mean over the shard (BERT, and every token classifier), which ringtile replaces by the shard's part of the mean
over the batch.

Shape letters: B batch, N local tokens, C classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForMaskedLMLoss, ForTokenClassification

from ringtile.hf.batch import active_batch
from ringtile.hf.liger import watch_fused_loss
from ringtile.hf.patches import Patches
from ringtile.ops import state_dtype


def shifts_labels(model: PreTrainedModel) -> bool:
    """Whether a token is to predict the next label, and not its own."""
    # transformers' own rule: without a loss_type (GPT-2) the loss is the causal one.
    loss = LOSS_MAPPING.get(getattr(model, "loss_type", None) or "ForCausalLM")
    return loss not in (ForMaskedLMLoss, ForTokenClassification)


def replace_means(wrapped: nn.Module, model: PreTrainedModel, patches: Patches) -> None:
    """Makes the shard's part of the mean over the batch of a mean over the targets of a shard.

    Of models that do not shift labels, and do not hand num_items_in_batch to their loss function. Whether their loss is
    a cross entropy at all, the first batch shows. wrapped: the model with its adapters.
    """
    if shifts_labels(model):
        return
    patches.set(model, "_loss_function", functools.partial(_watched_loss, model.loss_function))
    watch_fused_loss(model, _watched_loss, patches)
    patches.on_restore(wrapped.register_forward_hook(_replace_mean, with_kwargs=True).remove)


def _watched_loss(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    batch = active_batch()
    if batch is not None and kwargs.get("num_items_in_batch") is not None:
        batch.is_counted = True
    return original(*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _replace_mean(module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
    """Forward hook. The sum of the ranks' parts is the mean over the batch; each is scaled like a balancing loss, which
    no number of items divides either. logits (B, N, C), labels (B, N)."""
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
