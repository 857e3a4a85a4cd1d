"""How long the ways to compute one thing take over the ranks of a group: for a scheme called "auto"."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ringtile.transport.messages import all_gather
from ringtile.transport.transport import Transport


def measure(candidates: Sequence[Callable[[], None]], transport: Transport, device: torch.device) -> list[float]:
    """Return the seconds of each candidate on the slowest rank: the same numbers on every rank.

    All ranks call it with the same candidates, each of which is a collective that leaves no trace. A rank's time is the
    shorter of two runs, after one that warms up. What is sent meanwhile is no payload of the user's.
    """
    sent = transport.bytes_sent
    own = torch.tensor([_seconds(run, device) for run in candidates], dtype=torch.float32, device=device)
    with transport.agree("measure", {"candidates": len(candidates)}, device):
        slowest: list[float] = all_gather(own, transport, "the seconds").amax(0).tolist()
    transport.bytes_sent = sent
    return slowest


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
