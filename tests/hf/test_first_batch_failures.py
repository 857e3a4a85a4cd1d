"""A model that fails in one process, on all ranks or on one alone, while an engine gathers its weights."""

import os
import tempfile
from pathlib import Path

import pytest
import ringtile
import torch
import torch.distributed as dist
from hf_engines import engine as engine_arguments
from hf_engines import full_weights
from hf_models import tiny_model
from hf_training import Messages, make_trainer
from pool import run_ranks
from ringtile.first_batch.trace import Trace, runs_whole
from ringtile.hf import first_batch
from ringtile.hf.trainer import first_batch_of
from simulated_gpu import CUDA, SimulatedGpu
from torch import nn

from tools.pool import Pool


class Failing(nn.Module):
    """An MLP that fails in runs of one process on a cut of the first batch: of all ranks, or of the last one."""

    def __init__(self, mlp: nn.Module, alone: bool) -> None:
        super().__init__()
        self.mlp, self.alone = mlp, alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if runs_whole() and x.size(1) == 32 and (not self.alone or dist.get_rank() == dist.get_world_size() - 1):
            raise ValueError("32 tokens do not fit")
        return self.mlp(x)


def _rows_of_48(rows):
    ids = torch.tensor([(row["input_ids"] * 8)[:48] for row in rows])
    return {"input_ids": ids, "labels": ids.clone()}


def _trained(engine, alone, config):
    """What ringtile warned of, whether the first batch was proved, the losses and the weights."""
    model = tiny_model().train()
    model.model.layers[1].mlp = Failing(model.model.layers[1].mlp, alone)
    with pytest.MonkeyPatch.context() as patch, engine_arguments(engine) as arguments, Messages() as said:
        for name, value in {"_TOKENS": 1, "_ROW": 32, "_ALIKE_SECONDS": 2.0 if alone else 20.0}.items():
            patch.setattr(first_batch, name, value)
        steps = {"max_steps": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 1}
        trainer = make_trainer(model=model, collator=_rows_of_48, **steps, **arguments)
        ringtile.enable(trainer, {"context_parallel_size": 2} | config)
        try:
            trainer.train()
            proved = first_batch_of(trainer) is not None
        finally:
            ringtile.restore(trainer)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return list(said), proved, losses, full_weights(trainer.model)


ENGINES = ["FSDP2", pytest.param("ZeRO-3", marks=pytest.mark.long)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cut_that_fails_on_all_ranks_is_tried_whole(engine):
    checks = ({}, {"first_batch_check": False})
    proved, unproved = (run_ranks(2, _trained, engine, False, check, timeout=60.0) for check in checks)
    assert [rank[1] for rank in (*proved, *unproved)] == [True, True, False, False]
    assert proved[0][2] == unproved[0][2]
    torch.testing.assert_close(proved[0][3], unproved[0][3], rtol=0.0, atol=0.0)


def test_a_failure_of_one_rank_is_known_to_all_where_no_weights_are_gathered():
    for _, proved, losses, _ in run_ranks(4, _trained, "DDP", True, {}, timeout=60.0):
        assert proved
        assert len(losses) == 2


def _ends(engine, folder):
    """A process that fails ends, as it does under torchrun."""
    try:
        _trained(engine, True, {})
    except Exception as error:
        Path(folder, str(dist.get_rank())).write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(1)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_failure_of_one_rank_ends_the_training_where_weights_are_gathered(engine):
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(4)
        try:
            pool.outcomes(_ends, engine, folder, timeout=60.0)
        finally:
            pool.close()
        said = {path.name: path.read_text() for path in Path(folder).iterdir()}
    cause = (
        "on the first batch, model.layers.1.mlp (Failing) fails on this rank, and not on all, (ValueError: 32 tokens"
    )
    assert said["3"].startswith(f"RefusedError: {cause}"), said
    assert all(said[rank].startswith(f"PeerLostError: rank 3 was lost: {cause}") for rank in "012"), said


def test_where_nothing_was_recorded_ranks_compare_on_the_device_of_the_model():
    """A group over NCCL alone carries no tensors of a CPU."""
    model = nn.Linear(2, 2)
    offloaded = Trace({model: ""})
    with SimulatedGpu() as gpu:
        offloaded.loss = model.weight.detach().sum().to(CUDA)
        assert offloaded.device == CUDA
        gpu.move(model)
        assert Trace({model: ""}).device == CUDA
    assert Trace({}).device == torch.device("cpu")
