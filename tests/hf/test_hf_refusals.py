"""What a Trainer cannot do exactly under context parallelism is refused by name, before it trains."""

import functools
import types
from unittest import mock

import pytest
import ringtile
import torch
from hf_models import tiny_model
from hf_training import Padded, Stream, enter_world, failure_of, make_rows, make_trainer
from pool import run_ranks
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification, Trainer
from transformers.modeling_outputs import CausalLMOutput

CONFIG = {"context_parallel_size": 2}


def _refusal(trainer, config=CONFIG):
    before = dict(vars(trainer))
    with pytest.raises(ringtile.RingtileError) as raised:
        ringtile.enable(trainer, config)
    assert vars(trainer) == before
    return raised.value


# ---- refused by enable, whatever the world -------------------------------------------------------


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs)


class OwnStep(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eval_use_gather_object": True}, "eval_use_gather_object"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy='batch_rebalance'"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        ({"trainer_class": OwnLoss, "torch_compile": True}, "OwnLoss computes its loss from the outputs"),
        ({"trainer_class": OwnStep}, "OwnStep.training_step replaces that of transformers.Trainer"),
    ],
)
def test_trainer_setting_is_refused(options, words):
    error = _refusal(make_trainer(**options))
    assert isinstance(error, ringtile.Refused)
    assert words in str(error)


def test_model_init_is_refused():
    trainer = make_trainer()
    trainer.model_init = tiny_model
    assert "model_init" in str(_refusal(trainer))


def test_liger_is_refused():
    trainer = make_trainer()
    trainer.args.use_liger_kernel = True
    assert "use_liger_kernel" in str(_refusal(trainer))


def test_method_replaced_on_the_instance_is_refused():
    trainer = make_trainer()
    trainer.training_step = lambda *args: None
    assert "training_step" in str(_refusal(trainer))


def test_missing_touch_point_is_refused_with_versions():
    def other_version(self, batches):
        return None

    with mock.patch.object(Trainer, "_get_num_items_in_batch", other_version):
        error = str(_refusal(make_trainer()))
    assert "_get_num_items_in_batch(batch_samples, device) is not there" in error
    assert torch.__version__ in error


def test_changed_function_of_accelerate_is_refused_by_name():
    def other_version(dataloader, device=None, num_processes=None):
        return dataloader

    with mock.patch("accelerate.data_loader.prepare_data_loader", other_version):
        error = str(_refusal(make_trainer()))
    assert "accelerate.data_loader.prepare_data_loader(num_processes, process_index" in error
    assert "is not there" in error


def test_compute_loss_of_any_arguments_is_accepted():
    """It is the size of the world that is refused here, last of all."""
    assert "there are 1 ranks" in str(_refusal(make_trainer(trainer_class=OwnLoss)))


def test_sft_that_counts_no_targets_is_refused():
    trl = pytest.importorskip("trl")
    trainer = make_trainer(trainer_class=trl.SFTTrainer)
    trainer.model_accepts_loss_kwargs = False
    assert "SFTTrainer sets model_accepts_loss_kwargs to false" in str(_refusal(trainer))


def test_tensor_parallelism_is_refused():
    trainer = make_trainer()
    trainer.model._tp_size = 2
    assert "tensor parallelism of size 2" in str(_refusal(trainer))


def _slice_over_half_of_the_ranks(folder):
    enter_world()
    with pytest.raises(RuntimeError) as raised:
        AutoModelForCausalLM.from_pretrained(folder, distributed_config={"tp_size": 2})
    return str(raised.value)


@pytest.mark.long
def test_tensor_parallelism_takes_every_rank(tmp_path):
    """Why it is refused: of four ranks, transformers cannot make two groups of two."""
    tiny_model().save_pretrained(tmp_path)
    for message in run_ranks(4, _slice_over_half_of_the_ranks, str(tmp_path)):
        assert message == "tp_size (2) * fsdp_size (1) is not equal to world_size (4)"


def test_fsdp1_is_refused():
    trainer = make_trainer()  # without an accelerator FSDP1 does not start, so accelerate only says that it has
    trainer.accelerator.state.fsdp_plugin = types.SimpleNamespace(fsdp_version=1)
    assert "FSDP1 (fsdp_version 1)" in str(_refusal(trainer))


def test_other_size_in_parallelism_config_is_named():
    trainer = make_trainer()
    parallelism = types.SimpleNamespace(
        cp_enabled=True, cp_size=4, tp_size=1, sp_size=1, sp_enabled=False, sp_backend="deepspeed", tp_enabled=False
    )
    trainer.accelerator.state.parallelism_config = parallelism
    error = _refusal(trainer)
    assert isinstance(error, ringtile.ConfigError)
    assert "ParallelismConfig.cp_size is 4" in str(error)


def test_something_else_than_a_trainer_is_named():
    model = types.SimpleNamespace(model=tiny_model())
    with pytest.raises(ringtile.InputError, match=r"expected a transformers\.Trainer"):
        ringtile.enable(model, CONFIG)


@pytest.mark.parametrize("config", [None, 2, ["layout"], True])
def test_configuration_of_another_type_is_named(config):
    error = _refusal(make_trainer(), config)
    assert isinstance(error, ringtile.InputError)
    assert f"config is a {type(config).__name__}; expected a ringtile.Config" in str(error)


def test_world_that_is_no_multiple_is_named():
    error = _refusal(make_trainer())
    assert isinstance(error, ringtile.ConfigError)
    assert "context_parallel_size is 2 but there are 1 ranks" in str(error)


