"""How the command line ends a process that has lost another rank: at once.

Python's own end waits for threads and destructors of torch, and those may wait for a rank that never answers, or warn.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NoReturn


def end(status: int) -> NoReturn:
    """Ends this process now, with what it has printed."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(status)
