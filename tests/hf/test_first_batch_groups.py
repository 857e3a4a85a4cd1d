"""Groups of one world that prove different first batches: under FSDP2 and ZeRO-3 each forward pass is a collective of
all ranks, so that they must decide alike what they prove."""

from typing import Any

import pytest
import ringtile
import torch
import torch.distributed as dist
from hf_engines import engine as engine_arguments
from hf_models import tiny_model
from hf_training import TOLERANCE, Messages, Padded, make_trainer
from pool import run_ranks
from ringtile.first_batch import proof
from ringtile.hf import first_batch
from test_images import Padded as PaddedImages

from tools.models.tiny_images import image_model


def _is_first_group() -> bool:
    return dist.get_rank() < dist.get_world_size() // 2


def _longer_images(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of the first group, so long that no images are proved."""
    patch.setattr(first_batch, "_WITH_IMAGES", 100)
    model = image_model("qwen3_vl")
    collate = PaddedImages(model)

    def collator(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        words = [*range(3, 13)] * (12 if _is_first_group() else 1)
        return collate([{"words": words, "images": [0, 1]} for _ in rows])

    rows = [{"words": [], "images": []}] * 8
    return {"model": model, "trainer_arguments": {"train_dataset": rows, "data_collator": collator}}


def _a_tree(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """In the first group."""

    def collator(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = Padded()(rows)
        if not _is_first_group():
            return batch
        length = batch["input_ids"].size(1)
        tree = {"tree_parents": torch.tensor([[-1, 0, 0]]), "tree_lengths": torch.tensor([[4, 2, length - 6]])}
        return {"input_ids": batch["input_ids"], "labels": batch["labels"]} | tree

    return {"model": tiny_model().train(), "trainer_arguments": {"data_collator": collator}}


def _steeper(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What rounding does to the first group alone is so much that one process is asked twice."""
    patch.setattr(proof, "_STEEP", 0.0 if _is_first_group() else 1.0)
    return {"model": tiny_model().train()}


def _steeper_pairs(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    reference = {"trainer_arguments": {"ref_model": tiny_model(seed=3)}}
    return _steeper(patch) | reference | {"trainer_class": "trl.DPOTrainer"}


def _not_finite(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """In the first group."""
    model = tiny_model().train()
    forward = model.model.norm.forward
    model.model.norm.forward = lambda x: forward(x) * (torch.inf if _is_first_group() else 1.0)
    return {"model": model}


MADE = {"longer images": _longer_images, "a tree": _a_tree, "steeper": _steeper, "pairs": _steeper_pairs}
MADE["not finite"] = _not_finite


SAYS = {
    "longer images": "of more than 100 a cut is proved, without the images",
    "a tree": "the first batch proves nothing: it is a tree",
    "steeper": "rounding alone, or random numbers that nothing counts, change hidden states",
}


def _trained(what: str, config: dict[str, Any]) -> tuple[list[str], bool]:
    """What ringtile warns of on this rank, and whether its first batch was proved."""
    with pytest.MonkeyPatch.context() as patch, engine_arguments("FSDP2") as arguments, Messages() as said:
        steps = {"max_steps": 1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 1}
        trainer = make_trainer(**MADE[what](patch), **steps, **arguments, remove_unused_columns=False)
        ringtile.enable(trainer, config)
        trainer.train()
        found = ringtile.hf.trainer.first_batch_of(trainer)
        ringtile.restore(trainer)
    return said, found is not None


@pytest.mark.parametrize(
    "what", [*(pytest.param(what, marks=pytest.mark.long) for what in ("longer images", "a tree")), "steeper"]
)
def test_groups_prove_alike(what):
    for rank, (said, proved) in enumerate(run_ranks(4, _trained, what, {"context_parallel_size": 2}, timeout=100.0)):
        assert proved == (what != "a tree")
        warns = {"longer images": True, "a tree": rank == 0, "steeper": rank < 2}[what]
        assert [SAYS[what] in text for text in said] == [True] * warns


def test_groups_leave_the_proof_to_the_next_batch_together():
    found = run_ranks(4, _trained, "not finite", {"context_parallel_size": 2}, timeout=100.0)
    for rank, (said, proved) in enumerate(found):
        assert not proved
        assert ["this batch proves nothing, the next will" in text for text in said] == [True] * (rank % 2 == 0)


@pytest.mark.long
def test_groups_of_one_rank_prove_alike():
    """Which prove a tree of rows against the rows."""
    pytest.importorskip("trl")
    config = {"context_parallel_size": 1, "shared_prefix": True}
    for rank, (said, proved) in enumerate(run_ranks(2, _trained, "pairs", config, timeout=100.0)):
        assert proved
        assert [SAYS["steeper"] in text for text in said] == [True] * (rank == 0)


class _Means(torch.nn.Module):
    """An MLP that mixes the tokens that it sees."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) + x.mean(1, keepdim=True)


def _streamed(config: dict[str, Any] | None) -> tuple[list[float], list[str]]:
    trainer = make_trainer(max_steps=2)
    trainer.model.model.layers[1].mlp = _Means(trainer.model.model.layers[1].mlp)
    with Messages() as said:
        if config is not None:
            ringtile.enable(trainer, {"stream": True, "tile_tokens": 8} | config)
        trainer.train()
        ringtile.restore(trainer)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], list(said)


def test_a_stream_that_is_wrong_is_named_and_switched_off() -> None:
    expected, _ = _streamed(None)
    losses, said = _streamed({})
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert any("stream switched off: stream does not compute what one rank" in text for text in said)
    with pytest.raises(ringtile.RefusedError, match=r"stream does not compute what one rank .* Set stream: false"):
        _streamed({"first_batch_check": "require"})


class _Same(torch.nn.Module):
    """An MLP in a module of one's own."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


@pytest.mark.parametrize(("seconds", "expected"), [(60.0, [True, True, True, False]), (0.0, [True, False, False])])
def test_a_proof_that_would_take_long_is_made_of_less(
    seconds: float, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    backwards: list[bool] = []
    record = proof.record

    def recorded(*args: Any, **options: Any) -> Any:
        backwards.append(options.get("backward", True))
        return record(*args, **options)

    monkeypatch.setattr(proof, "_MOST_SECONDS", seconds)
    monkeypatch.setattr(proof, "record", recorded)
    trainer = make_trainer(max_steps=1)
    trainer.model.model.layers[1].mlp = _Same(trainer.model.model.layers[1].mlp)
    ringtile.enable(trainer, {"stream": True, "tile_tokens": 8})
    trainer.train()
    found = ringtile.hf.trainer.first_batch_of(trainer)
    ringtile.restore(trainer)
    assert backwards == expected
    assert found.forward > 0.0
    assert (found.backward > 0.0) == (seconds > 0.0)
