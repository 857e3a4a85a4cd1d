"""What only one rank meets, after the ranks have agreed on their configuration: all end at once, with its reason.

A rank that still waits 10 s after the first has ended is killed by `run_command`, and has another status.
"""

from __future__ import annotations

import os
import pathlib
import signal
import threading
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from pool import run_command
from ringtile.cli import environment, training, world
from ringtile.errors import ConfigError, Refused
from test_cli_train import TRAINING, write_config


def _rank_1_fails_in(name: str, error: Exception | None) -> None:
    """In a function of cli/training.py. None: it is killed."""
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
    "a refusal": (partial(_rank_1_fails_in, "Meter", Refused("this model")), "this model"),
    "a kill": (partial(_rank_1_fails_in, "make_model", None), "rank 0: a rank was lost: "),
    "in training": (
        partial(_rank_1_fails_in_training, ValueError("a bad row")),
        "rank 0: rank 1 was lost in train() of rank 0: ValueError: a bad row",
    ),
}
LONG = set(CASES) - {"no model folder", "in training"}
STATUS = {"a kill": -signal.SIGKILL, "an error that is not ours": 1, "in training": 1}  # of rank 1, where it is not 2


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix) if name in LONG else name for name in CASES]
)
def test_failure_of_one_rank_ends_all_with_its_reason(name: str, tmp_path: pathlib.Path) -> None:
    prepare, reason = CASES[name]
    variables = {"HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    done = run_command(2, "train", str(write_config(tmp_path)), prepare=prepare, variables=variables)
    assert done.args == [2, STATUS.get(name, 2)], done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ringtile: error: ")]
    assert line.startswith(f"ringtile: error: {reason if reason.startswith('rank ') else f'rank 1: {reason}'}")


def test_a_rank_that_lost_another_hears_why_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(world, "_store", store)
    assert world.heard() == ""
    said = threading.Timer(0.1, store.set, ("failed", "rank 0: a reason"))
    said.start()
    assert world.heard() == "rank 0: a reason"
    said.join()


@pytest.mark.matrix
def test_output_folder_that_rank_0_cannot_make_ends_all(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    training = TRAINING | {"output_dir": str(tmp_path / "file" / "out")}
    done = run_command(2, "train", str(write_config(tmp_path, training=training)))
    assert done.args == [2, 2]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ringtile: error: ")]
    assert line.startswith("ringtile: error: rank 0: training.output_dir: cannot write to")
