"""How long the ways to compute one thing take over the ranks of a group: for a scheme called "auto"."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringtile.transport.messages import all_gather
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
        """(rounds, candidates)"""
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
