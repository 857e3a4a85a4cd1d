"""What only one rank meets, after the ranks have agreed on their configuration: all end at once, with its reason.

A rank that still waits 10 s after the first has ended is killed by `run_command`, and has another status.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import run_command
from ringtile.cli import environment, train, training, world
from ringtile.errors import ConfigError, PeerLostError, RefusedError
from test_cli_train import TRAINING, write_config


def _rank_1_fails_in(name: str, error: Exception | None) -> None:
    """Fail in a function of cli/training.py. None: it is killed."""
    original = getattr(training, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if environment.rank() == 1:
            if error is not None:
                raise error
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(training, name, failing)


def _rank_1_fails_in_training(error: Exception) -> None:
    make_collator = training.make_collator

    def make(pad_id: int) -> Any:
        collate, batches = make_collator(pad_id), []

        def collate_or_fail(rows: Any) -> Any:
            batches.append(None)
            if environment.rank() == 1 and len(batches) == 3:
                raise error
            return collate(rows)

        return collate_or_fail

    training.make_collator = make


MISSING = ConfigError("data.files: text.txt names no file")
FOLDER = OSError(2, "No such file or directory", "model/config.json")
CASES = {
    "no model folder": (partial(_rank_1_fails_in, "make_model", ConfigError("model: no folder")), "model: no folder"),
    "no files": (partial(_rank_1_fails_in, "find_files", MISSING), str(MISSING)),
    "an error that is not ours": (partial(_rank_1_fails_in, "make_encoder", FOLDER), "FileNotFoundError: [Errno 2] No"),
    "arguments": (partial(_rank_1_fails_in, "make_arguments", ConfigError("training: x")), "training: x"),
    "rows": (partial(_rank_1_fails_in, "make_rows", ConfigError("data.files: no text")), "data.files: no text"),
    "a refusal": (partial(_rank_1_fails_in, "Meter", RefusedError("this model")), "this model"),
    "a kill": (partial(_rank_1_fails_in, "make_model", None), "rank 0: a rank was lost: "),
    "in training": (partial(_rank_1_fails_in_training, ValueError("a bad row")), "ValueError: a bad row"),
}
LONG = set(CASES) - {"no model folder", "in training"}
STATUS = {"a kill": -signal.SIGKILL, "an error that is not ours": 1, "in training": 1}  # of rank 1, where it is not 2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in CASES]
)
def test_failure_of_one_rank_ends_all_with_its_reason(name: str, tmp_path: pathlib.Path) -> None:
    prepare, reason = CASES[name]
    variables = {"HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    done = run_command(2, "train", str(write_config(tmp_path)), prepare=prepare, variables=variables)
    assert done.args == [2, STATUS.get(name, 2)], done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ringtile: error: ")]
    assert line.startswith(f"ringtile: error: {reason if reason.startswith('rank ') else f'rank 1: {reason}'}")


@pytest.fixture
def as_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process rank 1 of a world of two that has met, of which nothing is left afterwards."""
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "_store", dist.HashStore())
    monkeypatch.setattr(world, "_answers", True)
    monkeypatch.setattr(world, "_said", None)


@pytest.mark.usefixtures("as_rank_1")
def test_a_rank_says_why_it_fails_once_and_before_it_leaves_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(recipe: Any) -> None:
        raise ValueError("a bad row")

    heard = []
    monkeypatch.setattr(training, "_train", fails)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(training, "leave_groups", lambda error: heard.append(world.heard()))
    assert world.heard() == ""
    with pytest.raises(ValueError, match="a bad row") as raised:
        training.train(None)  # type: ignore[arg-type]
    assert heard == ["rank 1: ValueError: a bad row"]
    assert world.fail(raised.value) == heard[0]
    assert world._store is not None
    assert world._store.add("failures", 0) == 1


class _Stopped:
    """The store of a host that is stopped: every call waits."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: threading.Event().wait()


@pytest.mark.timeout(20)
@pytest.mark.usefixtures("as_rank_1")
def test_no_rank_waits_for_a_store_whose_host_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_store", _Stopped())
    began = time.monotonic()
    assert world.fail(ConfigError("no folder")) == "rank 1: no folder"
    assert world.heard() == ""
    assert world.first_to_say("a line")
    world.leave()
    assert time.monotonic() - began < world._ANSWER_SECONDS + 1.0  # one wait in all


class _Nothing:
    timeout_seconds = 1.0

    def mapping(self) -> dict[str, Any]:
        return {}


@contextlib.contextmanager
def _foreign_listener() -> Iterator[str]:
    """The port of a program that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.mark.timeout(30)
@pytest.mark.usefixtures("as_rank_1")
@pytest.mark.parametrize(
    ("rank", "error", "message"),
    [
        (
            "0",
            ConfigError,
            "MASTER_PORT is {port}, where another program of this machine listens; expected a port that",
        ),
        ("1", PeerLostError, "did not meet at MASTER_ADDR and MASTER_PORT within 1 s (no answer); expected that many"),
    ],
)
def test_a_port_that_another_program_has_is_named_in_time(
    rank: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    with _foreign_listener() as port:
        monkeypatch.setenv("MASTER_PORT", port)
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(error) as raised:
            world.alike(_Nothing)
    assert message.format(port=port) in str(raised.value)
    for thread in set(threading.enumerate()) - before:  # what torch says when the listener ends belongs to this test
        thread.join(10.0)


def _say_the_timeout_of_the_world() -> None:
    def make_model(*args: Any) -> Any:
        timeout = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
        raise ConfigError(f"the timeout is {timeout.total_seconds():g} s")

    training.make_model = make_model


def test_ddp_timeout_holds_on_cpus_too(tmp_path: pathlib.Path) -> None:
    """transformers passes it on with a GPU alone."""
    config = write_config(tmp_path, training=TRAINING | {"ddp_timeout": 7})
    variables = {"HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    done = run_command(2, "train", str(config), prepare=_say_the_timeout_of_the_world, variables=variables)
    assert "ringtile: error: the timeout is 7 s" in done.stderr


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("as_rank_1")
@pytest.mark.parametrize(("address", "rank"), [("127.0.0.1", "0"), ("127.0.0.1", "1"), ("no-such-host.invalid", "1")])
@pytest.mark.parametrize("broken", [False, True])
def test_a_start_waits_as_long_as_the_file_says(
    address: str, rank: str, broken: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """The other rank does not come, or the address has no host. A rank whose file is broken says that."""
    config = write_config(tmp_path, timeout_seconds="soon" if broken else 1.0)
    monkeypatch.setattr(world, "_TELL_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("RANK", rank)
    began = time.monotonic()
    with pytest.raises((ConfigError, PeerLostError)) as raised:
        train.run(argparse.Namespace(config=config, plot=None, compare=False))
    assert time.monotonic() - began < 1.0 + world._ANSWER_SECONDS + 5.0
    said = "timeout_seconds is 'soon'" if broken else "the 2 ranks of WORLD_SIZE did not meet at MASTER_ADDR and MASTER"
    assert said in str(raised.value)


@pytest.mark.long
def test_output_folder_that_rank_0_cannot_make_ends_all(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    training = TRAINING | {"output_dir": str(tmp_path / "file" / "out")}
    done = run_command(2, "train", str(write_config(tmp_path, training=training)))
    assert done.args == [2, 2]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ringtile: error: ")]
    assert line.startswith("ringtile: error: rank 0: training.output_dir: cannot write to")
