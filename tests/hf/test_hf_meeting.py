"""Ranks that share a sequence meet before each step: one that comes to another step, or to none, is named."""

import dataclasses
import datetime
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from faults.counts import Counts
from faults.training_kills import PHASES, Trial, run
from hf_training import PROOF, make_trainer, run_new_ranks
from pool import run_ranks
from ringtile import PeerLostError, RingMismatchError, enable, restore
from ringtile.hf.group import ContextParallelGroup, of_a_collective
from ringtile.transport import groups
from ringtile.transport.groups import ProcessGroupTransport
from torch.distributed import distributed_c10d
from transformers import TrainerCallback

KILL = Trial(world_size=3, context_parallel_size=3, phase="reduction", stops=False, victim=1, step=1, delay=0.0)
KILLS = [dataclasses.replace(KILL, world_size=2, context_parallel_size=2, phase="forward")]
LONG = [
    dataclasses.replace(KILL, world_size=4, context_parallel_size=2, phase="forward", victim=3),  # rank 1 of its group
    dataclasses.replace(KILL, phase="saving", victim=0),
    dataclasses.replace(KILL, world_size=4, context_parallel_size=2, phase="forward", victim=3, workers=2),
    dataclasses.replace(KILL, world_size=2, context_parallel_size=2, phase="evaluation", stops=True, timeout=2.0),
    *(dataclasses.replace(KILL, phase=phase, stops=stops) for phase in PHASES for stops in (False, True)),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("trial", [*KILLS, *(pytest.param(trial, marks=pytest.mark.long) for trial in LONG)], ids=str)
def test_ranks_end_when_one_is_lost(trial):
    counts = Counts()
    run(trial, counts)
    assert counts.named == 1, counts.notes


@pytest.mark.parametrize(
    ("said", "of_gloo"),
    [
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:1] Timed out", True),
        ("Application timeout caused pair closure", True),
        ("the sizes of a and b differ", False),
    ],
)
def test_errors_of_gloo_are_told_from_others(said, of_gloo):
    error = ValueError("raised from it")
    error.__cause__ = RuntimeError(said)
    assert of_a_collective(error) == of_gloo


class AsksOnRank0(TrainerCallback):
    """Sets a flag of the Trainer's, or evaluates itself, on the first rank alone."""

    def __init__(self, what):
        self.what, self.trainer = what, None

    def on_step_end(self, args, state, control, **kwargs):
        if dist.get_rank() == 0:
            if self.what == "evaluate()":
                self.trainer.evaluate()
            else:
                setattr(control, self.what, True)


def _asked_on_one_rank(what):
    """What each rank raises."""
    asks = AsksOnRank0(what)
    trainer = asks.trainer = make_trainer(max_steps=2, trainer_arguments={"callbacks": [asks]})
    enable(trainer, PROOF | {"context_parallel_size": 2})
    try:
        with pytest.raises(RingMismatchError) as raised:
            trainer.train()
    finally:
        restore(trainer)
    return str(raised.value)


@pytest.mark.parametrize("what", ["should_evaluate", "should_save", "should_training_stop", "evaluate()"])
def test_what_one_rank_alone_is_asked_for_is_named_at_once(what):
    first, second = run_ranks(2, _asked_on_one_rank, what)
    if what == "evaluate()":
        assert "rank 0 has a step of evaluation, rank 1 has what follows a step" in first
        assert "rank 1 has what follows a step, rank 0 has a step of evaluation" in second
    else:
        assert f"ranks disagree on {what} in call" in first
        assert "(what follows a step): rank 0 has 1, rank 1 has 0;" in first
        assert f"ranks disagree on {what} in call" in second


def _one_rank_does_not_come():
    """What rank 2 of two groups of two raises where rank 3 does something else."""
    group, store = ContextParallelGroup(2, 2.0, torch.device("cpu")), distributed_c10d._get_default_store()
    if dist.get_rank() == 3:
        store.wait(["a rank has failed"])
        return ""
    if dist.get_rank() < 2:
        group.meet("a step of training", 1)
        return ""
    with pytest.raises(PeerLostError) as raised:
        group.meet("a step of training", 1)
    store.set("a rank has failed", "")
    return raised.value.rank, str(raised.value)


def test_a_rank_that_does_not_come_is_named_by_its_rank_in_the_world_after_ddp_timeout():
    rank, said = run_new_ranks(4, _one_rank_does_not_come)[2]
    assert rank == 3
    assert said.startswith("rank 3 was lost in the header of call 1 (a step of training) of rank 2: nothing came")


class _OfADevice(ProcessGroupTransport):
    """Makes calls on a device that the host runs ahead of: "meta", which carries nothing."""

    def check_device(self, device):
        pass

    def _open(self, device):
        pass


def _steps_on_a_device():
    """The steps that rank 0 has come to before rank 1 comes to the second."""
    process_group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    groups._transports[process_group] = _OfADevice(process_group)
    group = SimpleNamespace(process_group=process_group, device=torch.device("meta"))
    store, come_to = distributed_c10d._get_default_store(), 0
    for step in (1, 2):
        if dist.get_rank() == 1 and step == 2:
            store.wait(["rank 0 has gone on"])
        ContextParallelGroup.meet(group, "a step of training", step)
        come_to = step
    store.set("rank 0 has gone on", "")
    return come_to


def test_the_host_of_a_device_waits_for_no_rank_at_a_step():
    assert run_ranks(2, _steps_on_a_device) == [2, 2]


def _timeout_of_the_world():
    """Of the world's group: before enable, in a training, and after restore."""
    found = []

    class Look(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            found.append(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds())

    trainer = make_trainer(max_steps=1, ddp_timeout=7)
    trainer.add_callback(Look())
    look = trainer.callback_handler.callbacks[-1]
    look.on_step_begin()
    enable(trainer, PROOF | {"context_parallel_size": 2})
    trainer.train()
    restore(trainer)
    look.on_step_begin()
    return len(set(found)), len(found)


def test_the_timeout_of_an_engine_that_runs_is_left_alone():
    assert run_ranks(2, _timeout_of_the_world) == [(1, 3)] * 2


def _group_after_destroy():
    """Whether a Trainer that is kept keeps its context-parallel group."""
    trainer = make_trainer(max_steps=1)
    before = set(distributed_c10d._world.pg_map)
    enable(trainer, PROOF | {"context_parallel_size": 2})
    (group,) = map(weakref.ref, set(distributed_c10d._world.pg_map) - before)
    del before
    trainer.train()
    dist.barrier()
    dist.destroy_process_group(group())
    gc.collect()
    return group() is None, trainer.state.global_step


def test_a_trainer_does_not_keep_its_group():
    assert run_ranks(2, _group_after_destroy) == [(True, 1)] * 2
