"""torchao's float8 linear layers: two ranks round to the same values as one process, forward and backward.

In float64, in which two ranks hardly ever round a number to the other side. Both with torchao, where it is installed
(0.18.0 was tried), and with its formulas.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import float8_formulas
import pytest
import ringtile
import torch
from hf_models import tiny_model
from hf_training import Run, assert_equal_training, failure_of, make_trainer, train
from pool import run_ranks
from ringtile import RefusedError
from ringtile.hf.features import float8
from torch import nn

SETTINGS = {"max_steps": 2, "evaluate": False}
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def _model(recipe: str, dtype: torch.dtype, is_real: bool, patch: pytest.MonkeyPatch) -> nn.Module:
    """Its inputs are of several sizes, so that the largest value of a shard is not that of the sequence."""
    model = tiny_model().to(dtype).train()
    with torch.no_grad():
        model.model.embed_tokens.weight *= torch.linspace(1, 5, 96)[:, None]
    if not is_real:
        patch.setitem(sys.modules, float8_formulas.MODULE, float8_formulas)
        return float8_formulas.convert(model, recipe)
    torchao = pytest.importorskip("torchao.float8")
    config = dataclasses.replace(torchao.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return torchao.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda x, name: "lm_head" not in name
    )


def _train(config: dict[str, Any] | None, recipe: str, is_real: bool) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        return train(config, model=_model(recipe, torch.float64, is_real, patch), **SETTINGS)


@pytest.mark.parametrize("is_real", [False, True], ids=["formulas", "torchao"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_scale_as_one_process(recipe: str, is_real: bool) -> None:
    expected = _train(None, recipe, is_real)
    for run in run_ranks(2, _train, {"context_parallel_size": 2, "first_batch_check": "require"}, recipe, is_real):
        assert_equal_training(run, expected)


def _with_scales_of_shards(dtype: torch.dtype) -> str:
    with pytest.MonkeyPatch.context() as patch:
        model = _model("tensorwise", dtype, False, patch)
        patch.setattr(float8, "active_batch", lambda: None)
        return failure_of(make_trainer(model=model), {"first_batch_check": "require"})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_first_batch_stops_scales_of_shards(dtype: torch.dtype) -> None:
    for said in run_ranks(2, _with_scales_of_shards, dtype):
        assert "model.layers.0" in said


def test_blocks_of_features_are_those_of_a_shard() -> None:
    """MXFP8 with gradients of weights in 16 bits: bit for bit in each token, where blocks of tokens are not."""
    mx = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear")
    torch.manual_seed(0)
    emulated = mx.KernelPreference.EMULATED
    layer = mx.MXFP8Linear(64, 96, bias=False, kernel_preference=emulated, wgrad_with_hp=True)
    hidden, upstream = torch.randn(1, 50, 64) * torch.linspace(1, 5, 50)[:, None], torch.randn(1, 50, 96)

    def computed(tokens: slice) -> list[torch.Tensor]:
        x = hidden[:, tokens].requires_grad_()
        out = layer(x)
        return [out, *torch.autograd.grad(out, (x, layer.weight), upstream[:, tokens])]

    whole, first, second = map(computed, (slice(50), slice(17), slice(17, 50)))
    for x, *shards in list(zip(whole, first, second, strict=True))[:2]:
        assert torch.equal(torch.cat(shards, 1), x)
    terms = upstream[0].abs().T @ hidden[0].abs()
    assert ((first[2] + second[2] - whole[2]).abs() <= 50 * torch.finfo(torch.float32).eps * terms).all()
    _refuse(lambda *_: layer)
    layer.wgrad_with_hp = False
    with pytest.raises(RefusedError, match="0 is a MXFP8Linear of"):
        _refuse(lambda *_: layer)


class WrappedWeight(nn.Parameter):
    __module__ = "torchao.prototype.moe_training.tensor"


class Wrapping(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.weight = WrappedWeight(self.weight.data)


def _refuse(layer: Callable[..., nn.Module], tiled: bool = False, precision: str = "no") -> None:
    trainer = SimpleNamespace(accelerator=SimpleNamespace(mixed_precision=precision))
    config = ringtile.Config(tiled_mlp=tiled)
    run: Any = SimpleNamespace(trainer=trainer, wrapped=nn.Sequential(layer(4, 4)), config=config)
    float8.FEATURE.refuse(run)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ((Wrapping,), "0.weight is a WrappedWeight of torchao.prototype.moe_training.tensor; expected"),
        ((float8_formulas.Float8Linear, True), "tiled_mlp: Float8Linear scales by the largest value"),
        ((nn.Linear, False, "fp8"), "mixed_precision is fp8"),
    ],
)
def test_what_is_scaled_otherwise_is_refused(case: Any, said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        _refuse(*case)
