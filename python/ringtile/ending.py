"""How a process ends that has lost another rank: soon, whatever still waits for that rank, and with its reason last.

Python's own end waits for threads and destructors of torch, and those may wait for a rank that never answers, or warn.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from types import TracebackType
from typing import Any, NoReturn

from ringtile.errors import PeerLostError

_CLEAN_UP_SECONDS = 0.5  # for what a program has registered with atexit
_hooks: list[Any] = []  # ours, the last one first


def end(status: int) -> NoReturn:
    """Ends this process now, with what it has printed."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(status)


def end_soon_if_uncaught() -> None:
    """From now on, a PeerLostError that the program does not catch ends the process as soon as it has been printed."""
    if sys.excepthook in _hooks[:1]:
        return
    previous = sys.excepthook

    def print_and_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Only the last hook ends the process: torch's, which prints what others say, may have been put around an older.
        if print_and_end is not _hooks[0] or not _is_a_loss(error) or hasattr(sys, "ps1") or sys.flags.interactive:
            previous(kind, error, trace)
            return
        clean_up = threading.Thread(target=atexit._run_exitfuncs, daemon=True)  # first: it may print, too
        clean_up.start()
        clean_up.join(_CLEAN_UP_SECONDS)
        previous(kind, error, trace)
        end(1)

    sys.excepthook = print_and_end
    _hooks.insert(0, print_and_end)


def _is_a_loss(error: BaseException | None) -> bool:
    """Whether it is a PeerLostError, or was raised from one."""
    while error is not None and not isinstance(error, PeerLostError):
        error = error.__cause__ or error.__context__
    return error is not None
