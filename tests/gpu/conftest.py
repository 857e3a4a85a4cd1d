"""A test that takes the device along ends its process, where another one goes on with the tests that are left."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from device import DEVICE


@pytest.fixture(autouse=True)
def device_lives(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a wrong memory access every call fails, in every test to come: pytest-xdist starts another process."""
    yield
    if DEVICE.type == "cuda" and "PYTEST_XDIST_WORKER" in os.environ:
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{request.node.nodeid} lost the device: {error}", file=sys.__stderr__, flush=True)
            os._exit(1)
