"""examples/train_grpo.py: ranks that share rows learn what one process learns."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from pool import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_grpo.py"


def example() -> Any:
    if "train_grpo" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_grpo", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["train_grpo"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["train_grpo"]


def train(cp: int, steps: int) -> list[tuple[float, float]]:
    logged: list[tuple[float, float]] = example().train(cp, steps)
    return logged


def assert_same(got: list[list[tuple[float, float]]], wanted: list[tuple[float, float]]) -> None:
    """The rewards are shares of the same tokens. A loss is a mean over 300 tokens, each good to a few ulp (6e-7) of
    float32; AdamW divides gradients by their own size, so that rounding grows by the steps taken."""
    for logged in got:
        assert [reward for _, reward in logged] == pytest.approx([reward for _, reward in wanted], abs=1e-6)
        assert [loss for loss, _ in logged] == pytest.approx([loss for loss, _ in wanted], abs=1e-4)


def test_two_ranks_learn_what_one_process_learns() -> None:
    (one_process,) = run_ranks(1, train, 1, 12)
    assert_same(run_ranks(2, train, 2, 12), one_process)
    rewards = [reward for _, reward in one_process]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2  # from half of the numbers to more: it learns


@pytest.mark.long  # the loss is the same code
def test_two_groups_of_two_ranks_are_two_processes() -> None:
    two_processes = run_ranks(2, train, 1, 6)
    assert_same(run_ranks(4, train, 2, 6), two_processes[0])
