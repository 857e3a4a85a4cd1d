"""Gloo ranks for tests: processes that are started once per session and run one test's function after another.

All are forked from one server process, which has imported what they need: torch and transformers take seconds.
"""

from __future__ import annotations

import datetime
import functools
import gc
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

Result = TypeVar("Result")
GRACE_SECONDS = 10.0  # once a rank has failed, for the others to notice
TRAINERS = [
    *(
        "transformers.trainer",
        "datasets",
        "peft",
        "deepspeed.module_inject",
        "torch._inductor.compile_fx",
        "trl.trainer.sft_trainer",
        "trl.trainer.dpo_trainer",
        "trl.trainer.reward_trainer",
    ),
    "ringtile.cli.verify",
]


CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Starts the server of all ranks, which imports beside the first tests: the trainers too, if a test of the session
    uses them. It leaves out what is not installed."""
    trainers = TRAINERS if "hf_training" in sys.modules else []
    CONTEXT.set_forkserver_preload(["torch.distributed", "ringtile.attn.attention", *trainers])
    forkserver.ensure_running()


def freeze_garbage() -> None:
    """Search nothing that exists now for garbage, and the rest less often: it would take half of a short training."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


class Pool:
    """W processes that form a gloo world. prepare(rank) runs in each of them first."""

    def __init__(
        self, world_size: int, group_timeout: float = 180.0, prepare: Callable[[int], None] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self.processes = []
        self.broken = False
        for rank in range(world_size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve,
                args=(theirs, rank, world_size, str(Path(self._folder.name) / "store"), group_timeout, prepare),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Result], *args: Any, timeout: float = 180.0, **kwargs: Any) -> list[Result]:
        """The results of function(*args, **kwargs) by rank; raises the error of the first rank to fail."""
        outcomes = self.outcomes(function, *args, timeout=timeout, **kwargs)
        if self.first_error is not None:
            raise self.first_error
        return outcomes

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 180.0,
        stopped: int | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """As `run`, but an exception is a result too; EOFError: the process died; TimeoutError: it did not answer.

        function is importable: a top-level function of a test file. stopped: a rank that never answers.
        """
        for connection in self._connections:
            connection.send((function, args, kwargs))
        self.first_error: BaseException | None = None
        outcomes: list[Any] = [TimeoutError(f"{function.__name__}: no answer in time")] * len(self._connections)
        waiting = {connection: rank for rank, connection in enumerate(self._connections) if rank != stopped}
        deadline = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                outcomes[rank] = outcome = _receive(connection, rank)
                if isinstance(outcome, BaseException) and self.first_error is None:
                    self.first_error = outcome
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting and self.first_error is None:
            self.first_error = outcomes[next(iter(waiting.values()))]
        self.broken = (
            self.broken
            or bool(waiting)
            or stopped is not None
            or any(isinstance(outcome, EOFError) for outcome in outcomes)
        )
        return outcomes

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


def _serve(
    connection: Connection,
    rank: int,
    world_size: int,
    store: str,
    group_timeout: float,
    prepare: Callable[[int], None] | None,
) -> None:
    if prepare is not None:
        prepare(rank)
    import torch
    import torch.distributed as dist

    freeze_garbage()
    tempfile.tempdir = str(Path(store).parent)  # which the pool removes
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=group_timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    while True:
        function, args, kwargs = connection.recv()
        text = ""
        try:
            outcome = function(*args, **kwargs)
        except BaseException as error:  # what pytest.raises raises is no Exception
            outcome, text = error, f"rank {rank}:\n{traceback.format_exc()}"
        try:
            connection.send((outcome, text))
        except (pickle.PicklingError, TypeError, AttributeError):
            connection.send((RuntimeError(f"rank {rank} returned what cannot be pickled, {outcome!r}"), text))


def _receive(connection: Connection, rank: int) -> Any:
    try:
        outcome, text = connection.recv()
    except (EOFError, ConnectionResetError):
        return EOFError(f"rank {rank} died")
    if isinstance(outcome, BaseException):
        outcome.__cause__ = RuntimeError(text)
    return outcome


@functools.cache
def _pools() -> dict[int, Pool]:
    return {}


