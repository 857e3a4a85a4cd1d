"""What the ranks of a group tell each other once: which of them share a host."""

from __future__ import annotations

import json
import os
import socket
import weakref
from pathlib import Path
from typing import Any

import torch

from ringtile.transport.messages import all_gather
from ringtile.transport.transport import Transport

_MAX_BYTES = 1 << 10  # of what a rank says

# Weak: what is known of a living group.
_hosts: weakref.WeakKeyDictionary[Transport, tuple[int, ...]] = weakref.WeakKeyDictionary()


def hosts_of(transport: Transport) -> tuple[int, ...]:
    """By rank, its host, numbered by its first rank. Collective the first time. RingMismatchError, PeerLostError."""
    if transport not in _hosts:
        names = gathered(transport, "agree on hosts", host_id())
        _hosts[transport] = tuple(map(names.index, names))
    return _hosts[transport]


def gathered(transport: Transport, op: str, mine: Any) -> list[Any]:
    """Return what each rank says, by rank; at most a KiB of JSON. A collective. RingMismatchError, PeerLostError."""
    if transport.world_size == 1:
        return [mine]
    own = torch.frombuffer(bytearray(json.dumps(mine).encode().ljust(_MAX_BYTES)), dtype=torch.uint8)
    with transport.agree(op, {}):
        said = all_gather(own, transport, op)
        transport.bytes_sent -= (transport.world_size - 1) * _MAX_BYTES  # no payload of a plan
    return [json.loads(bytes(each)) for each in said.tolist()]


def host_id() -> str:
    """Equal for two processes exactly if they run on one host and in one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
