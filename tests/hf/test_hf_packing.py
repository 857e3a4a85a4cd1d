"""Documents packed into a row: kept apart or not by one rule, on one rank and on more, and said in the log.

The reference is one process of transformers with the settings under which it keeps documents apart itself.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import ringtile
from hf_models import tiny_model
from hf_training import TOLERANCE, Padded, Run, assert_equal_training, failure_of, make_trainer, packed, train
from pool import run_ranks
from ringtile.cli import tiny_models
from torch import nn
from transformers import DataCollatorWithFlattening

WITH_ROWS = ("qwen2_vl", "glm4v", "qwen2_5_vl", "ernie4_5_vl_moe")  # of positions, for M-RoPE: one is for text
OPTIONS: dict[str, Any] = {"max_steps": 3, "evaluate": False, "learning_rate": 0.01}


def image_text(family: str) -> nn.Module:
    return tiny_models.tiny_model(tiny_models.tiny_config(family))


def rows_of_positions(count: int, batch: dict[str, Any]) -> dict[str, Any]:
    """position_ids (count, B, S), all alike."""
    return {**batch, "position_ids": batch["position_ids"].expand(count, -1, -1)}


def packed_in(count: int | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Documents in one row, with position ids (B, S) or (count, B, S)."""
    return packed(rows) if count is None else rows_of_positions(count, packed(rows))


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


def run(family: str, config: dict[str, Any] | None, count: int | None = None) -> tuple[Run, list[str]]:
    with Messages() as texts:
        model = image_text(family)
        return train(config, model=model, collator=functools.partial(packed_in, count), **OPTIONS), texts


@functools.cache
def apart(family: str) -> Run:
    """One process of transformers, without a cache, and with a row of positions for text where masks need one."""
    model = image_text(family)
    model.config.get_text_config().use_cache = False
    count = 4 if family in WITH_ROWS else None
    return train(None, model=model, collator=functools.partial(packed_in, count), **OPTIONS)


def assert_apart(family: str, config: dict[str, Any], count: int | None) -> list[str]:
    """Trains on as many ranks as share a sequence; returns what the first one warned of."""
    world_size = config["context_parallel_size"]
    runs = [run(family, config, count)] if world_size == 1 else run_ranks(world_size, run, family, config, count)
    for of_rank, _ in runs:
        assert_equal_training(of_rank, apart(family))
    assert all(not texts for _, texts in runs[1:])
    return runs[0][1]


QUICK = [("llava", 1), ("llava", 2), ("qwen2_vl", 1), ("qwen2_vl", 2)]
FAMILIES = ["internvl", "llava", "kimi_k25", "aya_vision", "cohere2_vision", "qwen2_vl", "glm4v"]


@pytest.mark.parametrize(
    ("family", "world_size"),
    [
        pytest.param(family, world_size, marks=() if (family, world_size) in QUICK else pytest.mark.long)
        for family in FAMILIES
        for world_size in (1, 2)
    ],
)
def test_documents_that_transformers_alone_joins_stay_apart_and_the_log_says_so(family: str, world_size: int) -> None:
    (said,) = assert_apart(family, {"context_parallel_size": world_size}, None)
    assert "ringtile keeps the documents of a packed row apart. transformers alone may let" in said
    assert "use_cache false in model.config.text_config" in said
    assert ("position_ids (4, B, S)" in said) == (family in WITH_ROWS)


@pytest.mark.parametrize(
    ("family", "count", "world_size"),
    [
        *[("qwen2_vl", 4, 2), ("qwen2_vl", 3, 2), ("qwen2_vl", 3, 1)],
        *[
            pytest.param(family, count, world_size, marks=pytest.mark.long)
            for family in ("glm4v", "qwen2_5_vl", "ernie4_5_vl_moe")
            for count in (3, 4)
            for world_size in (1, 2)
        ],
    ],
)
def test_rows_of_positions_train_as_one_process(family: str, count: int, world_size: int) -> None:
    (said,) = assert_apart(family, {"context_parallel_size": world_size}, count)
    assert ("position_ids (4, B, S)" in said) == (count == 3)


def test_an_evaluation_keeps_documents_apart_in_recurrent_layers_too() -> None:
    """All rows in one batch, packed and, in one process without ringtile, padded."""

    def eval_loss(config: dict[str, Any] | None, collator: Any) -> float:
        trainer = make_trainer(model=image_text("lfm2_vl"), collator=collator, per_device_eval_batch_size=5)
        if config is not None:
            ringtile.enable(trainer, config)
        loss: float = trainer.evaluate()["eval_loss"]
        return loss

    assert eval_loss({"context_parallel_size": 1}, packed) == pytest.approx(eval_loss(None, Padded()), rel=TOLERANCE)


def test_rows_of_positions_of_a_model_without_them_are_refused() -> None:
    assert all("InputError: position_ids are (4, 1," in failure for failure in run_ranks(2, failure_of_rows))


def failure_of_rows() -> str:
    return failure_of(make_trainer(collator=functools.partial(packed_in, 4)))


# ---- chunks -------------------------------------------------------------------------------------


def with_cu_seq_lens(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)


def run_llama4(config: dict[str, Any] | None) -> tuple[Run, list[str]]:
    with Messages() as texts:
        return train(config, model=tiny_model("llama4").train(), collator=with_cu_seq_lens, **OPTIONS), texts


def test_chunks_are_counted_over_the_packed_row_as_in_one_process_and_the_log_says_so() -> None:
    (expected, _) = run_llama4(None)
    (first, said), (_, nothing) = run_ranks(2, run_llama4, {"context_parallel_size": 2})
    assert_equal_training(first, expected)
    assert "attend within chunks of 4 tokens, which are counted over the packed row" in said[0]
    assert (len(said), nothing) == (1, [])
