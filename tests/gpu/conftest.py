"""A test that breaks the device ends its process; another process runs the remaining tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from device import DEVICE


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
