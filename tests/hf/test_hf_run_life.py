"""A run besides its steps: compilation, metrics, checkpoints, a crash, early stop, streams that are resumed."""

import json
import logging
import os
import signal
from pathlib import Path

import datasets
import numpy
import pytest
import torch
import torch.distributed as dist
from hf_engines import engine as engine_arguments
from hf_models import tiny_model, with_lora
from hf_training import (
    TOLERANCE,
    Run,
    Stream,
    assert_equal_training,
    enabled,
    make_rows,
    make_trainer,
    packed,
    run_new_ranks,
    train,
)
from pool import Pool, run_ranks
from ringtile import RefusedError, RingMismatchError
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainerCallback

CONFIG = {"context_parallel_size": 2}
TILED = {**CONFIG, "tiled_mlp": True, "tiled_loss": True, "tile_tokens": 5}


# ---- adapters -----------------------------------------------------------------------------------


class _Switch(TrainerCallback):
    """Steps train one adapter and the other in turn; both required gradients when DDP was made."""

    def __init__(self, freezes: bool) -> None:
        self.freezes = freezes

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        _use(model, "second" if state.global_step % 2 else "default", self.freezes)


def _use(model, name, freezes):
    """freezes: as PEFT does, all other adapters."""
    model = getattr(model, "module", model)
    model.set_adapter(name)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in parameter_name and (name in parameter_name or not freezes))


