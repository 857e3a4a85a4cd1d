"""Losses and models of users: whatever they write, the check of the first batch leaves it as it was, and what they do
with the model is that of one process, or refused."""

import collections

import numpy as np
import pytest
import ringtile
import torch
from hf_engines import full_weights
from hf_models import tiny_model
from hf_training import Messages, Padded, failure_of, make_rows, make_trainer
from pool import run_ranks
from ringtile.hf.trainer import first_batch_of
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel, Trainer

OUTSIDE: list[float] = []
COUNT = 0


def _of_tokens(logits, labels, reduction="sum"):
    return functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction=reduction
    )


class Own(Trainer):
    """A mean of one's own; `after` is what else a subclass does with it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.after(_of_tokens(outputs.logits, labels) / (labels[:, 1:] != -100).sum(), outputs)
        return (loss, outputs) if return_outputs else loss

    def after(self, loss, outputs):
        return loss


# ---- losses that write --------------------------------------------------------------------------


class Meter:
    def __init__(self):
        self.sum, self.count = 1.0, 0


class Ema(Own):
    """The weight of a second term follows the first one, in an object."""

    def after(self, loss, outputs):
        self.meter = getattr(self, "meter", None) or Meter()
        self.meter.sum = 0.5 * self.meter.sum + 0.5 * float(loss)
        self.meter.count += 1
        return loss + 0.1 * outputs.logits.square().mean() * self.meter.sum

    def held(self):
        return vars(self.meter)


class Containers(Own):
    def after(self, loss, outputs):
        self.queue = getattr(self, "queue", collections.deque(maxlen=3))
        self.array = getattr(self, "array", np.zeros(2))
        self.queue.append(float(loss))
        self.array += float(loss)
        OUTSIDE.append(float(loss))
        return loss

    def held(self):
        return list(self.queue), self.array.tolist(), list(OUTSIDE)


class Queue(Trainer):
    """Embeddings of past batches, in a tensor of the Trainer (MoCo)."""

    queue, at = None, 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.queue is None:
            self.queue = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
        outputs = model(**inputs, output_hidden_states=True)
        found = functional.normalize(outputs.hidden_states[-1].mean(1), dim=-1)
        scores = torch.cat([(found * found.detach()).sum(1, keepdim=True), found @ self.queue.clone().T], 1)
        self.queue[self.at : self.at + len(found)] = found.detach()
        self.at += len(found)
        return outputs.loss + functional.cross_entropy(scores, torch.zeros(len(found), dtype=torch.long))

    def held(self):
        return self.queue


class Center(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(32))

    def forward(self, x):
        loss = (x - self.center).square().mean()
        self.center.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return loss


class Criterion(Trainer):
    criterion = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.criterion = self.criterion or Center()
        outputs = model(**inputs, output_hidden_states=True)
        return outputs.loss + self.criterion(outputs.hidden_states[-1])

    def held(self):
        return self.criterion.center


class InPlace(Own):
    """Moves the labels on and masks ids in the tensors of the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, ids = inputs["labels"], inputs["input_ids"]
        labels[:, 1:] = labels[:, :-1].clone()
        left = (ids > 4).nonzero()[::3]
        ids[left[:, 0], left[:, 1]] = 4
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Logs(Own):
    def after(self, loss, outputs):
        self.log({"term": float(outputs.logits.square().mean())})
        return loss * (1 + float(torch.rand(())) + np.random.rand())  # noqa: NPY002


WRITING = (Ema, Containers, Queue, Criterion, InPlace, Logs)


def _left_behind(trainer, config):
    """Everything that a training leaves behind, and how often its loss was called."""
    global COUNT
    calls, compute_loss = 0, type(trainer).compute_loss

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return compute_loss(*args, **kwargs)

    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    OUTSIDE.clear()
    COUNT = 0
    type(trainer).compute_loss = counted
    try:
        ringtile.enable(trainer, {"context_parallel_size": 2, **config})
        trainer.train()
        proof = first_batch_of(trainer)
        ringtile.restore(trainer)
    finally:
        type(trainer).compute_loss = compute_loss
    logs = [
        {k: v for k, v in line.items() if "runtime" not in k and "second" not in k}
        for line in trainer.state.log_history
    ]
    held = getattr(trainer, "held", lambda: None)()
    drawn = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    return {"logs": logs, "held": held, "drawn": drawn, "weights": full_weights(trainer.model)}, calls, proof


