"""Ranks meet in ringtile.enable: one that fails there is named, as are other versions and another run."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hf_training import make_trainer
from pool import run_ranks
from ringtile import RingMismatchError, enable, restore
from ringtile.hf import group
from ringtile.hf.group import ContextParallelGroup

CP2 = {"context_parallel_size": 2}


def _differs(name: str) -> str:
    """What a rank raises where rank 1 has another version, or is of another run."""
    rank = dist.get_rank()
    here: Any = mock.patch.dict(os.environ, {name: f"run {rank}"})
    if name == "transformers":
        here = mock.patch.object(group.transformers, "__version__", f"5.{rank}")
    with here, pytest.raises(RingMismatchError) as error:
        ContextParallelGroup(2, 60.0, torch.device("cpu"))
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "values"), [("transformers", ("5.0", "5.1")), ("TORCHELASTIC_RUN_ID", ("run 0", "run 1"))]
)
def test_other_versions_and_another_run_are_named(name: str, values: tuple[str, str]) -> None:
    """Two jobs on one host with one MASTER_PORT become one world: its ranks trained together."""
    first, second = run_ranks(2, _differs, name)
    assert f"{name}: rank 0 has '{values[0]}', rank 1 has '{values[1]}'; expected the same packages" in first
    assert f"{name}: rank 1 has '{values[1]}', rank 0 has '{values[0]}'; expected the same packages" in second


def _one_fails(kind: str) -> tuple[str, float, str]:
    """What a rank raises where enable fails on rank 1 alone, after how long; and whether all go on."""
    rank, began = dist.get_rank(), time.monotonic()
    trainer = make_trainer(ddp_timeout=120)
    config: Any = {"a file": "/no/such/file.yaml", "a model": CP2 | {"tiled_mlp": True}}[kind] if rank else CP2
    if rank and kind == "a model":
        trainer.model.model.layers[0].mlp.forward = lambda x: x
    try:
        enable(trainer, config)
        said = "enabled"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    trainer = make_trainer()
    enable(trainer, CP2)
    restore(trainer)
    return said, seconds, "enabled"


@pytest.mark.parametrize("kind", ["a file", "a model"])
def test_a_rank_on_which_enable_fails_is_named_by_the_others_at_once(kind: str) -> None:
    (first, seconds, _), (second, _, _) = run_ranks(2, _one_fails, kind)
    reason = {"a file": "ConfigError: /no/such/file.yaml", "a model": "RefusedError: tiles: the forward of"}[kind]
    assert second.startswith(reason)
    assert first.startswith(f"PeerLostError: rank 1 was lost in ringtile.enable of rank 0: {reason}")
    assert seconds < 100  # of the 120 that a rank is waited for


def _means() -> bool:
    x = torch.linspace(0.1, 1, 97)
    return torch.equal(ContextParallelGroup(3, 60.0, torch.device("cpu")).mean(x), x)


def test_a_mean_of_equal_numbers_is_that_number() -> None:
    assert all(run_ranks(3, _means))
