"""Dynamic context parallelism: the rows of all ranks are one packed row, and a step is that of one process with them.

Shape letters: B rows, S tokens of a row, T tokens of the joined row.
"""

from __future__ import annotations

from typing import Any

import pytest
import ringtile
import torch
from hf_models import hybrid, tiny_model
from hf_training import TOLERANCE, Padded, Run, assert_equal_training, failure_of, make_trainer, packed, train
from pool import run_ranks
from ringtile import ConfigError, IntervalMask, RefusedError
from ringtile.hf.config import Config
from ringtile.hf.features import dynamic
from ringtile.hf.features.dynamic import join
from ringtile.hf.masks import mask_of_batch, read
from ringtile.hf.reading import Reading
from test_hf_rows import Embeds, classes, random_model
from transformers import AutoModel, Trainer

DYNAMIC = {"dynamic_context_parallel": True}
FLOAT64 = 1e-12  # sums over ~100 tokens of numbers of 2.2e-16, which each step passes on to the next
LOGGED = 3e-7  # two ulp of float32, in which the Trainer logs a loss
SETTINGS = {"max_steps": 2, "gradient_accumulation_steps": 2, "num_rows": 40}


def _train(config: dict[str, Any] | None, rows: int, options: dict[str, Any]) -> Run:
    options = {**SETTINGS, **options}
    family, mixes = options.pop("family", "llama"), options.pop("mixes_precisions", False)
    model = options.pop("make", tiny_model)(family)
    model = model if mixes else model.double()
    return train(config, model=model.train(), per_device_train_batch_size=rows, **options)


def _assert_one_process(size: int, *, check: bool | str = False, engine: str = "DDP", **options: Any) -> None:
    """mixes_precisions: parts compute in float32 whatever the model's dtype."""
    expected = _train(None, 2 * size, options)
    tolerance = TOLERANCE if options.get("mixes_precisions") else FLOAT64
    config = DYNAMIC | {"first_batch_check": check}
    for run in run_ranks(size, _train, config, 2, options | {"engine": engine}):
        assert_equal_training(run, expected, max(LOGGED, tolerance), tolerance, tolerance)
        assert (run.num_input_tokens, run.epoch) == (expected.num_input_tokens, expected.epoch)
        assert run.eval_loss == pytest.approx(expected.eval_loss, rel=1e-6)
        if run.predictions is not None and expected.predictions is not None and run.label_ids is not None:
            assert (run.predictions - expected.predictions)[run.label_ids != -100].abs().max() <= 1e-6


@pytest.mark.parametrize("size", [2, 4])
def test_rows_of_all_ranks_train_as_in_one_process(size: int) -> None:
    """Steps, losses, counts, an evaluation and predictions; and the first batch proves it."""
    _assert_one_process(size, check="require")


CELLS = {
    "padding on the left": {"collator": Padded("left"), "label_smoothing_factor": 0.1},
    "chunks": {"family": "llama4", "mixes_precisions": True},
    "SFTTrainer": {"trainer_class": "trl.SFTTrainer", "mixes_precisions": True},
}
LONG = {
    "one packed row": {"collator": packed},
    "recurrent layers": {"make": hybrid, "family": "qwen3_next", "mixes_precisions": True, "learning_rate": 0.01},
    "windows": {"family": "mistral-sliding"},
    "experts": {"family": "qwen3-moe", "mixes_precisions": True},
    "FSDP2": {"engine": "FSDP2"},
    "ZeRO-3": {"engine": "ZeRO-3", "mixes_precisions": True},
    "pairs": {
        **{"trainer_class": "trl.DPOTrainer", "mixes_precisions": True},
        "trainer_arguments": {"ref_model": tiny_model(seed=3)},
    },
}


