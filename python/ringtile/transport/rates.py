"""How fast links and kernels are, as `ringtile bench transport` measures it: what the scheme `auto` decides by.

The numbers are kept in a file of the user's cache folder, one for each machine, or in a file that the configuration
names. A file in the cache counts only if this user wrote it, on this machine, for this device.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import socket
import stat
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ringtile.errors import ConfigError

COMMAND = "ringtile bench transport"


@dataclass(frozen=True)
class Link:
    """Between ranks that both send and receive, as in a ring."""

    latency_s: float  # of a message
    bytes_per_s: float  # each way, of one rank
    host_bytes_per_s: float | None = None  # between hosts: of all ranks of a host together; None: as one rank
    overlap: float = 1.0  # the share of a message's time in which kernels can run

    def __post_init__(self) -> None:
        _check_from_0("latency_s", self.latency_s)
        _check_above_0("bytes_per_s", self.bytes_per_s)
        if self.host_bytes_per_s is not None:
            _check_above_0("host_bytes_per_s", self.host_bytes_per_s)
        if not _is_number(self.overlap) or not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap is {self.overlap!r:.100}; expected 0..1")


@dataclass(frozen=True)
class Kernel:
    """Attention on one device, in one dtype."""

    forward_flops_per_s: float
    backward_flops_per_s: float
    call_s: float  # of a kernel call, besides its flops

    def __post_init__(self) -> None:
        _check_above_0("forward_flops_per_s", self.forward_flops_per_s)
        _check_above_0("backward_flops_per_s", self.backward_flops_per_s)
        _check_from_0("call_s", self.call_s)


@dataclass(frozen=True)
class Rates:
    """One machine's links and kernels. machine, device: where they were measured; threads: of a rank, of a CPU."""

    kernels: dict[str, Kernel]  # by dtype: float32, bfloat16, ...
    within: Link | None = None  # a host
    between: Link | None = None  # hosts
    message_s: float = 0.0  # of a rank that posts a message and waits for it, at either end, besides its seconds
    copy_bytes_per_s: float = 1e12  # of what is put into messages and taken out
    threads: int | None = None  # None: kernels are as fast with any number
    machine: str = ""
    device: str = ""

    def __post_init__(self) -> None:
        if not self.kernels:
            raise ConfigError("kernels is empty; expected at least one dtype")
        _check_from_0("message_s", self.message_s)
        _check_above_0("copy_bytes_per_s", self.copy_bytes_per_s)
        if self.threads is not None and (type(self.threads) is not int or self.threads < 1):
            raise ConfigError(f"threads is {self.threads!r:.100}; expected at least 1, or none")
        for name in ("machine", "device"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} is {getattr(self, name)!r:.100}; expected text")

    @classmethod
    def of(cls, fields: Any) -> Rates:
        """From what `rates_json` gives. ConfigError names what is missing, unknown or no such number."""
        fields = _fields(cls, fields)
        links = {name: fields[name] for name in ("within", "between") if fields.get(name) is not None}
        of_links = {name: Link(**_fields(Link, link, f"{name}.")) for name, link in links.items()}
        kernels = fields["kernels"]
        if not isinstance(kernels, Mapping):
            raise ConfigError(f"kernels is {kernels!r:.100}; expected a mapping")
        of_dtype = {str(name): Kernel(**_fields(Kernel, each, f"kernels.{name}.")) for name, each in kernels.items()}
        return cls(**{**fields, "within": None, "between": None, **of_links, "kernels": of_dtype})


def _fields(cls: type, found: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{prefix or 'the file'} holds {type(found).__name__}; expected a mapping")
    known = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := [str(key) for key in found if key not in known]:
        raise ConfigError(f"unknown key {prefix}{unknown[0]:.100}; expected {', '.join(known)}")
    for name, field in known.items():
        if field.default is dataclasses.MISSING and name not in found:
            raise ConfigError(f"{prefix}{name} is missing")
    return dict(found)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e300


def _check_above_0(name: str, value: Any) -> None:
    if not _is_number(value) or value <= 0:
        raise ConfigError(f"{name} is {value!r:.100}; expected a finite number above 0")


def _check_from_0(name: str, value: Any) -> None:
    if not _is_number(value) or value < 0:
        raise ConfigError(f"{name} is {value!r:.100}; expected a finite number of at least 0")


_LIKE_A_CPU = Kernel(forward_flops_per_s=3e10, backward_flops_per_s=2.5e10, call_s=1e-4)
_LIKE_A_GPU = Kernel(forward_flops_per_s=3e14, backward_flops_per_s=2e14, call_s=2e-5)
ASSUMED = {
    "cpu": Rates(
        within=Link(latency_s=5e-5, bytes_per_s=2.5e9, overlap=0.0),
        between=Link(latency_s=1e-4, bytes_per_s=1.2e9),
        kernels={"float32": _LIKE_A_CPU},
        message_s=1e-4,
        copy_bytes_per_s=5e9,
        threads=1,
    ),
    "cuda": Rates(
        within=Link(latency_s=1e-5, bytes_per_s=2e11),
        between=Link(latency_s=2e-5, bytes_per_s=2.5e10, host_bytes_per_s=2e11),
        kernels={"bfloat16": _LIKE_A_GPU},
        message_s=2e-5,
    ),
}


def kernel_of(rates: Rates, dtype: torch.dtype) -> Kernel:
    """The kernels for a dtype; where it was not measured, the first that was."""
    return rates.kernels.get(str(dtype).removeprefix("torch.")) or next(iter(rates.kernels.values()))


# ---- files --------------------------------------------------------------------------------------


def read_rates(path: Path) -> Rates:
    """Rates from a YAML or JSON file. ConfigError, which names the file: it is unreadable, or holds something else."""
    try:
        rates = Rates.of(_mapping(path))
    except ConfigError as error:
        raise ConfigError(f"rates of {path}: {error}") from None
    return rates


def _mapping(path: Path) -> Mapping[str, Any]:
    """YAML does not take all of JSON's numbers: 1e-05 is a string there."""
    from ringtile.yaml_file import MAX_BYTES, read_yaml  # needs a package that attention does not

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

    def without_none(fields: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in fields if value is not None}

    return dataclasses.asdict(rates, dict_factory=without_none)


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
    within, between = rates.within or assumed.within, rates.between or assumed.between
    return dataclasses.replace(rates, within=within, between=between)


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
    return dataclasses.replace(rates, kernels=kernels, threads=threads)


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
