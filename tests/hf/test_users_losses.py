"""What losses of users do with the model is that of one process, or refused."""

import numpy as np
import pytest
import ringtile
import torch
from hf_models import tiny_model
from hf_training import Messages, Padded, failure_of, make_rows, make_trainer
from losses import Counting, OwnMean, of_tokens
from pool import run_ranks
from ringtile.hf.trainer import first_batch_of
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel, Trainer

# ---- what losses do with the model --------------------------------------------------------------


class Pointing(OwnMean):
    """Logits at given tokens, and blocks of a given length: nothing that a cut has."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        at = torch.tensor([650, 12, 699])
        token = functional.pad(of_tokens(logits, labels, "none"), (0, 1)).view(len(labels), -1, 100)
        return token.mean(-1).square().mean() + functional.cross_entropy(
            logits[:, at].flatten(0, 1), labels[:, at].flatten()
        )


class Flat(Trainer):
    """transformers' own line, on rows that the layout pads."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, output_hidden_states=True)
        loss = functional.cross_entropy(outputs.logits.view(-1, 96), inputs["labels"].view(-1), ignore_index=-100)
        loss = loss + 1e-3 * outputs.hidden_states[-1].view(-1, 32).square().mean()
        return (loss, outputs) if return_outputs else loss


class Generating(OwnMean):
    def after(self, loss, outputs):
        model = self.accelerator.unwrap_model(self.model)
        with torch.no_grad():
            found = model.generate(input_ids=torch.tensor([[3, 4, 5]] * 2), max_new_tokens=5, do_sample=False)
        return loss * (1 + found.float().mean() / 1000)


class Penalty(Trainer):
    """Adversarial embeddings: the model is called again on embeddings moved along their gradient."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        embed = self.accelerator.unwrap_model(model).get_input_embeddings()
        embeddings = embed(inputs.pop("input_ids")).detach().requires_grad_()
        loss = of_tokens(model(inputs_embeds=embeddings, **inputs).logits, labels) / labels.ne(-100).sum()
        (gradient,) = torch.autograd.grad(loss, embeddings, retain_graph=True)
        moved = (embeddings + 0.5 * gradient / gradient.norm()).detach()
        return loss + of_tokens(model(inputs_embeds=moved, **inputs).logits, labels) / labels.ne(-100).sum()


class Checkpointed(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        run = lambda ids, mask: model(input_ids=ids, attention_mask=mask).logits  # noqa: E731
        return of_tokens(checkpoint(run, ids, mask, use_reentrant=False), labels) / labels.ne(-100).sum()


class Embedding(Trainer):
    """A bare encoder and a contrastive loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mask = inputs["attention_mask"][..., None]
        hidden = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        found = functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        return functional.cross_entropy(found @ found.flip(0).T / 0.1, torch.arange(len(found)))


def _encoder():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=96, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    return BertModel(config, add_pooling_layer=False).train()


def _long():
    rows = [
        {"input_ids": torch.randint(3, 96, (700,)).tolist(), "labels": [3 + i % 90 for i in range(700)]}
        for _ in range(4)
    ]
    return {"model": tiny_model(max_position_embeddings=1024).train(), "trainer_arguments": {"train_dataset": rows}}


def _odd():
    """Rows of 3 tokens, which a zigzag of two ranks pads to 4."""
    rows = [{name: x[:3] for name, x in row.items()} for row in make_rows(22)]
    return {"trainer_arguments": {"train_dataset": rows}, "gradient_checkpointing": True}


USES = {
    "Pointing": (Pointing, _long),
    "Flat": (Flat, _odd),
    "Generating": (Generating, dict),
    "Penalty": (Penalty, dict),
    "Checkpointed": (Checkpointed, dict),
    "Counting": (Counting, dict),
    "Embedding": (Embedding, lambda: {"model": _encoder()}),
}


def _trained(what, on_ranks):
    cls, made = USES[what]
    torch.manual_seed(0)
    accumulated = 2 if what == "Counting" else 1
    options = {"learning_rate": 0.1, "max_steps": 2, "gradient_accumulation_steps": accumulated} | made()
    trainer = make_trainer(trainer_class=cls, **options)
    if on_ranks:
        ringtile.enable(trainer, {"context_parallel_size": 2})
    trainer.train()
    logs = [(line["loss"], float(line["grad_norm"])) for line in trainer.state.log_history if "loss" in line]
    evaluated = trainer.evaluate().get("eval_loss") if what == "Flat" else None
    proof = first_batch_of(trainer)
    if on_ranks:
        ringtile.restore(trainer)
    return logs, evaluated, proof


