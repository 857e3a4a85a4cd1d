"""Short training, evaluation and prediction runs of a real Trainer, in one process or on each rank of a world."""

import contextlib
import functools
import gc
import importlib
import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ringtile
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import imports, memory
from accuracy import assert_same_steps
from hf_engines import engine as engine_arguments
from hf_engines import full_weights
from hf_models import tiny_model, tiny_tokenizer, with_lora
from pool import Pool
from ringtile.hf.config import Config
from ringtile.hf.feature import Enabled
from ringtile.hf.model import base_model
from ringtile.hf.patches import Patches
from ringtile.hf.trainer import _shard
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

# fp32: a loss of 5 and weights of 1 are sums over ~20 tokens and 32 channels, added in another order on two ranks: a
# few ulp of 1.2e-7 a step, which each step passes on to the next. Any lost token, mask or factor shows above 1e-3.
TOLERANCE = 1e-6


# The first batch is proved in every cell of test-all; test_first_batch.py proves it in make test, which must be short.
PROOF = {} if os.environ.get("RINGTILE_TESTS") == "all" else {"first_batch_check": False}

# One process that attends, packs and drops as ranks that share a sequence: by the same path, as a group of its own.
GROUP_OF_ONE = {"context_parallel_size": 1, "group_of_one": True}

NOT_METRICS = {"loss", "grad_norm", "train_runtime", "train_tokens_per_second"}


# Accelerate reads a package's metadata from its file each time it asks whether it is there: a tenth of a training.
imports._is_package_available = functools.cache(imports._is_package_available)

# It collects garbage when a training begins, a twentieth of all that the tests compute: here, in each eighth training.
_begun = itertools.count()
memory.gc = SimpleNamespace(collect=lambda: 0 if next(_begun) % 8 else gc.collect())


def make_rows(num_rows: int, seed: int = 0, late_targets: bool = False) -> list[dict[str, Any]]:
    """Rows of 8 to 22 tokens that ignore their first targets: some of the first half, or, with `late_targets`, three
    quarters, so that the first of two ranks holds none in a contiguous layout with padding on the left."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_rows):
        length = int(torch.randint(8, 23, (), generator=generator))
        ids = torch.randint(3, 96, (length,), generator=generator)
        labels = ids.clone()
        labels[
            : 3 * length // 4 if late_targets else int(torch.randint(0, length // 2, (), generator=generator))
        ] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def make_pairs(num_rows: int, seed: int = 0) -> list[dict[str, str]]:
    """Prompts with a chosen and a rejected completion, as text of words for `tiny_tokenizer`."""
    generator = torch.Generator().manual_seed(seed)

    def words(shortest: int, longest: int) -> str:
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        return "".join(f" w{int(token)}" for token in torch.randint(3, 96, (length,), generator=generator))

    return [{"prompt": words(3, 9), "chosen": words(2, 12), "rejected": words(2, 12)} for _ in range(num_rows)]


@dataclass(frozen=True)
class Padded:
    """A data collator that pads to the longest row, left or right, with an attention mask."""

    side: str = "right"

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        columns: dict[str, list[list[int]]] = {name: [] for name in fill}
        for row in rows:
            padding = length - len(row["input_ids"])
            for name, values in {**row, "attention_mask": [1] * len(row["input_ids"])}.items():
                pad = [fill[name]] * padding
                columns[name].append(pad + values if self.side == "left" else values + pad)
        return {name: torch.tensor(values) for name, values in columns.items() if values}


def packed(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Documents one after another in one row; position ids start again with each."""
    batch: dict[str, torch.Tensor] = DataCollatorWithFlattening()(rows)
    return batch


