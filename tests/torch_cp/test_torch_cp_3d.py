"""examples/train_3d.py: every mesh has the losses of one process that knows nothing of ranks."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import run_ranks
from ringtile import IntervalMask
from strategies import dense

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_3d.py"
STEPS = 10


def example() -> Any:
    if "train_3d" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_3d", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["train_3d"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["train_3d"]


def train(**arguments: Any) -> list[float]:
    losses: list[float] = example().train(example().Config(steps=arguments.pop("steps", STEPS), **arguments))
    return losses


@pytest.fixture(scope="module")
def single_process() -> list[float]:
    """The same model in a plain loop: whole rows, a dense mask, PyTorch's attention."""
    config = example().Config(steps=STEPS)
    torch.manual_seed(0)
    model = example().Llama(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, foreach=False)
    losses, attention = [], F.scaled_dot_product_attention
    for step in range(STEPS):
        batch = example().make_batch(config, step)
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


def assert_same(got: list[list[float]], wanted: list[float]) -> None:
    """A loss near 5 is a mean over 1000 tokens, each good to a few ulp (6e-7) of float32: 1e-6 relative."""
    for losses in got:
        assert losses == pytest.approx(wanted, rel=1e-6)


@pytest.mark.long  # two of the meshes are in the next test too
@pytest.mark.parametrize(("dp", "cp", "tp"), [(2, 2, 1), (1, 2, 2), (1, 1, 1), (1, 4, 1)])
def test_every_mesh_has_the_losses_of_one_process(single_process: list[float], dp: int, cp: int, tp: int) -> None:
    assert_same(run_ranks(dp * cp * tp, train, dp=dp, cp=cp, tp=tp), single_process)


@pytest.mark.long
def test_a_checkpoint_of_one_mesh_goes_on_at_another(single_process: list[float], tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    assert_same(run_ranks(4, train, dp=2, cp=2, tp=1, save=folder, steps=5), single_process[:5])
    assert_same(run_ranks(4, train, dp=1, cp=2, tp=2, load=folder), single_process[5:])
