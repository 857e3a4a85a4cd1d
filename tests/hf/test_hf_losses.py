"""Trainers with custom losses, and TRL's: the same losses, metrics and weights as one process."""

import pytest
import ringtile
import torch
from hf_engines import needs_deepspeed
from hf_models import SIZES, tiny_model
from hf_training import TOLERANCE, assert_equal_training, failure_of, make_pairs, make_trainer, train
from pool import run_ranks
from torch.nn import functional
from transformers import BartConfig, BartForCausalLM, LlamaConfig, LlamaForSequenceClassification, Trainer

CONFIG = {"context_parallel_size": 2}


def _assert_equal(function, world_size=2, expected=None, **options) -> None:
    """Training with function(config, **options) on two ranks equals one process without ringtile."""
    expected = expected or function(None, **options)
    for run in run_ranks(world_size, function, CONFIG, timeout=110.0, **options):
        assert_equal_training(run, expected)
        for metrics, wanted in zip(run.metrics, expected.metrics, strict=True):
            assert metrics.keys() == wanted.keys()
            for name in metrics:  # logits and rewards are differences of numbers up to 5
                assert metrics[name] == pytest.approx(wanted[name], rel=TOLERANCE, abs=TOLERANCE * 5), name


# ---- Trainer subclasses, loss functions, label smoothing ----------------------------------------


class TwiceTheLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (2 * loss, outputs) if return_outputs else 2 * loss


class LastThird(Trainer):
    """The mean over the last third of each row, which no shard can compute by itself."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        begin = 2 * inputs["labels"].size(1) // 3
        logits, labels = outputs.logits[:, begin:-1], inputs["labels"][:, begin + 1 :]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss = loss / self.current_gradient_accumulation_steps if model.training else loss
        return (loss, outputs) if return_outputs else loss


class SumOverItems(Trainer):
    """Divides by the number of items, and does not undo the mean of the engine."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.parametrize(
    "trainer_class", [LastThird, *(pytest.param(c, marks=pytest.mark.long) for c in (TwiceTheLoss, SumOverItems))]
)
def test_custom_compute_loss_sees_unsharded_sequences(trainer_class):
    options = {"trainer_class": trainer_class}
    expected = train(None, **options)
    for run in run_ranks(2, train, CONFIG, **options):
        assert_equal_training(run, expected)
        assert run.eval_loss == pytest.approx(expected.eval_loss, rel=TOLERANCE)
        assert (run.predictions - expected.predictions).abs().max() <= TOLERANCE
        assert run.num_input_tokens == expected.num_input_tokens


