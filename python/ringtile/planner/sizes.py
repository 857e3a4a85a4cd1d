"""Numbers as people write them: 32K and 1M tokens, 80GiB of memory. K, M and G are binary: 1K is 1024."""

from __future__ import annotations

import re
from typing import NamedTuple

from ringtile.errors import ConfigError

_TOKENS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_MAX_TOKENS = 2**31 - 1  # the mask holds positions as int32


def parse_tokens(text: str, option: str = "--seq-len") -> int:
    """4096, 32K = 32768, 1M = 1048576. ConfigError for other text, or a number that is not 1 to 2**31 - 1."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([KMG]?)", text.strip(), re.IGNORECASE)
    tokens = float(found[1]) * _TOKENS[found[2].upper()] if found else 0.0
    if not 1 <= tokens <= _MAX_TOKENS or tokens != int(tokens):
        raise ConfigError(
            f"{option} is {text!r:.100}; expected a number of tokens, 1 to {_MAX_TOKENS}: 4096, 32K (32768) or 1M "
            f"(1048576)"
        )
    return int(tokens)


def parse_bytes(text: str) -> int:
    """80GiB, 512MiB, 80GB (decimal), or a number of bytes. ConfigError for other text."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", text.strip())
    units = {name.lower(): size for name, size in _BYTES.items()} | {"": 1, "b": 1}
    if found is None or found[2].lower() not in units or float(found[1]) == 0:
        raise ConfigError(f"--memory is {text!r:.100}; expected bytes with a unit: 80GiB, 512MiB, or 80GB (10**9)")
    return int(float(found[1]) * units[found[2].lower()])


class Rates(NamedTuple):
    """What a user says of the machines: flops per second of a device, and bytes per second of a rank."""

    flops: float
    within: float  # a host
    between: float  # hosts


def parse_rates(text: str) -> Rates:
    """FLOPS,WITHIN[,BETWEEN], as 4e14,2e11,2.5e10. ConfigError for other text."""
    try:
        numbers = [float(number) for number in text.split(",")]
        if len(numbers) in (2, 3) and all(1 <= number < 1e20 for number in numbers):
            return Rates(*numbers, *numbers[1:2] * (3 - len(numbers)))
    except ValueError:
        pass
    raise ConfigError(
        f"--rates is {text!r:.100}; expected FLOPS,WITHIN[,BETWEEN]: flops per second of a device, and bytes per "
        f"second that a rank sends within a host and between hosts, each 1 to 1e20, as 4e14,2e11,2.5e10"
    )


def tokens_text(tokens: int) -> str:
    """As `parse_tokens` reads it: 1M, 32K, 4097."""
    for unit in ("M", "K"):
        if tokens % _TOKENS[unit] == 0 and tokens:
            return f"{tokens // _TOKENS[unit]}{unit}"
    return str(tokens)


def bytes_text(num_bytes: float) -> str:
    """12.3 GiB, or MiB where that reads better."""
    return f"{num_bytes / 2**30:.2f} GiB" if abs(num_bytes) >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