@pytest.mark.parametrize("name", [*CELLS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_models_collators_trainers_and_engines(name: str) -> None:
    _assert_one_process(2, evaluate=False, **(CELLS | LONG)[name])


class ReadsPadding(Embeds):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, dict(inputs), False, num_items_in_batch)
        return loss + model(**{k: x for k, x in inputs.items() if k != "labels"}).last_hidden_state.square().mean()


def _train_encoder(config: dict[str, Any] | None, rows: int) -> Run:
    model = random_model(AutoModel, "bert").double()
    options = {"collator": classes, "trainer_class": ReadsPadding, "evaluate": False, "learning_rate": 0.01}
    return train(config, model=model, per_device_train_batch_size=rows, **SETTINGS, **options)


def test_a_loss_of_the_users_gets_whole_rows() -> None:
    """Padding too, which it may read."""
    expected = _train_encoder(None, 4)
    for run in run_ranks(2, _train_encoder, DYNAMIC, 2):
        assert_equal_training(run, expected, LOGGED, FLOAT64, FLOAT64)


def test_the_first_batch_stops_rows_that_are_joined_wrongly() -> None:
    for said in run_ranks(2, _joined_wrongly):
        assert "differ" in said


def _joined_wrongly() -> str:
    def wrong(*args: Any) -> Any:
        return mask_of_batch(*args) & IntervalMask.sliding_window(args[2], 4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic, "mask_of_batch", wrong)
        trainer = make_trainer(per_device_train_batch_size=2, num_rows=40)
        return failure_of(trainer, {**DYNAMIC, "first_batch_check": "require"})


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["right", "left", "none", "documents"])
def test_a_joined_row_attends_as_its_rows(causal: bool, side: str) -> None:
    torch.manual_seed(3)
    ids = torch.randint(1, 90, (3, 9))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if side != "none":
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        mask[2, 2:] = 0
        batch["attention_mask"] = mask if side == "left" else mask.flip(1)
    if side == "documents":
        batch["attention_mask"] = batch["attention_mask"] * torch.tensor([1, 1, 2, 2, 2, 3, 3, 3, 3])
    batch["labels"] = ids.masked_fill(batch["attention_mask"] == 0, -100) if side != "none" else ids
    reading, on_host = Reading(causal=causal, shifts_labels=causal), read(batch)[0]
    joined, rows = join(batch, on_host, reading)
    assert rows is not None
    rows_mask = mask_of_batch(on_host, 3, 9, True, causal)
    attends = _attends(rows_mask).expand(3, -1, -1)
    kept = rows.places.flatten() >= 0
    expected = torch.block_diag(*attends.int())[kept][:, kept].bool()
    assert torch.equal(_attends(rows.mask)[0], expected)
    assert torch.equal(joined["input_ids"][0], ids.flatten()[kept])
    targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:] if causal else batch["labels"]
    assert torch.equal(joined["shift_labels" if causal else "labels"][0], targets.flatten()[kept])
    assert joined["position_ids"][0].tolist() == torch.arange(9).repeat(3)[kept].tolist()
    assert not (targets.flatten()[~kept] != -100).any()
    assert torch.equal(rows.unshared(joined["input_ids"][..., None])[rows.places >= 0][:, 0], ids.flatten()[kept])


def _attends(mask: Any) -> torch.Tensor:
    keys = torch.arange(mask.seq_len)
    return (keys >= mask.begin[..., None]) & (keys < mask.end[..., None])


def test_padding_that_predicts_stays() -> None:
    ids = torch.arange(10).view(2, 5)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1] * 5])}
    joined, rows = join(batch, batch, Reading())
    assert rows is not None
    assert joined["input_ids"].tolist() == [[0, 1, 2, 3, 5, 6, 7, 8, 9]]  # 3 predicts 4
    assert rows.num_rows.tolist() == [[1, 1, 1, 0, 1, 1, 1, 1, 1]]
    assert join(batch, batch, Reading(), keeps_padding=True)[0]["input_ids"].size(1) == 10


def test_refuses_rows_of_images() -> None:
    batch = {"input_ids": torch.ones(2, 5), "pixel_values": torch.ones(2, 3)}
    with pytest.raises(RefusedError, match="2 rows with pixel_values"):
        join(batch, batch, Reading(besides=frozenset({"pixel_values"})))


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


def test_refuses_trainers_that_count_rows_themselves() -> None:
    assert run_ranks(2, _refused) == ["dynamic_context_parallel: OwnLoader makes its own train dataloader"] * 2


def _refused() -> str:
    with pytest.raises(RefusedError) as raised:
        ringtile.enable(make_trainer(trainer_class=OwnLoader), DYNAMIC)
    return str(raised.value).partition(",")[0]


def test_one_rank_has_no_rows_of_others() -> None:
    with pytest.raises(ConfigError, match="context_parallel_size is 1"):
        Config(context_parallel_size=1, **DYNAMIC)
