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
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification

from ringtile.errors import RefusedError
from ringtile.hf.batch import active_batch
from ringtile.hf.liger import watch_fused_loss
from ringtile.hf.patches import Patches
from ringtile.ops import state_dtype

_SHIFTS = {ForCausalLMLoss: True, ForMaskedLMLoss: False, ForTokenClassification: False}


def is_sum_over_tokens(model: PreTrainedModel) -> bool:
    """Whether the loss is one of a label for each token."""
    return _loss_of(model) in _SHIFTS


def shifts_labels(model: PreTrainedModel) -> bool:
    """Whether a token is to predict the next label, and not its own."""
    return _SHIFTS.get(_loss_of(model), True)


def _loss_of(model: PreTrainedModel) -> Any:
    # transformers' own rule: without a loss_type (GPT-2) the loss is the causal one.
    return LOSS_MAPPING.get(getattr(model, "loss_type", None) or "ForCausalLM")


def loss_of_its_own(model: PreTrainedModel) -> RefusedError:
    return RefusedError(
        f"{type(model).__name__} does not hand shift_labels to self.loss_function(..., **kwargs); expected it to: it "
        f"would shift the labels again, within each shard. Give the Trainer a compute_loss_func, which gets the logits "
        f"and labels of full sequences, and set a loss of your own before ringtile.enable"
    )


def watch_loss(wrapped: nn.Module, model: PreTrainedModel, patches: Patches) -> None:
    """Counts, on the ShardedBatch, calls of the model's loss function with the labels and their number over all shards.

    A causal model that computes its loss in another way would shift the labels again, within each shard, and take its
    mean. Where labels are not shifted, the mean of a shard is replaced. wrapped: the model with its adapters.
    """
    shifts = shifts_labels(model)
    patches.set(model, "_loss_function", functools.partial(_watched_loss, model.loss_function, shifts))
    watch_fused_loss(model, lambda original, *args, **kwargs: _watched_loss(original, shifts, *args, **kwargs), patches)
    if not shifts:
        part = _PartOfMean(type(model).__name__)
        patches.on_restore(wrapped.register_forward_hook(part.replace_loss, with_kwargs=True).remove)


def _watched_loss(original: Callable[..., Any], shifts: bool, *args: Any, **kwargs: Any) -> Any:
    batch = active_batch()
    wanted = ("shift_labels", "num_items_in_batch") if shifts else ("num_items_in_batch",)
    if batch is not None and all(kwargs.get(name) is not None for name in wanted):
        batch.loss_calls += 1
    return original(*args, **kwargs)


class _PartOfMean:
    """A hook that replaces a mean over the targets of a shard by the shard's part of the mean over those of the batch.

    Their sum over the group is that mean; each rank's is scaled like a balancing loss, which no number of items divides
    either. The first loss of a shard is compared with the cross entropy that replaces it.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._compared = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def replace_loss(self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        batch, labels = active_batch(), kwargs.get("labels")
        if batch is None or batch.loss_calls > 0 or labels is None or not isinstance(outputs, dict):
            return
        logits, mean = outputs.get("logits"), outputs.get("loss")
        if mean is None:
            return
        assert batch.num_targets is not None
        total = self._cross_entropy(logits, labels)
        if not self._compared and bool(labels.ne(-100).any()):
            self._compare(mean.detach(), total.detach() / labels.ne(-100).sum())
        outputs["loss"] = batch.mean_share * batch.sequence.world_size * total / batch.num_targets
        batch.loss_calls += 1

    def _cross_entropy(self, logits: Any, labels: Tensor) -> Tensor:
        """logits (B, N, C), labels (B, N) -> (): the sum over the tokens of a shard."""
        if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
            raise self._refused(f"logits {tuple(logits.shape) if isinstance(logits, Tensor) else type(logits)}")
        scores = logits.flatten(0, 1).to(state_dtype(logits.dtype))
        return functional.cross_entropy(scores, labels.flatten(), reduction="sum")

    def _compare(self, mean: Tensor, expected: Tensor) -> None:
        tolerance = max(1e-5, 2 * torch.finfo(mean.dtype).eps)
        if not torch.allclose(mean.to(expected.dtype), expected, rtol=tolerance, atol=0.0):
            raise self._refused(f"a loss of {float(mean):.6g} where that is {float(expected):.6g}")
        self._compared = True

    def _refused(self, got: str) -> RefusedError:
        return RefusedError(
            f"{self._model} computes {got}; expected the mean cross entropy of logits (B, N, C) and labels (B, N), or "
            f"a model that hands num_items_in_batch to self.loss_function. Give the Trainer a compute_loss_func, "
            f"which gets the logits and labels of full sequences"
        )