def run_ranks(
    world_size: int, function: Callable[..., Result], *args: Any, timeout: float = 180.0, **kwargs: Any
) -> list[Result]:
    """`Pool.run` on the session's pool of that size. A pool that lost a rank, or an answer, is replaced."""
    pools = _pools()
    if world_size in pools and pools[world_size].broken:
        pools.pop(world_size).close()
    if world_size not in pools:
        pools[world_size] = Pool(world_size)
    pool = pools[world_size]
    try:
        return pool.run(function, *args, timeout=timeout, **kwargs)
    except BaseException:
        pool.broken = True  # messages may still be under way in it
        raise


def close_pools() -> None:
    for pool in _pools().values():
        pool.close()
    _pools().clear()


# ---- commands -----------------------------------------------------------------------------------


def run_command(
    world_size: int,
    *arguments: str,
    prepare: Callable[[], None] | None = None,
    cwd: Path | None = None,
    variables: dict[str, str] | None = None,
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node world_size -m ringtile ARGUMENTS`, without importing everything again on each rank.

    prepare is called first, in each of the processes. In the result, args are the statuses of the ranks.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("out", "err")]
        ranks = []
        for rank in range(world_size):
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            environment = os.environ | {name: str(value) for name, value in world.items()} | (variables or {})
            command = CONTEXT.Process(
                target=_run_command, args=(arguments, prepare, environment, str(cwd or Path.cwd()), outputs)
            )
            command.start()
            ranks.append(command)
        status = _wait_for(ranks, time.monotonic() + timeout)
        done = subprocess.CompletedProcess(arguments, status, *(path.read_text() for path in outputs))
        done.args = [rank.exitcode for rank in ranks]
        return done


def run_program(
    program: str, cwd: Path | None = None, timeout: float = 240.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`python -c program`, in a process that has imported torch and ringtile."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("out", "err")]
        process = CONTEXT.Process(
            target=_run_program, args=(program, os.environ | variables, str(cwd or Path.cwd()), outputs)
        )
        process.start()
        status = _wait_for([process], time.monotonic() + timeout)
        return subprocess.CompletedProcess(program, status, *(path.read_text() for path in outputs))


def _run_program(program: str, environment: dict[str, str], folder: str, outputs: list[Path]) -> None:
    _redirect(folder, outputs)
    os.environ.clear()
    os.environ.update(environment)
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})


def _redirect(folder: str, outputs: list[Path]) -> None:
    os.chdir(folder)
    for stream, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)


def _wait_for(ranks: Sequence[multiprocessing.Process], deadline: float) -> int:
    """0, or the status of the first rank to fail, whose peers are then ended as torchrun would."""
    status, running = 0, {rank.sentinel: rank for rank in ranks}
    while running and (ended := wait(list(running), max(0.0, deadline - time.monotonic()))):
        for sentinel in ended:
            rank = running.pop(sentinel)
            rank.join()
            if rank.exitcode and not status:
                status, deadline = rank.exitcode, min(deadline, time.monotonic() + GRACE_SECONDS)
    for rank in running.values():
        rank.kill()
        rank.join()
    return status or (-1 if running else 0)


def _run_command(
    arguments: Sequence[str],
    prepare: Callable[[], None] | None,
    environment: dict[str, str],
    folder: str,
    outputs: list[Path],
) -> None:
    _redirect(folder, outputs)

    from ringtile.cli import train

    freeze_garbage()
    run_alone = _fork_a_process_to_compare_with()
    train.subprocess = SimpleNamespace(run=run_alone, DEVNULL=subprocess.DEVNULL)
    if prepare is not None:
        prepare()
    sys.exit(_main(arguments, environment))


def _main(arguments: Sequence[str], environment: dict[str, str]) -> int:
    import datasets
    import torch
    from ringtile.cli import main

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if "HF_DATASETS_CACHE" in environment:  # datasets read it when it was imported
        datasets.config.HF_DATASETS_CACHE = Path(environment["HF_DATASETS_CACHE"])
    return main(list(arguments))


def _fork_a_process_to_compare_with() -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """`subprocess.run`, for the `python -m ringtile train` that `--compare` starts. The process is forked now, while
    this one has no threads, and waits for its arguments."""
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ours.close()
            arguments, environment = theirs.recv()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            status = _main(arguments, environment)
        except EOFError:  # the parent has ended without it
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    theirs.close()

    def run(command: list[str], env: dict[str, str], stdout: int) -> subprocess.CompletedProcess[bytes]:
        assert command[:3] == [sys.executable, "-m", "ringtile"]
        assert stdout == subprocess.DEVNULL
        ours.send((command[3:], env))
        return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    return run