def _assert_same_bits(got, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for name in expected:
            _assert_same_bits(got[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for x, y in zip(got, expected, strict=True):
            _assert_same_bits(x, y)
    else:
        assert got == expected


def _with_and_without():
    found = {}
    for cls in WRITING:
        runs = []
        for proved in (True, False):
            trainer = make_trainer(trainer_class=cls, learning_rate=0.1, gradient_accumulation_steps=1, max_steps=2)
            runs.append(_left_behind(trainer, {"first_batch_check": proved}))
        found[cls.__name__] = runs
    return found


def test_losses_that_write_run_once_and_train_as_without_the_check():
    for found in run_ranks(2, _with_and_without, timeout=120.0):
        for (proved, calls, proof), (unproved, calls_without, _) in found.values():
            _assert_same_bits(proved, unproved)
            assert calls == calls_without == 2  # the steps
            assert proof.num_modules > 20


# ---- models that write --------------------------------------------------------------------------

ROOT = {"calls": 0}


def _helper():
    global COUNT
    COUNT += 1
    ROOT["calls"] += 1


def _closure():
    seen = []

    def hook(module, args, output):
        seen.append(len(seen))

    return seen, hook


class Writing(nn.Module):
    """Writes whatever a module can reach."""

    of_class = 0

    def __init__(self, mlp):
        super().__init__()
        self.mlp, self._calls, self.meter, self.seen = mlp, 0, Meter(), [0]
        self.tensor, self.array, self.deep = torch.zeros(2), np.zeros(2), {"a": [{}]}
        self.register_buffer("mean", torch.zeros(()))
        self.generator = np.random.default_rng(0)

    def forward(self, x):
        _helper()
        type(self).of_class += 1
        self._calls += 1
        self.meter.count += 1
        self.seen.append(self._calls)
        self.tensor += 1
        self.array += 1
        self.deep["a"][0][self._calls] = 1
        self.mean.add_(1)
        self.made = self.generator.random()
        return self.mlp(x)

    def held(self):
        held = [COUNT, dict(ROOT), Writing.of_class, self._calls, self.meter.count, list(self.seen), self.deep]
        return [*held, self.tensor, self.array.tolist(), self.mean, getattr(self, "made", None)]


class HeldInModel(Trainer):
    def held(self):
        return self.writing.held(), list(self.seen)


def _trained_with_a_model_that_writes(proved):
    Writing.of_class, ROOT["calls"] = 0, 0
    model = tiny_model().train()
    writing = model.model.layers[0].mlp = Writing(model.model.layers[0].mlp)
    seen, hook = _closure()
    model.model.layers[1].register_forward_hook(hook)
    trainer = make_trainer(model=model, trainer_class=HeldInModel, max_steps=2, gradient_accumulation_steps=1)
    trainer.writing, trainer.seen = writing, seen
    return _left_behind(trainer, {"first_batch_check": proved})


def test_a_model_that_writes_trains_as_without_the_check():
    proved, unproved = (run_ranks(2, _trained_with_a_model_that_writes, proved) for proved in (True, False))
    for (got, _, proof), (expected, _, _) in zip(proved, unproved, strict=True):
        assert expected["held"][0][0] == 2  # it writes in every forward pass
        _assert_same_bits(got, expected)
        assert proof.num_modules > 20


def _trained_with(change):
    model = tiny_model().train()
    change(model.model.layers[0].mlp)
    trainer = make_trainer(model=model, max_steps=1)
    with Messages() as said:
        ringtile.enable(trainer, {"context_parallel_size": 2})
        trainer.train()
        proof = first_batch_of(trainer)
        ringtile.restore(trainer)
    return said, proof, trainer.state.global_step


def _draws_from_an_iterator(mlp):
    numbers = iter(range(1000))
    mlp.register_forward_hook(lambda module, args, output: next(numbers) and None)


def _trained_on_long_rows():
    model = tiny_model(max_position_embeddings=1024).train()

    def check(module, args, output):
        if output.size(1) not in (350, 352):  # a shard of the whole row
            raise ValueError("blocks of 350")

    model.model.layers[0].mlp.register_forward_hook(check)
    rows = [{"input_ids": [3] * 700, "labels": [3] * 700}] * 4
    trainer = make_trainer(model=model, max_steps=1, trainer_arguments={"train_dataset": rows})
    with Messages() as said:
        ringtile.enable(trainer, {"context_parallel_size": 2})
        trainer.train()
        ringtile.restore(trainer)
    return said, trainer.state.global_step


def test_what_cannot_be_put_back_is_not_proved():
    (said, *_), _ = runs = run_ranks(2, _trained_with, _draws_from_an_iterator)
    assert "range_iterator, which cannot be put back" in said[0]
    assert [(proof, step) for _, proof, step in runs] == [(None, 1)] * 2


def test_a_model_that_fails_on_a_cut_trains_unproved():
    (said, step), (_, other) = run_ranks(2, _trained_on_long_rows)
    assert step == other == 1
    assert "model.layers.0" in said[0]
    assert "blocks of 350" in said[0]


# ---- what losses do with the model --------------------------------------------------------------


class Pointing(Own):
    """Logits at given tokens, and blocks of a given length: nothing that a cut has."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        at = torch.tensor([650, 12, 699])
        token = functional.pad(_of_tokens(logits, labels, "none"), (0, 1)).view(len(labels), -1, 100)
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


class Generating(Own):
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
        loss = _of_tokens(model(inputs_embeds=embeddings, **inputs).logits, labels) / labels.ne(-100).sum()
        (gradient,) = torch.autograd.grad(loss, embeddings, retain_graph=True)
        moved = (embeddings + 0.5 * gradient / gradient.norm()).detach()
        return loss + _of_tokens(model(inputs_embeds=moved, **inputs).logits, labels) / labels.ne(-100).sum()


class Checkpointed(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        run = lambda ids, mask: model(input_ids=ids, attention_mask=mask).logits  # noqa: E731
        return _of_tokens(checkpoint(run, ids, mask, use_reentrant=False), labels) / labels.ne(-100).sum()


class Counting(Trainer):
    """Counts the items of a step itself, as transformers does."""

    def get_batch_samples(self, iterator, num_batches, device):
        batches = [next(iterator) for _ in range(num_batches)]
        return batches, self.accelerator.gather(sum(x["labels"][:, 1:].ne(-100).sum() for x in batches)).sum()


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
    """Rows of 13 tokens, which a zigzag of two ranks pads to 16."""
    rows = [{name: x[:13] + [5] * (13 - len(x)) for name, x in row.items()} for row in make_rows(22)]
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
    trainer = make_trainer(trainer_class=cls, max_steps=2, **{"learning_rate": 0.1, **made()})
    if on_ranks:
        ringtile.enable(trainer, {"context_parallel_size": 2})
    trainer.train()
    logs = [(line["loss"], float(line["grad_norm"])) for line in trainer.state.log_history if "loss" in line]
    evaluated = trainer.evaluate().get("eval_loss") if what == "Flat" else None
    proof = first_batch_of(trainer)
    if on_ranks:
        ringtile.restore(trainer)
    return logs, evaluated, proof


@pytest.mark.parametrize("what", USES)
def test_what_losses_do_with_the_model_is_that_of_one_process(what):
    expected, loss, _ = _trained(what, False)
    for logs, evaluated, proof in run_ranks(2, _trained, what, True):
        assert np.array(logs) == pytest.approx(np.array(expected), rel=3e-6)
        assert (evaluated or 0.0) == pytest.approx(loss or 0.0, rel=3e-6)
        assert proof is not None


class Parts(Own):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, inner = inputs.pop("labels"), self.accelerator.unwrap_model(model)
        return _of_tokens(inner.lm_head(inner.model(**inputs).last_hidden_state), labels)


def _replaced_loss(trainer):
    trainer.compute_loss = lambda model, inputs, **kwargs: model(**inputs).loss


def _set_loss_function(trainer):
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.mean()


def _set_attention(trainer):
    trainer.model.set_attn_implementation("eager")


def _set_loss_of_the_model(trainer):
    trainer.model.loss_function = lambda logits, labels, **kwargs: logits.mean()


AFTER = {
    "loss_function": (Trainer, _set_loss_of_the_model, "LlamaForCausalLM was set after ringtile.enable"),
    "parts": (Parts, lambda trainer: None, "calls its argument `model`, not a part of it"),
    "compute_loss": (Trainer, _replaced_loss, "expected a compute_loss that was set before ringtile.enable"),
    "compute_loss_func": (Trainer, _set_loss_function, "compute_loss_func was set after ringtile.enable"),
    "attention": (Trainer, _set_attention, "was set to eager after ringtile.enable"),
}


def _refused(what, proved):
    cls, change, _ = AFTER[what]
    trainer = make_trainer(trainer_class=cls)

    def use(trainer):
        change(trainer)
        trainer.train()

    return failure_of(trainer, {"first_batch_check": proved}, use), trainer.state.global_step


@pytest.mark.parametrize("what", AFTER)
def test_losses_that_shard_nothing_are_refused(what):
    for proved in (True, False):
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
