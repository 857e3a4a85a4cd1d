"""A rank that dies or stops while a Trainer runs is named by all others, by its rank in the world, in every phase."""

import contextlib
import dataclasses
import datetime
import gc
import time
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from faults.counts import Counts
from faults.training_kills import PHASES, Trial, run
from hf_training import PROOF, make_trainer, run_new_ranks
from pool import run_ranks
from ringtile import MetricsCallback, PeerLostError, RingMismatchError, enable, restore
from ringtile.hf import peers as hf_peers
from ringtile.hf.group import ContextParallelGroup
from ringtile.hf.patches import Patches
from ringtile.hf.peers import Peers, of_a_collective
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
def test_lost_rank_is_named_by_all_others(trial):
    counts = Counts()
    run(trial, counts)
    assert counts.named == 1, counts.notes


def peers_of_all(seconds=10.0):
    """Of ranks that all share a sequence."""
    return Peers(ContextParallelGroup(dist.get_world_size(), seconds, torch.device("cpu")))


class _Engine:
    """Methods that fail."""

    def of_its_own(self):
        raise RuntimeError("the sizes of a and b differ")

    def no_rank_is_lost(self):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Timed out")


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


def _errors_of_others():
    """What an engine's own errors become, while all ranks are there."""
    patches, engine, peers, said = Patches(), _Engine(), peers_of_all(), []
    for name in ("of_its_own", "no_rank_is_lost"):
        peers.wrap(engine, name, patches)
        with pytest.raises(RuntimeError) as raised:
            getattr(engine, name)()
        said.append(str(raised.value))
    patches.restore()
    return said


def test_other_errors_stay_what_they_are():
    for said in run_new_ranks(2, _errors_of_others):
        assert said == ["the sizes of a and b differ", "[gloo/transport/tcp/pair.cc:1] Timed out"]


def _one_rank_stays(kind):
    """What each rank does where rank 1 raises in train(), and does not end."""
    hf_peers._LEAVE_SECONDS = 0.5
    peers, rank, store = peers_of_all(), dist.get_rank(), distributed_c10d._get_default_store()
    try:
        with peers.named("train"):
            if rank == 1:
                raise kind("of rank 1")
            dist.barrier()
            return "trained"
    except PeerLostError as error:
        store.set("rank 0 has ended", "")
        return str(error)
    except kind:
        store.wait(["rank 0 has ended"], datetime.timedelta(seconds=20))
        return "stayed"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_no_rank_waits_for_one_that_has_raised_and_stays(kind):
    told = f"rank 1 was lost in train() of rank 0: {kind.__name__}: of rank 1; see rank 1's log for the cause"
    assert run_new_ranks(2, _one_rank_stays, kind) == [told, "stayed"]


def _all_ranks_raise(another_trainer):
    """Whether all can go on."""
    with mock.patch.object(hf_peers, "_LEAVE_SECONDS", 0.2):
        peers = peers_of_all()
        with contextlib.suppress(ValueError), peers.named("train"):
            raise ValueError("of all ranks")
    if another_trainer:
        peers = peers_of_all()
    with peers.named("train"):
        time.sleep(0.6 * dist.get_rank())
        dist.barrier()
    return True


@pytest.mark.parametrize("another_trainer", [False, True])
def test_ranks_that_have_all_raised_can_go_on(another_trainer):
    assert run_ranks(2, _all_ranks_raise, another_trainer) == [True, True]


def _two_groups():
    """Whom each of four ranks names: rank 3 raises, of which only rank 2 hears from it."""
    peers = Peers(ContextParallelGroup(2, 10.0, torch.device("cpu")))
    with pytest.raises((ValueError, PeerLostError)) as raised, peers.named("train"):
        raise ValueError("of rank 3") if dist.get_rank() == 3 else RuntimeError("[gloo/transport/tcp/pair.cc:1] closed")
    return str(raised.value)


