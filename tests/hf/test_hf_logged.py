"""Every number that Trainer and TRL log, in training and evaluation, where rows do not fill the last batch: the numbers
of one process, and of two groups of two ranks those of two ranks that share nothing."""

import importlib
import math

import datasets
import pytest
import ringtile
import torch
from hf_models import SIZES, tiny_model
from hf_training import TOLERANCE, enabled, make_pairs, make_trainer
from pool import run_ranks
from transformers import LlamaConfig, LlamaForSequenceClassification

CONFIG = {"context_parallel_size": 2}
SFT, DPO, KTO, REWARD = (f"trl.{name}Trainer" for name in ("SFT", "DPO", "KTO", "Reward"))
ORPO = "trl.experimental.orpo.ORPOTrainer"
# Of each trainer: what its logs must hold, beside the loss, in training and evaluation.
PREFERENCES = {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"}
PREFERENCES |= {"logits/chosen", "logits/rejected"}
TOKENS = {"entropy", "num_tokens"}
LOGGED = {
    "transformers.Trainer": set(),
    SFT: TOKENS | {"mean_token_accuracy"},
    DPO: PREFERENCES | TOKENS | {"rewards/accuracies", "mean_token_accuracy"},
    KTO: PREFERENCES | TOKENS | {"kl"},
    ORPO: PREFERENCES | {"rewards/accuracies", "nll_loss", "log_odds_ratio", "log_odds_chosen"},
    REWARD: {"num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy", "margin"},
}
CASES = [
    ("transformers.Trainer", {}),
    ("transformers.Trainer", {"include_num_input_tokens_seen": "non_padding", "model": "qwen3-moe"}),
    (SFT, {}),
    (SFT, {"model": "qwen3-moe"}),
    (SFT, {"loss_type": "dft", "average_tokens_across_devices": False}),
    (SFT, {"packing": True, "packing_strategy": "bfd", "max_length": 48}),
    (SFT, {"padding_free": True, "max_length": None}),
    (SFT, {"label_smoothing_factor": 0.1, "model": "qwen3-moe"}),
    (DPO, {}),
    (DPO, {"model": "qwen3-moe"}),
    (KTO, {}),
    (KTO, {"loss_type": "apo_zero_unpaired", "desirable_weight": 2.0, "model": "qwen3-moe"}),
    (ORPO, {}),
    (ORPO, {"model": "qwen3-moe"}),
    (REWARD, {}),
]


def _accuracy(prediction):
    """Reads every token of every row, so that a lost, doubled or shifted one shows."""
    targets, words = prediction.label_ids[:, 1:], prediction.predictions[:, :-1].argmax(-1)
    return {"accuracy": float((words == targets)[targets != -100].mean())}


def _preferences(name, num_rows, seed=0):
    """Rows for DPO; for KTO, whether each is wanted."""
    rows = make_pairs(num_rows, seed)
    if name == KTO:
        rows = [
            {"prompt": row["prompt"], "completion": row["rejected" if i % 3 else "chosen"], "label": i % 3 == 0}
            for i, row in enumerate(rows)
        ]
    return datasets.Dataset.from_list(rows)


def _trainer(name, model="llama", train_dataset=None, **options):
    """11 rows to train on and 5 to evaluate, in batches of 2 or, over two groups, of 4: a few rows remain."""
    package, _, cls = name.rpartition(".")
    trainer_class = getattr(importlib.import_module(package), cls)
    more = {}
    if name == "transformers.Trainer" and model == "llama":
        more["compute_metrics"] = _accuracy
    if name in (DPO, KTO):
        more["ref_model"] = tiny_model(model, seed=3)
    if name == KTO:
        more |= {"train_dataset": _preferences(name, 11), "eval_dataset": _preferences(name, 5, seed=1)}
    if train_dataset is not None:
        more |= {"train_dataset": train_dataset, "eval_dataset": None}
    if name == REWARD:  # in float64: rewards are small numbers of either sign
        torch.manual_seed(0)
        network = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).double()
    else:
        network = tiny_model(model).train()
    return make_trainer(
        trainer_class=trainer_class,
        model=network,
        num_rows=11,
        max_steps=-1,
        num_train_epochs=1,
        trainer_arguments=more,
        **options,
    )


def _log_of(config, name, options):
    """The log of a training of an epoch and an evaluation, and the metrics of a prediction."""
    trainer = _trainer(name, **options)
    with enabled(trainer, config):
        trainer.train()
        trainer.evaluate()
        entries = list(trainer.state.log_history)
        if trainer.compute_metrics is not None:
            entries.append(trainer.predict(trainer.eval_dataset).metrics)
    return [_without_time(entry) for entry in entries]


