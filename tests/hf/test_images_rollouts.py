"""Trainers that generate, with images in the prompts: ranks that share sequences equal one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hf_rollouts import train_rollouts
from pool import run_ranks
from ringtile import RefusedError
from ringtile.hf.features import rollouts
from test_images_trl import processor, rows
from test_rollouts import ALL as EVERYTHING
from test_rollouts import RLOO, assert_equal

from tools.models.tiny_images import image_model

trl = pytest.importorskip("trl")
STEPS = {"learning_rate": 0.01}
ALL = EVERYTHING | {"max_steps": 2}


def made() -> dict[str, Any]:
    # TRL fails on a batch whose rows have no image, in one process too.
    data = {
        f"{name}_dataset": rows(count, ()).filter(lambda row: row["images"])
        for name, count in (("train", 12), ("eval", 3))
    }
    return {"model": image_model("gemma3"), "processing_class": processor(), **data}


def by_row(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Of completions that are all alike."""
    return [float(row % 3) for row in range(len(completion_ids))]


# The most likely tokens, whatever is drawn, so that ranks generate what one process does.
GREEDY = {"given": False, "top_k": 1, "rewards": [by_row], "max_completion_length": 2, "beta": 0.1, "max_steps": 1}
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(2, ALL, marks=LONG),
        (2, GREEDY),
        pytest.param(3, GREEDY, marks=LONG),
        pytest.param(3, ALL, marks=LONG),
        pytest.param(2, ALL | {"lora": True, "gradient_checkpointing": True}, marks=LONG),
        pytest.param(2, RLOO | {"kind": "RLOO", "max_steps": 2}, marks=LONG),
    ],
)
def test_equals_one_process(world: int, options: dict[str, Any]) -> None:
    options = options | STEPS
    expected = train_rollouts(None, made=made, **options)
    for run in run_ranks(world, train_rollouts, {"context_parallel_size": world}, group=world, made=made, **options):
        assert_equal(run, expected)


# ---- rows and what the processor has made of all -----------------------------------------------------

PROMPTS = [[5, 6], [7], [8, 9, 10]]
IMAGES = [["a", "b"], [], ["c"]]
TYPES = {"mm_token_type_ids": [[0, 1], [0], [1, 0, 0]]}
GRID = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 2]])


def trainer() -> Any:
    return object.__new__(trl.GRPOTrainer)


@pytest.mark.parametrize(
    "pixels",
    [
        {"pixel_values": torch.randn(20, 6), "image_grid_thw": GRID},
        {"pixel_values": torch.randn(3, 3, 4, 4), "image_sizes": GRID[:, 1:]},
        {"pixel_values": [x.numpy() for x in torch.randn(3, 3, 4, 4)]},
        {"pixel_values": torch.randn(3, 2, 3, 4, 4), "pixel_attention_mask": torch.ones(3, 2, 4, 4)},  # by row
    ],
    ids=["patches", "images", "arrays", "padded rows"],
)
def test_rows_are_parted_and_joined(pixels: dict[str, Any]) -> None:
    of_rows = rollouts._rows(trainer(), PROMPTS, IMAGES, pixels | TYPES)
    ids, images, fields = rollouts._unsplit(trainer(), of_rows)
    assert (ids, images, fields["mm_token_type_ids"]) == (PROMPTS, IMAGES, TYPES["mm_token_type_ids"])
    whole = {name: x if isinstance(x, torch.Tensor) else torch.tensor(np.array(x)) for name, x in pixels.items()}
    assert all(torch.equal(fields[name], x) for name, x in whole.items())
    first, last = (rollouts._unsplit(trainer(), part)[2] for part in (of_rows[:2], of_rows[2:]))
    assert all(torch.equal(torch.cat([first[name], last[name]]), x) for name, x in whole.items())
    assert first["mm_token_type_ids"] == TYPES["mm_token_type_ids"][:2]
    ids, images, fields = rollouts._unsplit(trainer(), of_rows[1:2])
    assert (ids, images, fields) == ([[7]], [[]], {"mm_token_type_ids": [[0]]})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pixel_values": torch.randn(5, 3, 4, 4)}, "was given images in tiles"),
        ({"pixel_values": torch.randn(3, 9, 6), "spatial_shapes": GRID[:, 1:]}, "was given images in tiles"),
        ({"pixel_values": torch.randn(3, 3, 4, 4), "sizes": torch.ones(4)}, "generates with sizes of 4 entries"),
    ],
)
def test_what_cannot_be_dealt_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        rollouts._rows(trainer(), PROMPTS, IMAGES, fields | TYPES)


def test_rows_with_other_pixels_are_other_rows() -> None:
    """The ranks compare digests of what they generate."""
    one, same, other = (
        rollouts._without_pixels([(PROMPTS, {"pixel_values": torch.full((2, 3), value)})]) for value in (1.0, 1.0, 2.0)
    )
    assert one == same != other