class _Distillation(Trainer):
    """The second adapter, frozen, teaches the first."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        _use(model, "second", True)
        with torch.no_grad():
            taught = model(**given).logits
        _use(model, "default", True)
        logits, kept = model(**given).logits, inputs["labels"][:, 1:] != -100
        divergence = torch.nn.functional.kl_div(
            logits.log_softmax(-1), taught.log_softmax(-1), log_target=True, reduction="none"
        ).sum(-1)
        loss = (divergence[:, :-1] * kept).sum() / num_items_in_batch
        return (loss, None) if return_outputs else loss


class _Both(Trainer):
    """One loss of both adapters, by two forwards."""

    def compute_loss(self, model, inputs, **options):
        losses = []
        for name in ("default", "second"):
            _use(model, name, False)
            losses.append(super().compute_loss(model, inputs, **options))
        return sum(losses)


SWITCHED = {
    "in turn": lambda: {"trainer_arguments": {"callbacks": [_Switch(freezes=False)]}},
    "in turn, as PEFT freezes": lambda: {"trainer_arguments": {"callbacks": [_Switch(freezes=True)]}},
    "in turn, checkpointed": lambda: {**SWITCHED["in turn"](), "gradient_checkpointing": True},
    "one teaches": lambda: {"trainer_class": _Distillation},
    "both": lambda: {"trainer_class": _Both},
}


def _switched(config, how):
    model = with_lora(tiny_model("llama").double().train())  # a divergence near 0 is what is left of logarithms near 4
    model.add_adapter("second", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name and (how != "one teaches" or "default" in name))
    return train(config, model=model, evaluate=False, **SWITCHED[how]())


CHECKED = CONFIG | {"first_batch_check": True}


@pytest.mark.parametrize(
    ("how", "config"),
    [
        pytest.param("in turn", CHECKED, marks=pytest.mark.long),  # its two risks are those of the next two
        ("in turn, as PEFT freezes", CONFIG),
        ("one teaches", CHECKED),
        pytest.param("in turn, checkpointed", CONFIG, marks=pytest.mark.long),
        pytest.param("in turn", TILED | {"tiled_loss": False}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_adapters_may_be_switched_between_steps(how, config):
    expected = _switched(None, how)
    for run in run_ranks(2, _switched, config, how):
        assert_equal_training(run, expected)


def _error_of_both(config):
    with pytest.raises(RuntimeError) as raised:
        _switched(config, "both")
    return str(raised.value)


@pytest.mark.long
@pytest.mark.parametrize("config", [None, CONFIG], ids=["DDP", "ringtile"])
def test_two_forwards_in_one_loss_are_refused_by_ddp_with_and_without_ringtile(config):
    """DDP marks the adapter that a forward does not use as ready, and then gets its gradient by the other forward."""
    for error in run_new_ranks(2, _error_of_both, config):
        assert error.startswith("Expected to mark a variable ready only once"), error


# ---- compilation --------------------------------------------------------------------------------


def _compiled(config, backend):
    """`train` with torch_compile, and what broke the graphs of its model."""
    torch._dynamo.reset()
    counters["graph_break"].clear()
    run = train(config, torch_compile=True, torch_compile_backend=backend, collator=packed, evaluate=False)
    return run, list(counters["graph_break"])


DDPS = ("DistributedDataParallel", "(Reducer)", "(Logger)")  # breaks of its own
# Loops of Python over tiles; before the loss's, a ContextVar is asked how long they may be.
TILES = ("_TiledMlp.__call__", "_head_forward", "ContextVar", "tiled_outputs")


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
    expected = train(None, collator=packed, evaluate=False)
    for run, reasons in run_ranks(2, _compiled, config, backend, timeout=500.0):
        assert_equal_training(run, expected)
        for reason in reasons:
            assert any(name in reason for name in DDPS + breaks), reason
        for name in breaks:
            assert any(name in reason for reason in reasons), name


# ---- metrics ------------------------------------------------------------------------------------


def _accuracy(prediction):
    """The share of targets that the logits before them rank first, and the number of targets."""
    guesses, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    targets = labels != -100
    return {"accuracy": float((guesses == labels)[targets].mean()), "targets": int(targets.sum())}


def _metrics(config):
    """(metrics of evaluate, metrics of predict, logits of predict without labels)"""
    trainer = make_trainer(trainer_arguments={"compute_metrics": _accuracy})
    with enabled(trainer, config):
        evaluated, predicted = trainer.evaluate(), trainer.predict(trainer.eval_dataset)
        unlabeled = trainer.predict([{"input_ids": row["input_ids"]} for row in trainer.eval_dataset]).predictions
    return evaluated, predicted.metrics, unlabeled


def test_metrics_see_global_sequences():
    expected = _metrics(None)
    for evaluated, predicted, unlabeled in run_ranks(2, _metrics, CONFIG):
        for metrics, wanted, prefix in ((evaluated, expected[0], "eval"), (predicted, expected[1], "test")):
            assert metrics[f"{prefix}_accuracy"] == wanted[f"{prefix}_accuracy"]
            assert metrics[f"{prefix}_targets"] == wanted[f"{prefix}_targets"]
            assert metrics[f"{prefix}_loss"] == pytest.approx(wanted[f"{prefix}_loss"], rel=TOLERANCE)
        assert unlabeled.shape == expected[2].shape
        assert numpy.abs(unlabeled - expected[2]).max() <= TOLERANCE


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
    with enabled(trainer, config):
        trainer.train()
        loss, best = trainer.evaluate()["eval_loss"], trainer.state.best_metric
    return trainer.state.global_step, loss, best


def test_early_stop_and_best_model_equal_one_process(tmp_path):
    steps, loss, best = _stop_early(None, str(tmp_path / "single"))
    assert 2 < steps < EARLY["max_steps"]
    assert loss == pytest.approx(best, rel=TOLERANCE)
    for run in run_ranks(2, _stop_early, CONFIG, str(tmp_path / "ranks")):
        assert run == pytest.approx((steps, loss, best), rel=TOLERANCE * 10)  # a learning rate of 4 magnifies rounding


def _stop_early_apart(config, folder):
    return _stop_early(config, f"{folder}/{dist.get_rank()}")


def test_best_model_is_the_first_ranks_where_ranks_share_no_folder(tmp_path):
    """transformers saves it on the first rank alone, and loads nothing on a rank that does not see it."""
    for steps, loss, best in run_ranks(2, _stop_early_apart, CONFIG, str(tmp_path)):
        assert steps > 2
        assert loss == pytest.approx(best, rel=TOLERANCE)


class ChangesWeights(TrainerCallback):
    """On the second rank alone, when training begins, or after its first step."""

    def __init__(self, when):
        self.when = when

    def change(self, model):
        if dist.get_rank() == 1:
            model.lm_head.weight.data[3, 4] += 2.0**-12

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if self.when == "begin":
            self.change(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.when == "end":
            self.change(model)


class Thaws(TrainerCallback):
    """Trains the embedding, which was frozen before, from the second step on."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.model.embed_tokens.weight.requires_grad = state.global_step >= 1


