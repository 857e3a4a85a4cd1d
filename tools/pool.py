"""Gloo ranks that run one function after another, for the tests and the tools: forked from one server process."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")
GRACE_SECONDS = 10.0  # once a rank has failed, for the others to notice

CONTEXT: ForkServerContext = multiprocessing.get_context("forkserver")


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
            for answering in ready:
                assert isinstance(answering, Connection)
                rank = waiting.pop(answering)
                outcomes[rank] = outcome = _receive(answering, rank)
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
            if isinstance(outcome, BaseException):
                pickle.loads(pickle.dumps(outcome))  # those that take two arguments are not made again of one
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