def test_unknown_key_is_named():
    assert "did you mean layout?" in str(_refusal(make_trainer(), {"layouts": "zigzag"}))


def _with(model, module):
    model.model.extra = module
    return model


def _in_expert(dropout):
    module = nn.Module()
    module.experts = nn.ModuleList([dropout])
    return module


class OwnModel(nn.Module):
    def forward(self, input_ids, **kwargs):
        return CausalLMOutput(loss=input_ids.sum())


class NoLossArguments(type(tiny_model())):
    def forward(self, input_ids, attention_mask=None, labels=None):
        return super().forward(input_ids, attention_mask=attention_mask, labels=labels)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: OwnModel(), "expected a transformers PreTrainedModel"),
        (lambda: LlamaForSequenceClassification(tiny_model().config), "a loss of its own for whole sequences"),
        (lambda: tiny_model("gemma3", use_bidirectional_attention=True), "bidirectional"),
        (lambda: tiny_model("doge"), "model.layers.0.self_attn (DogeAttention) picks the keys"),
        (lambda: tiny_model("phimoe"), "model.layers.0.mlp.router (PhimoeTopKRouter) samples the experts"),
        (lambda: _with(tiny_model(), nn.Dropout(0.1, inplace=True)), "model.extra drops with p = 0.1"),
        (lambda: _with(tiny_model(), type("Own", (nn.Dropout,), {})(0.1)), "a Own may drop otherwise than nn.Dropout"),
        (lambda: _with(tiny_model(), _in_expert(nn.Dropout(0.1))), "an expert does not know which tokens it was given"),
        (lambda: NoLossArguments(tiny_model().config), "num_items_in_batch"),
    ],
)
def test_model_is_refused(model, words):
    assert words in str(_refusal(make_trainer(model=model())))


# ---- refused while running ----------------------------------------------------------------------


def _failure(use=Trainer.train, prepare=lambda trainer: None, config=None, **options):
    trainer = make_trainer(**options)
    prepare(trainer)
    return failure_of(trainer, config, use)


def _rank_dependent_rows(trainer):
    trainer.train_dataset = make_rows(22, seed=trainer.args.process_index)


def test_different_batches_in_a_group_are_named():
    for message in run_ranks(2, _failure, prepare=_rank_dependent_rows):
        assert message.startswith("RingMismatch: ranks 0 and 1 share a sequence but got different batches")


def _rank_dependent_labels(trainer):
    for row in trainer.train_dataset:
        row["labels"][-1] += trainer.args.process_index


def test_different_batches_of_equal_shape_are_named():
    for message in run_ranks(2, _failure, prepare=_rank_dependent_labels):
        assert "the checksum of labels is" in message


def _dispatching_loader(trainer):
    accelerator = trainer.accelerator
    loader = torch.utils.data.DataLoader(Stream(make_rows(8)), batch_size=2, collate_fn=Padded())
    accelerator.dataloader_config.dispatch_batches = True
    dispatching = type(accelerator).prepare_data_loader(accelerator, loader)
    accelerator.dataloader_config.dispatch_batches = None
    accelerator.prepare_data_loader(dispatching)


def test_dispatching_loader_is_refused():
    for message in run_ranks(2, _failure, use=_dispatching_loader):
        assert "the data loader dispatches batches from rank 0" in message


def _without_ring(trainer):
    """A layer that attends without transformers' attention interface."""
    trainer.model.model.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)


@pytest.mark.parametrize("family", ["lfm2", "llama"])
def test_a_convolution_is_refused_where_nothing_proves_it(family):
    trainer = make_trainer(model=_with(tiny_model(family), nn.Conv1d(32, 32, 3)))
    assert "Conv1d" in str(_refusal(trainer, {"context_parallel_size": 2, "first_batch_check": False}))


def test_layer_without_the_ring_is_refused_where_nothing_proves_it():
    for message in run_ranks(2, _failure, prepare=_without_ring, config={"first_batch_check": False}):
        assert "has 2 layers but called ringtile's attention 1 times" in message


def _own_loss(trainer):
    """A model that shifts and averages on its own."""
    model = trainer.model
    forward, loss_function = model.forward, model.loss_function

    @functools.wraps(forward)
    def own_forward(*args, labels=None, **kwargs):
        output = forward(*args, **kwargs)
        output["loss"] = loss_function(output.logits, labels, model.config.vocab_size)
        return output

    model.forward = own_forward


def test_model_with_a_loss_of_its_own_is_refused():
    for message in run_ranks(2, _failure, prepare=_own_loss):
        assert "does not hand shift_labels to self.loss_function" in message


def _with_hole(trainer):
    hole = torch.ones(1, 8, dtype=torch.long)
    hole[0, 3] = 0
    model = trainer.accelerator.prepare(trainer.model)
    ids = torch.ones(1, 8, dtype=torch.long)
    trainer.compute_loss(model, {"input_ids": ids, "labels": ids, "attention_mask": hole})


def test_attention_mask_with_a_hole_is_refused():
    for message in run_ranks(2, _failure, use=_with_hole):
        assert message.startswith("MaskNotExpressible")


def _enable_with_size(size):
    with pytest.raises(ringtile.ConfigError) as raised:
        ringtile.enable(make_trainer(), {"context_parallel_size": size})
    return str(raised.value)


@pytest.mark.parametrize("size", [3, 4])
def test_size_that_does_not_divide_the_world_is_named(size):
    for message in run_ranks(2, _enable_with_size, size):
        assert f"context_parallel_size is {size} but there are 2 ranks" in message
