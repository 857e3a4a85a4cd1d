"""Trainers x engines x meshes x weights x ways to train: every cell has the losses and weights of one process.

pytest tests/hf/test_hf_matrix.py                           16 cells, in which every pair of choices occurs
pytest tests/hf/test_hf_matrix.py -m "long or not long" all 128
"""

import functools
import itertools

import pytest
from hf_engines import needs_deepspeed
from hf_training import Run, assert_equal_training, packed, train
from pool import run_ranks

TRAINERS = ("Trainer", "SFTTrainer")
ENGINES = ("DDP", "FSDP2", "ZeRO-2", "ZeRO-3")
WORLDS = {"cp2": 2, "dp2 x cp2": 4}
WEIGHTS = ("full", "LoRA")
WAYS = ("plain", "checkpointing", "accumulation", "packing")


def _options(trainer: str, weights: str, way: str) -> dict:
    """What `hf_training.train` is given, apart from the engine and the number of rows of a batch."""
    options = {"num_rows": 48, "max_steps": 3, "gradient_accumulation_steps": 1, "evaluate": False}
    if trainer == "SFTTrainer":
        import trl

        options["trainer_class"] = trl.SFTTrainer
    if way == "checkpointing":
        options["gradient_checkpointing"] = True
    elif way == "accumulation":
        options["gradient_accumulation_steps"] = 4
    elif way == "packing":
        options |= {"packing": True, "max_length": 48} if trainer == "SFTTrainer" else {"collator": packed}
    return options | {"lora": weights == "LoRA"}


@functools.cache
def _reference(trainer: str, weights: str, way: str, rows_of_a_batch: int) -> Run:
    """The same in one process without ringtile, on the batches of all data-parallel groups at once."""
    return train(None, per_device_train_batch_size=rows_of_a_batch, **_options(trainer, weights, way))


CHOICES = (TRAINERS, ENGINES, WORLDS, WEIGHTS, WAYS)


def _in_every_run(trainer: int, engine: int, world: int, weights: int, way: int) -> bool:
    """A cell for each engine and way, given by the numbers of its choices: an orthogonal array over their bits."""
    low, high = (engine ^ way) & 1, (engine ^ way) >> 1
    return (trainer, world, weights) == (low, high, low ^ high)


def test_cells_of_every_run_hold_every_pair():
    cells = [
        numbers
        for numbers in itertools.product(*(range(len(choices)) for choices in CHOICES))
        if _in_every_run(*numbers)
    ]
    for i, j in itertools.combinations(range(len(CHOICES)), 2):
        assert len({(cell[i], cell[j]) for cell in cells}) == len(CHOICES[i]) * len(CHOICES[j])


def _cells():
    for numbers in itertools.product(*(range(len(choices)) for choices in CHOICES)):
        values = [list(choices)[number] for choices, number in zip(CHOICES, numbers, strict=True)]
        marks = () if _in_every_run(*numbers) else (pytest.mark.long,)
        yield pytest.param(*values, marks=marks, id="-".join(values))


@pytest.mark.parametrize(("trainer", "engine", "world", "weights", "way"), _cells())
def test_cell_equals_one_process(trainer, engine, world, weights, way):
    if trainer == "SFTTrainer":
        pytest.importorskip("trl")
    if weights == "LoRA":
        pytest.importorskip("peft")
    if engine.startswith("ZeRO"):
        needs_deepspeed()
    expected = _reference(trainer, weights, way, WORLDS[world])
    config, options = {"context_parallel_size": 2}, _options(trainer, weights, way)
    for run in run_ranks(WORLDS[world], train, config, engine=engine, **options):
        assert_equal_training(run, expected)
