"""A run besides its steps: epochs, metrics, checkpoints, a crash, early stop, compilation, mixed precision."""

import functools
import json
import os
import signal
from pathlib import Path

import numpy
import pytest
import ringtile
import torch
from hf_engines import engine as engine_arguments
from hf_training import TOLERANCE, Run, assert_equal_training, make_trainer, packed, train
from pool import Pool, run_ranks
from test_hf_trainer import assert_equal_runs
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback

CONFIG = {"context_parallel_size": 2}
TILED = {**CONFIG, "tiled_mlp": True, "tiled_loss": True, "tile_tokens": 5}


@functools.cache
def _reference(**options) -> Run:
    """The same run without ringtile, in one process."""
    return train(None, **options)


# ---- epochs and ways to train -------------------------------------------------------------------

# 22 rows in batches of 4: the last batch of an epoch has 2 rows, the last step one batch.
EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 4, "max_grad_norm": 0.5}


@pytest.mark.parametrize("scheduler", [pytest.param("linear", marks=pytest.mark.long), "cosine"])
def test_epochs_with_uneven_batches_equal_one_process(scheduler):
    options = {**EPOCHS, "lr_scheduler_type": scheduler}
    for run in run_ranks(2, train, CONFIG, **options):
        assert_equal_runs(run, _reference(**options))


def _reentrant(config):
    """`train` with the older of the two kinds of checkpointing, which needs inputs with gradients."""
    return train(
        config, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}, evaluate=False
    )


def test_reentrant_checkpointing_equals_one_process():
    expected = _reentrant(None)
    for run in run_ranks(2, _reentrant, CONFIG):
        assert_equal_training(run, expected)


def _compiled(config, backend):
    """`train` with torch_compile, and what broke the graphs of its model."""
    torch._dynamo.reset()
    counters["graph_break"].clear()
    run = train(config, torch_compile=True, torch_compile_backend=backend, collator=packed, evaluate=False)
    return run, list(counters["graph_break"])


DDPS = ("DistributedDataParallel", "(Reducer)", "(Logger)")  # breaks of its own
TILES = ("_TiledForward.__call__", "_head_forward", "tiled_linear_cross_entropy")  # loops of Python over tiles


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "config", "breaks"),
    [
        pytest.param("aot_eager", CONFIG, (), marks=pytest.mark.long),
        pytest.param("aot_eager", TILED, TILES, marks=pytest.mark.long),
        pytest.param("inductor", CONFIG, (), marks=pytest.mark.long),
        pytest.param("inductor", TILED, TILES, marks=pytest.mark.long),
    ],
)
def test_compiled_model_equals_one_process(backend, config, breaks):
    """inductor's kernels round the same float32 sums in another order, as two ranks do. The ring is in the graph."""
    for run, reasons in run_ranks(2, _compiled, config, backend, timeout=500.0):
        assert_equal_training(run, _reference(collator=packed, evaluate=False))
        for reason in reasons:
            assert any(name in reason for name in DDPS + breaks), reason
        for name in breaks:
            assert any(name in reason for reason in reasons), name


def test_bfloat16_is_as_close_to_float32_as_one_process():
    """Under autocast activations have 8 significant bits: a sum of rounded terms is off by 2^-9 of them, on one rank
    and on two. The weights and their gradients stay float32."""
    exact, single = _reference(evaluate=False), _reference(evaluate=False, bf16=True)
    assert single.losses != exact.losses
    for run in run_ranks(2, train, CONFIG, evaluate=False, bf16=True):
        for tested in (run, single):
            assert tested.losses == pytest.approx(exact.losses, rel=2**-8)
            assert tested.grad_norms == pytest.approx(exact.grad_norms, rel=2**-6)
        assert all(weight.dtype == torch.float32 for weight in run.weights.values())


# ---- metrics ------------------------------------------------------------------------------------


def _accuracy(prediction):
    """The share of targets that the logits before them rank first, and the number of targets."""
    guesses, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    targets = labels != -100
    return {"accuracy": float((guesses == labels)[targets].mean()), "targets": int(targets.sum())}


def _metrics(config):
    """(metrics of evaluate, metrics of predict, logits of predict without labels)"""
    trainer = make_trainer(trainer_arguments={"compute_metrics": _accuracy})
    if config is not None:
        ringtile.enable(trainer, config)
    evaluated, predicted = trainer.evaluate(), trainer.predict(trainer.eval_dataset)
    unlabelled = trainer.predict([{"input_ids": row["input_ids"]} for row in trainer.eval_dataset]).predictions
    if config is not None:
        ringtile.restore(trainer)
    return evaluated, predicted.metrics, unlabelled


def test_metrics_see_global_sequences():
    expected = _metrics(None)
    for evaluated, predicted, unlabelled in run_ranks(2, _metrics, CONFIG):
        for metrics, wanted, prefix in ((evaluated, expected[0], "eval"), (predicted, expected[1], "test")):
            assert metrics[f"{prefix}_accuracy"] == wanted[f"{prefix}_accuracy"]
            assert metrics[f"{prefix}_targets"] == wanted[f"{prefix}_targets"]
            assert metrics[f"{prefix}_loss"] == pytest.approx(wanted[f"{prefix}_loss"], rel=TOLERANCE)
        assert unlabelled.shape == expected[2].shape
        assert numpy.abs(unlabelled - expected[2]).max() <= TOLERANCE


