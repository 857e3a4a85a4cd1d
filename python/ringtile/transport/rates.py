"""How fast links and kernels are, as `ringtile bench transport` measures it: what the scheme `auto` decides by.

The numbers are kept in a file of the user's cache folder, one for each machine, or in a file that the configuration
names. A file in the cache counts only if this user wrote it, on this machine, for this device.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from ringtile.config import Count, Section
from ringtile.errors import ConfigError
from ringtile.yaml_file import MAX_BYTES, read_yaml

COMMAND = "ringtile bench transport"
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Link(Section):
    """Between ranks that both send and receive, as in a ring."""

    latency_s: _Seconds  # of a message
    bytes_per_s: _Rate  # each way, of one rank
    host_bytes_per_s: _Rate | None = None  # between hosts: of all ranks of a host together; None: as one rank
    overlap: float = Field(default=1.0, ge=0, le=1)  # the share of a message's time in which kernels can run


class Kernel(Section):
    """Attention on one device, in one dtype."""

    forward_flops_per_s: _Rate
    backward_flops_per_s: _Rate
    call_s: _Seconds  # of a kernel call, besides its flops


class Rates(Section):
    """One machine's links and kernels. machine, device: where they were measured; threads: of a rank, of a CPU."""

    within: Link | None = None  # a host
    between: Link | None = None  # hosts
    kernels: dict[str, Kernel]  # by dtype: float32, bfloat16, ...
    exchange_s: _Seconds = 0.0  # of a rank that posts some messages and waits for them, besides theirs
    copy_bytes_per_s: _Rate = 1e12  # of what is put into messages and taken out
    threads: Count | None = None  # None: kernels are as fast with any number
    machine: str = ""
    device: str = ""


_LIKE_A_CPU = Kernel(forward_flops_per_s=3e10, backward_flops_per_s=2.5e10, call_s=1e-4)
_LIKE_A_GPU = Kernel(forward_flops_per_s=3e14, backward_flops_per_s=2e14, call_s=2e-5)
ASSUMED = {
    "cpu": Rates(
        within=Link(latency_s=5e-5, bytes_per_s=2.5e9, overlap=0.0),
        between=Link(latency_s=1e-4, bytes_per_s=1.2e9),
        kernels={"float32": _LIKE_A_CPU},
        exchange_s=2e-4,
        copy_bytes_per_s=5e9,
        threads=1,
    ),
    "cuda": Rates(
        within=Link(latency_s=1e-5, bytes_per_s=2e11),
        between=Link(latency_s=2e-5, bytes_per_s=2.5e10, host_bytes_per_s=2e11),
        kernels={"bfloat16": _LIKE_A_GPU},
        exchange_s=5e-5,
    ),
}


def kernel_of(rates: Rates, dtype: torch.dtype) -> Kernel:
    """The kernels for a dtype; where it was not measured, the first that was."""
    return rates.kernels.get(str(dtype).removeprefix("torch.")) or next(iter(rates.kernels.values()))


# ---- files --------------------------------------------------------------------------------------


def read_rates(path: Path) -> Rates:
    """Rates from a YAML or JSON file. ConfigError, which names the file: it is unreadable, or holds something else."""
    try:
        rates = Rates(**dict(_mapping(path)))
        if not rates.kernels:
            raise ConfigError("kernels is empty; expected at least one dtype")
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"rates of {path}: {error}") from None
    return rates


def _mapping(path: Path) -> Mapping[str, Any]:
    """YAML does not take all of JSON's numbers: 1e-05 is a string there."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_BYTES))
        if isinstance(found, dict):
            return found
    except (OSError, ValueError, RecursionError):
        pass
    return read_yaml(path)


def cache_path(device_type: str) -> Path:
    """The file of this machine; the cache folder is that of the XDG base directories."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = given if given.is_absolute() else Path.home() / ".cache"
    machine = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())
    return folder / "ringtile" / f"rates-{machine}-{device_type}.json"


def cached_rates(device_type: str) -> Rates | None:
    """What was measured on this machine; None: nothing was. ConfigError: the file is not to be trusted."""
    path = cache_path(device_type)
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"rates of {path}: {error.strerror}; expected a readable file") from error
    again = f"; remove it and measure again: {COMMAND}"
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & stat.S_IWOTH:
        raise ConfigError(f"rates of {path}: expected a regular file of this user that not everybody can write{again}")
    try:
        rates = read_rates(path)
    except ConfigError as error:
        raise ConfigError(f"{error}{again}") from None
    here = (socket.gethostname(), device_name(device_type))
    if (rates.machine, rates.device) != here:
        raise ConfigError(
            f"rates of {path} are of {rates.machine or 'no machine'}, {rates.device or 'no device'}; "
            f"expected {', '.join(here)}{again}"
        )
    return rates


def rates_json(rates: Rates) -> dict[str, Any]:
    """What `read_rates` reads."""
    fields: dict[str, Any] = json.loads(rates.model_dump_json(exclude_none=True))
    return fields


def known_rates(device_type: str, path: str | None, num_hosts: int) -> Rates:
    """The rates of a file, else of the cache, else assumed ones, with a warning. All links that are needed are there.

    num_hosts: over which the ranks of the group are spread. ConfigError.
    """
    assumed = ASSUMED.get(device_type, ASSUMED["cpu"])
    rates = read_rates(Path(path)) if path is not None else cached_rates(device_type)
    if rates is None:
        missing, rates = "links and kernels are", assumed
    elif rates.within is None:
        missing = "messages within a host are"
    else:
        missing = "messages between hosts are" if num_hosts > 1 and rates.between is None else ""
    if missing:
        warnings.warn(
            f"the scheme auto assumes how fast {missing}, because that was not measured; measure it on these hosts "
            f"with: {COMMAND}",
            stacklevel=2,
        )
    links = {"within": rates.within or assumed.within, "between": rates.between or assumed.between}
    return rates.model_copy(update=links)


def with_threads(rates: Rates, threads: int) -> Rates:
    """The rates of ranks that have so many threads, if kernels are as much faster."""
    if rates.threads is None:
        return rates
    share = threads / rates.threads
    kernels = {
        name: Kernel(
            forward_flops_per_s=kernel.forward_flops_per_s * share,
            backward_flops_per_s=kernel.backward_flops_per_s * share,
            call_s=kernel.call_s,
        )
        for name, kernel in rates.kernels.items()
    }
    return rates.model_copy(update={"kernels": kernels, "threads": threads})


# ---- names --------------------------------------------------------------------------------------


def device_name(device_type: str) -> str:
    """Of the GPU, or of the CPU where there is none."""
    is_gpu = device_type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name() if is_gpu else cpu_name()


def cpu_name() -> str:
    """The CPU's model name."""
    info = Path("/proc/cpuinfo")  # Linux only
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def host_id() -> str:
    """Equal for two processes exactly if they run on one host and in one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
