"""torchao's float8 linear layers: two ranks round to the same values as one process, forward and backward.

In float64, in which two ranks hardly ever round a number to the other side: torchao multiplies in float32.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import ringtile
import torch
from hf_models import tiny_model
from hf_training import Run, assert_equal_training, train
from pool import run_ranks
from ringtile import RefusedError
from ringtile.hf.features import float8
from torch import nn

SETTINGS = {"max_steps": 2, "evaluate": False}
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def _converted(recipe: str) -> nn.Module:
    torchao = pytest.importorskip("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=True)
    # Inputs of several sizes, so that the largest value of a shard is not that of the sequence.
    model = tiny_model().double().train()
    with torch.no_grad():
        model.model.embed_tokens.weight *= torch.linspace(1, 5, 96)[:, None]
    return torchao.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda x, name: "lm_head" not in name
    )


def _train(config: dict[str, Any] | None, recipe: str, own_scales: bool = False) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        if own_scales:
            patch.setattr(float8, "active_batch", lambda: None)
        return train(config, model=_converted(recipe), **SETTINGS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_scale_as_one_process(recipe: str) -> None:
    expected = _train(None, recipe)
    for run in run_ranks(2, _train, {"context_parallel_size": 2, "first_batch_check": "require"}, recipe):
        assert_equal_training(run, expected)


def test_scales_of_shards_would_be_others() -> None:
    """Rowwise recipes round scales to powers of two, by which no number is rounded otherwise, but for subnormals."""
    expected = _train(None, "tensorwise")
    run, _ = run_ranks(2, _train, {"context_parallel_size": 2, "first_batch_check": False}, "tensorwise", True)
    assert all(abs(x / y - 1) > 1e-5 for x, y in zip(run.grad_norms, expected.grad_norms, strict=True))


class MXLinear(nn.Linear):
    __module__ = "torchao.prototype.mx_formats.mx_linear"


class Float8Linear(nn.Linear):
    __module__ = "torchao.float8.float8_linear"


def _refused(layer: type, tiled: bool, precision: str) -> str:
    model = nn.Sequential(layer(4, 4))
    trainer = SimpleNamespace(accelerator=SimpleNamespace(mixed_precision=precision))
    config = ringtile.Config(tiled_mlp=tiled)
    with pytest.raises(RefusedError) as raised:
        float8.FEATURE.refuse(SimpleNamespace(trainer=trainer, wrapped=model, config=config))
    return str(raised.value)


def test_what_is_scaled_otherwise_is_refused() -> None:
    assert "0 is a MXLinear of torchao.prototype.mx_formats.mx_linear" in _refused(MXLinear, False, "no")
    assert "tiled_mlp: Float8Linear scales by the largest value" in _refused(Float8Linear, True, "no")
    assert "mixed_precision is fp8" in _refused(nn.Linear, False, "fp8")
