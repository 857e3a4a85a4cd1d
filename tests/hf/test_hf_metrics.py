"""`MetricsCallback`: the numbers in the Trainer's log are those of the data, of the plan and of the clock."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import ringtile
import torch
import torch.distributed as dist
from hf_training import PROOF, Padded, make_trainer
from pool import run_ranks
from ringtile.first_batch.trace import running_trace
from ringtile.hf import first_batch
from ringtile.hf.batch import ShardedBatch, active_batch
from ringtile.hf.features import callbacks
from ringtile.hf.layers import layer_masks
from ringtile.peak_memory import peak_bytes
from ringtile.planner.layer import plan_of
from ringtile.sequence.plan import Shape
from transformers import PreTrainedModel, TrainerCallback

KEYS = {"tokens_per_s", "tokens_per_rank", "bytes_moved", "wait_share", "peak_bytes"}
TOKENS = 4 * 24  # of a step: 2 batches of 2 rows of 24 tokens


class Padded24(Padded):
    """Every batch has 24 tokens a row."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(rows)
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {
            name: torch.nn.functional.pad(value, (0, 24 - value.size(1)), value=fill[name])
            for name, value in batch.items()
        }


class Clock:
    """time.perf_counter in a world where a step takes one second, an evaluation and a save 50."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Reporter(TrainerCallback):
    """Sees what TensorBoard's and W&B's callbacks see; moves the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.logged: list[dict[str, Any]] = []

    def on_step_begin(self, *unused: Any, **also_unused: Any) -> None:
        self.clock.now += 1.0

    def on_evaluate(self, *unused: Any, **also_unused: Any) -> None:
        self.clock.now += 50.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append(dict(logs))


