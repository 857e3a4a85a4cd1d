"""The environment variables that the command line reads: torchrun's, and those that doctor reports."""

from __future__ import annotations

import os

# torchrun sets these in its workers.
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
REPORTED = ("RINGTILE_CPU_ISA", "RINGTILE_CUDA_ISA", "RINGTILE_CONFIG", "OMP_NUM_THREADS")


def rank() -> int:
    """The rank of this process; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """The rank of this process among those of its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_world_size() -> int:
    """The number of ranks on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def reported() -> dict[str, str | None]:
    """The variables that doctor shows; None: not set."""
    return {name: os.environ.get(name) for name in REPORTED}


def without(*names: str) -> dict[str, str]:
    """The environment for a child process, without some variables."""
    return {name: value for name, value in os.environ.items() if name not in names}


def without_torchrun() -> dict[str, str]:
    """The environment for a child process that must not join this process's world."""
    kept = without(*TORCHRUN_VARIABLES)
    return {name: value for name, value in kept.items() if not name.startswith(TORCHRUN_PREFIXES)}
