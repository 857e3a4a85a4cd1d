"""Models of sound and text, with sound: on ranks as in one process, or refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cells import Cell, Refusal, check, check_on_ranks, params, table
from test_images import STEPS, make_rows
from transformers import PreTrainedModel

from tools.models.tiny_models import tiny_config, tiny_model
from tools.models.tiny_sounds import Sounds, sound_model


class Padded:
    """A data collator that pads rows with sounds on the right."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._sounds = Sounds(model)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return self._sounds.batch([(row["words"], row["images"]) for row in rows], ignored=3)


def made(name: str) -> dict[str, Any]:
    model = sound_model(name)
    model.config.get_text_config().use_cache = False
    return {"model": model, "trainer_arguments": {"train_dataset": make_rows(20), "data_collator": Padded(model)}}


def cell(name: str, ranks: int = 2, long: bool = True, **more: Any) -> Cell:
    world = {"world": ranks, "config": {"context_parallel_size": ranks}}
    return Cell(f"{name}, {ranks} ranks", STEPS, made=functools.partial(made, name), long=long, **world, **more)


# Towers that get one sound beside the other are split; those that get their frames one after another are not.
WHOLE = {"says": ("ringtile: every rank computes all images of",)}
MODELS = {"voxtral": {}, "audioflamingo3": {}, "glmasr": {}}
MODELS |= dict.fromkeys(("qwen3_asr", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), WHOLE)
CELLS = table(
    *(cell(name, ranks, (name, ranks) != ("voxtral", 2), **more) for name, more in MODELS.items() for ranks in (2, 3))
)


@pytest.mark.parametrize("cell", params(CELLS))
def test_ranks_train_with_sound_as_one_process(cell: Cell) -> None:
    check(__name__, cell)


# ---- refusals -----------------------------------------------------------------------------------


def made_phi4() -> dict[str, Any]:
    """Text, and features of one sound."""
    model = tiny_model(tiny_config("phi4_multimodal"))
    ids = torch.arange(3, 35)[None]

    def batch(rows: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": ids, "labels": ids, "audio_input_features": torch.ones(1, 16, 80)}

    return {"model": model, "trainer_arguments": {"data_collator": batch}}


OF_A_RUN = table(
    Refusal("no language model", "the batch holds audio_input_features", STEPS, made=made_phi4),
)


@pytest.mark.parametrize("refusal", params(OF_A_RUN))
def test_sound_that_is_not_understood_is_refused(refusal: Refusal) -> None:
    check_on_ranks(__name__, "OF_A_RUN", refusal)
