"""What a checkpointed layer keeps of its first run, so that no rank communicates when the backward runs it again.

A checkpoint runs a function in the forward, and once more in the backward. The first run fills a slot, the second takes
it, once. A slot's key is (module, metadata of the call). Tensor values need no key: the recomputation sees the same
ones. A call runs again if one run makes two with the same key, or if a kept result was written to. All ranks
find the same slots: a key has only what they share.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Hashable, Iterator
from typing import Literal

from torch import Tensor

_PARTS = 10  # of a device's memory, of which "auto" keeps at most one


class CheckpointBudget:
    """The bytes that may still be kept."""

    def __init__(self, num_bytes: float) -> None:
        self.num_bytes = num_bytes

    def take(self, num_bytes: int) -> bool:
        """Return whether so many fit, and are taken now."""
        fits = num_bytes <= self.num_bytes
        self.num_bytes -= num_bytes if fits else 0
        return fits


def checkpoint_budget(setting: Literal["auto"] | bool, memory_bytes: int) -> CheckpointBudget | None:
    """Return the budget of one step by the key keep_attention. memory_bytes: of a device, the least of the group's."""
    if setting == "auto":
        return CheckpointBudget(memory_bytes // _PARTS)
    return CheckpointBudget(math.inf) if setting else None


class Slot:
    """Room for the result of one call: tensors, and the number of the call on its group."""

    def __init__(self) -> None:
        self._is_open = True
        self._result: tuple[tuple[Tensor, ...], int] | None = None
        self._versions: list[int] = []

    def fill(self, tensors: tuple[Tensor, ...], number: int) -> None:
        """Keep a result, if it is the first."""
        if self._is_open:
            self._is_open = False
            self._result = tuple(x.detach() for x in tensors), number
            self._versions = [x._version for x in tensors]

    def take(self) -> tuple[tuple[Tensor, ...], int] | None:
        """Return what was kept; None if it is gone, or was written to."""
        result, self._result = self._result, None
        return None if result is None or [x._version for x in result[0]] != self._versions else result

    def close(self) -> None:
        """Keep nothing."""
        self._is_open, self._result = False, None


class Kept:
    """The slots of one call of a checkpointed function. budget: what they may take."""

    def __init__(self, budget: CheckpointBudget) -> None:
        self.caller: object = None  # the module that mixes tokens now
        self._budget = budget
        self._slots: dict[Hashable, list[Slot | None]] = {}
        self._found: dict[Hashable, int] | None = None  # by key, in a later run; None: this is the first

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Enter the function, for the first time or again: inside, `slot` finds the slots of this call."""
        before, inside.kept = inside.kept, self
        try:
            yield
        finally:
            inside.kept, self._found, self.caller = before, {}, None

    def slot(self, key: Hashable, num_bytes: int) -> Slot | None:
        key = (self.caller, key)
        if self._found is not None:
            number = self._found[key] = self._found.get(key, -1) + 1
            slots = self._slots.get(key, [])
            return slots[number] if number < len(slots) else None
        slots = self._slots.setdefault(key, [])
        slots.append(Slot() if self._budget.take(num_bytes) else None)
        if len(slots) > 1:
            for each in slots:
                if each is not None:
                    each.close()
        return slots[-1]


class _Inside(threading.local):
    kept: Kept | None = None


inside = _Inside()  # .kept: of the checkpointed function that this thread is in; None: none, or it keeps nothing


def slot(key: Hashable, num_bytes: int) -> Slot | None:
    """Return the slot of a call in a checkpointed function, which may hold its result; None: nothing is kept of it.

    key: what tells it from other calls of the same module; num_bytes: what is to be kept: the same on all ranks.
    """
    return None if inside.kept is None else inside.kept.slot(key, num_bytes)


def called_by(module: object) -> None:
    """Say which module makes the calls from here on."""
    if inside.kept is not None:
        inside.kept.caller = module
