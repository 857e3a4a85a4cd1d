"""A test that breaks the device ends its process; another process runs the remaining tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from device import DEVICE
from ringtile import ops


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
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        said = [line for line in report.longreprtext.splitlines() if line.strip()]
        print(f"\nFAILED {report.nodeid} ({report.when})", *said[-6:], sep="\n", flush=True)


@pytest.fixture(autouse=True)
def device_lives(request: pytest.FixtureRequest) -> Iterator[None]:
    """After an illegal memory access every later call fails too, so pytest-xdist has to start a new process."""
    if DEVICE.type == "cuda":
        ops.why_not_on(0)  # loads the kernels, as ops that a test calls directly do not
    yield
    if DEVICE.type == "cuda" and "PYTEST_XDIST_WORKER" in os.environ:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            capture = request.config.pluginmanager.getplugin("capturemanager")
            with capture.global_and_fixture_disabled():
                print(f"\n{request.node.nodeid} lost the device: {error}", file=sys.stderr, flush=True)
            os._exit(1)