class Freezes(Thaws):
    """The same of a weight that DDP knows: it was not frozen when the model was wrapped."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.model.embed_tokens.weight.requires_grad = False


def _what_callbacks_did(callback, frozen):
    """(the error, the last that was said, the embedding's norm)"""
    trainer = make_trainer(trainer_arguments={"callbacks": [callback]}, max_steps=3)
    weight = trainer.model.model.embed_tokens.weight
    weight.requires_grad = not frozen
    said = Errors()
    logging.getLogger("ringtile").addHandler(said)
    try:
        with enabled(trainer, CONFIG):
            trainer.train()
    except (RefusedError, RingMismatchError) as error:
        return type(error).__name__, str(error), 0.0
    finally:
        logging.getLogger("ringtile").removeHandler(said)
    return "", " ".join(said.texts), float(weight.detach().norm())


class Errors(logging.Handler):
    def __init__(self):
        super().__init__(logging.ERROR)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


DIFFER = "ranks 0 and 1 share a sequence but hold different weights: "


def test_ranks_with_different_weights_are_named():
    for error, said, _ in run_ranks(2, _what_callbacks_did, ChangesWeights("begin"), False):
        assert error == "RingMismatchError"
        assert f"{DIFFER}1 of 21, the first of them lm_head.weight" in said
    for error, said, _ in run_ranks(2, _what_callbacks_did, ChangesWeights("end"), False):
        assert error == ""
        assert DIFFER in said


def test_weight_that_ddp_does_not_know_is_refused():
    for error, said, _ in run_ranks(2, _what_callbacks_did, Thaws(), True):
        assert error == "RefusedError"
        assert "model.embed_tokens.weight was frozen when train() was called" in said
    first, second = run_ranks(2, _what_callbacks_did, Freezes(), False)
    assert first == second
    assert first[:2] == ("", "")


# ---- checkpoints --------------------------------------------------------------------------------

# AdamW has state to lose, and the order of rows is random.
# 14 rows are four steps, so the crash is inside the first epoch and the end inside the second.
LIFE = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 5, "save_strategy": "steps", "save_steps": 2}
LIFE |= {"num_rows": 14}


