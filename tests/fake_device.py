"""A device for tests of `hf.offload`, made of CPU tensors, whose copies are as late as they are allowed to be."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(eq=False)
class Pending:
    """A copy that has not been made: done in order, when somebody waits for it or for a later one."""

    source: View
    target: View


class View:
    """A tensor, as long as somebody else holds its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage, self.dtype = weakref.ref(tensor.untyped_storage()), tensor.dtype
        self.place = tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor | None:
        storage = self.storage()
        return None if storage is None else torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


@dataclass
class LateTransfer:
    """Until it is waited for, a copy's target holds nan; both tensors must then still be there, else that is an error.

    A reader that does not wait, a writer that frees too early, or a source overwritten under way shows as nan, as an
    error, or as other numbers. log: ("to host" or "to device", bytes), and what tests add. hosts and devices: the
    memory on either side.
    """

    log: list[tuple[str, object]] = field(default_factory=list)
    hosts: list[weakref.ref[object]] = field(default_factory=list)
    devices: list[weakref.ref[object]] = field(default_factory=list)
    queue: deque[Pending] = field(default_factory=deque)

    def takes(self, tensor: Tensor) -> bool:
        return True

    def empty(self, like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        with _disable_current_modes():  # a test that counts bytes counts those of the device
            made = torch.empty_like(like) if shape is None else torch.empty(shape, dtype=like.dtype)
        self.hosts.append(weakref.ref(made.untyped_storage()))
        return made

    def begin(self, source: Tensor, target: Tensor) -> Pending:
        is_on_host = target.untyped_storage() in [host() for host in self.hosts]
        self.log.append(("to host" if is_on_host else "to device", target.nbytes))
        self.devices.append(weakref.ref((source if is_on_host else target).untyped_storage()))
        target.detach().fill_(torch.nan)
        pending = Pending(View(source), View(target))
        self.queue.append(pending)
        return pending

    def wait(self, ticket: Pending) -> None:
        while ticket in self.queue:
            pending = self.queue.popleft()
            source, target = pending.source.tensor(), pending.target.tensor()
            if target is None and source is None:
                continue  # nobody can see it: a graph that was let go
            assert source is not None, "the source of a copy was freed before the copy was made"
            assert target is not None, "the target of a copy was freed before the copy was made"
            target.data.copy_(source.data)  # .data: what a device copies on its own is no in-place operation


def alive(memory: list[weakref.ref[object]]) -> int:
    """How many pieces of it are still there."""
    return len({id(piece) for ref in memory if (piece := ref()) is not None})
