"""Random numbers drawn in a forward pass on a shard are refused by name. Draws elsewhere are not."""

import pytest
import ringtile
import torch
from hf_models import tiny_model
from hf_training import Padded, assert_equal_training, failure_of, make_trainer, train
from pool import run_ranks
from ringtile.hf.random_draws import RandomDraws
from test_hf_losses import LastThird
from torch import nn
from torch.nn import functional
from torch.nn.modules import module
from transformers import Trainer, TrainerCallback
from transformers.models.doge.modeling_doge import DogeAttention

CONFIG = {"context_parallel_size": 2}
# By family: what asks for random numbers, and the first module that draws.
DRAWING = {
    "seed-oss": ({"attention_dropout": 0.0}, "model.layers.0.self_attn (SeedOssAttention)"),
    "starcoder2": ({"residual_dropout": 0.1}, "model.layers.0.self_attn (Starcoder2Attention)"),
    "opt": ({"layerdrop": 0.1}, "model.decoder (OPTDecoder)"),
    "mixtral": ({"router_jitter_noise": 0.1}, "model.layers.0.mlp (MixtralSparseMoeBlock)"),
}


def _refusal(model, prepare=lambda trainer: None, **options):
    """The message that stops the training of a model, which nothing watches afterwards."""
    trainer = make_trainer(model=model.train(), **options)
    prepare(trainer)
    message = failure_of(trainer)
    assert not module._global_forward_hooks
    assert not module._global_forward_pre_hooks
    return message


def _refusals(**options):
    return {family: _refusal(tiny_model(family, **settings), **options) for family, (settings, _) in DRAWING.items()}


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"trainer_class": LastThird}])
def test_models_that_draw_are_refused_by_name(options):
    for messages in run_ranks(2, _refusals, **options):
        for family, (_, place) in DRAWING.items():
            assert messages[family].startswith(f"Refused: {place}"), messages[family]
            assert "draws random numbers in its forward pass" in messages[family]


class Late(TrainerCallback):
    """Drops units from the second step on: by then nothing looks for the module any more."""

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == 1:
            model.config.dropped = 0.1


class LateDropout(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.config = model.config

    def forward(self, x):
        return functional.silu(functional.dropout(x, getattr(self.config, "dropped", 0.0)))


def _late_refusal():
    model = tiny_model()
    model.model.layers[0].mlp.act_fn = LateDropout(model)
    return _refusal(model, lambda trainer: trainer.add_callback(Late()))


def test_a_draw_in_a_later_step_is_refused():
    for message in run_ranks(2, _late_refusal):
        assert message.startswith("Refused: LlamaForCausalLM, in a module that is not known, draws random numbers")


class Drawing(LastThird):
    """Draws outside of the model, as a sampler or a metric may."""

    def compute_loss(self, *args, **kwargs):
        torch.rand(())
        return super().compute_loss(*args, **kwargs)


def _drawing_collator(rows):
    torch.rand(())
    return Padded()(rows)


@pytest.mark.parametrize(
    "options", [{"collator": _drawing_collator, "eval_on_start": True}, {"trainer_class": Drawing}]
)
def test_draws_outside_of_the_model_change_nothing(options):
    expected = train(None, evaluate=False, **options)
    for run in run_ranks(2, train, CONFIG, evaluate=False, **options):
        assert_equal_training(run, expected)


def _one_rank_that_drops():
    """A training with dropout, tiled but not context parallel."""
    trainer = make_trainer(model=tiny_model("starcoder2", residual_dropout=0.1).train(), max_steps=1)
    ringtile.enable(trainer, {"tiled_loss": True})
    trainer.train()
    ringtile.restore(trainer)
    return trainer.state.global_step


def test_a_model_that_draws_trains_on_one_rank():
    assert _one_rank_that_drops() == 1


def test_only_training_is_watched():
    model = tiny_model("starcoder2", residual_dropout=0.1)
    draws = RandomDraws(model)
    ids = torch.ones(1, 4, dtype=torch.long)
    with draws.refused(model):
        torch.rand(())
    with pytest.raises(ringtile.Refused, match="Starcoder2"), draws.refused(model.train()):
        model(ids)


def test_a_model_that_makes_its_own_mask_is_refused_by_name():
    for message in run_ranks(2, _refusal_of_own_mask, Trainer) + run_ranks(2, _refusal_of_own_mask, LastThird):
        assert message.startswith(
            "Refused: model.layers.0.self_attn (OwnAttention) fails on a shard of the first batch"
        )


class OwnAttention(DogeAttention):
    """Of a type that ringtile does not know."""


def _refusal_of_own_mask(trainer_class):
    model = tiny_model("doge", hidden_dropout=0.0)
    for layer in model.model.layers:
        layer.self_attn.__class__ = OwnAttention
    return _refusal(model, trainer_class=trainer_class)