class MeanPerBatch(Trainer):
    """Averages the means of its batches, like axolotl's Trainer, which does not count targets."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.model_accepts_loss_kwargs = False


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.long)
            for options in ({"label_smoothing_factor": 0.1}, {"average_tokens_across_devices": False})
        ),
    ],
)
def test_mean_of_means_equals_one_process(options):
    options = {"trainer_class": MeanPerBatch, **options}
    expected = train(None, **options)
    for run in run_ranks(2, train, CONFIG, **options):
        assert_equal_training(run, expected)
        assert run.eval_loss == pytest.approx(expected.eval_loss, rel=TOLERANCE)


@pytest.mark.long
def test_mean_of_means_of_two_groups_equals_two_ranks():
    expected = run_ranks(2, train, None, trainer_class=MeanPerBatch)[0]
    for run in run_ranks(4, train, CONFIG, trainer_class=MeanPerBatch):
        assert_equal_training(run, expected)


def _squared(outputs, labels, num_items_in_batch=None):
    """A user's loss function, which shifts the labels itself."""
    logits, labels = outputs.logits[:, :-1], labels[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none") ** 2
    return losses.sum() / (num_items_in_batch if num_items_in_batch is not None else labels.ne(-100).sum())


def _num_processes():
    """Inside a step, and after one that has failed."""
    counted, trainer = [], make_trainer()

    def fail(*args, **kwargs):
        counted.append(trainer.accelerator.num_processes)
        raise KeyError

    trainer.compute_loss_func = fail
    ringtile.enable(trainer, {**CONFIG, "first_batch_check": False})
    with pytest.raises(KeyError):
        trainer.train()
    ringtile.restore(trainer)
    return [*counted, trainer.accelerator.num_processes]


def test_a_group_counts_as_one_process_inside_a_step():
    assert run_ranks(2, _num_processes) == [[1, 2], [1, 2]]


def _mean(outputs, labels, num_items_in_batch=None):
    """A user's loss function, which looks at one batch only."""
    return outputs.logits.square().mean()


def _train_squared(config, **options):
    # Squares have gradients of norm 12; at the usual learning rate of 0.3 each step would amplify rounding.
    options = {"trainer_arguments": {"compute_loss_func": _squared}, "learning_rate": 0.01, **options}
    return train(config, evaluate=False, **options)


@pytest.mark.parametrize("average", [True, pytest.param(False, marks=pytest.mark.long)])
def test_compute_loss_func_sees_unsharded_sequences(average):
    _assert_equal(_train_squared, average_tokens_across_devices=average)


@pytest.mark.long
def test_compute_loss_func_of_one_batch_equals_one_process():
    _assert_equal(_train_squared, trainer_arguments={"compute_loss_func": _mean})


def test_compute_loss_func_of_two_groups_equals_two_ranks():
    expected = run_ranks(2, _train_squared, None)[0]
    for run in run_ranks(4, _train_squared, CONFIG):
        assert_equal_training(run, expected)


def _train_bart(config):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "decoder_ffn_dim": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "vocab_size": 96}
    settings = {"dropout": 0.0, "is_decoder": True, "is_encoder_decoder": False, "max_position_embeddings": 64}
    model = BartForCausalLM(BartConfig(**sizes, **settings, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    for parameter in model.parameters():  # the bias of a key has no gradient: at 0, only rounding could be compared
        parameter.data += 0.1 * torch.randn_like(parameter)
    return _train_squared(config, model=model.train())


@pytest.mark.long
def test_compute_loss_func_serves_a_model_that_would_shift_labels_itself():
    _assert_equal(_train_bart)


def test_label_smoothing_equals_one_process():
    _assert_equal(train, label_smoothing_factor=0.1)


def test_custom_loss_on_tiled_logits_is_refused():
    for message in run_ranks(2, _failure, LastThird, tiled_loss=True):
        assert "the logits, which do not exist in training" in message


class PositionalCall(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(inputs["input_ids"], inputs["attention_mask"]).logits.square().mean()


def test_model_called_with_positional_arguments_equals_one_process():
    _assert_equal(train, trainer_class=PositionalCall, evaluate=False)


class AsTuple(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs, return_dict=False)[0]


class HiddenStates(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, output_hidden_states=True)
        return sum(hidden[:, 3].square().mean() for hidden in outputs.hidden_states)


@pytest.mark.long
def test_hidden_states_are_unsharded():
    _assert_equal(train, trainer_class=HiddenStates, evaluate=False, learning_rate=0.01)


def _failure(trainer_class, **config):
    return failure_of(make_trainer(trainer_class=trainer_class), config)


def test_outputs_without_names_are_refused():
    for message in run_ranks(2, _failure, AsTuple):
        assert "returns a tuple; expected return_dict=True" in message


# ---- TRL ----------------------------------------------------------------------------------------


def _train_trl(name, config, **options):
    import trl

    return train(config, trainer_class=getattr(trl, name), evaluate=False, **options)


def _train_sft(config, **options):
    return _train_trl("SFTTrainer", config, **options)


SFT = [
    {"padding_free": True, "max_length": None},
    {"loss_type": "dft"},
]
MORE_SFT = [
    {"packing": True, "packing_strategy": "bfd", "max_length": 48},  # test_hf_matrix.py packs in every run
    {"packing": True, "packing_strategy": "bfd_split", "max_length": 16},
    {"packing": True, "packing_strategy": "wrapped", "max_length": 32},
    {"label_smoothing_factor": 0.1},
    {"pad_to_multiple_of": 8},
]


@pytest.mark.parametrize(
    "options",
    [*SFT, *(pytest.param(options, marks=pytest.mark.long) for options in MORE_SFT)],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_sft_equals_one_process(options):
    pytest.importorskip("trl")
    _assert_equal(_train_sft, num_rows=32, max_steps=2, **options)


def _train_completions(config):
    import datasets

    rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in make_pairs(16)]
    return _train_trl(
        "SFTTrainer", config, max_steps=2, trainer_arguments={"train_dataset": datasets.Dataset.from_list(rows)}
    )


@pytest.mark.long
def test_sft_on_completions_equals_one_process():
    pytest.importorskip("trl")
    _assert_equal(_train_completions)


def _train_dpo(config, **options):
    reference = tiny_model(seed=3)
    return _train_trl("DPOTrainer", config, trainer_arguments={"ref_model": reference}, max_steps=2, **options)


DPO = [
    {"loss_type": ["sigmoid"]},
    {"loss_type": ["sigmoid_norm"], "ld_alpha": 0.5},
    {"loss_type": ["robust"], "label_smoothing": 0.1, "use_weighting": True},
    {"loss_type": ["aot"], "f_divergence_type": "reverse_kl"},
]


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": ["ipo", "sft"], "loss_weights": [0.7, 0.3]},
        *(pytest.param(options, marks=pytest.mark.long) for options in DPO),
    ],
    ids=lambda options: "-".join(options["loss_type"]),
)
def test_dpo_equals_one_process(options):
    pytest.importorskip("trl")
    _assert_equal(_train_dpo, num_rows=16, **options)


def _train_dpo_lora(config, engine="DDP"):
    """With adapters, the reference model is the model without them."""
    return _train_trl("DPOTrainer", config, lora=True, max_steps=2, num_rows=16, engine=engine)


@pytest.mark.parametrize(
    "engine", ["DDP", *(pytest.param(name, marks=pytest.mark.long) for name in ("FSDP2", "ZeRO-2"))]
)
def test_dpo_with_lora_equals_one_process(engine):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    if engine == "ZeRO-2":
        needs_deepspeed()
    _assert_equal(_train_dpo_lora, expected=_train_dpo_lora(None), engine=engine)


def _train_kto(config, **options):
    """Each row wanted or not; and once more with the completion of another row, by which KTO estimates a divergence."""
    import datasets

    pairs = make_pairs(16)
    rows = [
        {"prompt": pair["prompt"], "completion": pair["rejected" if i % 3 else "chosen"], "label": i % 3 == 0}
        for i, pair in enumerate(pairs)
    ]
    data = {"train_dataset": datasets.Dataset.from_list(rows), "ref_model": tiny_model(seed=3)}
    return _train_trl("KTOTrainer", config, trainer_arguments=data, max_steps=2, **options)


@pytest.mark.long  # test_hf_logged.py trains KTO in every run
@pytest.mark.parametrize("options", [{}, {"loss_type": "apo_zero_unpaired", "desirable_weight": 2.0}])
def test_kto_equals_one_process(options):
    pytest.importorskip("trl")
    _assert_equal(_train_kto, per_device_train_batch_size=4, **options)


@pytest.mark.long
def test_kto_of_two_groups_equals_two_ranks():
    pytest.importorskip("trl")
    expected = run_ranks(2, _train_kto, None)[0]
    _assert_equal(_train_kto, world_size=4, expected=expected)


def _train_orpo(config, **options):
    from trl.experimental.orpo import ORPOTrainer

    return train(config, trainer_class=ORPOTrainer, max_steps=2, num_rows=16, evaluate=False, **options)


def test_orpo_equals_one_process():
    pytest.importorskip("trl")
    _assert_equal(_train_orpo)


@pytest.mark.long
def test_orpo_of_two_groups_equals_two_ranks():
    pytest.importorskip("trl")
    _assert_equal(_train_orpo, world_size=4, expected=run_ranks(2, _train_orpo, None)[0])


def _train_reward(config, engine="DDP", **options):
    """In float64: a reward is one number per sequence, small and of either sign, and its gradient a difference of two
    sequences', so that rounding in float32 is not small against the weights."""
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).double()
    return _train_trl("RewardTrainer", config, model=model, max_steps=2, num_rows=16, engine=engine, **options)