EARLY = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 12}


def _stop_early(config, folder):
    """(steps until the loss of evaluation rose twice, that of the model which was loaded in the end, the best)"""
    trainer = make_trainer(
        folder=folder,
        learning_rate=4.0,
        lr_scheduler_type="constant",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        trainer_arguments={"callbacks": [EarlyStoppingCallback(2)]},
        **EARLY,
    )
    if config is not None:
        ringtile.enable(trainer, config)
    trainer.train()
    loss, best = trainer.evaluate()["eval_loss"], trainer.state.best_metric
    if config is not None:
        ringtile.restore(trainer)
    return trainer.state.global_step, loss, best


def test_early_stop_and_best_model_equal_one_process(tmp_path):
    steps, loss, best = _stop_early(None, str(tmp_path / "single"))
    assert 2 < steps < EARLY["max_steps"]
    assert loss == pytest.approx(best, rel=TOLERANCE)
    for run in run_ranks(2, _stop_early, CONFIG, str(tmp_path / "ranks")):
        assert run == pytest.approx((steps, loss, best), rel=TOLERANCE * 10)  # a learning rate of 4 magnifies rounding


# ---- checkpoints --------------------------------------------------------------------------------

# AdamW has state to lose, several workers' worth of random order too; two epochs, so that the crash is inside one.
LIFE = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 8, "save_strategy": "steps", "save_steps": 3}


class Crash(TrainerCallback):
    """Dies without a word after step 5, two steps after the last checkpoint."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def _live(config, folder, engine, crash, resume=None):
    callbacks = {"callbacks": [Crash()]} if crash else {}
    folder = str(folder)
    return train(
        config, engine=engine, folder=folder, evaluate=False, resume=resume, trainer_arguments=callbacks, **LIFE
    )


@pytest.mark.parametrize("engine", [pytest.param("DDP", marks=pytest.mark.long), "FSDP2"])
def test_resume_after_a_kill_is_bitwise_the_uninterrupted_run(engine, tmp_path):
    expected = run_ranks(2, _live, CONFIG, tmp_path / "whole", engine, crash=False)
    doomed = Pool(2)
    outcomes = doomed.outcomes(_live, CONFIG, tmp_path / "crashed", engine, crash=True)
    doomed.close()
    assert all(isinstance(outcome, EOFError) for outcome in outcomes)
    checkpoint = str(tmp_path / "crashed" / "checkpoint-3")
    resumed = run_ranks(2, _live, CONFIG, tmp_path / "crashed", engine, crash=False, resume=checkpoint)
    for run, wanted in zip(resumed, expected, strict=True):
        assert run.losses == wanted.losses  # the state of the Trainer remembers the first three
        assert run.grad_norms == wanted.grad_norms
        assert all(torch.equal(run.weights[name], weight) for name, weight in wanted.weights.items())


# An epsilon as large as the roots that Adam divides by: rounding stays what it was, and the weights can be compared.
OTHER_WORLD = {**LIFE, "max_steps": 6, "adam_epsilon": 1e-2, "num_rows": 24, "gradient_accumulation_steps": 1}


def _in_a_world(world, folder, resume=None):
    """The first rank's run on (engine, ranks, ranks a sequence), in which a step has 4 rows."""
    engine, world_size, size = world
    options = {**OTHER_WORLD, "per_device_train_batch_size": 4 * size // world_size, "evaluate": False}
    config = {"context_parallel_size": size, "tiled_mlp": True}
    if world_size == 1:
        return train(config, folder=str(folder), resume=resume, **options)
    return run_ranks(world_size, train, config, engine=engine, folder=str(folder), resume=resume, **options)[0]


WORLDS = [("DDP", 1, 1), ("DDP", 2, 2), ("DDP", 4, 4), ("DDP", 4, 2), ("FSDP2", 2, 2), ("FSDP2", 4, 4), ("FSDP2", 4, 2)]
SHORT = (("DDP", 2, 2), ("DDP", 1, 1))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param(saved, resumed, marks=() if (saved, resumed) == SHORT else pytest.mark.long)
        for saved in WORLDS
        for resumed in WORLDS
        if saved != resumed and (saved[0] == resumed[0])
    ],
    ids=str,
)
def test_resume_at_another_world_size_is_the_uninterrupted_run(saved, resumed, tmp_path):
    expected = _in_a_world(saved, tmp_path)
    run = _in_a_world(resumed, tmp_path / "resumed", str(tmp_path / "checkpoint-3"))
    assert_equal_training(run, expected)


def _save(folder):
    with engine_arguments("DDP") as arguments:
        trainer = make_trainer(max_steps=1, **arguments)
        ringtile.enable(trainer, CONFIG)
        trainer.train()
        trainer.save_model(folder)
        ringtile.restore(trainer)
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def test_saved_model_does_not_know_ringtile(tmp_path):
    weights = run_ranks(2, _save, str(tmp_path))[0]
    assert "ringtile" not in json.dumps(json.loads(Path(tmp_path, "config.json").read_text()))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(weight, weights[name]) for name, weight in loaded.named_parameters())
