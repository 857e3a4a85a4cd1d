"""A deep copy of the model of an enabled Trainer, such as the teacher of a self-distillation, is a model of its own."""

from __future__ import annotations

import copy
import functools
import io
from pathlib import Path
from typing import Any

import pytest
import ringtile
import torch
import torch.distributed as dist
from hf_models import hybrid, tiny_model
from hf_training import PROOF, make_trainer
from losses import OwnLoss
from pool import run_program, run_ranks
from ringtile.hf.patches import Patches
from torch import nn
from transformers import Trainer, TrainerCallback

IDS = torch.arange(3, 35)[None]
TILED = {"tiled_mlp": True, "tiled_norm": True, "tiled_loss": True, "tile_tokens": 5}


class Teacher(TrainerCallback):
    """Copies the model when training begins, and moves each weight of the copy."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.model = copy.deepcopy(self.trainer.accelerator.unwrap_model(self.trainer.model)).eval()
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.mul_(1.25)
        self.before = self.model(input_ids=IDS).logits


MODELS = {
    "llama": tiny_model,
    "dropout": functools.partial(tiny_model, "gpt2", resid_pdrop=0.1, embd_pdrop=0.1),
    "positions in an embedding": functools.partial(tiny_model, "opt"),
    "temperature": functools.partial(tiny_model, "llama4"),
    "hybrid": functools.partial(hybrid, "qwen3_next"),
}


def largest_differences(model: str, config: dict[str, Any], options: dict[str, Any]) -> list[float]:
    """Of a copy's logits, before and after two steps of the model, from those of a plain model with its weights."""
    trainer = make_trainer(model=MODELS[model]().train(), max_steps=2, **options)
    ringtile.enable(trainer, PROOF | config)
    teacher = Teacher(trainer)
    trainer.add_callback(teacher)
    trainer.train()
    plain = MODELS[model]().eval()
    plain.load_state_dict(teacher.model.state_dict())
    expected, copied = plain(input_ids=IDS).logits, copy.deepcopy(trainer.model).eval()
    pairs = [(teacher.before, expected), (teacher.model(input_ids=IDS).logits, expected)]
    last = copied(input_ids=IDS).logits
    ringtile.restore(trainer)
    pairs.append((last, trainer.model.eval()(input_ids=IDS).logits))
    return [float((got - wanted).abs().max() / wanted.abs().max()) for got, wanted in pairs]


@pytest.mark.parametrize(
    ("model", "config", "options"),
    [
        ("llama", {"context_parallel_size": 2, "first_batch_check": True, **TILED}, {}),
        ("llama", {"context_parallel_size": 2}, {"trainer_class": OwnLoss}),
        ("dropout", {"context_parallel_size": 2}, {}),
        ("positions in an embedding", {"context_parallel_size": 2}, {}),
        pytest.param("temperature", {"context_parallel_size": 2}, {}, marks=pytest.mark.long),
        ("hybrid", {"context_parallel_size": 2}, {}),
    ],
)
def test_a_copy_of_the_model_is_its_own(model: str, config: dict[str, Any], options: dict[str, Any]) -> None:
    for differences in run_ranks(2, largest_differences, model, config, options):
        assert max(differences) < 1e-5, differences


LOADED = """
import os, torch
saved, expected = torch.load(os.environ["SAVED"], weights_only=False)
ids = torch.arange(3, 35)[None]
assert torch.equal(saved.eval()(input_ids=ids, labels=ids).loss, expected)
assert saved.generate(input_ids=ids, max_new_tokens=2).shape == (1, 34)
saved.train()(input_ids=ids, labels=ids).loss.backward()
"""


def save_while_enabled(config: dict[str, Any], lora: bool, path: str) -> None:
    """The model of an enabled Trainer, and its loss when it is restored."""
    trainer = make_trainer(max_steps=1, lora=lora)
    ringtile.enable(trainer, PROOF | config)
    trainer.train()
    saved = io.BytesIO()
    torch.save(trainer.model, saved)
    ringtile.restore(trainer)
    loss = trainer.model.eval()(input_ids=IDS, labels=IDS).loss.detach()
    if dist.get_rank() == 0:
        model = torch.load(io.BytesIO(saved.getvalue()), weights_only=False)
        torch.save((model, loss), path)


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_model_that_was_saved_while_it_was_sharded_is_loaded_elsewhere(tmp_path: Path, lora: bool) -> None:
    """By a process that calls no `enable`."""
    path = str(tmp_path / "model.pt")
    run_ranks(2, save_while_enabled, {"context_parallel_size": 2, **TILED}, lora, path)
    loaded = run_program(LOADED, SAVED=path)
    assert loaded.returncode == 0, loaded.stderr


def test_a_wrapped_forward_of_a_copy_is_the_copys() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1.0

        def forward(self, x: float) -> float:
            return self.factor * x

    patches = Patches()
    model = nn.Sequential(Scale(), Scale())
    of_another = model[1]
    of_another.forward = lambda x: 3.0 * x
    for module in model:
        patches.wrap(module, "forward", lambda original, x: (original(x), original.__self__))
    copied = copy.deepcopy(model)
    copied[0].factor = 2.0
    assert model[0](5.0) == (5.0, model[0])
    assert copied[0](5.0) == (10.0, copied[0])
    assert copied[1](5.0) == (15.0, copied[1])
    patches.restore()
    assert model[0](5.0) == 5.0