@pytest.mark.parametrize("engine", ["DDP", pytest.param("FSDP2", marks=pytest.mark.long)])
def test_reward_model_equals_one_process(engine):
    pytest.importorskip("trl")
    _assert_equal(_train_reward, expected=_train_reward(None), engine=engine)


@pytest.mark.long
def test_centered_rewards_equal_one_process():
    pytest.importorskip("trl")
    _assert_equal(_train_reward, center_rewards_coefficient=0.1)


def _train_margins(config):
    import datasets

    rows = [{**row, "margin": 0.1 * i} for i, row in enumerate(make_pairs(16))]
    return _train_reward(config, trainer_arguments={"train_dataset": datasets.Dataset.from_list(rows)})


@pytest.mark.long
def test_rewards_with_margins_equal_one_process():
    pytest.importorskip("trl")
    _assert_equal(_train_margins)


def _evaluate(config):
    """The losses of DPO and ORPO in evaluation."""
    import trl
    from trl.experimental.orpo import ORPOTrainer

    losses = []
    for trainer_class, options in ((trl.DPOTrainer, {"ref_model": tiny_model(seed=3)}), (ORPOTrainer, {})):
        trainer = make_trainer(trainer_class=trainer_class, num_rows=4, trainer_arguments=options)
        if config is not None:
            ringtile.enable(trainer, config)
        losses.append(trainer.evaluate()["eval_loss"])
        if config is not None:
            ringtile.restore(trainer)
    return losses


@pytest.mark.long
def test_preferences_evaluate_as_one_process():
    pytest.importorskip("trl")
    expected = _evaluate(None)
    for losses in run_ranks(2, _evaluate, CONFIG):
        assert losses == pytest.approx(expected, rel=TOLERANCE)


def test_trainers_that_generate_are_refused():
    class GRPOTrainer(Trainer):
        """Recognized by name; TRL's own needs a reward function and a tokenizer with a chat template."""

    with pytest.raises(ringtile.Refused, match="each rank would sample its own completions"):
        ringtile.enable(make_trainer(trainer_class=GRPOTrainer), CONFIG)
