"""What cannot be exact is refused by name, one row each, by `enable`, before anything changes."""

import types
from typing import Any
from unittest import mock

import pytest
import ringtile
import torch
from cells import Refusal, check_enable, of_change, params, table
from hf_models import hybrid, tiny_encoder, tiny_model
from hf_training import make_trainer
from losses import OwnLoss
from pool import run_ranks
from torch import nn
from transformers import (
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)
from transformers.modeling_outputs import CausalLMOutput

from tools.models import tiny_models

CONFIG = {"context_parallel_size": 2}


def of_model(words: str, model: Any, **more: Any) -> Refusal:
    return Refusal(words, words, made=lambda: {"model": model()}, **more)


# ---- trainers -----------------------------------------------------------------------------------


class OwnStep(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class OwnInputs(Trainer):
    """Might generate what it trains on."""

    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


def settings(words: str, **options: Any) -> Refusal:
    return Refusal(words, words, options)


PARALLELISM = types.SimpleNamespace(
    cp_enabled=True, cp_size=4, tp_size=1, sp_size=1, sp_enabled=False, sp_backend="deepspeed", tp_enabled=False
)
TRAINERS = [
    settings("OwnLoss computes its loss from the outputs", trainer_class=OwnLoss, torch_compile=True),
    settings("OwnStep.training_step replaces that of transformers.Trainer", trainer_class=OwnStep),
    settings("OwnInputs._prepare_inputs replaces that of transformers.Trainer", trainer_class=OwnInputs),
    of_change("model_init", lambda trainer: setattr(trainer, "model_init", tiny_model)),
    of_change("training_step", lambda trainer: setattr(trainer, "training_step", lambda *args: None)),
    of_change(
        "tensor parallelism of size 2, not by transformers", lambda trainer: setattr(trainer.model, "_tp_size", 2)
    ),
    of_change(
        "ParallelismConfig.cp_size is 4",
        lambda trainer: setattr(trainer.accelerator.state, "parallelism_config", PARALLELISM),
        error="ConfigError",
    ),
    Refusal(
        "SFTTrainer that counts no targets",
        "SFTTrainer sets model_accepts_loss_kwargs to false",
        {"trainer_class": "trl.SFTTrainer"},
        prepare=lambda trainer: setattr(trainer, "model_accepts_loss_kwargs", False),
        needs=("trl",),
    ),
    # compute_loss of any arguments is accepted: it is the size of the world that is refused, last of all.
    Refusal(
        "a world that is no multiple",
        "context_parallel_size is 2 but there is 1 rank;",
        {"trainer_class": OwnLoss},
        error="ConfigError",
    ),
    Refusal("an unknown key", "did you mean layout?", config={"layouts": "zigzag"}, error="ConfigError"),
]


class OwnModel(nn.Module):
    def forward(self, input_ids, **kwargs):
        return CausalLMOutput(loss=input_ids.sum())


class NoLossArguments(type(tiny_model())):
    def forward(self, input_ids, attention_mask=None, labels=None):
        return super().forward(input_ids, attention_mask=attention_mask, labels=labels)


def both_ways() -> nn.Module:
    model = tiny_encoder()
    model.model.layers[1].attn.is_causal = True
    return model


def masked_lm(name: str, **values: Any) -> nn.Module:
    config = tiny_models.tiny_config(f"{name}:masked-lm")
    for setting, value in values.items():
        setattr(config, setting, value)
    return tiny_models.tiny_model(config, "masked-lm")


def peft_with(config: str, **values: Any) -> nn.Module:
    import peft

    return peft.get_peft_model(tiny_model(), getattr(peft, config)(task_type="CAUSAL_LM", **values))


TARGETS = {"r": 4, "target_modules": ["q_proj", "v_proj", "up_proj"]}
ADAPTERS = {"needs": ("peft",)}
MODELS = [
    of_model("expected a transformers PreTrainedModel", OwnModel),
    of_model("model.layers.0.self_attn (DogeAttention) picks the keys", lambda: tiny_model("doge")),
    of_model("model.layers.0.mlp.router (PhimoeTopKRouter) samples the experts", lambda: tiny_model("phimoe")),
    of_model("num_items_in_batch", lambda: NoLossArguments(tiny_model().config)),
    # recurrent layers
    of_model(
        "has recurrent layers and Trainer uses torch_compile",
        lambda: hybrid("lfm2"),
        prepare=lambda trainer: setattr(trainer.args, "torch_compile", True),
    ),
    of_model(
        "model.layers.0.temporal_block.rg_lru (RecurrentGemmaRglru) is the RG-LRU", lambda: hybrid("recurrent_gemma")
    ),
    # encoders
    of_model("(MobileBertEmbeddings) joins the embeddings of neighboring tokens", lambda: masked_lm("mobilebert")),
    of_model(
        "(EsmEmbeddings) scales embeddings by how many tokens of the row", lambda: masked_lm("esm", token_dropout=True)
    ),
    of_model("has causal and bidirectional layers", both_ways),
    of_model(
        "has an encoder and a decoder",
        lambda: T5ForConditionalGeneration(T5Config(d_model=32, d_ff=48, num_layers=2, vocab_size=96)),
    ),
    # PEFT
    of_model("PREFIX_TUNING", lambda: peft_with("PrefixTuningConfig", num_virtual_tokens=5), **ADAPTERS),
    of_model(
        "ADALORA",
        lambda: peft_with("AdaLoraConfig", init_r=6, target_r=4, total_step=100, tinit=10, tfinal=20, **TARGETS),
        **ADAPTERS,
    ),
]
ENABLE = table(*TRAINERS, *MODELS)


@pytest.mark.parametrize("refusal", params(ENABLE))
def test_enable_refuses(refusal: Refusal) -> None:
    check_enable(refusal)


# ---- what no row can say -------------------------------------------------------------------------


def test_a_missing_touch_point_is_refused_with_versions():
    """Releases may lack what is replaced, or rename an argument that the replacement is given."""
    for method in (None, OwnInputs._prepare_inputs):
        with mock.patch.object(Trainer, "compute_loss", method), pytest.raises(ringtile.RefusedError) as raised:
            ringtile.enable(make_trainer(), {"shared_prefix": True})
        words = "Trainer.compute_loss(model, inputs, return_outputs, num_items_in_batch) is not there (torch"
        assert f"{words} {torch.__version__}, transformers" in str(raised.value)


def test_something_else_than_a_trainer_is_named():
    with pytest.raises(ringtile.InputError, match=r"expected a transformers\.Trainer"):
        ringtile.enable(types.SimpleNamespace(model=tiny_model()), CONFIG)


@pytest.mark.parametrize("config", [None, 2, ["layout"], True])
def test_configuration_of_another_type_is_named(config):
    with pytest.raises(ringtile.InputError, match=f"config is a {type(config).__name__}; expected a ringtile.Config"):
        ringtile.enable(make_trainer(), config)


def _enable_with_size_three():
    with pytest.raises(ringtile.ConfigError, match="context_parallel_size is 3 but there are 2 ranks"):
        ringtile.enable(make_trainer(), {"context_parallel_size": 3})


def test_size_that_does_not_divide_the_world_is_named():
    run_ranks(2, _enable_with_size_three)
