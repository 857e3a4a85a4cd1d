"""The peak of memory of this process: resident on a CPU, by the allocator's count on a GPU."""

from __future__ import annotations

import pathlib
import resource

import torch

_PROC = pathlib.Path("/proc/self")  # Linux only


def reset_peak_bytes(device: str = "cpu") -> None:
    """Makes peak_bytes start anew, where the system can."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif (_PROC / "clear_refs").exists():
        (_PROC / "clear_refs").write_text("5")


def peak_bytes(device: str = "cpu") -> int:
    """The most memory this process held: resident, or on a GPU in tensors."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if (_PROC / "status").exists():  # ru_maxrss would start at the parent's peak
        lines = (_PROC / "status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