def packed_for_flash(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Documents in one row, named by cu_seq_lens beside their position ids."""
    batch: dict[str, Any] = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    return batch


class Stream(IterableDataset):
    """The rows as an iterable data set without a length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@dataclass
class Run:
    """What a training run left behind."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    eval_loss: float = 0.0
    predictions: torch.Tensor | None = None
    label_ids: torch.Tensor | None = None
    metrics: list[dict[str, float]] = field(default_factory=list)  # whatever else the Trainer logged of a step
    num_input_tokens: int = 0
    total_flos: float = 0.0
    epoch: float = 0.0
    global_step: int = 0
    first_eval_loss: float = 0.0  # of an evaluation before the training
    said: list[str] = field(default_factory=list)  # what ringtile warned of


class Messages(logging.Handler):
    """What ringtile warns of inside."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("ringtile").addHandler(self)
        return self.texts

    def __exit__(self, *error: object) -> None:
        logging.getLogger("ringtile").removeHandler(self)


def enter_world() -> None:
    """Makes transformers see the process group of this rank, or its absence, as if started for it."""
    import datasets  # a machine with a GPU that runs tests/gpu may not have it

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    if dist.is_initialized() and dist.get_world_size() > 1:
        rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)


@contextlib.contextmanager
def without_other_tests(name: str) -> Iterator[None]:
    """Inside, of the modules of tests that a session has imported this one alone is there: a proof keeps and puts back
    the data of all modules of the user, and those of other tests would take most of its time."""
    others = [each for each in sys.modules if each.startswith("test_") and each != name]
    hidden = {each: sys.modules.pop(each) for each in others}
    try:
        yield
    finally:
        sys.modules.update(hidden)


def run_new_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """As `pool.run_ranks`, on ranks that end with it."""
    with contextlib.closing(Pool(world_size)) as pool:
        return pool.run(function, *args)


def make_trainer(
    family: str = "llama",
    *,
    collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]] | None = None,
    trainer_class: type[Trainer] | str = Trainer,
    stream: bool = False,
    late_targets: bool = False,
    model: torch.nn.Module | None = None,
    lora: bool = False,
    num_rows: int = 22,
    folder: str | None = None,
    trainer_arguments: dict[str, Any] | None = None,
    arguments_class: type[TrainingArguments] = TrainingArguments,
    **arguments: Any,
) -> Trainer:
    """A Trainer on 22 training and 5 evaluation rows; SGD without clipping, so that weights show every gradient."""
    enter_world()
    train_rows: Any = make_rows(num_rows, late_targets=late_targets)
    eval_rows: Any = make_rows(5, seed=1)
    settings = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 0.3,
        "optim": "sgd",
        "max_grad_norm": 1e9,  # reports the norm and clips nothing: clipping would hide a wrong scale of the loss
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "include_num_input_tokens_seen": "all",
        **arguments,
    }
    model = model or tiny_model(family).train()  # before the arguments, under which DeepSpeed may shard new models
    model = with_lora(model) if lora else model
    folder = folder or tempfile.mkdtemp(prefix="ringtile-test-")
    extra = {"data_collator": collator or Padded(), **(trainer_arguments or {})}
    if isinstance(trainer_class, str):
        package, _, name = trainer_class.rpartition(".")
        trainer_class = getattr(importlib.import_module(package), name)
    if trainer_class.__module__.startswith("trl."):
        package = importlib.import_module(trainer_class.__module__.rpartition(".")[0])
        config_class = getattr(package, trainer_class.__name__.replace("Trainer", "Config"))
        training_arguments = config_class(folder, **{"max_length": 64, "bf16": False, **settings})
        if trainer_class.__name__ != "SFTTrainer":
            train_rows, eval_rows = make_pairs(num_rows), make_pairs(5, seed=1)
        import datasets

        train_rows, eval_rows = (datasets.Dataset.from_list(rows) for rows in (train_rows, eval_rows))
        extra = {"processing_class": tiny_tokenizer(), **(trainer_arguments or {})}
    else:
        training_arguments = arguments_class(folder, **settings)
    given = (train_rows, eval_rows)
    return trainer_class(
        model=model,
        args=training_arguments,
        **dict(zip(("train_dataset", "eval_dataset"), map(Stream, given) if stream else given, strict=True)) | extra,
    )


