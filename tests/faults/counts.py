"""What became of the trials of a campaign."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field


@dataclass
class Counts:
    """right: the correct result. named: ringtile's own error. The others are bugs; `notes` describes each of them."""

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
        return self.silent + self.unnamed + self.hangs + self.crashes

    def row(self) -> dict[str, int]:
        counts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "notes"}
        return {"trials": self.trials, **counts}
