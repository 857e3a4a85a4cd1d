"""A process in which gloo has worked ends cleanly, whatever still refers to its groups."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ringtile.transport.groups import wait_for_gloo


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


# Two ranks in one process, so that no message of another process is waited for. Python drops each tensor at once: a
# thread of gloo needs the GIL to let go of it, while the program ends.
ENDS = """
import datetime, threading, torch
from ringtile.transport import groups
from torch.distributed import HashStore, ProcessGroupGloo

def make(rank):
    ranks[rank] = ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=60))

store, ranks = HashStore(), [None, None]
threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for _ in range(40):
    for group in ranks:
        tensor = torch.ones(1_000_000)
        work = group.allreduce([tensor])
        del tensor, work
"""


@pytest.mark.long  # without the handler it aborts in one of three runs
def test_a_program_that_ends_while_gloo_works_ends_cleanly() -> None:
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
