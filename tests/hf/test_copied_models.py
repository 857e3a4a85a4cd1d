"""A deep copy of the model of an enabled Trainer, such as the teacher of a self-distillation, is a model of its own."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import ringtile
import torch
from hf_models import hybrid, tiny_model
from hf_training import PROOF, make_trainer
from losses import OwnLoss
from pool import run_ranks
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
