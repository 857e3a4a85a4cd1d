"""Gloo ranks for tests: processes that are started once per session and run one test's function after another.

All are forked from one server process, which has imported what they need: torch and transformers take seconds.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tools.pool import CONTEXT, GRACE_SECONDS, Pool, Result, freeze_garbage

TRAINERS = [
    *("transformers.trainer", "transformers.models.llama.modeling_llama", "datasets", "peft", "torch.distributed.fsdp"),
    *("deepspeed.module_inject", "deepspeed.runtime.zero.muon.muon_optimizer", "torch._inductor.compile_fx"),
    *(f"trl.trainer.{kind}_trainer" for kind in ("sft", "dpo", "reward", "grpo")),
    *("hypothesis.strategies", "ringtile.cli.verify", "ringtile.torch_context_parallel.context"),
]


def start_server() -> None:
    """Starts the server of all ranks, which imports beside the first tests: the trainers too, if a test of the session
    uses them. It leaves out what is not installed."""
    trainers = TRAINERS if "hf_training" in sys.modules else []
    CONTEXT.set_forkserver_preload(["torch.distributed", "torch._dynamo", "ringtile.attn.attention", *trainers])
    forkserver.ensure_running()


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
