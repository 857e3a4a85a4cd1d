"""What the ranks of a group find out about themselves: which share a host, and what is fastest, for "auto"."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ringtile.transport.messages import all_gather, all_gather_object
from ringtile.transport.transport import Transport

SECONDS = 0.3  # for the runs of all candidates, if that is more than twice each
MOST_ROUNDS = 9


def measure(candidates: Sequence[Callable[[], None]], transport: Transport, device: torch.device) -> list[float]:
    """Return the seconds of each candidate until its slowest rank is done: the same numbers on every rank.

    All ranks call it with the same candidates, each of which is a collective that leaves no trace. After a run of each
    that warms up they take turns, so that what slows the machine for a while slows all of them: twice, or more often if
    they are short. The median counts. What is sent meanwhile is no payload of the user's.
    """
    sent = transport.bytes_sent

    def of_all_ranks(own: list[list[float]]) -> Tensor:
        """Return (rounds, candidates): the slowest rank's."""
        with transport.agree("measure", {"candidates": len(candidates)}, device):
            numbers = torch.tensor(own, dtype=torch.float32, device=device)
            return all_gather(numbers, transport, "the seconds").amax(0).cpu()

    def one_round() -> list[float]:
        return [_seconds(run, device) for run in candidates]

    one_round()
    rounds = [one_round()]
    num_rounds = int(SECONDS / max(float(of_all_ranks(rounds).sum()), 1e-9))
    rounds += [one_round() for _ in range(min(max(num_rounds, 2), MOST_ROUNDS) - 1)]
    seconds: list[float] = of_all_ranks(rounds).median(0).values.tolist()
    transport.bytes_sent = sent
    return seconds


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def hosts_of(transport: Transport) -> tuple[int, ...]:
    """Return by rank its host, numbered by its first rank. A call the first time.

    Raise RingMismatchError or PeerLostError.
    """
    if not transport.hosts:
        names = all_gather_object(_host_id(), transport, "agree on hosts")
        transport.hosts = tuple(map(names.index, names))
    return transport.hosts


def _host_id() -> str:
    """Return what is equal for two processes exactly if they run on one host and in one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
