"""A device for tests of `tiled.offload`, made of CPU tensors, whose copies are as late as they are allowed to be."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field

import torch
from ringtile.tiled.offload import Copy
from torch import Tensor


@dataclass(eq=False)
class Pending:
    """A copy that has not been made: done in order, when somebody waits for it or for a later one."""

    source: weakref.ref[Tensor]
    target: weakref.ref[Tensor]


@dataclass
class LateTransfer:
    """Until it is waited for, a copy's target holds nan; both tensors must then still be there, else that is an error.

    A reader that does not wait, a writer that frees too early, or a source overwritten under way shows as nan, as an
    error, or as other numbers. log: ("to host" or "to device", bytes), and what tests add.
    """

    log: list[tuple[str, object]] = field(default_factory=list)
    hosts: list[weakref.ref[Tensor]] = field(default_factory=list)
    devices: list[weakref.ref[Tensor]] = field(default_factory=list)
    queue: deque[Pending] = field(default_factory=deque)

    def takes(self, tensor: Tensor) -> bool:
        return True

    def begin_to_host(self, tensor: Tensor) -> Copy:
        self.log.append(("to host", tensor.nbytes))
        copy = self._begin(tensor)
        self.hosts.append(weakref.ref(copy.tensor))
        self.devices.append(weakref.ref(tensor))
        return copy

    def begin_to_device(self, host: Tensor, device: torch.device) -> Copy:
        self.log.append(("to device", host.nbytes))
        copy = self._begin(host)
        self.devices.append(weakref.ref(copy.tensor))
        return copy

    def _begin(self, source: Tensor) -> Copy:
        target = torch.full_like(source, torch.nan, requires_grad=False)
        pending = Pending(weakref.ref(source), weakref.ref(target))
        self.queue.append(pending)
        return Copy(target, pending)

    def wait(self, ticket: Pending) -> None:
        while ticket in self.queue:
            pending = self.queue.popleft()
            source, target = pending.source(), pending.target()
            if target is None and pending.source() is None:
                continue  # nobody can see it: a graph that was let go
            assert source is not None, "the source of a copy was freed before the copy was made"
            assert target is not None, "the target of a copy was freed before the copy was made"
            target.data.copy_(source.data)  # .data: what a device copies on its own is no in-place operation


def alive(tensors: list[weakref.ref[Tensor]]) -> int:
    """How many of them are still there."""
    return sum(tensor() is not None for tensor in tensors)
