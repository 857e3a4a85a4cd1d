"""Positions that jump inside documents, and batches that workers draw: as in one process."""

import multiprocessing
import random
from typing import Any

import pytest
import torch
from hf_training import Padded, assert_equal_training, failure_of, make_trainer, packed, train
from pool import run_ranks
from ringtile.hf import shard
from ringtile.hf.shard import shard_batch

ALONE: dict[str, Any] = {"evaluate": False, "max_steps": 2, "gradient_accumulation_steps": 1}


def _positions(row: dict[str, Any]) -> torch.Tensor:
    """Those of one document: a prompt that is skipped, a jump, and a copy of the first tokens' positions."""
    places = torch.arange(len(row["input_ids"]))
    return torch.where(places < 4, places, places + 9).where(places < 6, places - 6)


def apart(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A row for each document. A mask of zeros and ones says that each is one, so transformers joins none."""
    batch = Padded()(rows)
    positions = torch.zeros_like(batch["input_ids"])
    for i, row in enumerate(rows):
        positions[i, : len(row["input_ids"])] = _positions(row)
    return batch | {"position_ids": positions}


def joined(rows: list[dict[str, Any]], name: str) -> dict[str, torch.Tensor]:
    """All documents in one row, each named."""
    batch = packed(rows)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    numbers = torch.arange(len(rows)).repeat_interleave(lengths)[None]
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    named = {"seq_idx": numbers, "attention_mask": numbers + 1, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    kept = {key: named[key] for key in named if key.startswith(name)}
    return batch | kept | {"position_ids": torch.cat([_positions(row) for row in rows])[None]}


def by_seq_idx(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return joined(rows, "seq_idx")


def by_ids(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return joined(rows, "attention_mask")


def by_ends(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return joined(rows, "cu_seq_lens")


@pytest.mark.parametrize("collator", [by_seq_idx, by_ids, by_ends])
def test_positions_that_jump_and_start_again_are_free(collator: Any) -> None:
    """Against one process with a row for each document, which knows nothing of packing."""
    model: dict[str, Any] = {"learning_rate": 0.01}
    expected = train(None, collator=apart, **ALONE, **model)
    keys = {"context_parallel_size": 2, "first_batch_check": "require"}
    for run in run_ranks(2, train, keys, collator=collator, **ALONE, **model):
        assert_equal_training(run, expected)


def _counted_anew() -> str:
    """What ends the training where a rank counts the positions of its shard itself."""

    def sharded(*args: Any, **options: Any) -> Any:
        local, batch = shard_batch(*args, **options)
        if options["group"] is not None:
            local["position_ids"] = torch.arange(local["position_ids"].size(1)).expand_as(local["position_ids"])
        return local, batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "shard_batch", sharded)
        return failure_of(make_trainer(collator=by_seq_idx))


def test_the_first_batch_stops_other_positions() -> None:
    for message in run_ranks(2, _counted_anew):
        assert "RefusedError" in message
        assert "model.rotary_emb" in message


def drawing(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Masks tokens by the generators that collators use."""
    batch = Padded()(rows)
    shape = batch["input_ids"].shape
    hit = (torch.rand(shape) < 0.3) | torch.tensor(random.random() < 0.2)
    return batch | {
        "input_ids": batch["input_ids"].masked_fill(hit, 2),
        "labels": batch["labels"].masked_fill(~hit, -100),
    }


def with_workers(config: dict[str, Any] | None, **options: Any) -> Any:
    """As train. A rank of the session's pool is a daemon, and its context is a server that it is a fork of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.context._default_context, "_actual_context", multiprocessing.get_context("fork"))
        patch.setitem(multiprocessing.current_process()._config, "daemon", False)  # type: ignore[attr-defined]
        return train(config, dataloader_num_workers=2, **options)


@pytest.mark.parametrize(("ranks", "processes"), [(2, 1), (4, 2)])
def test_what_workers_draw_is_that_of_one_process(ranks: int, processes: int) -> None:
    """Two workers of each process; with two groups, those of two processes."""
    options = {"collator": drawing, **ALONE, "max_steps": 4}
    alone = with_workers(None, **options) if processes == 1 else run_ranks(processes, with_workers, None, **options)[0]
    for run in run_ranks(ranks, with_workers, {"context_parallel_size": 2}, **options):
        assert_equal_training(run, alone)