def _without_time(entry):
    """Numbers per second become numbers. They are logged with three decimals, and seconds with four."""
    counted = {}
    for key, value in entry.items():
        if key.endswith("steps_per_second"):  # transformers counts each rank as one with a batch of its own
            continue
        if key.endswith("_per_second"):
            counted[key] = round(value * entry[f"{key.split('_')[0]}_runtime"])
        elif not key.endswith(("_runtime", "_preparation_time")):
            counted[key] = value
    return counted


def _assert_equal(got, expected):
    assert [entry.keys() for entry in got] == [entry.keys() for entry in expected]
    wrong = [
        f"entry {number}: {key} {entry[key]} for {value}"
        for number, (entry, wanted) in enumerate(zip(got, expected, strict=True))
        for key, value in wanted.items()  # logits and rewards are differences of numbers up to 5
        if entry[key] != pytest.approx(value, rel=TOLERANCE, abs=5 * TOLERANCE)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def _cases(*in_every_run):
    for name, options in CASES:
        marks = () if (name, options) in in_every_run else (pytest.mark.long,)
        label = "-".join([name.rpartition(".")[2], *map(str, options.values())])
        yield pytest.param(name, options, marks=marks, id=label)


@pytest.mark.parametrize(("name", "options"), _cases((KTO, {})))
def test_two_ranks_log_the_numbers_of_one_process(name, options):
    pytest.importorskip(name.split(".")[0])
    expected = _log_of(None, name, options)
    assert {f"eval_{key}" for key in LOGGED[name]} <= {key for entry in expected for key in entry}
    for got in run_ranks(2, _log_of, CONFIG, name, options):
        _assert_equal(got, expected)


@pytest.mark.parametrize(("name", "options"), _cases((SFT, {"model": "qwen3-moe"})))
def test_two_groups_log_the_numbers_of_two_ranks(name, options):
    pytest.importorskip(name.split(".")[0])
    expected = run_ranks(2, _log_of, None, name, options)[0]
    for got in run_ranks(4, _log_of, CONFIG, name, options):
        _assert_equal(got, expected)


def _evaluate_with_precomputed(config, name, folder):
    """On rows that the Trainer meets after it was enabled, and hands to its reference model first. From disk, where the
    ranks find the result of that."""
    trainer = _trainer(name, precompute_ref_log_probs=True, train_dataset=datasets.load_from_disk(folder))
    with enabled(trainer, config):
        return _without_time(trainer.evaluate(datasets.load_from_disk(folder)))


@pytest.mark.parametrize("name", [DPO, pytest.param(KTO, marks=pytest.mark.long)])
def test_precomputed_references_are_those_of_their_rows(name, tmp_path):
    pytest.importorskip("trl")
    for folder in ("one", "two"):
        _preferences(name, 7, seed=2).save_to_disk(str(tmp_path / folder))
    expected = _evaluate_with_precomputed(None, name, str(tmp_path / "one"))
    for got in run_ranks(2, _evaluate_with_precomputed, CONFIG, name, str(tmp_path / "two")):
        _assert_equal([got], [expected])


def _losses_without_a_word(config):
    """Of a model that never says word 50, so that the loss of a batch with that word is infinite, on one rank."""
    trainer = _trainer("transformers.Trainer")
    word = torch.tensor([50])
    trainer.model.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, word, -math.inf))
    with enabled(trainer, config):
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_infinite_loss_is_left_out_as_in_one_process():
    expected = _losses_without_a_word(None)
    assert all(map(math.isfinite, expected))
    assert min(expected) < 4.0  # less than a batch that counts
    assert run_ranks(2, _losses_without_a_word, CONFIG) == [pytest.approx(expected, rel=TOLERANCE)] * 2


def _gather_objects(config):
    trainer = _trainer("transformers.Trainer")
    refused = pytest.raises(ringtile.RefusedError, match="gather_for_metrics of objects, of a list; expected tensors")
    with enabled(trainer, config), refused:
        trainer.accelerator.gather_for_metrics(["a row"])


def test_gathered_objects_are_refused():
    run_ranks(2, _gather_objects, CONFIG)


def _own_evaluation(config):
    """The first word of each evaluation row, by a loop of the user's own."""
    trainer = _trainer("transformers.Trainer")
    with enabled(trainer, config):
        return [
            word
            for batch in trainer.get_eval_dataloader()
            for word in trainer.accelerator.gather_for_metrics(batch["input_ids"][:, 0]).tolist()
        ]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 4])
def test_own_evaluation_loop_gets_each_row_once(world):
    words = _own_evaluation(None)
    assert run_ranks(world, _own_evaluation, CONFIG) == [words] * world
