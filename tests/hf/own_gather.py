"""accelerate's collectives as a module imports them that is not the Trainer's."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate.utils import gather, gather_object, reduce


def rows_of_all(rows: torch.Tensor) -> torch.Tensor:
    """rows (N, ...) -> (N * processes, ...), by every import. AssertionError: two of them differ, or the slice of this
    process holds other rows."""
    from accelerate.utils import gather as imported_here

    state = accelerate.Accelerator()
    ways = [gather, imported_here, accelerate.utils.operations.gather, state.gather]
    found, *others = [way(rows) for way in ways]
    assert all(torch.allclose(found, other, 0, 0, equal_nan=True) for other in others)
    assert found.size(0) == state.num_processes * len(rows) == accelerate.PartialState().num_processes * len(rows)
    mine = found[state.process_index * len(rows) :][: len(rows)]
    assert torch.allclose(mine, rows, 0, 0, equal_nan=True) or not state.is_main_process  # rewards are the first rank's
    return found


def numbers_of_all(number: float, objects: list[Any]) -> tuple[float, float, int]:
    """The mean and the sum of a number, and how many objects there are."""
    mean, total = (reduce(torch.tensor(float(number)), reduction).item() for reduction in ("mean", "sum"))
    return mean, total, len(gather_object(objects))
