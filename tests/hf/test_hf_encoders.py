"""Encoders, and classifiers of tokens: labels that are not shifted, masks that are not causal; equal to one process."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import ringtile
import torch
from hf_models import NUM_LABELS, SIZES, tiny_encoder
from hf_training import TOLERANCE, Padded, Run, assert_equal_training, failure_of, make_trainer, packed, train
from pool import run_ranks
from ringtile.cli.tiny_models import tiny_config
from ringtile.cli.tiny_models import tiny_model as any_tiny_model
from ringtile.hf.checks import attends_causally
from ringtile.hf.layers import layer_masks, mask_of_layer
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithFlattening,
    T5Config,
    T5ForConditionalGeneration,
)

CONFIG = {"context_parallel_size": 2}


def packed_apart(rows):
    """Documents in one row, named by cu_seq_lens: transformers' masks of encoders do not look at position ids."""
    return DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)


@dataclass(frozen=True)
class Labelled:
    """Labels of the tokens themselves: some words to be guessed, or a class for every token that had a label."""

    collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]
    classes: bool
    types: bool = False  # with token_type_ids

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = dict(self.collator([{**row, "labels": self._labels(row)} for row in rows]))
        if self.types:
            batch["token_type_ids"] = batch["input_ids"] % 2
        return batch

    def _labels(self, row: dict[str, Any]) -> list[int]:
        if self.classes:
            # None for the first token: DataCollatorWithFlattening removes it.
            return [-100, *(label if label < 0 else label % NUM_LABELS for label in row["labels"][1:])]
        return [token if i % 3 == 1 else -100 for i, token in enumerate(row["input_ids"])]


def _train(config, family="modernbert", classes=False, collator=None, types=False, model=None, **options) -> Run:
    options = {"max_steps": 5, "evaluate": False, "learning_rate": 0.05, **options}
    collator = Labelled(collator or Padded(), classes, types)
    return train(config, model=tiny_encoder(family, classes, **(model or {})), collator=collator, **options)


def _train_all(config, cases):
    return [_train(config, **case) for case in cases]


# What one process trains on where the documents of a packed row are to be apart: the same documents, a row each.
UNPACKED = {packed_apart: Padded()}
CASES = {
    "masked words": {"collator": Padded("left"), "evaluate": True},
    "packed": {"collator": packed_apart},
    "no shift, a mean": {"family": "bert", "types": True},
}
LONG = {
    "classes": {"classes": True, "evaluate": True},
    "causal classes": {"family": "llama", "classes": True, "collator": packed},
    "packed without bounds": {"collator": packed},
    "eurobert": {"family": "eurobert"},
    "eurobert packed": {"family": "eurobert", "collator": packed_apart},
    "eurobert classes": {"family": "eurobert", "classes": True},
    "bert classes": {"family": "bert", "classes": True},
    "packed classes": {"classes": True, "collator": packed_apart},
    "only masked words": {"model": {"sparse_prediction": True}},
    "smoothed words": {"label_smoothing_factor": 0.1},
    "smoothed mean": {"family": "bert", "label_smoothing_factor": 0.1},
    "checkpointing": {"gradient_checkpointing": True, "classes": True},
    "own token average": {"average_tokens_across_devices": False, "family": "bert"},
    "lora": {"family": "eurobert", "lora": True, "classes": True},
}


def _plain(cases) -> list[dict[str, Any]]:
    return [{**case, "collator": UNPACKED.get(case.get("collator"), case.get("collator"))} for case in cases.values()]


@functools.cache
def _reference() -> list[Run]:
    return _train_all(None, _plain(CASES))


def _check(cases, expected, world_size=2, layout="zigzag") -> None:
    config = {**CONFIG, "layout": layout}
    for runs in run_ranks(world_size, _train_all, config, [*cases.values()], timeout=200.0):
        for name, run, wanted in zip(cases, runs, expected, strict=True):
            assert run.losses == pytest.approx(wanted.losses, rel=TOLERANCE), name
            assert_equal_training(run, wanted)
            assert run.eval_loss == pytest.approx(wanted.eval_loss, rel=TOLERANCE)
            if wanted.predictions is not None:
                assert (run.predictions - wanted.predictions).abs().max() <= TOLERANCE * 10
                assert torch.equal(run.label_ids, wanted.label_ids)


def test_encoders_equal_one_process():
    _check(CASES, _reference())


