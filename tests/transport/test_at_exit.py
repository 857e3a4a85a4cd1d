"""A process in which gloo has worked ends cleanly, whatever still refers to its groups."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from ringtile.transport.at_exit import wait_for_gloo


def test_the_end_waits_for_a_thread_of_gloo_that_runs() -> None:
    began, done = threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        began.set()
        for _ in range(20):
            hashlib.sha256(b"0" * (1 << 22))  # without the GIL
        done.set()

    threading.Thread(target=work).start()
    began.wait()
    wait_for_gloo()
    assert done.is_set()
