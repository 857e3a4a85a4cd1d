"""Models of images and text, with images: on ranks as in one process, the weights of the tower included."""

import functools
from typing import Any

import pytest
import torch
from cells import Cell, check, params, table
from hf_training import TOLERANCE
from ringtile.cli.tiny_images import FIRST_WORD, LAST_WORD, Images, image_model
from transformers import PreTrainedModel

STEPS = {"gradient_accumulation_steps": 2, "learning_rate": 0.01, "max_steps": 2, "remove_unused_columns": False}
# How many images are in each row of a batch: several, one, none in a row, none in a batch.
NUM_IMAGES = (2, 1, 0, 1, 3, 0, 0, 0, 1, 1)


def make_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(num_rows):
        count = int(torch.randint(8, 17, (), generator=generator))
        words = torch.randint(FIRST_WORD, LAST_WORD + 1, (count,), generator=generator)
        rows.append({"words": words.tolist(), "images": [10 * i + j for j in range(NUM_IMAGES[i % len(NUM_IMAGES)])]})
    return rows


class Padded:
    """A data collator that pads rows with images on the right."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._images = Images(model)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return self._images.batch([(row["words"], row["images"]) for row in rows], ignored=3)


def made(name: str) -> dict[str, Any]:
    model = image_model(name)
    data = {"train_dataset": make_rows(20), "eval_dataset": make_rows(5, seed=1), "data_collator": Padded(model)}
    return {"model": model, "trainer_arguments": data}


def cell(name: str, what: str = "", long: bool = True, **more: Any) -> Cell:
    options = STEPS | more.pop("options", {})
    return Cell(f"{name}{what}", options, made=functools.partial(made, name), long=long, **more)


EVERY_RUN = ("qwen2_5_vl", "qwen3_vl", "gemma3")  # M-RoPE and windows; deep features; images that attend both ways
OTHERS = (
    *("qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma4", "internvl", "llava", "llava_next"),
    *("llava_onevision", "glm4v", "smolvlm", "idefics3", "mistral3"),
)
# Gemma 4 has gradients of 14 at its random weights: large steps multiply the rounding of the first.
STEEP = {"gemma4": {"norms": 10 * TOLERANCE, "weights": 10 * TOLERANCE}}
MODELS = [*(cell(name, long=name not in EVERY_RUN, **STEEP.get(name, {})) for name in (*EVERY_RUN, *OTHERS))]
CELLS = table(*MODELS)


@pytest.mark.parametrize("cell", params(CELLS))
def test_ranks_train_with_images_as_one_process(cell: Cell) -> None:
    check(__name__, cell)
