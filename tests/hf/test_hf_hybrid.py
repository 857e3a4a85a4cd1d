"""Hybrid models: what of them is left alone, and which mixers are refused. test_hf_exact_models.py trains them."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from hf_models import hybrid, tiny_model
from hf_training import GROUP_OF_ONE, enabled, make_trainer
from ringtile.errors import RefusedError
from ringtile.hf.families import CACHES
from ringtile.hf.features import recurrent
from ringtile.recurrent import functions, kernels
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer


def loss_of(model: nn.Module, **inputs: Any) -> float:
    ids = torch.arange(3, 19)[None]
    return model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss.item()


def loss_in(trainer: Trainer, **inputs: Any) -> torch.Tensor:
    """As in a step of the Trainer."""
    ids = torch.arange(3, 19)[None]
    loss: torch.Tensor = trainer.compute_loss(trainer.model, {"input_ids": ids, "labels": ids, **inputs})
    return loss


RESTARTING = torch.cat([torch.arange(6), torch.arange(10)])[None]


def test_other_models_and_restored_ones_are_as_they_were() -> None:
    model, other = hybrid("qwen3_next"), hybrid("qwen3_next")
    leaking = loss_of(model, position_ids=RESTARTING)
    trainer = make_trainer(model=model)
    with enabled(trainer, GROUP_OF_ONE):
        assert float(loss_in(trainer, position_ids=RESTARTING)) != leaking
        assert loss_of(other, position_ids=RESTARTING) == leaking
        assert loss_of(model, position_ids=RESTARTING) == leaking  # outside of the Trainer's steps
    assert loss_of(model, position_ids=RESTARTING) == leaking
    assert not any("forward" in vars(module) for module in model.modules())


PACKED = {"input_ids": torch.arange(3, 19)[None], "labels": torch.arange(3, 19)[None], "position_ids": RESTARTING}


def gradients_of(trainer: Trainer, batches: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Of the mean loss of all tokens with a target."""
    trainer.model.zero_grad()
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for batch in batches:
        trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=torch.tensor(count)).backward()
    return [weight.grad.clone() for weight in trainer.model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "mamba"])
def test_documents_of_a_packed_row_are_apart_on_one_rank(family: str, checkpointing: bool) -> None:
    """Loss and gradients are those of the documents alone, by the model's own code, in tiles or not; what is not packed
    is the model's own, bit for bit."""
    trainer = make_trainer(model=hybrid(family))
    if checkpointing:
        trainer.model.gradient_checkpointing_enable()
    labels = PACKED["labels"].masked_fill(RESTARTING == 0, -100)
    row = {**PACKED, "labels": labels}
    apart = [{name: x[:, part] for name, x in row.items()} for part in (slice(6), slice(6, None))]
    alone, joined = gradients_of(trainer, apart), gradients_of(trainer, [row])
    tiled = {"tiled_mlp": True, "tile_tokens": 5} if family != "mamba" else {"tiled_norm": True, "tile_tokens": 64}
    with enabled(trainer, tiled):
        got, still_alone = gradients_of(trainer, [row]), gradients_of(trainer, apart)
    largest = max(float(x.abs().max()) for x in alone)
    difference = [max(float((x - y).abs().max()) for x, y in zip(alone, z, strict=True)) for z in (joined, got)]
    assert difference[0] > 1e-2 * largest  # what transformers loses
    assert difference[1] <= 1e-5 * largest  # sums of 16 tokens in other orders
    for x, y in zip(alone, still_alone, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6 * largest)


def test_joined_documents_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for family, times in (("qwen3_next", 1), ("llama", 0)):
        caplog.clear()
        model = hybrid(family) if times else tiny_model(family)
        with enabled(make_trainer(model=model), {"context_parallel_size": 1}):
            assert sum("of a packed row to the next" in record.getMessage() for record in caplog.records) == times


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "mamba"])
def test_libraries_get_numbers_of_the_models_dtype(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products would round wider ones; decays and steps stay in float32."""
    seen: dict[str, torch.dtype] = {}

    def spy(op: str) -> Any:
        def compute(**given: Any) -> Any:
            seen.update({f"{op} {name}": x.dtype for name, x in given.items() if torch.is_tensor(x)})
            return getattr(kernels, op)(**given)

        return compute

    monkeypatch.setattr(recurrent, "uses_libraries", lambda device: True)
    monkeypatch.setattr(
        functions, "function_for", lambda op, *rest: kernels.causal_conv1d if op == "causal_conv1d" else spy(op)
    )
    trainer = make_trainer(model=hybrid(family).to(torch.bfloat16))
    with enabled(trainer, GROUP_OF_ONE):
        loss_in(trainer)
    for name, dtype in seen.items():
        if not name.endswith("seq_idx"):
            multiplied = name.split()[1] in ("q", "k", "v", "x", "B", "C") and not name.startswith("selective")
            assert dtype == (torch.bfloat16 if multiplied else torch.float32), name
    assert seen


def test_models_that_take_a_short_cut_in_training_evaluate_too() -> None:
    trainer = make_trainer(model=hybrid("bamba").train())
    with enabled(trainer, GROUP_OF_ONE):
        training = loss_in(trainer)
        trainer.model.eval()
        assert loss_in(trainer) == training


def test_a_mixer_that_would_miss_the_batch_is_refused() -> None:
    """A checkpoint that ringtile has not seen, a cache."""
    trainer = make_trainer(model=hybrid("lfm2").train())
    layer = trainer.model.model.layers[0]
    again = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    filled, own = _filled(trainer.model), layer.forward
    trainer.model.train()

    def cached(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs | filled)

    with enabled(trainer, GROUP_OF_ONE):
        with mock.patch.object(layer, "forward", again):
            loss = loss_in(trainer)
        with pytest.raises(RefusedError, match=r"layers.0.conv \(Lfm2ShortConv\) is computed again in the backward"):
            loss.backward()
        with (
            mock.patch.object(layer, "forward", cached),
            pytest.raises(RefusedError, match=r"layers.0.conv \(Lfm2ShortConv\) got a cache; expected none"),
        ):
            loss_in(trainer)


def test_what_a_recurrence_may_not_ignore_is_refused() -> None:
    """Qwen3-Next hands its recurrence every argument that it does not know."""
    trainer = make_trainer(model=hybrid("qwen3_next").train())
    with enabled(trainer, GROUP_OF_ONE):
        expected = loss_in(trainer, position_ids=RESTARTING)
        with pytest.raises(RefusedError, match="got decay_mask, which may change what it computes"):
            loss_in(trainer, position_ids=RESTARTING, decay_mask=torch.ones(()))
        assert loss_in(trainer, position_ids=RESTARTING, decay_mask=None) == expected


def _filled(model: nn.Module) -> dict[str, Any]:
    """A cache that holds three tokens, under the name by which the model returns and takes it."""
    outputs = model.train(False)(torch.ones(1, 3).long(), use_cache=True)
    return {name: outputs[name] for name in CACHES if name in outputs}
