"""Models whose head reads whole rows, and embeddings of them: a shard's outputs are gathered before the head."""

import pytest
import torch
from hf_training import assert_equal_training, train
from pool import run_ranks
from ringtile.hf.model import attends_causally
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Trainer,
)

from tools.models.tiny_models import tiny_config

CP2 = {"context_parallel_size": 2}
CLASSES = 3
# One step on each batch, so small that no step multiplies the rounding of the one before.
SETTINGS = {"max_steps": 2, "learning_rate": 0.01}


def random_model(auto: type, family: str) -> PreTrainedModel:
    """Weights of random sizes, biases too: a zero would hide what reads it."""
    torch.manual_seed(0)
    config = tiny_config(family)
    config.num_labels, config.pad_token_id = 2 if auto is AutoModelForQuestionAnswering else CLASSES, 0
    config.is_decoder = False
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    model = auto.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return model.train()


def _collated(rows):
    """Rows padded on the right. A class of each row, and a span, follow from its tokens."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
    return {"input_ids": padded, "attention_mask": mask}


def classes(rows):
    return {**_collated(rows), "labels": torch.tensor([sum(row["input_ids"]) % CLASSES for row in rows])}


def spans(rows):
    firsts = torch.tensor([row["input_ids"][0] % 4 for row in rows])
    return {**_collated(rows), "start_positions": firsts, "end_positions": firsts + 3}


def _train(auto, family, collator, config, **options):
    model = random_model(auto, family)
    return train(config, model=model, collator=collator, **SETTINGS, **options)


LONG = [pytest.param(family, marks=pytest.mark.long) for family in ("llama", "modernbert")]


@pytest.mark.parametrize("family", ["bert", *LONG])  # test_hf_exact.py has a Llama that scores the last token
def test_a_classifier_of_rows_equals_one_process(family):
    """A pooler, the last token's score, a mean over tokens; an evaluation and predictions too."""
    options = (AutoModelForSequenceClassification, family, classes)
    expected = _train(*options, None)
    for run in run_ranks(2, _train, *options, CP2 | {"first_batch_check": True}):
        assert_equal_training(run, expected)
        assert run.eval_loss == pytest.approx(expected.eval_loss, rel=1e-6)
        assert (run.predictions - expected.predictions).abs().max() <= 1e-6


@pytest.mark.parametrize("family", ["bert", pytest.param("llama", marks=pytest.mark.long)])
def test_spans_of_rows_equal_one_process(family):
    options = (AutoModelForQuestionAnswering, family, spans)
    expected = _train(*options, None, evaluate=False)
    for run in run_ranks(2, _train, *options, CP2, evaluate=False):
        assert_equal_training(run, expected)


class Embeds(Trainer):
    """Rows of one class are to be near one another: by their means, and by what the model pools."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, weights = inputs.pop("labels"), inputs["attention_mask"][..., None]
        outputs = model(**inputs)
        loss = 0
        for rows in ((outputs.last_hidden_state * weights).sum(1) / weights.sum(1), outputs.pooler_output):
            alike = functional.normalize(rows) @ functional.normalize(rows).T
            loss = loss + (alike - (labels[:, None] == labels).float()).square().mean()
        return (loss, outputs) if return_outputs else loss


def test_embeddings_of_rows_equal_one_process():
    options = (AutoModel, "bert", classes)
    expected = _train(*options, None, trainer_class=Embeds, evaluate=False)
    for run in run_ranks(2, _train, *options, CP2, trainer_class=Embeds, evaluate=False):
        assert_equal_training(run, expected)


def test_the_head_says_nothing_of_causality():
    assert not attends_causally(random_model(AutoModelForSequenceClassification, "bert"))
    assert attends_causally(random_model(AutoModelForSequenceClassification, "llama"))
