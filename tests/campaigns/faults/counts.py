"""What became of the trials of a campaign."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass
class Counts:
    """right: the correct result. named: ringtile's own error. The others are bugs; `notes` describes each of them."""

    BUGS: ClassVar = ("silent", "unnamed", "hangs", "crashes")
    right: int = 0
    named: int = 0
    silent: int = 0  # a wrong number, and no error
    unnamed: int = 0  # an error that is not ringtile's
    hangs: int = 0
    crashes: int = 0  # the process died
    notes: list[str] = field(default_factory=list)

    @property
    def trials(self) -> int:
        return self.right + self.named + self.bugs

    @property
    def bugs(self) -> int:
        return sum(getattr(self, name) for name in self.BUGS)

    def row(self) -> dict[str, int]:
        return {"trials": self.trials, **{name: getattr(self, name) for name in ("right", "named", *self.BUGS)}}
