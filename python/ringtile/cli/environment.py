"""The environment variables that the command line reads: torchrun's, and those that doctor reports."""

from __future__ import annotations

import datetime
import os
import zlib

from ringtile.errors import ConfigError

# torchrun sets these in its workers.
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
WORLD_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # one of them makes a process part of a world
REPORTED = (
    *("RINGTILE_CPU_ISA", "RINGTILE_CUDA_ISA", "RINGTILE_SELF_TEST", "RINGTILE_SHARED_MEMORY", "RINGTILE_CONFIG"),
    "RINGTILE_ATTENTION_KERNEL",
    "OMP_NUM_THREADS",
)
_LAUNCHER = "start ringtile with torchrun, which sets all of them, or unset all of them for one process"


def rank() -> int:
    """Return the rank of this process; 0 without torchrun. ConfigError: the variable is no rank."""
    return _integer("RANK", 0, 0)


def world_size() -> int:
    """Return the number of ranks; 1 without torchrun. ConfigError: the variable is no number of ranks."""
    return _integer("WORLD_SIZE", 1, 1)


def local_world_size() -> int:
    """Return the number of ranks on this machine; 1 without torchrun. ConfigError: the variable is no number of
    ranks."""
    return _integer("LOCAL_WORLD_SIZE", 1, 1)


def check_world() -> None:
    """ConfigError: the variables do not describe one rank of a world, so that ranks would wait, or train apart."""
    if not any(name in os.environ for name in WORLD_VARIABLES):
        return
    for name in (*WORLD_VARIABLES, "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            given = ", ".join(each for each in TORCHRUN_VARIABLES if os.environ.get(each)) or "none"
            raise ConfigError(f"{name} is not set, but of the launcher's variables {given}; {_LAUNCHER}")
    if rank() >= world_size():
        raise ConfigError(f"RANK is {rank()} and WORLD_SIZE {world_size()}; expected a smaller rank; {_LAUNCHER}")
    local_world_size()
    _integer("LOCAL_RANK", 0, 0)
    _integer("MASTER_PORT", 29500, 1, 65535)


def error_file() -> str | None:
    """Return where torchrun looks for the error of this process, to show it in its summary."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE")


def is_first_to_say(text: str) -> bool:
    """Return whether no other worker of this torchrun has said the text; True without torchrun's store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    from torch._C._distributed_c10d import TCPStore

    run = "/".join(os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    try:
        address, wait = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), datetime.timedelta(seconds=5)
        store = TCPStore(*address, is_master=False, timeout=wait, wait_for_workers=False)
        return bool(store.add(f"ringtile/{run}/{zlib.crc32(text.encode())}", 1) == 1)
    except (KeyError, ValueError, RuntimeError):
        return True


def reported() -> dict[str, str | None]:
    """Return the variables that doctor shows; None: not set."""
    return {name: os.environ.get(name) for name in REPORTED}


def without(*names: str) -> dict[str, str]:
    """Return the environment for a child process, without some variables."""
    return {name: value for name, value in os.environ.items() if name not in names}


def without_torchrun() -> dict[str, str]:
    """Return the environment for a child process that must not join this process's world."""
    kept = without(*TORCHRUN_VARIABLES)
    return {name: value for name, value in kept.items() if not name.startswith(TORCHRUN_PREFIXES)}


def _integer(name: str, default: int, low: int, high: int = 2**31 - 1) -> int:
    text = os.environ.get(name, str(default))
    value = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else -1
    if not low <= value <= high:
        raise ConfigError(f"{name} is {text[:40]!r}; expected an integer from {low} to {high}; {_LAUNCHER}")
    return value
