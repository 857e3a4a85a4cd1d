"""Kills or stops a random rank of a small training, at a random moment of a random phase.

Every other rank must end soon, and the last thing that it prints is a sentence of ringtile that names that rank, or, in
a collective of the engine or of accelerate, gloo's own error, on which torchrun would end the others. A rank that waits
for one which such an error has ended names that one, whose log has the error.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import math
import multiprocessing
import os
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import hf_training  # noqa: F401  the server from which ranks are forked imports it too
from pool import CONTEXT, start_server
from torch.distributed import TCPStore

from faults.counts import Counts

PROGRAMS = ("trainer", "train")  # a script around a Trainer, and `ringtile train`
STORES = ("rank 0", "agent")  # who hosts the store: ranks that were started by hand, or by torchrun
SCHEMES = ("ring", "all_gather", "ulysses", "usp:2", "auto")
PHASES = ("forward", "backward", "reduction", "evaluation", "saving")
WORLDS = ((2, 2), (3, 3), (4, 2), (4, 4))  # (ranks, ranks that share a sequence)
TIMEOUT_SECONDS = 4.0  # until a stopped rank is missed
NO_TIMEOUT_SECONDS = 60.0  # a killed one is noticed without
END_SECONDS = 2.0  # from the kill, or from the timeout, to the end of the process
PARENT_SECONDS = 5.0  # more, where a killed rank has workers: torch's look for their parent so often
BUSY_SECONDS = 3.0  # more, where other programs use the cores; only a rank later than that is a bug
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
    program: str = "trainer"
    store: str = "rank 0"
    scheme: str = "ring"

    def late(self, ends: list[float]) -> float:
        """Return how many seconds too late the last of these ranks ended; at most 0: none did. ends: from the kill."""
        workers = PARENT_SECONDS if self.workers else 0.0
        return max(ends, default=0.0) - END_SECONDS - (self.timeout if self.stops else workers)

    @classmethod
    def draw(cls, rng: random.Random, number: int) -> Trial:
        place = (number + number // len(PHASES)) % len(SCHEMES)  # each scheme with each phase, in turn
        scheme, store, program = SCHEMES[place], STORES[number // 6 % 2], PROGRAMS[number // 12 % 2]
        even = [world for world in WORLDS if scheme in ("ring", "all_gather", "auto") or world[1] != 3]  # of 4 heads
        world_size, size = rng.choice(even)
        phase = PHASES[number % len(PHASES)]
        delay = rng.choice([0.0, rng.uniform(0.0, 0.02)])
        stops, step = rng.random() < 0.4, rng.randint(1, 3)
        victim = rng.choice([0, rng.randrange(world_size)])
        engine, workers = rng.choice(["DDP", "DDP", "FSDP2"]) if program == "trainer" else "DDP", rng.choice([0, 2])
        timeout = TIMEOUT_SECONDS if stops else NO_TIMEOUT_SECONDS
        return cls(
            *(world_size, size, phase, stops, victim, step, delay, timeout, engine, workers, program, store, scheme)
        )


def campaign(trials: int | None, seed: int) -> Counts:
    start_server()
    counts, rng, late = Counts(), random.Random(seed), 0
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(trials or 30):
        trial = Trial.draw(rng, number)
        before, ends = counts.bugs, run(trial, counts)
        seconds[trial.stops] += ends
        late += trial.late(ends) > 0
        bug = counts.notes[-1] if counts.bugs > before else ""
        print(f"{number}: {trial}: {[round(end, 2) for end in ends]} {bug}", flush=True)
    for stops, ends in seconds.items():
        if ends:
            name = f"stop (after the timeout of {TIMEOUT_SECONDS:g} s)" if stops else "kill"
            median, longest = statistics.median(ends), max(ends)
            counts.notes.insert(0, f"{len(ends)} ranks, {name} to end: median {median:.2f} s, longest {longest:.2f} s")
    counts.notes.insert(
        0, f"{late} trials in which a rank ended later than {END_SECONDS:g} s after the kill or timeout"
    )
    return counts


def run(trial: Trial, counts: Counts, tries: int = 3) -> list[float]:
    """Counts one trial, by its worst rank; returns the seconds from the kill to the end of each other process.

    On a busy machine a rank may be silent for longer than a short timeout before any is stopped: it is tried again.
    """
    ends: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if trial.store == "agent" else None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1] if agent is None else agent.port
        variables = {"TORCHELASTIC_USE_AGENT_STORE": str(agent is not None), "MASTER_PORT": str(port)}
        _write_recipe(trial, Path(folder))
        ranks = [
            CONTEXT.Process(target=_rank, args=(rank, trial, folder, variables)) for rank in range(trial.world_size)
        ]
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
        counts.notes.append(f"{trial}: no rank was struck: {str(words)[-900:]}")
        return []
    if running:
        counts.hangs += 1
        counts.notes.append(f"{trial}: ranks {sorted(running.values())} hung")
        return []
    last = {rank: "".join(text.rstrip().splitlines(keepends=True)[-1:]) for rank, text in words.items()}
    of_gloo = re.compile(r"\[rank\d\]: .*(gloo/|closed by peer|timeout caused pair closure|DistBackendError).*\n*")
    causes = {trial.victim, *(rank for rank, line in last.items() if of_gloo.fullmatch(line))}
    of_ringtile = re.compile(
        r"(\[rank\d\]: ringtile\.errors\.PeerLostError|ringtile: error: rank \d)"
        rf": rank ({'|'.join(map(str, causes))}) was lost in .*\n*"
    )
    wrong = {
        rank: words[rank][-1200:]
        for rank, line in last.items()
        if not of_ringtile.fullmatch(line) and not of_gloo.fullmatch(line)
    }
    seconds = [end - began for end in ends.values()]
    if wrong:
        counts.unnamed += 1
        counts.notes.append(f"{trial}: {str(wrong)[:2000]}")
    elif trial.late(seconds) > BUSY_SECONDS:
        counts.hangs += 1
        counts.notes.append(f"{trial}: named, and ended after {seconds}")
    else:
        counts.named += 1
    return seconds


def _write_recipe(trial: Trial, folder: Path) -> None:
    """For `ringtile train`."""
    from test_cli_train import TRAINING, write_config

    always = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    write_config(
        folder,
        **_keys(trial),
        data={"files": "text.txt", "eval_files": "text.txt", "seq_len": 64},
        training={
            **TRAINING,
            **always,
            "max_steps": 40,
            "save_total_limit": 2,
            "output_dir": f"{folder}/out",
            "dataloader_num_workers": trial.workers,
            "ddp_timeout": math.ceil(trial.timeout),
        },
    )


def _keys(trial: Trial) -> dict[str, Any]:
    return {"context_parallel_size": trial.context_parallel_size, "context_parallel_scheme": trial.scheme}


def _rank(rank: int, trial: Trial, folder: str, variables: dict[str, str]) -> None:
    """One rank, as a program: it trains until it is struck, or fails because another one was, and ends as Python does,
    with all destructors; a process of multiprocessing ends without them."""
    for stream in (1, 2):
        os.dup2(os.open(f"{folder}/rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    import torch

    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": trial.world_size, "LOCAL_WORLD_SIZE": trial.world_size}
    os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="127.0.0.1", **variables)
    multiprocessing.set_start_method("fork", force=True)  # of data-loading workers, which inherit connections then
    torch.set_num_threads(1)
    status = 0
    try:
        _arm_in_training(rank, trial, folder)
        (_train if trial.program == "trainer" else _command)(trial, folder)
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    gc.freeze()  # Python's end would read every object that was ever imported, for seconds where ranks share cores
    ctypes.pythonapi.Py_Exit(status)


def _arm_in_training(rank: int, trial: Trial, folder: str) -> None:
    from transformers import Trainer

    original = Trainer.train

    def train(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        if rank == trial.victim:
            _Strike(trainer, trial, Path(folder, "struck")).arm()
        elif trial.phase == "reduction" and trial.engine == "DDP":  # a hook of one rank alone is named in place of it
            for parameter in trainer.model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _: None)
        return original(trainer, *args, **kwargs)

    Trainer.train = train


def _command(trial: Trial, folder: str) -> None:
    import datasets
    from ringtile.cli import command

    datasets.config.HF_DATASETS_CACHE = Path(folder, "datasets")
    sys.argv = ["ringtile", "train", f"{folder}/run.yaml"]
    command()


def _train(trial: Trial, folder: str) -> None:
    import ringtile
    import torch.distributed as dist
    from hf_engines import engine
    from hf_training import make_trainer

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=trial.timeout))
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
            ddp_timeout=math.ceil(trial.timeout),
            **arguments,
        )
        ringtile.enable(trainer, _keys(trial))
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
