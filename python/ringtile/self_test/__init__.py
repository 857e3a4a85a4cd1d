"""The first use of a kernel on a device compares a small case with its definition; a kernel that differs is not used.

Once for each kernel, device and dtype (attention: head dims too); every later call looks the result up. On a CPU the
process tests, in milliseconds; on a GPU a child process does (child_process.py), once a machine. Ranks may so differ in
who computes, and then in the last bits of their own rows, but nothing that they exchange depends on it.

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

from ringtile.self_test import child_process
from ringtile.self_test.child_process import Question

VARIABLE = "RINGTILE_SELF_TEST"
IN_PROCESS = ("cpu",)  # where a child would cost more than its start

logger = logging.getLogger(__name__)
failures: dict[object, str] = {}  # by kernel, device, dtype, ...: what is wrong with it, "" if nothing
_warned: set[tuple[object, str]] = set()
_lock = threading.RLock()


@functools.cache
def is_on() -> bool:
    """Whether kernels are checked."""
    return os.environ.get(VARIABLE) != "0"


def why_not(key: object, test: Callable[[], str]) -> str:
    """Return what is wrong with a kernel; "" if nothing is. test finds out, the first time.

    A CUDA graph that is being captured is not disturbed: what no earlier call has checked is used unchecked there.
    """
    found = failures.get(key)
    return _run_once(key, test) if found is None else found


def _run_once(key: object, test: Callable[[], str]) -> str:
    if not is_on() or torch.compiler.is_compiling():
        return ""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return ""
    with _lock:
        if key not in failures:
            failures[key] = run(test)
        return failures[key]


def of_kernel(device: torch.device, question: Question, test: Callable[[], str]) -> str:
    """test() of a kernel, or on a GPU what a child process says: the kernel may take it along."""
    return test() if device.type in IN_PROCESS else child_process.why_not(device, question)


def prepare(device: torch.device, *questions: Question) -> None:
    """Finds out about many of ringtile's kernels at once, where a child process does."""
    if device.type not in IN_PROCESS:
        run(lambda: child_process.why_not(device, *questions))


def run(test: Callable[[], str]) -> str:
    """test(), or the error that it raises; whatever the caller has switched on for its own operations."""
    try:
        with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
            return test()
    except torch.OutOfMemoryError:  # which says nothing of the kernel
        raise
    except Exception as error:  # a library may raise anything
        return error_of(error)


def error_of(error: Exception) -> str:
    """Return what is wrong with a kernel that raises."""
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
    """Reset all verdicts, as in a new process."""
    failures.clear()
    child_process.forget()
    _warned.clear()
    is_on.cache_clear()
