"""End a process cleanly in which gloo has worked, whatever still refers to its groups.

A thread of gloo lets go of the tensors of its last work after it has told of it. For a tensor that Python has dropped
it needs the GIL; Python, once it finalizes, ends a thread that asks for it, and C++ aborts the process (status -6,
"terminate called without an active exception").
"""

from __future__ import annotations

import atexit
import contextlib
import time
from pathlib import Path

_SECONDS = 10.0
_CHECKS = 3  # in a row: a thread that waits for the GIL, which the check holds, looks idle too


@atexit.register
def wait_for_gloo() -> None:
    """Wait, without the GIL, until gloo's threads in this process sleep, which they do until there is work."""
    deadline, idle = time.monotonic() + _SECONDS, 0
    while idle < _CHECKS and time.monotonic() < deadline:
        time.sleep(0.001)
        idle = 0 if any(" (pt_gloo_runloop) R " in state for state in _thread_states()) else idle + 1


def _thread_states() -> list[str]:
    """Return /proc's line on each thread of this process: "number (name) state ..."; none where there is no /proc."""
    lines = []
    for path in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            lines.append(path.read_text())
    return lines
