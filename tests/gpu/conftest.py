"""A test that hangs or breaks the device ends its process, and is named; another process runs the remaining tests."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from device import DEVICE
from failures import HOW, line
from ringtile import ops

SECONDS = float(os.environ.get("RINGTILE_TEST_SECONDS", "0"))  # that a test may take; run_all sets it
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
STDERR = 2


def pytest_configure() -> None:
    global STDERR
    STDERR = os.dup(2)  # not yet captured


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a CPU, one cell of each shows that they run. tests/attn and tests/tiled say what its kernels compute."""
    seen: set[object] = set()
    for item in items if DEVICE.type == "cpu" else ():
        if isinstance(item, pytest.Function) and "/gpu/" in item.path.as_posix():
            if item.function in seen:
                item.add_marker("long")
            seen.add(item.function)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tells of a failure at once, as a run that is killed has no summary; of a worker that ended too."""
    if report.failed and not IS_WORKER:
        said = [text for text in report.longreprtext.splitlines() if text.strip()]
        crashed, no_memory = ("crashed while running", "OutOfMemoryError")
        how = HOW[2 if crashed in report.longreprtext else no_memory in report.longreprtext]
        print(f"\n{line(report.nodeid, how)}", *said[-6:], sep="\n", flush=True)


def end_process(nodeid: str, how: str, reason: str) -> None:
    os.write(STDERR, f"\n{line(nodeid, how, reason)}\n".encode())
    if how == "hung":
        faulthandler.dump_traceback(STDERR)
    os._exit(1)


@pytest.fixture(autouse=True)
def device_lives(request: pytest.FixtureRequest) -> Iterator[None]:
    """After an illegal memory access every later call fails too, so pytest-xdist has to start a new process."""
    nodeid = request.node.nodeid
    timer = threading.Timer(SECONDS, end_process, (nodeid, "hung", f"not done after {SECONDS:.0f} s"))
    timer.daemon = True
    if SECONDS:
        timer.start()
        faulthandler.dump_traceback_later(SECONDS + 10, exit=True, file=STDERR)  # where no thread may run
    if DEVICE.type == "cuda":
        ops.why_not_on(0)  # loads the kernels, as ops that a test calls directly do not
    yield
    if DEVICE.type == "cuda" and IS_WORKER:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            end_process(nodeid, "lost the device", str(error))
    timer.cancel()
    if SECONDS:
        faulthandler.cancel_dump_traceback_later()
