"""The gradient of a decay's parameters: at most as far from float64 as that of transformers' own float32.

It is a sum over tokens that cancels, in which one draw may favor either: errors are compared over heads and seeds, as
far as two draws of so many agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import ringtile
import scan_oracle
import torch
from accuracy import slack
from hf_training import make_trainer
from pool import run_ranks
from ringtile.recurrent import kernels
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from tools.models.tiny_models import tiny_config

Gradients = dict[str, Tensor]


def errors(got: list[Gradients], want: list[Gradients]) -> dict[str, float]:
    """By the last part of a parameter's name: the root of the mean square of what is off, relative to its norm."""
    squares: dict[str, list[float]] = {}
    for ours, exact in zip(got, want, strict=True):
        for name, x in exact.items():
            square = float((ours[name].double() - x).square().sum() / x.square().sum())
            squares.setdefault(name.rpartition(".")[2], []).append(square)
    return {name: (sum(of) / len(of)) ** 0.5 for name, of in squares.items()}


def assert_as_near(ours: list[Gradients], theirs: list[Gradients], exact: list[Gradients]) -> None:
    own, other = errors(ours, exact), errors(theirs, exact)
    assert own.keys() == other.keys() != set()
    numbers = {name: sum(x.numel() for one in exact for n, x in one.items() if n.endswith(name)) for name in own}
    assert all(own[name] <= slack(numbers[name])[0] ** 0.5 * other[name] for name in own), (own, other)


# ---- the op -------------------------------------------------------------------------------------

HEADS, DIM = 8, 16
Delta = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def inputs(kind: str, seed: int, num_tokens: int, decay: str) -> Gradients:
    """Keys, queries and values as they come out of a SiLU; transformers' own initial decays, or slow ones."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (functional.silu(torch.randn(1, num_tokens, HEADS, DIM, generator=generator) + 1) for _ in "qkv")
    q, k = (functional.normalize(x, dim=-1) for x in (q, k))
    rates = torch.empty(HEADS).uniform_(0.01, 16, generator=generator)
    by_channel = (DIM,) if kind == "kda" else ()
    a, b = (torch.randn(1, num_tokens, HEADS, *dims, generator=generator) for dims in (by_channel, ()))
    A_log = rates.log() if decay == "initial" else torch.full((HEADS,), -6.0)
    return {"q": q, "k": k, "v": v, "a": a, "b": b, "A_log": A_log, "dt_bias": torch.ones(HEADS, *by_channel)}


def gradients_of(delta: Delta, given: Gradients, dtype: torch.dtype) -> Gradients:
    x = {name: y.to(dtype, copy=True).requires_grad_() for name, y in given.items()}
    rate = x["A_log"].exp().view(-1, *[1] * (x["a"].dim() - 3))
    decay = -rate * functional.softplus(x["a"] + x["dt_bias"])
    out = delta(x["q"], x["k"], x["v"], decay, x["b"].sigmoid())
    slopes = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    (out * slopes.to(dtype)).sum().backward()
    return {name: x[name].grad for name in ("A_log", "dt_bias", "a")}  # type: ignore[misc]


def alone(module: Any) -> Delta:
    def delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        seq_idx = torch.zeros(1, q.size(1), dtype=torch.int32)
        out: Tensor = module.gated_delta_rule(q, k, v, g, beta, seq_idx=seq_idx, initial_state=None, scale=DIM**-0.5)[0]
        return out

    return delta


@pytest.mark.parametrize(
    ("num_tokens", "decay"),
    # 130 tokens cross chunks; what a slow decay does shows within one.
    [(20, "slow"), (130, "initial"), pytest.param(200, "slow", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("kind", ["delta", "kda"])
def test_ops_are_as_near_to_float64_as_transformers(kind: str, num_tokens: int, decay: str) -> None:
    theirs = chunk_kimi_delta_attention if kind == "kda" else torch_chunk_gated_delta_rule
    given = [inputs(kind, seed, num_tokens, decay) for seed in range(4)]
    exact = [gradients_of(alone(scan_oracle), each, torch.float64) for each in given]
    found = [gradients_of(lambda *x: theirs(*x)[0], each, torch.float32) for each in given]
    assert_as_near([gradients_of(alone(kernels), each, torch.float32) for each in given], found, exact)


# ---- models -------------------------------------------------------------------------------------

OF_DECAY = (".A_log", ".dt_bias", ".in_proj_ba.weight", ".in_proj_a.weight", ".a_proj.weight")


class InFloat64(TorchFunctionMode):
    """transformers computes decays, norms and recurrences in float32 whatever the model's dtype: here in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = {torch.float32: torch.float64}
        args = [wide.get(x, x) if isinstance(x, torch.dtype) else x for x in args]
        return func(
            *args, **{n: wide.get(x, x) if isinstance(x, torch.dtype) else x for n, x in (kwargs or {}).items()}
        )


class Keep(TrainerCallback):  # type: ignore[misc]
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.found = {name: x.grad.double() for name, x in named if name.endswith(OF_DECAY)}


def first_step(family: str, config: dict[str, Any] | None, dtype: torch.dtype = torch.float32) -> list[Gradients]:
    """Of two models with transformers' own initial weights, in a Trainer; config: under ringtile."""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        tiny = tiny_config(family)
        tiny.get_text_config().output_router_logits = False
        model = AutoModelForCausalLM.from_config(tiny, dtype=torch.float32, experts_implementation="eager").to(dtype)
        rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 96, (4, 40)).tolist()]
        trainer = make_trainer(model=model, max_steps=1, trainer_arguments={"train_dataset": rows})
        keep = Keep()
        trainer.add_callback(keep)
        if config is not None:
            ringtile.enable(trainer, config)
        with InFloat64() if dtype == torch.float64 else contextlib.nullcontext():
            trainer.train()
        if config is not None:
            ringtile.restore(trainer)
        found.append(keep.found)
    return found


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "olmo_hybrid"])
def test_models_are_as_near_to_float64_as_in_transformers(family: str) -> None:
    exact, theirs = first_step(family, None, torch.float64), first_step(family, None)
    for ours in run_ranks(2, first_step, family, {"context_parallel_size": 2}):
        assert_as_near(ours, theirs, exact)