# In every run test_hf_rows.py trains embeddings, test_gradients_of_users.py a penalty, test_hf_exact.py checkpoints.
LONG = ("Embedding", "Penalty", "Checkpointed")


@pytest.mark.parametrize("what", [pytest.param(what, marks=[pytest.mark.long] * (what in LONG)) for what in USES])
def test_what_losses_do_with_the_model_is_that_of_one_process(what):
    expected, loss, _ = _trained(what, False)
    for logs, evaluated, proof in run_ranks(2, _trained, what, True):
        assert np.array(logs) == pytest.approx(np.array(expected), rel=3e-6)
        assert (evaluated or 0.0) == pytest.approx(loss or 0.0, rel=3e-6)
        assert proof is not None


class Parts(OwnMean):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, inner = inputs.pop("labels"), self.accelerator.unwrap_model(model)
        return of_tokens(inner.lm_head(inner.model(**inputs).last_hidden_state), labels)


class Bare(OwnMean):
    def compute_loss(self, model, *args, **kwargs):
        return super().compute_loss(self.model, *args, **kwargs)


def _replaced_loss(trainer):
    trainer.compute_loss = lambda model, inputs, **kwargs: model(**inputs).loss


def _set_loss_function(trainer):
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.mean()


def _set_attention(trainer):
    trainer.model.set_attn_implementation("eager")


def _set_loss_of_the_model(trainer):
    trainer.model.loss_function = lambda logits, labels, **kwargs: logits.mean()


AFTER = {
    "loss_function": (Trainer, _set_loss_of_the_model, "the loss is"),
    "parts": (Parts, lambda trainer: None, "calls its argument `model`, not a part of it"),
    "past its engine": (Bare, lambda trainer: None, "nor self.model"),
    "compute_loss": (Trainer, _replaced_loss, "expected a compute_loss set before ringtile.enable"),
    "compute_loss_func": (Trainer, _set_loss_function, "the loss is"),
    "attention": (Trainer, _set_attention, "was set to attn_implementation 'eager' after ringtile.enable"),
}


def _refused(what, proved):
    cls, change, _ = AFTER[what]
    trainer = make_trainer(trainer_class=cls)

    def use(trainer):
        change(trainer)
        trainer.train()

    return failure_of(trainer, {"first_batch_check": proved}, use), trainer.state.global_step


ALIKE = ("compute_loss_func",)  # it is found as loss_function is


@pytest.mark.parametrize("what", [pytest.param(what, marks=[pytest.mark.long] * (what in ALIKE)) for what in AFTER])
def test_losses_that_shard_nothing_are_refused(what):
    for proved in (True, False)[: 2 if what in ("parts", "compute_loss") else 1]:  # a proof needs the call of a model
        for message, step in run_ranks(2, _refused, what, proved):
            assert AFTER[what][2] in message
            assert step == 0


# ---- data ---------------------------------------------------------------------------------------


def _said_of(collator, change=None):
    trainer = make_trainer(collator=collator, max_steps=1)
    with torch.no_grad():
        if change is not None:
            change(trainer.model)
    with Messages() as said:
        ringtile.enable(trainer, {"context_parallel_size": 2})
        trainer.train()
        ringtile.restore(trainer)
    return said


def _left_with_all_labels(rows):
    return Padded("left")([row | {"labels": row["input_ids"]} for row in rows])


def _nan(model):
    model.model.norm.weight.fill_(float("nan"))


def test_numbers_that_are_not_finite_prove_nothing():
    said, _ = run_ranks(2, _said_of, Padded(), _nan)
    assert any("the loss is not finite in one process" in text for text in said), said


def test_left_padding_whose_first_token_keeps_its_label_is_warned_of():
    first, second = run_ranks(2, _said_of, _left_with_all_labels)
    assert any("the first token of a row that is padded on the left keeps its label" in text for text in first)
    assert second == []
