"""Offload of checkpointed hidden states: copied to host memory during the forward, prefetched in the backward.

Activation checkpointing keeps each layer's input (B, N, E) and recomputes the rest of the layer. Those inputs grow
with layers times tokens; here they wait in host memory until they are needed (Rajbhandari et al., arXiv:2104.07857;
Bekman et al., arXiv:2506.13996). With x_i the input of layer i:

    forward   layer      |  0  |  1  |  2  |  3  |           x_i leaves the device once layer i + 2 has started
              to host     | x_0 | x_1 | x_2 | x_3 |
    backward  layer               |  3  |  2  |  1  |  0  |  x_3 and x_2 are still on the device; the others are
              to device           |     | x_1 | x_0 |        fetched one layer ahead

Each tensor has one `_Saved` object, owned by autograd alone: when autograd drops it, with or without a backward, its
host memory is freed. Only the device waits for copies; the host never does.

Shape letters: B batch, N local tokens, E hidden size.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ringtile.errors import RefusedError
from ringtile.tiled.host import HostCopies

ON_DEVICE = 2  # layer inputs on the device at a time: one in use, one being copied


class _Saved:
    """One hidden state: on the device while it is copied to the host, on the host, or on its way back."""

    on_device: Tensor | None = None

    def __init__(self, tensor: Tensor, transfer: HostCopies, previous: _Saved | None) -> None:
        self.transfer, self.device = transfer, tensor.device
        self.previous = weakref.ref(previous) if previous is not None else lambda: None
        held = tensor.detach()  # keeps the memory, not the graph
        self.host = transfer.empty(held)
        self.ticket = transfer.begin(held, self.host)
        self.on_device, self.version = held, held._version

    def is_copy_of(self, tensor: Tensor) -> bool:
        """Return whether this holds the tensor itself: the same memory, unmodified since."""
        held = self.on_device
        return held is not None and _same_memory(held, tensor) and self.version == tensor._version

    def prefetch(self) -> None:
        """Starts the copy back to the device, unless the tensor is there."""
        if self.on_device is None:
            self.on_device = torch.empty_like(self.host, device=self.device)
            self.ticket = self.transfer.begin(self.host, self.on_device)
            self.version = self.on_device._version

    def take(self) -> Tensor:
        """Returns the tensor on the device and drops this object's own reference to it."""
        self.prefetch()
        tensor = self.on_device
        assert tensor is not None
        self.leave_device()
        return tensor

    def leave_device(self) -> None:
        """Releases the device memory after the copy in flight. RefusedError: the tensor was modified meanwhile."""
        if self.on_device is None:
            return
        self.transfer.wait(self.ticket)
        modified = self.on_device._version != self.version
        shape, self.on_device = tuple(self.on_device.shape), None
        if modified:
            raise RefusedError(
                f"activation_offloading: a checkpointed hidden state {shape} was modified in place after its layer "
                "started; expected it to stay unmodified: write x = x + y instead of x += y"
            )

    def __del__(self) -> None:
        if self.on_device is not None:  # the graph was freed without a backward, mid-copy
            self.transfer.wait(self.ticket)


@contextlib.contextmanager
def hooks_of(
    hidden: Tensor, pack: Callable[[list[Tensor], Tensor], Any], unpack: Callable[[Any], Any]
) -> Iterator[None]:
    """Inside, autograd keeps pack([hidden], tensor) of each tensor that it saves; later the list is empty."""
    held = [hidden]  # torch keeps the hook as long as what it packed, which must not keep the tensor
    try:
        with saved_tensors_hooks(functools.partial(pack, held), unpack):
            yield
    finally:
        held.clear()


class ActivationOffload:
    """Shared by the checkpointed layers of one model: tracks which hidden states are on the device, and their order."""

    def __init__(self, transfer: HostCopies) -> None:
        self.transfer = transfer
        self._recent: list[weakref.ref[_Saved]] = []  # still on the device; newest last

    def wrap(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps checkpoint(function, hidden, *args, **kwargs) so that it saves `hidden` in host memory.

        Other saved tensors stay where they are: parameters, tensors shared by layers (rotary embeddings, masks), and
        whatever is recomputed.
        """

        @functools.wraps(checkpoint)
        def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            hidden: Any = args[0] if args else None
            if not torch.is_grad_enabled() or not self._can_leave(hidden):
                return checkpoint(function, *args, **kwargs)
            with hooks_of(hidden, self._pack, self._unpack):
                return checkpoint(function, *args, **kwargs)

        return checkpointed

    def _can_leave(self, hidden: Any) -> bool:
        """Plain floating-point activations only; a parameter, or a view of one, stays on the device anyway."""
        return (
            type(hidden) is Tensor
            and hidden.is_floating_point()
            and not isinstance(hidden._base, nn.Parameter)
            and self.transfer.takes(hidden)
        )

    def _pack(self, held: list[Tensor], tensor: Tensor) -> Tensor | _Saved:
        if not held or not _same_memory(held[0], tensor):
            return tensor
        recent = [
            saved for saved in (ref() for ref in self._recent) if saved is not None and saved.on_device is not None
        ]
        for saved in recent:
            if saved.is_copy_of(tensor):
                return saved
        while len(recent) >= ON_DEVICE:
            recent.pop(0).leave_device()
        new = _Saved(tensor, self.transfer, recent[-1] if recent else None)
        self._recent = [weakref.ref(saved) for saved in (*recent, new)]
        return new

    def _unpack(self, packed: Tensor | _Saved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor = packed.take()
        previous = packed.previous()
        if previous is not None:
            previous.prefetch()
        return tensor


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors on one device are the same view of the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )
