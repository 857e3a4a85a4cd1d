"""Two training steps of a tiny model, in one process or on the ranks of a group, and the comparison of both."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import warnings
from typing import Any

import ringtile
import torch
import transformers
from ringtile.cli.proofs import LIMITS, max_rel_diff
from ringtile.errors import RingtileError
from ringtile.hf.trainer import first_batch_of
from transformers import PretrainedConfig, PrinterCallback, Trainer, TrainingArguments

from tools.models import tiny_images, tiny_sounds
from tools.models.tiny_images import FIRST_WORD, LAST_WORD, Images, image_model
from tools.models.tiny_models import (
    IMAGES,
    SOUND,
    VOCABULARY,
    causal_types,
    head_of,
    image_text_types,
    tiny_config,
    tiny_model,
    types_with_heads,
)

STEPS = 2
LENGTHS = (24, 19, 21, 16)  # of the rows, two in a batch: longer than the windows and chunks of tiny configurations
MAX_REL_WEIGHT_DIFF = 1e-5  # of a parameter, relative to its largest number


def all_types() -> list[str]:
    """The names that `python -m tools.models` knows."""
    others = [f"{name}:{IMAGES}" for name in tiny_images.TYPES] + [f"{name}:{SOUND}" for name in tiny_sounds.TYPES]
    return [*causal_types(), *image_text_types(), *others, *types_with_heads()]


def train(
    source: str | PretrainedConfig, config: dict[str, Any] | None, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Trains STEPS steps, with `config` under ringtile -> losses, grad_norms, weights; or refused, the sentence."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.getLogger("ringtile").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    data: dict[str, Any] = {}
    if head_of(source) in (IMAGES, SOUND):
        images = head_of(source) == IMAGES
        model = image_model(source, dtype) if images else tiny_sounds.sound_model(source, dtype)
        made = Images(model) if images else tiny_sounds.Sounds(model)
        data = {"train_dataset": _rows_with_images(), "data_collator": _Collator(made)}
    else:
        tiny = tiny_config(source)
        if head_of(source) == "sequence-classification":  # its score is that of the last token that is none
            tiny.get_text_config().pad_token_id = 0
        model = tiny_model(tiny, head_of(source), dtype)
        data["train_dataset"] = _rows(head_of(source), model.config.num_labels or 1)
    arguments = TrainingArguments(
        tempfile.mkdtemp(prefix="ringtile-models-"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        optim="sgd",
        learning_rate=0.05,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,  # reports the norm and clips nothing: clipping would hide a wrong scale of the loss
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
    )
    trainer = Trainer(model=model, args=arguments, **data)
    trainer.remove_callback(PrinterCallback)
    try:
        if config is not None:
            ringtile.enable(trainer, config)
        trainer.train()
        proof = first_batch_of(trainer)
    except RingtileError as error:
        return {"refused": str(error), "class": type(model).__name__}
    finally:
        ringtile.restore(trainer)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "class": type(model).__name__,
        "losses": [entry["loss"] for entry in logs],
        "grad_norms": [float(entry["grad_norm"]) for entry in logs],
        "weights": {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()},
        "first_batch": None if proof is None else dataclasses.asdict(proof),
    }


def differences(run: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The largest relative difference of losses, gradient norms and weights."""
    weights = 0.0
    for name, weight in expected["weights"].items():
        if weight.size == 0:
            continue
        largest = float(abs(weight).max()) or 1.0
        difference = float(abs(run["weights"][name] - weight).max()) / largest
        weights = max(weights, difference if difference == difference else float("inf"))
    return {
        "losses": max_rel_diff(run["losses"], expected["losses"]),
        "gradient norms": max_rel_diff(run["grad_norms"], expected["grad_norms"]),
        "weights": weights,
    }


def equal(difference: dict[str, float]) -> bool:
    """Whether two runs in float32 agree to rounding. False for NaN."""
    limits = {"losses": LIMITS["losses"], "gradient norms": LIMITS["grad_norms"], "weights": MAX_REL_WEIGHT_DIFF}
    return all(difference[name] <= limit for name, limit in limits.items())


def _rows_with_images() -> list[dict[str, list[int]]]:
    """Two rows with images in a batch, then one with two and one without."""
    generator = torch.Generator().manual_seed(0)
    images: list[list[int]] = [[0], [1], [2, 3], []]
    counts = [length - 10 for length in LENGTHS]
    words = [torch.randint(FIRST_WORD, LAST_WORD + 1, (count,), generator=generator).tolist() for count in counts]
    return [{"words": of_row, "images": held} for of_row, held in zip(words, images, strict=True)]


class _Collator:
    """Makes a batch of rows with images or sounds."""

    def __init__(self, images: Images) -> None:
        self._images = images

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return self._images.batch([(row["words"], row["images"]) for row in rows], ignored=2)


def _rows(head: str, num_labels: int) -> list[dict[str, torch.Tensor]]:
    """Rows padded on the right to one length, whose first targets are ignored. The labels are words, or for a head that
    classifies tokens or rows, one of num_labels classes."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in LENGTHS:
        ids = torch.randint(3, VOCABULARY, (max(LENGTHS),), generator=generator)
        held = torch.arange(max(LENGTHS)) < length
        ids[~held] = 0
        labels = (ids % num_labels if head == "token-classification" else ids).masked_fill(~held, -100)
        labels[: length // 4] = -100
        labels = ids.sum() % num_labels if head == "sequence-classification" else labels
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": held.long()})
    return rows
