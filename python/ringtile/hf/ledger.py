"""A record of every attribute that ringtile replaced on other libraries' objects, and the way back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class Ledger:
    """A list of replaced attributes, undone in reverse order.

    An inherited attribute (a method of the class) is deleted from the owner again; an attribute of the owner itself
    is set back to the identical object.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._entries: list[tuple[object, str]] = []
        _ledgers.add(self)

    @property
    def entries(self) -> tuple[tuple[object, str], ...]:
        """(owner, attribute name) of every replacement in force, oldest first."""
        return tuple(self._entries)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replaces `owner.name` by `value` and remembers what the owner itself held."""
        held = {**vars(owner), **vars(owner).get("_modules", {})}  # torch.nn.Module keeps children apart
        if name in held:
            original = held[name]
            self.on_restore(lambda: setattr(owner, name, original))
        else:
            self.on_restore(lambda: delattr(owner, name))
        self._entries.append((owner, name))
        setattr(owner, name, value)

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Runs `undo` when the ledger is restored, for changes that are more than one attribute."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Undoes every change, last first. A second call does nothing."""
        self._entries.clear()
        while self._undo:
            self._undo.pop()()


_ledgers: weakref.WeakSet[Ledger] = weakref.WeakSet()


def replaced_in_process() -> list[tuple[object, str]]:
    """The entries of every ledger in this process. Ledgers come in no particular order."""
    return [entry for ledger in _ledgers for entry in ledger.entries]