class Crash(TrainerCallback):
    """Dies without a word after step 3, a step after the last checkpoint."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def _live(config, folder, engine, crash, resume=None):
    callbacks = {"callbacks": [Crash()]} if crash else {}
    folder = str(folder)
    return train(
        config, engine=engine, folder=folder, evaluate=False, resume=resume, trainer_arguments=callbacks, **LIFE
    )


@pytest.mark.parametrize(
    ("engine", "config"),
    [
        ("DDP", CONFIG),
        pytest.param("FSDP2", CONFIG, marks=pytest.mark.long),
        pytest.param("FSDP2", CONFIG | {"stream": True, "tile_tokens": 8}, marks=pytest.mark.long),
    ],
)
def test_resume_after_a_kill_is_bitwise_the_uninterrupted_run(engine, config, tmp_path):
    expected = run_ranks(2, _live, config, tmp_path / "whole", engine, crash=False)
    doomed = Pool(2)
    outcomes = doomed.outcomes(_live, config, tmp_path / "crashed", engine, crash=True)
    doomed.close()
    assert all(isinstance(outcome, EOFError) for outcome in outcomes)
    checkpoint = str(tmp_path / "crashed" / "checkpoint-2")
    resumed = run_ranks(2, _live, config, tmp_path / "crashed", engine, crash=False, resume=checkpoint)
    for run, wanted in zip(resumed, expected, strict=True):
        assert run.losses == wanted.losses  # the state of the Trainer remembers the first two
        assert run.grad_norms == wanted.grad_norms
        assert all(torch.equal(run.weights[name], weight) for name, weight in wanted.weights.items())


# An epsilon as large as the roots that Adam divides by: rounding stays what it was, and the weights can be compared.
OTHER_WORLD = {**LIFE, "max_steps": 4, "adam_epsilon": 1e-2, "num_rows": 12, "gradient_accumulation_steps": 1}


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
    run = _in_a_world(resumed, tmp_path / "resumed", str(tmp_path / "checkpoint-2"))
    assert_equal_training(run, expected)


def _save(folder):
    with engine_arguments("DDP") as arguments:
        trainer = make_trainer(max_steps=1, **arguments)
        with enabled(trainer, CONFIG):
            trainer.train()
            trainer.save_model(folder)
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def test_saved_model_does_not_know_ringtile(tmp_path):
    weights = run_ranks(2, _save, str(tmp_path))[0]
    assert "ringtile" not in json.dumps(json.loads(Path(tmp_path, "config.json").read_text()))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(weight, weights[name]) for name, weight in loaded.named_parameters())


# ---- streams, which have no length and no sampler: every rank of a group reads the same rows -----------

# 10 rows in batches of 4: the third and last batch has 2 rows.
STREAM = {**LIFE, "max_steps": 3, "save_steps": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}


def _of_torch():
    return Stream(make_rows(10))


def _of_datasets():
    rows = datasets.Dataset.from_list(make_rows(10))
    return rows.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=8)


def _train_stream(config, make_stream, folder, **options) -> Run:
    stream = {"train_dataset": make_stream()}
    return train(config, folder=str(folder), trainer_arguments=stream, evaluate=False, **{**STREAM, **options})


@pytest.mark.parametrize(
    ("make_stream", "world_size"),
    [
        (_of_datasets, 2),  # of shards, which have a state
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((_of_torch, 2), (_of_datasets, 4), (_of_torch, 4))),
    ],
)
def test_resumed_stream_is_bitwise_the_uninterrupted_run(make_stream, world_size, tmp_path):
    """Of 2 ranks, and of two groups of 2 ranks, each of which reads its share."""
    options = {"per_device_train_batch_size": 8 // world_size}
    whole = run_ranks(world_size, _train_stream, CONFIG, make_stream, tmp_path, **options)
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed = run_ranks(world_size, _train_stream, CONFIG, make_stream, tmp_path / "b", resume=checkpoint, **options)
    for run, expected in zip(resumed, whole, strict=True):
        assert run.global_step == 3
        assert run.losses == expected.losses  # the state of the Trainer remembers the first two
        assert run.grad_norms == expected.grad_norms
        assert all(torch.equal(run.weights[name], weight) for name, weight in expected.weights.items())


def test_ignore_data_skip_begins_the_stream_again(tmp_path):
    """As in one process."""
    whole = _train_stream(None, _of_torch, tmp_path)
    options = {"resume": str(tmp_path / "checkpoint-2"), "ignore_data_skip": True, "save_strategy": "no"}
    expected = _train_stream(None, _of_torch, tmp_path / "one", **options)
    assert expected.losses[:2] == whole.losses[:2]
    assert expected.losses[2:] != pytest.approx(whole.losses[2:], rel=100 * TOLERANCE)
    for run in run_ranks(2, _train_stream, CONFIG, _of_torch, tmp_path / "ranks", **options):
        assert run.losses == pytest.approx(expected.losses, rel=TOLERANCE)
