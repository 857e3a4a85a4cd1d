"""Processes that the tools keep: two gloo ranks, and one that trains alone.

All are forked from one server, which has imported torch and transformers once. They run one function after another; a
process that dies, hangs or fails is replaced together with its peers.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_PRELOAD = ("tools.models.tiny_training", "torch.distributed")


class Workers:
    """`size` processes; a gloo world if there is more than one. They start with the first call."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the store, and of what they write

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> list[Any]:
        """The results of function(*arguments) by rank. An exception is a result too; TimeoutError: no answer in time;
        EOFError: the process died."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, arguments))
        results: list[Any] = [TimeoutError(f"no answer within {seconds:g} s") for _ in self._connections]
        waiting, deadline = set(self._connections), time.monotonic() + seconds
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for rank, connection in enumerate(self._connections):
                if connection in ready:
                    waiting.discard(connection)
                    try:
                        results[rank] = connection.recv()
                    except (EOFError, OSError):
                        results[rank] = EOFError("the process died")
        if any(isinstance(result, BaseException) for result in results):
            self.close()
        return results

    def close(self) -> None:
        """Ends the processes; the next call starts others."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))
        self._folder = tempfile.TemporaryDirectory(prefix="ringtile-models-")
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self._size, self._folder.name), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)


def _serve(connection: Connection, rank: int, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    tempfile.tempdir = folder
    if size > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in world.items()})
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=size)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            result: Any = function(*arguments)
        except Exception as error:
            result = RuntimeError(f"{type(error).__name__}: {error}")
        connection.send(result)
