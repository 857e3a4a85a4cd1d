"""Tests that fail, each in a way of its own: `run_all --rehearse --planted` shows that each is named at the end."""

from __future__ import annotations

import os
import signal
import threading

import torch


def test_planted_failure() -> None:
    assert torch.ones(()).item() == 2, "planted"


def test_planted_hang() -> None:
    threading.Event().wait()


def test_planted_lost_process() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_planted_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 TiB (planted)")


def test_nothing_is_planted_here() -> None:
    pass
