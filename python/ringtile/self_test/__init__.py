"""The first use of a kernel on a device compares a small case with its definition; a kernel that differs is not used.

Once a process for each kernel, device and dtype (attention: head dims too), in milliseconds; every later call looks the
result up. Each process tests for itself: ranks may so differ in who computes, and then in the last bits of their own
rows, but nothing that they exchange depends on it.

RINGTILE_SELF_TEST=0 switches it off: every kernel counts as right.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

VARIABLE = "RINGTILE_SELF_TEST"

logger = logging.getLogger(__name__)
failures: dict[object, str] = {}  # by kernel, device, dtype, ...: what is wrong with it, "" if nothing
_warned: set[tuple[object, str]] = set()
_lock = threading.RLock()


@functools.cache
def is_on() -> bool:
    """Whether kernels are checked."""
    return os.environ.get(VARIABLE) != "0"


def why_not(key: object, test: Callable[[], str]) -> str:
    """What is wrong with a kernel; "" if nothing is. test finds out, the first time.

    A CUDA graph that is being captured is not disturbed: what no earlier call has checked is used unchecked there.
    """
    found = failures.get(key)
    return _run_once(key, test) if found is None else found


def _run_once(key: object, test: Callable[[], str]) -> str:
    if not is_on() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return ""
    with _lock:
        if key not in failures:
            failures[key] = run(test)
        return failures[key]


def run(test: Callable[[], str]) -> str:
    """test(), or the error that it raises; whatever the caller has switched on for its own operations."""
    try:
        with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
            return test()
    except torch.OutOfMemoryError:  # which says nothing of the kernel
        raise
    except RuntimeError as error:  # NotImplementedError too
        return f"raises {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def warn_once(kernel: str, where: str, reason: str, instead: str) -> None:
    """Says once a process that a kernel is not used, and what runs instead."""
    if (kernel, where) not in _warned:
        _warned.add((kernel, where))
        logger.warning(
            "%s is not used for %s: it %s. %s runs instead; please report this with the output of: ringtile doctor",
            *(kernel, where, reason, instead),
        )


def forget() -> None:
    """As in a new process."""
    failures.clear()
    _warned.clear()
    is_on.cache_clear()