@contextlib.contextmanager
def enabled(trainer: Trainer, config: dict[str, Any] | None) -> Iterator[None]:
    """Under ringtile with `config` inside."""
    if config is None:
        yield
        return
    keys = {key: value for key, value in (PROOF | config).items() if key != "group_of_one"}
    ringtile.enable(trainer, keys)
    patches = Patches()
    if "group_of_one" in config:
        run = Enabled(trainer, trainer.model, base_model(trainer.model), Config.load(keys))
        patches = Patches.of(lambda new: setattr(_shard(run, new), "proof", None))
    try:
        yield
    finally:
        patches.restore()
        ringtile.restore(trainer)


def train(config: dict[str, Any] | None, *, engine: str = "DDP", **options: Any) -> Run:
    """Trains, evaluates and predicts; with `config`, under ringtile. Run it on every rank."""
    with engine_arguments(engine) as arguments, Messages() as said:
        run, trainer = _train(config, **{**arguments, **options})
    if dist.is_initialized() and dist.get_world_size() > 1:  # the engine is the one asked for
        classes = type(getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)).__mro__
        assert WRAPPERS[engine.partition("-")[0]] in [cls.__name__ for cls in classes]
    run.said = said
    return run


WRAPPERS = {"DDP": "DistributedDataParallel", "FSDP2": "FSDPModule", "ZeRO": "DeepSpeedEngine"}


def _train(
    config: dict[str, Any] | None,
    *,
    evaluate: bool = True,
    evaluate_first: bool = False,
    resume: str | None = None,
    **options: Any,
) -> tuple[Run, Trainer]:
    trainer = make_trainer(**options)
    run = Run()
    with enabled(trainer, config):
        _fill(run, trainer, evaluate, evaluate_first, resume)
    return run, trainer


def _fill(run: Run, trainer: Trainer, evaluate: bool, evaluate_first: bool, resume: str | None) -> None:
    if evaluate_first:
        run.first_eval_loss = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=resume)
    for entry in trainer.state.log_history:
        run.eval_loss = entry.get("eval_loss", run.eval_loss)
        if "loss" in entry:
            run.losses.append(entry["loss"])
            run.grad_norms.append(float(entry.get("grad_norm", 0.0)))
            run.metrics.append({name: entry[name] for name in sorted(entry.keys() - NOT_METRICS)})
    run.weights = full_weights(trainer.model)
    run.num_input_tokens = trainer.state.num_input_tokens_seen
    run.total_flos, run.epoch, run.global_step = (
        trainer.state.total_flos,
        trainer.state.epoch,
        trainer.state.global_step,
    )
    if evaluate:
        run.eval_loss = trainer.evaluate()["eval_loss"]
        output = trainer.predict(trainer.eval_dataset)
        run.predictions, run.label_ids = torch.as_tensor(output.predictions), torch.as_tensor(output.label_ids)


def failure_of(
    trainer: Trainer, config: dict[str, Any] | None = None, use: Callable[[Trainer], Any] = Trainer.train
) -> str:
    """ "RefusedError: why": the RingtileError that ends `use` of the Trainer once it is enabled."""
    ringtile.enable(trainer, {"context_parallel_size": 2, **(config or {})})
    try:
        with pytest.raises(ringtile.RingtileError) as raised:
            use(trainer)
    finally:
        ringtile.restore(trainer)
    return f"{type(raised.value).__name__}: {raised.value}"


def assert_equal_training(
    run: Run,
    expected: Run,
    losses: float = TOLERANCE,
    norms: float = TOLERANCE,
    weights: float = TOLERANCE,
    trained: str = "",
) -> None:
    """The same steps: losses, gradient norms, and the weights after the last one with `trained` in their names, each
    relative to its largest. The tolerances are of one step."""
    assert run.global_step == expected.global_step == len(run.losses)
    assert_same_steps(run.losses, expected.losses, losses)
    assert_same_steps(run.grad_norms, expected.grad_norms, norms)
    names = [name for name in expected.weights if trained in name]
    assert names
    assert names == [name for name in run.weights if trained in name]
    for name in names:
        weight = expected.weights[name]
        assert run.weights[name].dtype == weight.dtype
        assert (run.weights[name] - weight).abs().max() <= run.global_step * weights * weight.abs().max(), name
