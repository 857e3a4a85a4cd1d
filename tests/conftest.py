"""The session's pools of ranks are closed, and what tests left in temporary folders is removed, when it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir

import pytest
import torch

pytest.register_assert_rewrite("hf_training", "cells")

import strategies  # noqa: E402, F401  # hypothesis's profile, without a deadline, before any test is collected
from kernels_off import kernels_off  # noqa: E402
from pool import close_pools, freeze_garbage, start_server  # noqa: E402

THREADS = int(os.environ.get("RINGTILE_TEST_THREADS", "1"))
_folder = tempfile.TemporaryDirectory(prefix="ringtile-")


@pytest.fixture(autouse=True)
def number_of_threads() -> Iterator[None]:
    """On a busy machine, threads that share a small tensor wait for each other most of the time. A test of threads sets
    their number; CI's, THREADS, is that of a user's machine."""
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(THREADS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeats the tests that are marked in_torch_too."""
    if (mark := metafunc.definition.get_closest_marker("in_torch_too")) is not None:
        again = pytest.param(True, id="in torch", marks=[pytest.mark.long] * mark.kwargs.get("long", False))
        metafunc.parametrize("without_kernels", [pytest.param(False, id="kernels"), again], indirect=True)


@pytest.fixture(autouse=True)
def without_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels are switched off for the second run of such a test."""
    with kernels_off() if getattr(request, "param", False) else contextlib.nullcontext():
        yield


@pytest.fixture(scope="module")
def short_samples() -> Iterator[None]:
    """The samples of benchmarks in this process take no longer than they must: their speed is not looked at."""
    from benchmarks import measure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "SAMPLE_SECONDS", 0.005)
        patch.setattr(measure, "COPY_BYTES", 1 << 20)
        yield


def pytest_sessionstart(session: pytest.Session) -> None:
    get_temp_dir()  # made now, in its usual place: multiprocessing removes it when the process ends
    tempfile.tempdir = _folder.name


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    freeze_garbage()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """What ranks print is captured as what tests print."""
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()
    start_server()
    capture.suspend_global_capture()


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pools()
    tempfile.tempdir = None
    _folder.cleanup()