class PlannedBytes(TrainerCallback):
    """Adds up the plans of all layers for each sharded batch of a step; after the step, which resolves schemes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.config, self.dtype = model.config.get_text_config(), model.dtype
        self.total, self.in_step = 0, False
        self.batches: list[tuple[ShardedBatch, int]] = []  # of this step, with their rows
        model.register_forward_pre_hook(self.before_forward, with_kwargs=True)

    def before_forward(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.in_step and running_trace() is None and (sharded := active_batch()) is not None:
            self.batches.append((sharded, kwargs["input_ids"].size(0)))

    def on_step_begin(self, *unused: Any, **also_unused: Any) -> None:
        self.in_step = True

    def on_step_end(self, *unused: Any, **also_unused: Any) -> None:
        self.in_step = False
        num_heads = self.config.num_attention_heads
        num_kv_heads = getattr(self.config, "num_key_value_heads", None) or num_heads
        head_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // num_heads
        while self.batches:
            sharded, batch_size = self.batches.pop(0)
            shape = Shape(batch_size, num_heads, num_kv_heads, head_dim, head_dim, self.dtype)
            for layer in layer_masks(self.config):
                sequence = sharded.narrowed(layer)
                scheme = sequence.resolved(shape).scheme
                mine = plan_of(sequence.mask, sequence.layout, shape, scheme).ranks[sequence.rank]
                self.total += mine.forward_bytes_sent + mine.backward_bytes_sent


def logged(config: dict[str, Any], **arguments: Any) -> tuple[list[dict[str, Any]], int]:
    """The logged lines with a loss on this rank, and the bytes that the plans of its rings send in all steps."""
    clock = Clock()
    mocked = mock.Mock(perf_counter=clock)
    with mock.patch.object(callbacks, "time", mocked), mock.patch.object(first_batch, "time", mocked):
        trainer = make_trainer(collator=Padded24(), **arguments)
        planned, reporter = PlannedBytes(trainer.model), Reporter(clock)
        for callback in (planned, reporter, ringtile.MetricsCallback()):
            trainer.add_callback(callback)
        ringtile.enable(trainer, config)
        trainer.train()
        ringtile.restore(trainer)
    in_history = [line for line in trainer.state.log_history if "loss" in line]
    lines = [line for line in reporter.logged if "loss" in line]
    assert [{**line, "step": of_state["step"]} for line, of_state in zip(lines, in_history, strict=True)] == in_history
    return lines, planned.total


# Checkpointed layers keep attention, and communicate no more.
@pytest.mark.parametrize("checkpointed", [pytest.param(False, marks=pytest.mark.long), True])
def test_metrics_are_those_of_the_data_the_plan_and_the_clock(checkpointed: bool) -> None:
    options = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "gradient_checkpointing": checkpointed}
    runs = run_ranks(2, logged, {"context_parallel_size": 2}, **options)
    planned = sum(plan_bytes for _, plan_bytes in runs)
    assert planned > 0
    for lines, _ in runs:
        assert len(lines) == 2
        for line in lines:
            assert line.keys() >= KEYS
            assert line["tokens_per_s"] == TOKENS  # the 50 s of the evaluations do not count
            assert line["tokens_per_rank"] == TOKENS / 2
            assert line["peak_bytes"] > 1 << 20
        assert sum(2 * line["bytes_moved"] for line in lines) == planned  # of the padded batches, all different
    assert [line["peak_bytes"] for line in runs[0][0]] == [line["peak_bytes"] for line in runs[1][0]]


def test_different_batches_count_once_each() -> None:
    for lines, _ in run_ranks(2, logged, {}):
        assert [line["tokens_per_s"] for line in lines] == [2 * TOKENS] * len(lines)
        assert [line["tokens_per_rank"] for line in lines] == [TOKENS] * len(lines)
        assert not lines[0].keys() & {"bytes_moved", "wait_share"}


def test_one_process_and_lines_at_the_end_of_an_epoch() -> None:
    (line,), _ = logged({}, logging_strategy="epoch", num_train_epochs=1, max_steps=-1, num_rows=10)
    assert line["tokens_per_s"] == line["tokens_per_rank"] == pytest.approx(TOKENS, rel=0.2)  # the last step has fewer
    assert line["peak_bytes"] <= peak_bytes()


def late() -> float:
    """The mean of the seconds that the ranks wait in a step, where rank 1 comes late to the first ring of a forward."""
    trainer = make_trainer(collator=Padded24(), num_rows=16, max_steps=3)
    if dist.get_rank() == 1:
        trainer.model.model.layers[0].self_attn.register_forward_pre_hook(lambda *unused: time.sleep(0.2))
    trainer.add_callback(ringtile.MetricsCallback())
    ringtile.enable(trainer, PROOF | {"context_parallel_size": 2})
    trainer.train()
    ringtile.restore(trainer)
    line = trainer.state.log_history[2]
    assert line["wait_share"] <= 1
    seconds: float = line["wait_share"] * TOKENS / line["tokens_per_s"]
    return seconds


def test_a_rank_that_waits_is_seen() -> None:
    """Rank 0 waits for 0.2 s in each of 2 batches, and rank 1 for nothing; a busy machine makes rank 0 late too."""
    first, second = run_ranks(2, late)
    assert first == second
    assert first > 0.1


def losses_and_keys(measured: bool) -> tuple[list[tuple[float, float]], set[str]]:
    trainer = make_trainer(max_steps=2)
    if measured:
        trainer.add_callback(ringtile.MetricsCallback())
    ringtile.enable(trainer, PROOF | {"context_parallel_size": 2})
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [(log["loss"], log["grad_norm"]) for log in logs], {*logs[0]}


def test_metrics_change_no_number() -> None:
    (plain, keys), (measured, more) = (run_ranks(2, losses_and_keys, on)[0] for on in (False, True))
    assert measured == plain
    assert more - keys == KEYS


def test_a_trainer_that_is_not_enabled_is_refused() -> None:
    trainer = make_trainer(max_steps=1)
    trainer.add_callback(ringtile.MetricsCallback())
    for _ in range(2):
        with pytest.raises(
            ringtile.ConfigError, match=r"expected ringtile.enable\(trainer, ...\) after the callback was"
        ):
            trainer.train()
        ringtile.enable(trainer, {})
        ringtile.restore(trainer)
