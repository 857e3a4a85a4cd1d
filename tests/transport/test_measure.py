"""Times of candidates that all ranks run: the slowest rank's, the same on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from ringtile import LoopbackWorld
from ringtile.transport.measure import measure


def test_the_slowest_rank_counts_and_the_first_run_does_not() -> None:
    """Sleeps of 10 ms or more are told from none, and from the 200 ms of a first run."""

    def rank(group: Any) -> tuple[list[float], list[int]]:
        runs = [0, 0]

        def candidate(i: int) -> Callable[[], None]:
            def run() -> None:
                runs[i] += 1
                time.sleep(0.2 if runs[i] == 1 else 0.01 if (i, group.transport.rank) == (1, 2) else 0)

            return run

        return measure([candidate(0), candidate(1)], group.transport, torch.device("cpu")), runs

    first, *others = LoopbackWorld(3).run(rank)
    assert all(other == first for other in others)
    (none, slow), runs = first
    assert none < 0.1
    assert 0.01 <= slow < 0.1
    assert runs == [3, 3]
