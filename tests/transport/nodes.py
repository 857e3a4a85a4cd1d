"""Two nodes on one machine: network namespaces, joined by a link of limited rate. For root, where `ip` and `tc` work.

Ranks of one namespace reach each other at full speed and share memory; to the other they have the link alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>
_count = itertools.count()


@dataclass(frozen=True)
class TwoNodes:
    """names: of the namespaces, which are also those of their ends of the link."""

    names: tuple[str, str]
    addresses: tuple[str, str] = ("10.77.0.1", "10.77.0.2")

    def enter(self, rank: int, ranks_per_node: int) -> None:
        """Moves this process, the rank of a world, to its node."""
        name = self.names[rank // ranks_per_node]
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", name).open("rb") as namespace:
            if libc.setns(namespace.fileno(), NEW_NETWORK) != 0:
                raise OSError(ctypes.get_errno(), f"setns {name}")
        os.environ["GLOO_SOCKET_IFNAME"] = name

    def command(self, node: int, *arguments: str) -> list[str]:
        """arguments, to be run on a node."""
        return ["ip", "netns", "exec", self.names[node], *arguments]

    def cut(self) -> None:
        """Takes the link down: what is sent is lost, and nobody is told."""
        _run("ip", "-n", self.names[0], "link", "set", self.names[0], "down")


@contextlib.contextmanager
def two_nodes(rate: str = "1gbit") -> Iterator[TwoNodes]:
    """rate: of the link, each way, as `tc` writes it. Raises OSError where this machine lets us make none."""
    if not shutil.which("ip") or not shutil.which("tc"):
        raise OSError("ip and tc are not installed")
    name = f"rt{os.getpid()}x{next(_count)}"
    nodes = TwoNodes((f"{name}a", f"{name}b"))
    first, second = nodes.names
    with contextlib.ExitStack() as undo:
        for name in nodes.names:
            _run("ip", "netns", "add", name)
            undo.callback(_run, "ip", "netns", "del", name)
        _run("ip", "link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
        for name, address in zip(nodes.names, nodes.addresses, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", name, "up")
            shaped = ("root", "tbf", "rate", rate, "burst", "128kbit", "latency", "400ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", name, *shaped)
        yield nodes


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
