"""The balancing loss of a mixture of experts is that of the whole sequence: value, gradients, and what is logged."""

import types
from unittest import mock

import pytest
import ringtile
import transformers.models.mixtral.modeling_mixtral as mixtral
from hf_models import tiny_model
from hf_training import assert_equal_training, make_trainer, packed, train
from pool import run_ranks
from ringtile.hf.balancing_loss import check_balancing_loss
from torch.nn import functional
from transformers import Trainer

CONFIG = {"context_parallel_size": 2}
OPTIONS = {"family": "mixtral-balanced", "max_steps": 2}


class OwnLoss(Trainer):
    """Computes its loss from the outputs of full sequences."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},  # padded: the mask takes the padding out
        {"collator": packed},  # no mask: every token counts, but not the layout's padding
        {"average_tokens_across_devices": False},
        {"trainer_class": OwnLoss},
    ],
    ids=["padded", "packed", "not averaged", "own loss"],
)
def test_balancing_loss_equals_one_process(options):
    options = {**OPTIONS, "evaluate": False, "gradient_accumulation_steps": 1, **options}
    expected = train(None, **options)
    for run in run_ranks(2, train, CONFIG, **options):
        assert_equal_training(run, expected)


def _eval_loss(config):
    trainer = make_trainer("mixtral-balanced")
    if config is not None:
        ringtile.enable(trainer, config)
    loss = trainer.evaluate()["eval_loss"]
    ringtile.restore(trainer)
    return loss


@pytest.mark.parametrize("world_size", [2, 4])
def test_balancing_loss_of_evaluation_equals_one_process(world_size):
    expected = _eval_loss(None) if world_size == 2 else run_ranks(2, _eval_loss, None)[0]
    for loss in run_ranks(world_size, _eval_loss, CONFIG):
        assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("trainer_class", [Trainer, pytest.param(OwnLoss, marks=pytest.mark.long)])
def test_balancing_loss_equals_data_parallel_ranks(trainer_class):
    """Each batch has a balancing loss of its own, as in data parallelism without ringtile."""
    options = {**OPTIONS, "num_rows": 32, "evaluate": False, "gradient_accumulation_steps": 1}
    options["trainer_class"] = trainer_class
    expected = run_ranks(2, train, None, **options)[0]
    for run in run_ranks(4, train, CONFIG, **options):
        assert_equal_training(run, expected)


def test_logged_balancing_loss_is_that_of_the_sequence():
    trl = pytest.importorskip("trl")
    options = {**OPTIONS, "trainer_class": trl.SFTTrainer, "evaluate": False}
    expected = train(None, **options)
    assert expected.metrics[0]["aux_loss"] > 0.0
    for run in run_ranks(2, train, CONFIG, **options):
        assert_equal_training(run, expected)
        for step, other in zip(run.metrics, expected.metrics, strict=True):
            assert step["aux_loss"] == pytest.approx(other["aux_loss"], rel=1e-6)


def _with_balancing_loss(outputs, labels, num_items_in_batch=None):
    losses = functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return losses / num_items_in_batch + outputs.aux_loss


@pytest.mark.long
def test_balancing_loss_in_a_loss_function_equals_data_parallel_ranks():
    options = {**OPTIONS, "num_rows": 32, "evaluate": False, "gradient_accumulation_steps": 1}
    options["trainer_arguments"] = {"compute_loss_func": _with_balancing_loss}
    expected = run_ranks(2, train, None, **options)[0]
    for run in run_ranks(4, train, CONFIG, **options):
        assert_equal_training(run, expected)


@pytest.mark.long
def test_balancing_loss_of_dpo_equals_one_process():
    pytest.importorskip("trl")
    expected = _train_dpo(None)
    assert expected.metrics[0]["aux_loss"] > 0.0
    for run in run_ranks(2, _train_dpo, CONFIG, timeout=110.0):
        assert_equal_training(run, expected)


def _train_dpo(config):
    from test_hf_losses import _train_trl

    models = {"model": tiny_model("mixtral-balanced").train(), "trainer_arguments": {"ref_model": None}}
    models["trainer_arguments"]["ref_model"] = tiny_model("mixtral-balanced", seed=3)
    return _train_trl("DPOTrainer", config, max_steps=2, num_rows=16, **models)


def _own_loss(logits, num_experts=None, top_k=2, attention_mask=None):
    return sum(layer.softmax(-1).var() for layer in logits)


def test_formula_of_another_kind_is_refused():
    with mock.patch.object(mixtral, "load_balancing_loss_func", _own_loss):
        trainer = make_trainer("mixtral-balanced")
        with pytest.raises(ringtile.Refused, match="whose formula is not the one of Mixtral"):
            ringtile.enable(trainer, CONFIG)
        assert mixtral.load_balancing_loss_func is _own_loss


def test_model_of_unknown_code_is_refused():
    """Code that is not transformers' may compute a balancing loss anywhere."""
    model = tiny_model("mixtral-balanced")
    own = type("OwnForCausalLM", (type(model),), {"__module__": __name__})
    model.__class__ = own
    with pytest.raises(ringtile.Refused, match="that ringtile does not know"):
        check_balancing_loss(model)
    model.config = types.SimpleNamespace(get_text_config=lambda: types.SimpleNamespace(output_router_logits=False))
    check_balancing_loss(model)
