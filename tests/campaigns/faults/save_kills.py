"""Kills a random rank at a random file operation of its saves, then resumes.

Every trial has a place of its own: what Python opens to write, renames, makes or removes below the output folder. The
resumed training must begin at the last whole checkpoint, name the damaged one, and end bitwise where an undisturbed one
ends.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import hf_training  # noqa: F401  the server from which ranks are forked imports it too
import torch
import torch.distributed as dist
from pool import Pool, start_server
from ringtile.errors import CheckpointError, PeerLostError
from ringtile.hf.checkpoints import MANIFEST

from faults.counts import Counts

CELLS = (("DDP", 1), ("DDP", 2), ("FSDP2", 2))  # (engine, ranks)
OPERATIONS = {
    "open": "open",
    "os.rename": "rename",
    "os.mkdir": "mkdir",
    "os.remove": "remove",
    "os.rmdir": "remove",
}  # audit events
SAVES = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": 6, "num_rows": 24}
LIMIT_SECONDS = 300.0  # of a training; it takes a few, but machines are busy
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3}


class Place(NamedTuple):
    """Where a rank is killed: before its operation of that number."""

    engine: str
    world_size: int
    victim: int
    number: int
    operation: str

    def __str__(self) -> str:
        who = f"{self.engine}, rank {self.victim} of {self.world_size}"
        return f"{who} killed before {self.operation} (no. {self.number})"


class Outcome(NamedTuple):
    """A training: losses and a digest of its weights, the step it began at, and what was logged of checkpoints."""

    losses: list[float]
    weights: str
    began: int
    said: str


def campaign(trials: int | None, seed: int) -> Counts:
    start_server()
    counts, chance = Counts(), random.Random(seed)
    pools = {world_size: Pool(world_size, LIMIT_SECONDS) for world_size in (1, 2)}
    expected: dict[tuple[str, int], Outcome] = {}
    places: list[Place] = []
    with tempfile.TemporaryDirectory() as folder:
        for cell in CELLS:
            arguments = (cell[0], f"{folder}/whole{cell}", f"{folder}/log")
            expected[cell] = pools[cell[1]].run(_train, *arguments, timeout=LIMIT_SECONDS)[0]
            places += _places(cell, folder)
        chance.shuffle(places)
        for number, place in enumerate(_spread(places, trials or 15)):
            before, pool = counts.bugs, pools[place.world_size]
            _try(place, pool, expected[place[:2]], f"{folder}/{number}", counts)
            print(f"{number}:", counts.notes[-1] if counts.bugs > before else place, flush=True)
            shutil.rmtree(f"{folder}/{number}", ignore_errors=True)
            if pool.broken:
                pool.close()
                pools[place.world_size] = Pool(place.world_size, LIMIT_SECONDS)
    for pool in pools.values():
        pool.close()
    return counts


def _places(cell: tuple[str, int], folder: str) -> list[Place]:
    """List every operation of an undisturbed training, by rank."""
    return [
        Place(*cell, rank, number, operation)
        for rank in range(cell[1])
        for number, operation in enumerate(Path(f"{folder}/log{rank}").read_text().splitlines())
    ]


def _spread(places: list[Place], number: int) -> list[Place]:
    """Choose so many of the places, of as many kinds as there are, which take turns."""
    kinds: dict[tuple[Any, ...], list[Place]] = {}
    for place in places:
        kinds.setdefault((*place[:3], re.sub(r"\.tmp\w+", ".tmp", place.operation)), []).append(place)
    turns = max(map(len, kinds.values()))
    return [of_kind[turn] for turn in range(turns) for of_kind in kinds.values() if turn < len(of_kind)][:number]


def _try(place: Place, pool: Pool, expected: Outcome, folder: str, counts: Counts) -> None:
    log = f"{folder}.log"
    doomed = Pool(place.world_size, LIMIT_SECONDS)
    try:
        outcomes = doomed.outcomes(
            *(_train, place.engine, folder, log, place.victim, place.number), timeout=LIMIT_SECONDS
        )
    finally:
        doomed.close()
    if not isinstance(outcomes[place.victim], EOFError):
        counts.unnamed += 1
        counts.notes.append(f"{place}: was not killed: {outcomes[place.victim]!r}"[:500])
        return
    for rank, outcome in enumerate(outcomes):
        if rank != place.victim and not (isinstance(outcome, PeerLostError) and outcome.rank == place.victim):
            counts.unnamed += 1
            counts.notes.append(f"{place}: rank {rank}: {outcome!r}"[:500])
            return
    whole, damaged = _complete(Path(folder))
    resumed = pool.outcomes(_train, place.engine, folder, log, resume=True, timeout=LIMIT_SECONDS)
    if not whole and all(isinstance(outcome, CheckpointError) for outcome in resumed):
        message = str(resumed[0])
        if not all(f"checkpoint-{step}" in message for step in damaged):
            counts.unnamed += 1
            counts.notes.append(f"{place}: {damaged} not named in: {message}")
            return
        # What the error says to do.
        resumed = pool.outcomes(_train, place.engine, folder, log, timeout=LIMIT_SECONDS)
    for rank, outcome in enumerate(resumed):
        if isinstance(outcome, TimeoutError):
            counts.hangs += 1
            counts.notes.append(f"{place}: resumed, rank {rank} hung")
            return
        if isinstance(outcome, BaseException):
            counts.unnamed += 1
            counts.notes.append(f"{place}: resumed, rank {rank}: {outcome!r}"[:800])
            return
    outcome = resumed[0]
    last = max(whole, default=0)
    unnamed = [step for step in damaged if step > last > 0 and f"checkpoint-{step}" not in outcome.said]
    if outcome.began != last or (outcome.losses, outcome.weights) != (expected.losses, expected.weights):
        counts.silent += 1
        counts.notes.append(f"{place}: began at {outcome.began}, whole are {whole}, {outcome} for {expected}"[:800])
    elif unnamed:
        counts.unnamed += 1
        counts.notes.append(f"{place}: {unnamed} not named in: {outcome.said!r}")
    else:
        counts.named += 1


def _complete(run: Path) -> tuple[list[int], list[int]]:
    """List the steps of the checkpoints that have a complete manifest and every file of it, and of the others."""
    whole: list[int] = []
    damaged: list[int] = []
    for path in run.glob("checkpoint-*"):
        try:
            files = json.loads((path / MANIFEST).read_text())["files"]
        except FileNotFoundError:
            files = None
        good = files is not None and all((path / name).is_file() for name in files)
        (whole if good else damaged).append(int(path.name.split("-")[1]))
    return sorted(whole), sorted(damaged)


def _watch(folder: str, number: int, log: str) -> None:
    """Writes the file operations of this process below a folder to a log, and kills it before that one."""
    counted, logged = itertools.count(), open(log, "w")  # noqa: SIM115

    def before(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in OPERATIONS or not str(arguments[0]).startswith(folder):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if next(counted) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        logged.write(f"{OPERATIONS[event]} {os.path.relpath(str(arguments[0]), folder)}\n")
        logged.flush()

    sys.addaudithook(before)  # for ever; no other training of this process has that folder


def _train(engine: str, folder: str, log: str, victim: int = -1, number: int = -1, resume: bool = False) -> Outcome:
    """Train on each rank. The victim is killed at that operation."""
    import ringtile
    from hf_engines import engine as engine_arguments
    from hf_engines import full_weights
    from hf_training import make_trainer
    from transformers import TrainerCallback

    began: list[int] = []

    class Begins(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            began.append(state.global_step)

    said = _Said()
    rank = dist.get_rank()
    logging.getLogger("ringtile").addHandler(said)
    config = {"context_parallel_size": dist.get_world_size(), "tiled_mlp": True}
    try:
        with engine_arguments(engine) as arguments:
            trainer = make_trainer(
                folder=folder, trainer_arguments={"callbacks": [Begins()]}, **SAVES, **ADAM, **arguments
            )
            ringtile.enable(trainer, config)
            try:
                _watch(folder, number if rank == victim else -1, f"{log}{rank}")
                trainer.train(resume_from_checkpoint=resume or None)
                losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
                weights = _digest(full_weights(trainer.model))
            finally:
                ringtile.restore(trainer)
    finally:
        logging.getLogger("ringtile").removeHandler(said)
    return Outcome(losses, weights, began[0], "\n".join(said.lines))


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
