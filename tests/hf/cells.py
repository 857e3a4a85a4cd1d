"""Rows of the tables of trainings: what runs on ranks under ringtile, and what it equals, or why it is refused."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import ringtile
import torch
from hf_training import PROOF, TOLERANCE, Run, assert_equal_training, enter_world, failure_of, make_trainer, train
from pool import run_ranks
from torch.nn.modules import module as hooks
from transformers import Trainer

OPTIONS = {"max_steps": 2, "evaluate": False}  # of every training, unless a row says otherwise


def _nothing(*trainer: Trainer) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Cell:
    """A training on ranks under ringtile and the same without it, the reference, which is one process by default.

    options are those of `hf_training.train` on both sides; ranks and alone: more for one side. made: more that each
    process makes for itself, such as a model; made_alone: the same where the reference differs.
    """

    what: str  # the risk that this row holds
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, Any] = field(default_factory=dict)
    alone: dict[str, Any] = field(default_factory=dict)
    made: Callable[[], dict[str, Any]] = _nothing
    made_alone: Callable[[], dict[str, Any]] | None = None
    world: int = 2
    processes: int = 1  # of the reference
    alone_config: dict[str, Any] | None = None  # of a reference that is under ringtile too
    long: bool = False
    needs: tuple[str, ...] = ()  # packages
    losses: float = TOLERANCE
    norms: float = TOLERANCE
    weights: float = TOLERANCE
    predictions: float = TOLERANCE  # of logits, not relative
    trained: str = ""  # the weights that are compared: those with this in their names
    says: tuple[str, ...] = ()  # what the first rank warns of, once each; no other rank warns

    @property
    def size(self) -> int:
        """The ranks that share a sequence."""
        return int(self.config.get("context_parallel_size", 2))

    @property
    def engine(self) -> str:
        return str((self.options | self.ranks).get("engine", "DDP"))

    @property
    def same_batches(self) -> bool:
        """Whether the reference reads batch by batch what a group of ranks reads, so that all counts are the same."""
        differ = {"collator", "per_device_train_batch_size"} & (self.ranks.keys() | self.alone.keys())
        return self.world // self.size == self.processes and not differ

    def packages(self) -> set[str]:
        named = str(self.options.get("trainer_class", "")).partition(".")[0]
        zero = ["deepspeed"] * self.engine.startswith("ZeRO")
        return {*self.needs, *zero, *["trl"] * (named == "trl"), *["peft"] * bool(self.options.get("lora"))}


def table(*rows: Any) -> dict[str, Any]:
    """The rows by what they say of themselves."""
    named = {row.what: row for row in rows}
    assert len(named) == len(rows), "two rows are called alike"
    return named


def params(rows: dict[str, Any]) -> list[Any]:
    return [pytest.param(row, id=what, marks=[pytest.mark.long] * row.long) for what, row in rows.items()]


def train_cell(module: str, what: str, alone: bool, proved: bool = True) -> Run:
    """Run it on every rank: the row is looked up there, so that it may hold functions that cannot be sent."""
    cell: Cell = importlib.import_module(module).CELLS[what]
    enter_world()
    made = cell.made_alone if alone and cell.made_alone else cell.made
    options = OPTIONS | cell.options | (cell.alone if alone else cell.ranks) | made()
    config = {"context_parallel_size": 2} | cell.config | ({} if proved else {"first_batch_check": False})
    return train(cell.alone_config if alone else config, **options)


_references: dict[str, Run] = {}


def _reference(module: str, cell: Cell) -> Run:
    """Rows with equal options share it."""
    options = sorted((cell.options | cell.alone).items())
    key = repr((cell.processes, options, cell.made_alone or cell.made, cell.alone_config))
    if key not in _references:
        call = (module, cell.what, True)
        _references[key] = (
            train_cell(*call) if cell.processes == 1 else run_ranks(cell.processes, train_cell, *call, timeout=200.0)[0]
        )
    return _references[key]


def _of_ranks(cell: Cell, *call: Any) -> list[Run]:
    return [train_cell(*call)] if cell.world == 1 else run_ranks(cell.world, train_cell, *call, timeout=200.0)


def assert_same_bits(proved: Run, unproved: Run, counts_flops: bool = True) -> None:
    """The check of the first batch changes nothing. counts_flops: ZeRO-3 counts the weights that it has gathered."""
    assert proved.weights.keys() == unproved.weights.keys()
    for name, weight in unproved.weights.items():
        assert torch.equal(proved.weights[name], weight), name
    names = ["losses", "grad_norms", "metrics", "eval_loss", "first_eval_loss", "num_input_tokens"]
    for name in [*names, *["total_flos"] * counts_flops]:
        assert repr(getattr(proved, name)) == repr(getattr(unproved, name)), name  # NaN is itself
    if unproved.predictions is not None:
        assert torch.equal(proved.predictions, unproved.predictions)


def check(module: str, cell: Cell) -> None:
    for package in cell.packages():
        pytest.importorskip(package)
    expected, call = _reference(module, cell), (module, cell.what, False)
    runs = _of_ranks(cell, *call)
    for run in runs:
        assert_equal_runs(run, expected, cell)
    if PROOF == {} and "first_batch_check" not in cell.config:
        for proved, unproved in zip(runs, _of_ranks(cell, *call, False), strict=True):
            assert_same_bits(proved, unproved, counts_flops=cell.engine != "ZeRO-3")
    for words in cell.says:
        assert sum(words in text for text in runs[0].said) == 1, runs[0].said
    assert len(runs[0].said) <= len(cell.says), runs[0].said
    assert not any(run.said for run in runs[1:])


def assert_equal_runs(run: Run, expected: Run, cell: Cell) -> None:
    assert_equal_training(run, expected, cell.losses, cell.norms, cell.weights, cell.trained)
    for loss, wanted in ((run.eval_loss, expected.eval_loss), (run.first_eval_loss, expected.first_eval_loss)):
        assert loss == pytest.approx(wanted, rel=cell.losses)
    if expected.predictions is not None:
        assert run.predictions.shape == expected.predictions.shape
        assert (run.predictions - expected.predictions).abs().max() <= cell.predictions
        assert torch.equal(run.label_ids, expected.label_ids)
    if cell.same_batches:
        assert (run.epoch, run.num_input_tokens) == (expected.epoch, expected.num_input_tokens)
        if cell.made_alone is None and cell.engine != "ZeRO-3":  # whose parameters transformers does not see whole
            assert run.total_flos == expected.total_flos
        for metrics, wanted in zip(run.metrics, expected.metrics, strict=True):
            assert metrics.keys() == wanted.keys()
            for name in metrics:  # logits and rewards are differences of numbers up to 5
                assert metrics[name] == pytest.approx(wanted[name], rel=cell.losses, abs=5 * TOLERANCE), name


# ---- refusals -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """What ends `use` of an enabled Trainer on two ranks, or `enable` in one process: an error that holds the words.

    what: what is refused; where the words say it, the same.
    """

    what: str
    words: str
    options: dict[str, Any] = field(default_factory=dict)
    made: Callable[[], dict[str, Any]] = _nothing
    prepare: Callable[[Trainer], Any] = _nothing
    use: Callable[[Trainer], Any] = Trainer.train
    config: dict[str, Any] = field(default_factory=dict)
    error: str = "RefusedError"
    long: bool = False
    needs: tuple[str, ...] = ()


def of_change(words: str, prepare: Any, **more: Any) -> Refusal:
    """Of a Trainer that was changed before it is enabled."""
    return Refusal(words, words, prepare=prepare, **more)


def _trainer(refusal: Refusal) -> Trainer:
    trainer = make_trainer(**({"max_steps": 1} | refusal.options | refusal.made()))
    refusal.prepare(trainer)
    return trainer


def fail(module: str, rows: str, what: str) -> str:
    """ "RefusedError: why". Run it on every rank."""
    refusal: Refusal = getattr(importlib.import_module(module), rows)[what]
    enter_world()
    message = failure_of(_trainer(refusal), refusal.config, refusal.use)
    assert not hooks._global_forward_hooks  # what watched the modules is gone
    assert not hooks._global_forward_pre_hooks
    return message


def check_on_ranks(module: str, rows: str, refusal: Refusal) -> None:
    """Every rank says it."""
    for package in refusal.needs:
        pytest.importorskip(package)
    for message in run_ranks(2, fail, module, rows, refusal.what):
        assert message.startswith(f"{refusal.error}: "), message
        assert refusal.words in message


def check_enable(refusal: Refusal) -> None:
    """`enable` refuses, and leaves the Trainer as it was."""
    for package in refusal.needs:
        pytest.importorskip(package)
    trainer = _trainer(refusal)
    before = dict(vars(trainer))
    with pytest.raises(ringtile.RingtileError) as raised:
        ringtile.enable(trainer, {"context_parallel_size": 2} | refusal.config)
    assert type(raised.value).__name__ == refusal.error
    assert refusal.words in str(raised.value)
    assert vars(trainer) == before
