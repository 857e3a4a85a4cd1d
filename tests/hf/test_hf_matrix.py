"""Trainers x engines x meshes x weights x MLPs x ways to train: every cell has the losses and weights of one process.

pytest tests/hf/test_hf_matrix.py                       8 cells, in which every pair of choices occurs
pytest tests/hf/test_hf_matrix.py -m "long or not long" all 512
"""

import itertools

import pytest
from cells import Cell, check, params, table
from hf_training import packed

CHOICES = {
    "engine": ("DDP", "FSDP2", "ZeRO-2", "ZeRO-3"),
    "trainer": ("Trainer", "SFTTrainer"),
    "world": ("cp2", "dp2 x cp2"),
    "weights": ("full", "LoRA"),
    "activations": ("kept", "checkpointing"),
    "batches": ("one", "accumulation"),
    "rows": ("padded", "packing"),
    "MLPs": ("whole", "tiled"),
}
WORLDS = {"cp2": 2, "dp2 x cp2": 4}
ORDERS = (0b0011, 0b0101, 0b0110, 0b0001, 0b0010, 0b0111, 0b1011)  # none is another's complement


def _options(trainer: str, weights: str, activations: str, batches: str, rows: str) -> dict:
    """What `hf_training.train` is given, apart from the engine and the number of rows of a batch."""
    options = {"num_rows": 64, "max_steps": 2, "gradient_accumulation_steps": 1}
    if trainer == "SFTTrainer":
        options["trainer_class"] = "trl.SFTTrainer"
    if activations == "checkpointing":
        options["gradient_checkpointing"] = True
    if batches == "accumulation":
        options["gradient_accumulation_steps"] = 2
    if rows == "packing":
        options |= {"packing": True, "max_length": 48} if trainer == "SFTTrainer" else {"collator": packed}
    return options | {"lora": weights == "LoRA"}


def _in_every_run(engine: int, *others: int) -> bool:
    """Two cells for each engine, which differ in all other choices. That with most to do is DDP's, the cheapest."""
    first = tuple(order >> (3 - engine) & 1 for order in ORDERS)
    return others in (first, tuple(1 - choice for choice in first))


def test_cells_of_every_run_hold_every_pair():
    sizes = [len(values) for values in CHOICES.values()]
    cells = [numbers for numbers in itertools.product(*map(range, sizes)) if _in_every_run(*numbers)]
    for i, j in itertools.combinations(range(len(sizes)), 2):
        assert len({(cell[i], cell[j]) for cell in cells}) == sizes[i] * sizes[j]


def _cells():
    """Each with one process, on the batches of all data-parallel groups at once."""
    for cell in itertools.product(*map(enumerate, CHOICES.values())):
        numbers, (engine, trainer, world, *ways, mlps) = zip(*cell, strict=True)
        yield Cell(
            "-".join((engine, trainer, world, *ways, mlps)),
            _options(trainer, *ways),
            {"tiled_mlp": True, "tile_tokens": 7} if mlps == "tiled" else {},
            ranks={"engine": engine},
            alone={"per_device_train_batch_size": WORLDS[world]},
            world=WORLDS[world],
            long=not _in_every_run(*numbers),
        )


CELLS = table(*_cells())


@pytest.mark.parametrize("cell", params(CELLS))
def test_cell_equals_one_process(cell):
    check(__name__, cell)
