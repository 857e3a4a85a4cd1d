"""The memory of a device, and the peak of this process: resident on a CPU, by the allocator's count on a GPU."""

from __future__ import annotations

import os
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


def memory_bytes(device: torch.device) -> int:
    """The memory of a device; of a CPU this rank's share of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def peak_bytes(device: str = "cpu") -> int:
    """The most memory this process held: resident, or on a GPU in tensors."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    if (_PROC / "status").exists():  # ru_maxrss would start at the parent's peak
        lines = (_PROC / "status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