def test_ranks_of_another_sequence_hear_whom_it_has_lost():
    said = run_new_ranks(4, _two_groups)
    for rank in range(3):
        assert said[rank].startswith(f"rank 3 was lost in train() of rank {rank}: ValueError: of rank 3"), said


def _failures_in_turn():
    """Whom each rank names in a second training, after one in which all have failed because of another rank."""
    peers, rank, said = peers_of_all(), dist.get_rank(), []
    for lost in (1, 2):
        with pytest.raises((ValueError, PeerLostError)) as raised, peers.named("train"):
            raise ValueError("it") if rank == lost else RuntimeError("[gloo/transport/tcp/pair.cc:1] closed")
        said.append(str(raised.value).partition(" was lost")[0])
    return said


def test_a_second_failure_is_not_taken_for_the_first():
    assert run_new_ranks(3, _failures_in_turn) == [["rank 1", "rank 2"], ["it", "rank 2"], ["rank 1", "it"]]


def _other_calls():
    """What each rank raises where rank 0 alone evaluates before the training."""
    trainer = make_trainer(max_steps=1)
    enable(trainer, {"context_parallel_size": 2})
    try:
        with pytest.raises(RingMismatchError) as raised:
            trainer.evaluate() if dist.get_rank() == 0 else trainer.train()
    finally:
        restore(trainer)
    return str(raised.value)


def test_ranks_that_call_other_methods_are_named():
    first, second = run_ranks(2, _other_calls)
    assert "rank 0 has evaluation_loop() of the Trainer, rank 1 has train() of the Trainer" in first
    assert "rank 1 has train() of the Trainer, rank 0 has evaluation_loop() of the Trainer" in second


def _one_rank_does_not_come(name):
    """What rank 0 raises where rank 1 does something else."""
    trainer = make_trainer(max_steps=1, ddp_timeout=2)
    enable(trainer, {"context_parallel_size": 2})
    store = distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait([f"{name} has failed"])
        return ""
    try:
        with pytest.raises(PeerLostError) as raised:
            trainer.predict(trainer.eval_dataset) if name == "predict" else getattr(trainer, name)()
    finally:
        store.set(f"{name} has failed", "")
    return str(raised.value)


@pytest.mark.parametrize("name", ["evaluate", pytest.param("predict", marks=pytest.mark.long)])
def test_a_rank_that_does_not_come_is_named_after_ddp_timeout(name):
    said, _ = run_new_ranks(2, _one_rank_does_not_come, name)
    header = "the header of call 1 (evaluation_loop() of the Trainer) of rank 0"
    assert said.startswith(f"rank 1 was lost in {header}: nothing came")


class _OfADevice(ProcessGroupTransport):
    """Makes calls on a device that the host runs ahead of: "meta", which carries nothing."""

    def check_device(self, device):
        pass

    def _open(self, device):
        pass


class _Steps:
    def get_batch_samples(self, batches, number):
        return [next(batches) for _ in range(number)]

    def prediction_step(self):
        return None


def _steps_on_a_device():
    """What rank 0's second step returns before rank 1 has come to it."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    groups._transports[group] = _OfADevice(group)
    patches, steps, store = Patches(), _Steps(), distributed_c10d._get_default_store()
    peers = Peers(SimpleNamespace(size=2, process_group=group, device=torch.device("meta")))
    peers.meet_when_loaded(steps, patches)
    said = [steps.get_batch_samples(iter("abc"), 2)]
    if dist.get_rank() == 1:
        store.wait(["rank 0 has gone on"])
    try:
        said.append(steps.get_batch_samples(iter("abc"), 2))
    finally:
        store.set("rank 0 has gone on", "")
    return said


def test_the_host_of_a_device_waits_for_no_rank_at_a_step():
    assert run_ranks(2, _steps_on_a_device) == [[["a", "b"]] * 2] * 2


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
    trainer.add_callback(MetricsCallback())
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
