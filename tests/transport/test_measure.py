"""Times of candidates that all ranks run: the slowest rank's, the same on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ringtile import LoopbackWorld
from ringtile.transport import measure


def test_the_slowest_rank_counts_and_the_first_run_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = threading.local()  # a rank is a thread
    monkeypatch.setattr(measure.time, "perf_counter", lambda: getattr(clock, "now", 0.0))

    def on_rank(group: Any) -> tuple[list[float], list[int]]:
        runs = [0, 0]

        def candidate(i: int) -> Callable[[], None]:
            def run() -> None:
                runs[i] += 1
                took = 9.0 if runs[i] == 1 else 3.0 + runs[i] if (i, group.transport.rank) == (1, 2) else 1.0
                clock.now = getattr(clock, "now", 0.0) + took

            return run

        return measure.measure([candidate(0), candidate(1)], group.transport, torch.device("cpu")), runs

    assert LoopbackWorld(3).run(on_rank) == [([1.0, 5.0], [3, 3])] * 3
