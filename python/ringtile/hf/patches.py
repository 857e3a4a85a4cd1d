"""What ringtile replaced on other people's objects, and how everything is put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Ledger:
    """A list of replaced attributes, undone in reverse order.

    An attribute that was only inherited (a method of the class) is deleted again; one that the owner itself held is
    set back to the identical object.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._entries: list[tuple[object, str]] = []

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
        """Runs `undo` when the ledger is restored, for what is not one attribute."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Puts everything back, last first. A second call does nothing."""
        self._entries.clear()
        while self._undo:
            self._undo.pop()()
