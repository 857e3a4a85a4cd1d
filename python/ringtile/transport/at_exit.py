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


@atexit.register
def wait_for_gloo() -> None:
    """Wait, without the GIL, until gloo's threads in this process sleep, and have not run since the last look."""
    deadline, before = time.monotonic() + _SECONDS, None
    while (found := _threads_of_gloo()) and time.monotonic() < deadline:
        if found == before and not any("State:\tR" in text for text in found):
            return
        before = found
        time.sleep(0.001)


def _threads_of_gloo() -> list[str]:
    """Return /proc's text on each thread of gloo: its state, and how often it gave up the CPU. It waits for the GIL of
    a caller asleep, but has run by the time that the caller has the GIL again. Empty where there is no /proc."""
    texts = []
    for path in sorted(Path("/proc/self/task").glob("*/status")):
        with contextlib.suppress(OSError):  # it has ended
            if "gloo_" in (text := path.read_text()).partition("\n")[0]:  # pt_gloo_runloop, gloo_tcp_loop
                texts.append(text)
    return texts
