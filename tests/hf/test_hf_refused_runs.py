"""What cannot be exact is refused by name by a training on two ranks, one row each."""

import functools
from typing import Any

import pytest
import ringtile
import torch
import transformers.models.mixtral.modeling_mixtral as mixtral
from cells import Refusal, check_on_ranks, of_change, params, table
from hf_models import tiny_encoder, tiny_model
from hf_training import Padded, Stream, make_rows, make_trainer, packed
from losses import AsTuple, LastThird
from test_hf_exact import bart
from test_hf_exact_models import Labeled, PackedIn
from transformers.models.doge.modeling_doge import DogeAttention


def rank_dependent_rows(trainer):
    trainer.train_dataset = make_rows(22, seed=trainer.args.process_index)


def rank_dependent_labels(trainer):
    for row in trainer.train_dataset:
        row["labels"][-1] += trainer.args.process_index


def rank_dependent_length(trainer):
    trainer.train_dataset = Stream(make_rows(4 - 2 * trainer.args.process_index))


def dispatching_loader(trainer):
    accelerator = trainer.accelerator
    loader = torch.utils.data.DataLoader(Stream(make_rows(8)), batch_size=2, collate_fn=Padded())
    accelerator.dataloader_config.dispatch_batches = True
    dispatching = type(accelerator).prepare_data_loader(accelerator, loader)
    accelerator.dataloader_config.dispatch_batches = None
    accelerator.prepare_data_loader(dispatching)


def own_loss(trainer):
    """A model that shifts and averages on its own."""
    model = trainer.model
    forward, loss_function = model.forward, model.loss_function

    @functools.wraps(forward)
    def own_forward(*args, labels=None, **kwargs):
        output = forward(*args, **kwargs)
        output["loss"] = loss_function(output.logits, labels, model.config.vocab_size)
        return output

    model.forward = own_forward


def loss_set_later(trainer):
    """Takes ringtile's place, and calls the model on whole rows."""
    trainer.compute_loss = functools.partial(type(trainer).compute_loss, trainer)
    trainer.train()


def enabled_twice(trainer):
    ringtile.enable(make_trainer(model=trainer.model), {"context_parallel_size": 2})


def with_hole(trainer):
    hole = torch.ones(1, 8, dtype=torch.long)
    hole[0, 3] = 0
    model = trainer.accelerator.prepare(trainer.model)
    ids = torch.ones(1, 8, dtype=torch.long)
    trainer.compute_loss(model, {"input_ids": ids, "labels": ids, "attention_mask": hole})


def with_full_masks(trainer):
    model = trainer.accelerator.prepare(trainer.model)
    ids = torch.ones(1, 8, dtype=torch.long)
    trainer.compute_loss(model, {"input_ids": ids, "labels": ids, "is_causal": False})


RUNS = [
    Refusal("full masks in one call", "is called with is_causal=False, and its config says True", use=with_full_masks),
    of_change(
        "ranks 0 and 1 share a sequence but got different batches", rank_dependent_rows, error="RingMismatchError"
    ),
    of_change("ranks disagree on batches in call", rank_dependent_length, error="RingMismatchError"),
    of_change("the checksum of labels is", rank_dependent_labels, error="RingMismatchError"),
    Refusal("a loss set after enable", "in the first training step did not call the model that", use=loss_set_later),
    Refusal("a second Trainer", "another Trainer is enabled on this model", use=enabled_twice),
    Refusal("a dispatching loader", "the data loader dispatches batches from rank 0", use=dispatching_loader),
    # The next row, and a forward that returns another loss among ENCODERS, are refused by the same proof.
    Refusal("a model that shifts and averages on its own", "the loss is", prepare=own_loss, long=True),
    Refusal("a model that shifts labels itself", "the loss is", made=lambda: {"model": bart()["model"]}),
    Refusal(
        "a hole in attention_mask",
        "row 0, query 4 needs the keys [0, 3), [4, 5)",
        use=with_hole,
        error="MaskNotExpressibleError",
    ),
    Refusal(
        "a loss on tiled logits",
        "the logits, which do not exist in training",
        {"trainer_class": LastThird},
        config={"tiled_loss": True},
    ),
    Refusal("outputs without names", "returns a tuple; expected return_dict=True", {"trainer_class": AsTuple}),
    Refusal("rows of positions of a model without them", "are (4, 1,", {"collator": PackedIn(4)}, error="InputError"),
]


def twice_the_loss(trainer):
    forward = trainer.model.forward

    @functools.wraps(forward)  # by whose arguments the Trainer chooses columns
    def twice(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs["loss"] = 2 * outputs["loss"]
        return outputs

    trainer.model.forward = twice


def shifted_too(trainer):
    collator = trainer.data_collator
    trainer.data_collator = lambda rows: {**(batch := collator(rows)), "shift_labels": batch["labels"]}


def loaded_with_flash(trainer):
    trainer.data_collator = Labeled(packed, classes=True)
    config, switch = trainer.model.config, trainer.model.set_attn_implementation
    flash = config._attn_implementation_internal = "flash_attention_2"  # which no CPU loads, nor switches back to
    trainer.model.set_attn_implementation = lambda names: switch("sdpa" if names[""] == flash else names)


WORDS = {"collator": Labeled(Padded(), classes=True)}


def of_encoder(words: str, prepare: Any) -> Refusal:
    return Refusal(words, words, WORDS, lambda: {"model": tiny_encoder(classes=True)}, prepare)


ENCODERS = [
    of_encoder("the loss is", twice_the_loss),
    of_encoder("the batch holds shift_labels", shifted_too),
    of_encoder("whether the attention of ModernBertForTokenClassification sees them is not known", loaded_with_flash),
]

BALANCE = mixtral.load_balancing_loss_func


def balances_otherwise(trainer):
    mixtral.load_balancing_loss_func = lambda logits, *args: sum(layer.softmax(-1).var() for layer in logits)


def puts_balance_back(trainer):
    try:
        trainer.train()
    finally:
        ringtile.restore(trainer)
        mixtral.load_balancing_loss_func = BALANCE


class OwnAttention(DogeAttention):
    """Of a type that ringtile does not know, which makes its own mask."""


def own_mask() -> dict[str, Any]:
    model = tiny_model("doge", hidden_dropout=0.0)
    for layer in model.model.layers:
        layer.self_attn.__class__ = OwnAttention
    return {"model": model.train()}


FAILS = "model.layers.0.self_attn (OwnAttention) fails on a shard of the first batch"
RANDOM = [
    Refusal(
        "mixtral draws, own loss",
        "what model.layers.0.mlp (MixtralSparseMoeBlock) hands",
        {"trainer_class": LastThird},
        lambda: {"model": tiny_model("mixtral", router_jitter_noise=0.1).train()},
    ),
    Refusal("a mask of its own", FAILS, made=own_mask),
    Refusal(
        "a balancing loss of another kind",
        "the loss is",
        {"family": "mixtral-balanced"},
        prepare=balances_otherwise,
        use=puts_balance_back,
    ),
]
TRAIN = table(*RUNS, *ENCODERS, *RANDOM)


@pytest.mark.parametrize("refusal", params(TRAIN))
def test_training_refuses(refusal: Refusal) -> None:
    check_on_ranks(__name__, "TRAIN", refusal)


def test_a_model_that_draws_trains_on_one_rank():
    """With dropout, tiled but not context parallel."""
    trainer = make_trainer(model=tiny_model("starcoder2", residual_dropout=0.1).train(), max_steps=1)
    ringtile.enable(trainer, {"tiled_loss": True})
    trainer.train()
    ringtile.restore(trainer)
    assert trainer.state.global_step == 1
