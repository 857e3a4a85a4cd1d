"""A checkpoint is whole, or resuming from it is refused by name; a save that fails leaves the one before it."""

import json
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
import ringtile
import torch
from hf_engines import engine
from hf_training import PROOF, make_trainer
from pool import Pool, run_ranks
from ringtile import CheckpointError, PeerLostError
from ringtile.hf import checkpoints
from ringtile.hf.checkpoints import MANIFEST, damage_of, find
from transformers import TrainerCallback

CONFIG = PROOF | {"context_parallel_size": 2}
SAVING = {"save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 4}
FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state_1.pth")


def _train(folder, resume=None, config=CONFIG, callbacks=(), **options):
    trainer = make_trainer(
        folder=str(folder), trainer_arguments={"callbacks": list(callbacks)}, **{**SAVING, **options}
    )
    ringtile.enable(trainer, config)
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        ringtile.restore(trainer)
    return {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(the folder of a training of two ranks with checkpoints 2 and 4, its last weights)"""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(2, _train, folder)[0]


@pytest.fixture
def copy(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved[0], tmp_path / "copy"))


def _truncate(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGE = {
    "is missing": pathlib.Path.unlink,
    "bytes, ": _truncate,
}


@pytest.mark.parametrize("words", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named(words, name, copy):
    last = copy / "checkpoint-4"
    assert damage_of(last) is None
    DAMAGE[words](last / name)
    assert damage_of(last).startswith(name)
    assert words in damage_of(last)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.check(last)
    assert f"{last} is damaged: {name}" in str(raised.value)
    assert f"the last whole checkpoint is {copy / 'checkpoint-2'}: set resume_from_checkpoint" in str(raised.value)
    assert find(str(copy)) == copy / "checkpoint-2"


@pytest.mark.parametrize("text", ["", "[]", "null", '{"files": 3}', '{"files": {}}', "\xff", '{"files": {"x": 3}}'])
def test_damaged_manifest_is_named(text, tmp_path):
    (tmp_path / "trainer_state.json").touch()
    (tmp_path / MANIFEST).write_text(text, encoding="latin-1")
    assert damage_of(tmp_path) == f"{MANIFEST} is not readable"


def _resumes(folder, resume, **options):
    try:
        return _train(folder, resume, **options)
    except CheckpointError as error:
        return str(error)


def test_resume_refuses_a_damaged_checkpoint_on_every_rank_and_finds_the_whole_one(saved, copy):
    _truncate(copy / "checkpoint-4" / "model.safetensors")
    (copy / "checkpoint-4" / "rng_state_7.pth").touch()  # of a larger world
    for message in run_ranks(2, _resumes, copy, str(copy / "checkpoint-4")):
        assert "checkpoint-4 is damaged: model.safetensors has " in message
    for weights in run_ranks(2, _resumes, copy, True):  # goes on from step 2 to step 4
        assert all(torch.equal(weight, saved[1][name]) for name, weight in weights.items())
    assert damage_of(copy / "checkpoint-4") is None
    assert not (copy / "checkpoint-4" / "rng_state_7.pth").exists()


def test_no_whole_checkpoint_is_named(copy):
    for name in ("checkpoint-2", "checkpoint-4"):
        (copy / name / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-4: optimizer.pt is missing; .*checkpoint-2: optimizer.pt"):
        find(str(copy))
    with pytest.raises(CheckpointError, match="which is no folder"):
        checkpoints.check(copy / "checkpoint-5")


LEFT = {
    "nothing": (),
    "weights": ("model.safetensors", "optimizer.pt"),
    "a draft": (f"{MANIFEST}.new", "trainer_state.json"),
}


@pytest.mark.parametrize("left", LEFT)
def test_a_checkpoint_that_is_only_begun_is_not_whole(left, copy):
    last = copy / "checkpoint-4"
    (last / f"{MANIFEST}.new").touch()
    for path in last.iterdir():
        if path.name not in LEFT[left]:
            path.unlink()
    assert damage_of(last)
    assert find(str(copy)) == copy / "checkpoint-2"


def test_a_checkpoint_is_damaged_from_its_first_deleted_file_on(copy, monkeypatch):
    def checked(path, **options):
        assert "while it was being saved or deleted" in damage_of(path.parent)
        deleted.append(path.name)
        unlink(path, **options)

    deleted, unlink = [], pathlib.Path.unlink
    monkeypatch.setattr(pathlib.Path, "unlink", checked)
    checkpoints._delete_older(copy, 1, {copy / "checkpoint-4"})
    assert set(FILES) <= set(deleted)
    assert [path.name for path in copy.iterdir()] == ["checkpoint-4"]


ENGINES = {
    "optimizer.bin": "FSDP (FULL_STATE_DICT)",
    "optimizer_0": "FSDP (SHARDED_STATE_DICT)",
    "latest": "DeepSpeed",
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_checkpoint_of_another_engine_is_refused(name, copy):
    last = copy / "checkpoint-4"
    checkpoints._check_engine(last, "DDP or one process")
    with pytest.raises(CheckpointError, match="was saved under DDP or one process, and this training runs under FSDP"):
        checkpoints._check_engine(last, "FSDP (FULL_STATE_DICT)")
    (last / "optimizer.pt").rename(last / name)
    checkpoints._check_engine(last, ENGINES[name])


def _resumes_under_fsdp(folder):
    with engine("FSDP2") as arguments:
        return _resumes(folder, True, **arguments)


def test_fsdp_refuses_a_checkpoint_of_ddp(copy):
    for message in run_ranks(2, _resumes_under_fsdp, copy):
        assert "was saved under DDP or one process, and this training runs under FSDP (FULL_STATE_DICT);" in message


def _resumes_without_optimizer(folder):
    _train(folder, save_only_model=True, max_steps=2)
    return _train(folder, True)


def test_a_checkpoint_without_optimizer_state_is_resumed_as_transformers_does(tmp_path):
    """With a new optimizer, as the user asked for by save_only_model."""
    options = {**SAVING, "per_device_train_batch_size": 2}
    for folder, resume, steps in ((tmp_path / "one", None, 2), (tmp_path / "one", True, 4)):
        alone = make_trainer(folder=str(folder), **{**options, "max_steps": steps, "save_only_model": True})
        alone.train(resume_from_checkpoint=resume)
    for weights in run_ranks(2, _resumes_without_optimizer, tmp_path / "two"):
        for name, weight in alone.model.named_parameters():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)


def _no_file_is_read(folder):
    read = []

    def audit(event, arguments):
        if event == "open" and armed and str(arguments[0]).startswith(str(folder)) and arguments[1] in ("r", "rb"):
            read.append(str(arguments[0]))

    armed = True
    sys.addaudithook(audit)
    _train(folder, max_steps=2)
    armed = False
    return read


def test_a_save_reads_no_file_back(tmp_path):
    assert run_ranks(2, _no_file_is_read, tmp_path) == [[], []]
    files = json.loads((tmp_path / "checkpoint-2" / MANIFEST).read_text())["files"]
    assert files == {
        path.name: path.stat().st_size for path in (tmp_path / "checkpoint-2").iterdir() if path.name != MANIFEST
    }


def test_nothing_is_written_where_no_sequence_is_sharded(tmp_path):
    _train(tmp_path, config={"tiled_mlp": True})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(MANIFEST)]


def test_checkpoint_without_a_manifest_is_accepted_with_a_warning(copy, caplog):
    (copy / "checkpoint-4" / MANIFEST).unlink()
    with caplog.at_level(logging.WARNING):
        assert find(str(copy)) == copy / "checkpoint-4"
    assert "was saved without ringtile" in caplog.text


class _KilledWhileSaving(TrainerCallback):
    """Ends the process once the files of step 4 are there, and the manifest is not complete."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            checkpoints._write_manifest = lambda folder: os.kill(os.getpid(), signal.SIGKILL)


def test_a_save_that_was_killed_is_not_whole(tmp_path):
    doomed = Pool(2)
    outcomes = doomed.outcomes(_train, tmp_path, callbacks=[_KilledWhileSaving()], max_steps=6, save_total_limit=1)
    doomed.close()
    assert isinstance(outcomes[0], EOFError)
    assert isinstance(outcomes[1], PeerLostError)
    assert str(outcomes[1]).startswith("rank 0 was lost in ")  # the step that it meets rank 1 before, or its engine
    assert damage_of(tmp_path / "checkpoint-4") == "its training ended while it was being saved or deleted"
    assert find(str(tmp_path)) == tmp_path / "checkpoint-2"


def test_older_checkpoints_are_deleted_after_the_new_one_is_whole(tmp_path):
    run_ranks(2, _train, tmp_path, save_total_limit=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    manifest = json.loads((tmp_path / "checkpoint-4" / MANIFEST).read_text())
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= manifest["files"].keys()


def _until_the_disk_is_full(folder):
    with pytest.raises((CheckpointError, PeerLostError)) as raised:
        _train(folder, max_steps=40, save_steps=1)
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount")
def test_a_full_disk_is_named_and_leaves_the_checkpoint_before(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs")
    doomed = Pool(2)
    try:
        (first, message), (second, told) = doomed.run(_until_the_disk_is_full, tmp_path)
        whole = find(str(tmp_path))
    finally:
        doomed.close()
        subprocess.run(["umount", tmp_path], check=True)
    assert first == "CheckpointError"
    assert "could not be saved on rank 0" in message
    assert f"the last whole checkpoint is {whole}" in message
    if second == "CheckpointError":  # its own file, of RNG states, met the full disk too
        assert "could not be saved on rank 1" in told
    else:
        assert second == "PeerLostError"
        assert told.startswith("rank 0 was lost in train() of rank 1: CheckpointError")
