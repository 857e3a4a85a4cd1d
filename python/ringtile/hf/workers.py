"""Data-loading workers that end with their rank, at once.

A forked worker holds all connections of its rank. Until it has ended, the ranks that wait for a killed rank see no end
of them; a worker looks for its parent every 5 s only.
"""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from torch.utils.data import DataLoader

from ringtile.hf.patches import Patches

_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when the thread that made it ends


def install(accelerator: Accelerator, patches: Patches) -> None:
    """Every loader that is prepared from now on has such workers."""
    original = accelerator.prepare_data_loader

    @functools.wraps(original)
    def prepare(data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
        end_with_rank(data_loader)
        return original(data_loader, *args, **kwargs)

    patches.set(accelerator, "prepare_data_loader", prepare)


def end_with_rank(loader: DataLoader[Any]) -> None:
    """Makes the workers that this loader will start end with the process that starts them."""
    if loader.num_workers > 0 and not isinstance(loader.worker_init_fn, _EndWithParent) and sys.platform == "linux":
        loader.worker_init_fn = _EndWithParent(loader.worker_init_fn)


@dataclass(frozen=True)
class _EndWithParent:
    """A worker's first call; a class, since a worker that is not forked gets it pickled."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.then is not None:
            self.then(worker)
