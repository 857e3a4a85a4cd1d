"""Which ranks of a group share a host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ringtile.transport.messages import all_gather_object
from ringtile.transport.transport import Transport


def hosts_of(transport: Transport) -> tuple[int, ...]:
    """Return by rank its host, numbered by its first rank. A call the first time.

    Raise RingMismatchError or PeerLostError.
    """
    if not transport.hosts:
        names = all_gather_object(_host_id(), transport, "agree on hosts")
        transport.hosts = tuple(map(names.index, names))
    return transport.hosts


def _host_id() -> str:
    """Return what is equal for two processes exactly if they run on one host and in one network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
