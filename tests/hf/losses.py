"""Trainers and functions with losses of their own, and a Trainer that scales its loss for float16."""

import math
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from torch.nn import functional
from transformers import Trainer


class OwnLoss(Trainer):
    """Computes its loss from the outputs of full sequences."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs)


class TwiceTheLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (2 * loss, outputs) if return_outputs else 2 * loss


class LastThird(Trainer):
    """The mean over the last third of each row, which no shard can compute by itself."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        begin = 2 * inputs["labels"].size(1) // 3
        logits, labels = outputs.logits[:, begin:-1], inputs["labels"][:, begin + 1 :]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss = loss / self.current_gradient_accumulation_steps if model.training else loss
        return (loss, outputs) if return_outputs else loss


class Scaled(Trainer):
    """Says of its loss what a Trainer of transformers 5.19 and later can say; older ones do not read it."""

    loss_is_scaled_for_ga = True


class Unscaled(Trainer):
    """The same for a loss that training_step is to divide by the number of accumulation steps."""

    loss_is_scaled_for_ga = False


class UnscaledLastThird(LastThird):
    loss_is_scaled_for_ga = False


class Drawing(LastThird):
    """Draws outside of the model, as a sampler or a metric may."""

    def compute_loss(self, *args, **kwargs):
        torch.rand(())
        return super().compute_loss(*args, **kwargs)


class SumOverItems(Trainer):
    """Divides by the number of items, and does not undo the mean of the engine."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class MeanPerBatch(Trainer):
    """Averages the means of its batches, like axolotl's Trainer, which does not count targets."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.model_accepts_loss_kwargs = False


class Counting(Trainer):
    """Counts the items of a step itself, as transformers does."""

    def get_batch_samples(self, iterator, num_batches, device):
        batches = [next(iterator) for _ in range(num_batches)]
        return batches, self.accelerator.gather(sum(x["labels"][:, 1:].ne(-100).sum() for x in batches)).sum()


class PositionalCall(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(inputs["input_ids"], inputs["attention_mask"]).logits.square().mean() * self.args.world_size


class AsTuple(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs, return_dict=False)[0]


class HiddenStates(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, output_hidden_states=True)
        return sum(hidden[:, 3].square().mean() for hidden in outputs.hidden_states)


class ZLoss(Trainer):
    """Adds a term over the logits to the Trainer's loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 1e-2 * outputs.logits.logsumexp(-1).square().mean()
        return (loss, outputs) if return_outputs else loss


def squared(outputs, labels, num_items_in_batch=None):
    """A user's loss function, which shifts the labels itself."""
    logits, labels = outputs.logits[:, :-1], labels[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") ** 2
    return losses.sum() / (num_items_in_batch if num_items_in_batch is not None else labels.ne(-100).sum())


def mean_of_logits(outputs, labels, num_items_in_batch=None):
    """A user's loss function, which looks at one batch only."""
    return outputs.logits.square().mean()


class ScalingTrainer(Trainer):
    """What accelerate sets up for `fp16: true` on a GPU; on a CPU it trains in float32 and says nothing.

    spoilt: the micro-step whose gradients rank 0 overflows, and no other rank: its step is skipped on all of them.
    """

    def __init__(self, *args: Any, autocast: bool, spoilt: int | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        accelerator = self.accelerator
        accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
        accelerator.autocast_handler = AutocastKwargs(enabled=autocast)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        backward, num_calls = accelerator.backward, 0
        self.skipped = None if spoilt is None else 1 + (spoilt - 1) // self.args.gradient_accumulation_steps

        def spoil(loss, **kwargs):
            nonlocal num_calls
            num_calls += 1
            backward(loss * math.inf if num_calls == spoilt and accelerator.process_index == 0 else loss, **kwargs)

        accelerator.backward = spoil

    def log(self, logs, *args, **kwargs):
        if "grad_norm" in logs:
            skipped = self.accelerator.optimizer_step_was_skipped
            assert skipped == (self.state.global_step == self.skipped)
            logs |= {"scale": self.accelerator.scaler.get_scale(), "skipped": skipped}
            logs["grad_norm"] = 0.0 if skipped else logs["grad_norm"]
        super().log(logs, *args, **kwargs)


def of_tokens(logits, labels, reduction="sum"):
    return functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction=reduction
    )


class OwnMean(Trainer):
    """A mean of one's own; `after` is what else a subclass does with it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.after(of_tokens(outputs.logits, labels) / (labels[:, 1:] != -100).sum(), outputs)
        return (loss, outputs) if return_outputs else loss

    def after(self, loss, outputs):
        return loss