@pytest.mark.long
@pytest.mark.parametrize("layout", ["contiguous", "striped", "balanced", "per_document"])
def test_encoders_in_every_layout_equal_one_process(layout):
    _check(CASES, _reference(), layout=layout)


@pytest.mark.long
def test_more_encoders_equal_one_process():
    _check(LONG, _train_all(None, _plain(LONG)))


@pytest.mark.long
def test_two_groups_equal_two_ranks_without():
    cases = {**CASES, **LONG}
    _check(cases, run_ranks(2, _train_all, None, _plain(cases), timeout=100.0)[0], world_size=4)


# ---- refused by name --------------------------------------------------------------------------------


def _both_ways(model):
    model.model.layers[1].attn.is_causal = True
    return model


def _llama_that_looks_ahead(layers):
    model = tiny_encoder("llama", classes=True)
    model.config.is_causal = False  # transformers then makes full masks; without padding its layers decide
    for layer in model.model.layers:
        layer.self_attn.is_causal = not layers
    return model


def _tiny(name, **settings):
    config = tiny_config(f"{name}:masked-lm")
    for setting, value in settings.items():
        setattr(config, setting, value)
    return any_tiny_model(config, "masked-lm")


def _says_causal(model):
    for layer in model.model.layers:
        layer.attn.is_causal = True
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: AutoModelForSequenceClassification.from_config(BertConfig(**SIZES)), "a loss of its own for whole"),
        (lambda: _tiny("mobilebert"), "(MobileBertEmbeddings) joins the embeddings of neighbouring tokens"),
        (lambda: _tiny("esm", token_dropout=True), "(EsmEmbeddings) scales embeddings by how many tokens of the row"),
        (lambda: _both_ways(tiny_encoder()), "has causal and bidirectional layers"),
        (
            lambda: _says_causal(tiny_encoder()),
            "is causal in its layers (model.layers.0.attn.is_causal) but not in its",
        ),
        (lambda: _llama_that_looks_ahead(layers=False), "LlamaForTokenClassification is causal in its layers"),
        (
            lambda: T5ForConditionalGeneration(T5Config(d_model=32, d_ff=48, num_layers=2, vocab_size=96)),
            "has an encoder and a decoder",
        ),
    ],
)
def test_model_is_refused(model, words):
    with pytest.raises(ringtile.Refused) as raised:
        ringtile.enable(make_trainer(model=model()), CONFIG)
    assert words in str(raised.value)


def test_window_of_a_layer_is_the_one_made_before():
    """torch.compile cannot make the masks of the layers: they are made of the config, before the forward pass."""
    model = tiny_encoder()
    made = [mask_of_layer(layer.attn, {"sliding_window": layer.attn.sliding_window}) for layer in model.model.layers]
    assert made == layer_masks(model.config, causal=False)
    assert {layer.window for layer in made} == {None, 4}


def test_llama_that_looks_ahead_is_an_encoder():
    assert not attends_causally(_llama_that_looks_ahead(layers=True))


def _twice_the_loss(trainer):
    forward = trainer.model.forward

    @functools.wraps(forward)  # by whose arguments the Trainer chooses columns
    def twice(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs["loss"] = 2 * outputs["loss"]
        return outputs

    trainer.model.forward = twice


def _shifted_too(trainer):
    collator = trainer.data_collator
    trainer.data_collator = lambda rows: {**(batch := collator(rows)), "shift_labels": batch["labels"]}


def _loaded_with_flash(trainer):
    trainer.data_collator = Labelled(packed, classes=True)
    config, switch = trainer.model.config, trainer.model.set_attn_implementation
    config._attn_implementation_internal = "flash_attention_2"  # which no CPU loads, nor switches back to
    trainer.model.set_attn_implementation = lambda name: switch("sdpa" if isinstance(name, dict) else name)


def _failures(prepares):
    failures = []
    for prepare in prepares:
        trainer = make_trainer(model=tiny_encoder(classes=True), collator=Labelled(Padded(), classes=True))
        prepare(trainer)
        failures.append(failure_of(trainer))
    return failures


def test_first_step_refuses_what_is_not_exact():
    for loss, labels, documents in run_ranks(2, _failures, [_twice_the_loss, _shifted_too, _loaded_with_flash]):
        assert "ModernBertForTokenClassification computes a loss of" in loss
        assert "the batch holds shift_labels" in labels
        assert "whether flash attention sees those of ModernBertForTokenClassification is not known" in documents
