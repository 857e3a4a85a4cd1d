"""The examples of loops in plain PyTorch: ranks that share sequences have the losses of one process.

examples/train_3d.py on every mesh, against a process that knows nothing of ranks; examples/train_grpo.py.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_same_steps
from pool import run_ranks
from ringtile import IntervalMask
from strategies import dense

STEPS = 10


def example(name: str) -> Any:
    """The module examples/NAME.py."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "examples" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


# ---- pretraining on a mesh of three dimensions --------------------------------------------------


def train_3d(**arguments: Any) -> list[float]:
    losses: list[float] = example("train_3d").train(
        example("train_3d").Config(steps=arguments.pop("steps", STEPS), **arguments)
    )
    return losses


@pytest.fixture(scope="module")
def single_process() -> list[float]:
    """Train the same model in a plain loop: whole rows, a dense mask, PyTorch's attention."""
    config = example("train_3d").Config(steps=STEPS)
    torch.manual_seed(0)
    model = example("train_3d").Llama(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, foreach=False)
    losses, attention = [], F.scaled_dot_product_attention
    for step in range(STEPS):
        batch = example("train_3d").make_batch(config, step)
        attend = dense(IntervalMask.documents(batch.lengths))[:, None]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", functools.partial(attention, attn_mask=attend))
            logits = model(batch.input_ids, batch.position_ids)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]  # it learns, so a wrong gradient shows
    return losses


def assert_same_losses(got: list[list[float]], wanted: list[float]) -> None:
    """A loss near 5 is a mean over 1000 tokens, each good to a few ulp (6e-7) of float32: 1e-6 relative a step."""
    for losses in got:
        assert_same_steps(losses, wanted, 1e-6)


@pytest.mark.long  # two of the meshes are in the next test too
@pytest.mark.parametrize(("dp", "cp", "tp"), [(2, 2, 1), (1, 2, 2), (1, 1, 1), (1, 4, 1)])
def test_every_mesh_has_the_losses_of_one_process(single_process: list[float], dp: int, cp: int, tp: int) -> None:
    assert_same_losses(run_ranks(dp * cp * tp, train_3d, dp=dp, cp=cp, tp=tp), single_process)


@pytest.mark.long
def test_a_checkpoint_of_one_mesh_goes_on_at_another(single_process: list[float], tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    assert_same_losses(run_ranks(4, train_3d, dp=2, cp=2, tp=1, save=folder, steps=5), single_process[:5])
    assert_same_losses(run_ranks(4, train_3d, dp=1, cp=2, tp=2, load=folder), single_process[5:])


# ---- reinforcement learning ---------------------------------------------------------------------


def train_grpo(cp: int, steps: int) -> list[tuple[float, float]]:
    logged: list[tuple[float, float]] = example("train_grpo").train(cp, steps)
    return logged


def assert_same(got: list[list[tuple[float, float]]], wanted: list[tuple[float, float]]) -> None:
    """The rewards are shares of the same tokens. A loss is a mean over 300 tokens, each good to a few ulp (6e-7) of
    float32; AdamW divides gradients by their own size, so that rounding grows by the steps taken."""
    for logged in got:
        assert [reward for _, reward in logged] == pytest.approx([reward for _, reward in wanted], abs=1e-6)
        assert [loss for loss, _ in logged] == pytest.approx([loss for loss, _ in wanted], abs=1e-4)


def test_two_ranks_learn_what_one_process_learns() -> None:
    (one_process,) = run_ranks(1, train_grpo, 1, 12)
    assert_same(run_ranks(2, train_grpo, 2, 2), one_process[:2])
    rewards = [reward for _, reward in one_process]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2  # from half of the numbers to more: it learns


@pytest.mark.long  # the loss is the same code
def test_two_groups_of_two_ranks_are_two_processes() -> None:
    two_processes = run_ranks(2, train_grpo, 1, 6)
    assert_same(run_ranks(4, train_grpo, 2, 6), two_processes[0])
