"""A test that breaks the device ends its process; another process runs the remaining tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from device import DEVICE


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a CPU, one cell of each shows that they run. tests/attn and tests/tiled say what its kernels compute."""
    seen: set[object] = set()
    for item in items if DEVICE.type == "cpu" else ():
        if isinstance(item, pytest.Function) and "/gpu/" in item.path.as_posix():
            if item.function in seen:
                item.add_marker("long")
            seen.add(item.function)


@pytest.fixture(autouse=True)
def device_lives(request: pytest.FixtureRequest) -> Iterator[None]:
    """After an illegal memory access every later call fails too, so pytest-xdist has to start a new process."""
    yield
    if DEVICE.type == "cuda" and "PYTEST_XDIST_WORKER" in os.environ:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{request.node.nodeid} lost the device: {error}", file=sys.__stderr__, flush=True)
            os._exit(1)
