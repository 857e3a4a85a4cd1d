"""Kills or stops a random rank of a small training, at a random moment of a random phase.

Every other rank must end soon, with a PeerLost that names that rank.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import hf_training  # noqa: F401  the server from which ranks are forked imports it too
from pool import _context

from faults.counts import Counts

PHASES = ("forward", "backward", "reduction", "evaluation", "saving")
WORLDS = ((2, 2), (3, 3), (4, 2), (4, 4))  # (ranks, ranks that share a sequence)
TIMEOUT_SECONDS = 4.0  # until a stopped rank is missed
NO_TIMEOUT_SECONDS = 60.0  # a killed one is noticed without
LIMIT_SECONDS = 60.0  # then a rank counts as hung


@dataclass(frozen=True)
class Trial:
    world_size: int
    context_parallel_size: int
    phase: str
    stops: bool
    victim: int
    step: int
    delay: float  # seconds after the beginning of the phase
    timeout: float = TIMEOUT_SECONDS  # of all groups
    engine: str = "DDP"
    workers: int = 0  # that load data, forked from each rank

    @classmethod
    def draw(cls, rng: random.Random, number: int) -> Trial:
        world_size, size = rng.choice(WORLDS)
        phase = PHASES[number % len(PHASES)]
        delay = rng.choice([0.0, rng.uniform(0.0, 0.02)])
        stops, victim, step = rng.random() < 0.25, rng.randrange(world_size), rng.randint(1, 3)
        engine, workers = rng.choice(["DDP", "DDP", "FSDP2"]), rng.choice([0, 2])
        timeout = TIMEOUT_SECONDS if stops else NO_TIMEOUT_SECONDS
        return cls(world_size, size, phase, stops, victim, step, delay, timeout, engine, workers)


def campaign(trials: int | None, seed: int) -> Counts:
    counts, rng = Counts(), random.Random(seed)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(trials or 30):
        trial = Trial.draw(rng, number)
        before, ends = counts.bugs, run(trial, counts)
        seconds[trial.stops] += ends
        bug = counts.notes[-1] if counts.bugs > before else ""
        print(f"{number}: {trial}: {[round(end, 2) for end in ends]} {bug}", flush=True)
    for stops, ends in seconds.items():
        if ends:
            name = f"stop (timeout {TIMEOUT_SECONDS:g} s)" if stops else "kill"
            median, longest = statistics.median(ends), max(ends)
            counts.notes.insert(0, f"{len(ends)} ranks, {name} to end: median {median:.2f} s, longest {longest:.2f} s")
    return counts


def run(trial: Trial, counts: Counts, tries: int = 3) -> list[float]:
    """Counts one trial, by its worst rank; returns the seconds from the kill to the end of each other process.

    On a busy machine a rank may be silent for longer than a short timeout before any is stopped: it is tried again.
    """
    context = _context()
    ends: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, trial, folder)) for rank in range(trial.world_size)]
        for rank in ranks:
            rank.start()
        running = {rank.sentinel: number for number, rank in enumerate(ranks) if number != trial.victim}
        struck = Path(folder, "struck")
        deadline = time.monotonic() + 10 * LIMIT_SECONDS  # for the training to come to the phase
        while running and time.monotonic() < deadline:
            for sentinel in wait(list(running), 0.2):
                ends[running.pop(sentinel)] = time.monotonic()  # type: ignore[call-overload]
            if struck.exists():
                deadline = min(deadline, float(struck.read_text() or deadline) + LIMIT_SECONDS)
        for rank in ranks:
            rank.kill()
            rank.join()
        words = {
            rank: Path(folder, f"rank{rank}").read_text() if Path(folder, f"rank{rank}").exists() else ""
            for rank in range(trial.world_size)
            if rank != trial.victim
        }
        began = float(struck.read_text()) if struck.exists() else None
    if began is None and trial.stops and tries > 1:
        return run(trial, counts, tries - 1)
    if began is None:
        counts.unnamed += 1
        counts.notes.append(f"{trial}: no rank was struck: {str(words)[:600]}")
        return []
    if running:
        counts.hangs += 1
        counts.notes.append(f"{trial}: ranks {sorted(running.values())} hung")
        return []
    wrong = {
        rank: text for rank, text in words.items() if not text.startswith(f"PeerLost: rank {trial.victim} was lost")
    }
    if wrong:
        counts.unnamed += 1
        counts.notes.append(f"{trial}: {str(wrong)[:1200]}")
    else:
        counts.named += 1
    return [end - began for end in ends.values()]


def _rank(rank: int, trial: Trial, folder: str) -> None:
    """One rank: trains until it is struck, or fails because another one was."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    import torch
    import torch.distributed as dist

    multiprocessing.set_start_method("fork", force=True)  # of data-loading workers, which inherit connections then
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=trial.timeout)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=trial.world_size, timeout=timeout
    )
    try:
        _train(rank, trial, folder)
        said = "the training came to its end"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"
    Path(folder, f"rank{rank}").write_text(said)
    sys.exit(1)


def _train(rank: int, trial: Trial, folder: str) -> None:
    import ringtile
    from hf_engines import engine
    from hf_training import make_trainer

    with engine(trial.engine) as arguments:
        trainer = make_trainer(
            folder=f"{folder}/out",
            max_steps=40,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=2,
            dataloader_num_workers=trial.workers,
            **arguments,
        )
        size = trial.context_parallel_size
        ringtile.enable(trainer, {"context_parallel_size": size, "timeout_seconds": trial.timeout})
        if rank == trial.victim:
            _Strike(trainer, trial, Path(folder, "struck")).arm()
        trainer.train()


class _Strike:
    """Ends or stops this process, once, some time after its phase has begun."""

    def __init__(self, trainer: Any, trial: Trial, struck: Path) -> None:
        self._trainer, self._trial, self._struck = trainer, trial, struck
        self._under_way = False

    def arm(self) -> None:
        trainer, phase = self._trainer, self._trial.phase
        if phase == "reduction" and self._trial.engine == "DDP":  # which reduces gradients when the last one is there
            for parameter in trainer.model.parameters():
                parameter.register_post_accumulate_grad_hook(self._begin)
            return
        owner, name = {
            "forward": (trainer, "compute_loss"),
            "backward": (trainer.accelerator, "backward"),
            "reduction": (trainer.accelerator, "backward"),  # FSDP2 reduces the gradients of a layer after the layer
            "evaluation": (trainer, "prediction_step"),
            "saving": (trainer, "_save_checkpoint"),
        }[phase]
        original = getattr(owner, name)

        def phase_of_training(*args: Any, **kwargs: Any) -> Any:
            if phase != "forward" or trainer.model.training:
                self._begin()
            return original(*args, **kwargs)

        setattr(owner, name, phase_of_training)

    def _begin(self, *_: Any) -> None:
        if self._under_way or self._trainer.state.global_step < self._trial.step:
            return
        self._under_way = True
        if self._trial.delay == 0.0:
            self._strike()
        else:
            threading.Timer(self._trial.delay, self._strike).start()

    def _strike(self) -> None:
        temporary = self._struck.with_suffix(".new")
        temporary.write_text(str(time.monotonic()))
        with contextlib.suppress(OSError):
            temporary.replace(self._struck)
        os.kill(os.getpid(), signal.SIGSTOP if self._trial.stops else signal.SIGKILL)
