"""PEFT's adapters beside LoRA: those that add tokens or terms to the loss, draw numbers, or mix tokens, on two ranks
against one process, or refused by name."""

import pytest
import torch
from hf_models import tiny_model
from hf_training import TOLERANCE, assert_equal_training, failure_of, make_trainer, train
from pool import run_ranks

peft = pytest.importorskip("peft")

CONFIG = {"context_parallel_size": 2}
LAYERS = {"target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
TOKENS = {"num_virtual_tokens": 5, "task_type": "CAUSAL_LM"}
EXACT = {
    "AdaLoraConfig": {"init_r": 6, "target_r": 4, "total_step": 100, "tinit": 10, "tfinal": 20, **LAYERS},
    "PromptTuningConfig": TOKENS,
    "PromptEncoderConfig": {**TOKENS, "encoder_hidden_size": 16},
    "CPTConfig": {
        **{"cpt_token_ids": [5, 6, 7, 8], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]},
        "task_type": "CAUSAL_LM",
    },
    "LoHaConfig": {"r": 4, **LAYERS},
    "LoKrConfig": {"r": 4, **LAYERS},
    "IA3Config": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "OFTConfig": {"r": 0, "oft_block_size": 8, **LAYERS},
    "VeraConfig": {"r": 4, **LAYERS},
    "AdaptionPromptConfig": {"adapter_len": 4, "adapter_layers": 2, "task_type": "CAUSAL_LM"},
    "TrainableTokensConfig": {"token_indices": list(range(3, 20)), "target_modules": ["embed_tokens"]},
}
IN_EVERY_RUN = {"AdaLoraConfig", "PromptTuningConfig", "CPTConfig", "LoHaConfig"}
REFUSED = [
    ("PrefixTuningConfig", TOKENS, "PREFIX_TUNING"),
    ("LilyConfig", {"r": 4, **LAYERS}, "a mean over the tokens of the batch"),
    ("LoraConfig", {"r": 4, "alora_invocation_tokens": [5], **LAYERS}, "looks for these tokens in a shard"),
]


def _adapted(config, settings):
    """No factor starts at 0, so that all have gradients."""
    model = tiny_model().train()
    torch.manual_seed(1)
    model = peft.get_peft_model(model, getattr(peft, config)(**settings))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.02 * torch.randn_like(parameter)
    return model.train()


def _train(config, adapter, trainer="Trainer", **options):
    if trainer != "Trainer":
        import trl

        options |= {"trainer_class": getattr(trl, trainer), "evaluate": False}
    return train(config, model=_adapted(adapter, EXACT[adapter]), **{"learning_rate": 0.02, "max_steps": 3, **options})


def _assert_equal(world_size, expected, *args, **options):
    for run in run_ranks(world_size, _train, CONFIG, *args, **options):
        assert_equal_training(run, expected)
        assert run.eval_loss == pytest.approx(expected.eval_loss, rel=TOLERANCE)
        for metrics, wanted in zip(run.metrics, expected.metrics, strict=True):
            assert metrics == pytest.approx(wanted, rel=TOLERANCE, abs=5 * TOLERANCE)


@pytest.mark.parametrize(
    "adapter", [pytest.param(name, marks=() if name in IN_EVERY_RUN else (pytest.mark.long,)) for name in EXACT]
)
def test_adapter_trains_as_in_one_process(adapter):
    _assert_equal(2, _train(None, adapter), adapter)


@pytest.mark.long
@pytest.mark.parametrize("adapter", ["AdaLoraConfig", "PromptTuningConfig"])
def test_adapter_of_two_groups_trains_as_on_two_ranks(adapter):
    _assert_equal(4, run_ranks(2, _train, None, adapter)[0], adapter)


@pytest.mark.long
@pytest.mark.parametrize("trainer", ["SFTTrainer", "DPOTrainer"])
def test_prompts_train_under_trl_as_in_one_process(trainer):
    """At a rate at which DPO's rewards, which begin at 0, are more than rounding after a step."""
    pytest.importorskip("trl")
    options = {"adapter": "PromptTuningConfig", "trainer": trainer, "max_steps": 2}
    options["learning_rate"] = 300.0 if trainer == "DPOTrainer" else 0.02
    _assert_equal(2, _train(None, **options), **options)


def _failure(adapter, settings):
    return failure_of(make_trainer(model=_adapted(adapter, settings)))


def _refusal(adapter, settings):
    with pytest.raises(Exception) as raised:  # noqa: PT011
        _failure(adapter, settings)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(("adapter", "settings", "words"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_adapter_is_refused_before_anything_changes(adapter, settings, words):
    for message in run_ranks(2, _refusal, adapter, settings):
        assert message.startswith("Refused: the model has an adapter of PEFT with")
        assert words in message
