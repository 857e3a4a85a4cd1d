"""Checkpointed hidden states in host memory: written beside the forward, read back ahead of the backward.

Activation checkpointing keeps one tensor (B, N, E) per layer, its input, and computes the rest of the layer again.
What remains grows with layers times tokens; here it lives in host memory while it is not needed (Rajbhandari et
al., arXiv:2104.07857; Bekman et al., arXiv:2506.13996). With x_i the input of layer i:

    forward   layer      |  0  |  1  |  2  |  3  |           x_i leaves the device when two more layers have begun
              to host     | x_0 | x_1 | x_2 | x_3 |
    backward  layer               |  3  |  2  |  1  |  0  |  x_3 and x_2 never left; the others are read one layer
              to device           |     | x_1 | x_0 |        ahead

One tensor, one `_Saved` object, held by autograd alone: it and its host memory go when autograd lets go of it, whether
a backward came or not. Only the device waits for copies, the host never does.

Shape letters: B batch, N local tokens, E hidden size.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .errors import Refused

ON_DEVICE = 2  # inputs of this many layers are on the device at a time: one is computed with, one is copied


class Copy(NamedTuple):
    """A copy under way: where it goes, and what `Transfer.wait` takes. Not to be read before that."""

    tensor: Tensor
    ticket: Any


class Transfer(Protocol):
    """Copies between a device and host memory, in the order they are begun, beside what the device computes."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether the tensor is on a device that this copies from."""

    def begin_to_host(self, tensor: Tensor) -> Copy:
        """Begins after what was computed so far. The tensor must stay as it is until the ticket is waited for."""

    def begin_to_device(self, host: Tensor, device: torch.device) -> Copy:
        """The way back; neither of the two tensors may go before the ticket is waited for."""

    def wait(self, ticket: Any) -> None:
        """What the device computes from now on, and reuses of memory freed from now on, come after that copy."""


class CudaTransfer:
    """Pinned host memory, and one side stream per device."""

    def __init__(self) -> None:
        self._side: dict[torch.device, torch.cuda.Stream] = {}

    def takes(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def begin_to_host(self, tensor: Tensor) -> Copy:
        return self._begin(tensor, torch.empty_like(tensor, device="cpu", pin_memory=True), tensor.device)

    def begin_to_device(self, host: Tensor, device: torch.device) -> Copy:
        return self._begin(host, torch.empty_like(host, device=device), device)

    def _begin(self, source: Tensor, target: Tensor, device: torch.device) -> Copy:
        """Copies on the side stream, after the work of the current one: it made the source, or last used the target."""
        if device not in self._side:
            self._side[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side = self._side[device]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
            return Copy(target, side.record_event())

    def wait(self, ticket: torch.cuda.Event) -> None:
        torch.cuda.current_stream(ticket.device).wait_event(ticket)


class _Saved:
    """One hidden state: on the device and on its way to the host, on the host, or on its way back."""

    on_device: Tensor | None = None

    def __init__(self, tensor: Tensor, transfer: Transfer, previous: _Saved | None) -> None:
        self.transfer, self.device = transfer, tensor.device
        self.previous = weakref.ref(previous) if previous is not None else lambda: None
        held = tensor.detach()  # the memory, not the graph that made it
        self.host, self.ticket = transfer.begin_to_host(held)
        self.on_device, self.version = held, held._version

    def is_copy_of(self, tensor: Tensor) -> bool:
        """Whether this holds the same numbers: not only equal ones, but the same memory, unmodified."""
        held = self.on_device
        return held is not None and _same_memory(held, tensor) and self.version == tensor._version

    def prefetch(self) -> None:
        """Begins to bring it back to the device, if it has left it."""
        if self.on_device is None:
            self.on_device, self.ticket = self.transfer.begin_to_device(self.host, self.device)
            self.version = self.on_device._version

    def take(self) -> Tensor:
        """The tensor on the device, which nobody else holds for its sake from now on."""
        self.prefetch()
        tensor = self.on_device
        assert tensor is not None
        self.leave_device()
        return tensor

    def leave_device(self) -> None:
        """Lets go of the device's memory after the copy under way. Refused: the tensor was modified meanwhile."""
        if self.on_device is None:
            return
        self.transfer.wait(self.ticket)
        modified = self.on_device._version != self.version
        shape, self.on_device = tuple(self.on_device.shape), None
        if modified:
            raise Refused(
                f"activation_offload: a checkpointed hidden state {shape} was modified in place after its layer had "
                "begun; expected it to stay as the layer saw it: write x = x + y in the place of x += y"
            )

    def __del__(self) -> None:
        if self.on_device is not None:  # freed while it is being copied, in a graph without a backward
            self.transfer.wait(self.ticket)


class ActivationOffload:
    """What the checkpointed layers of one model share: which tensors are on the device, and which comes next."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self._recent: list[weakref.ref[_Saved]] = []  # those that have not left the device; newest last

    def wrap(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """checkpoint(function, hidden, *args, **kwargs), which puts `hidden` in host memory where it saves it.

        Anything else that is saved inside stays where it is: parameters, what layers share (rotary embeddings,
        masks), what is computed again.
        """

        @functools.wraps(checkpoint)
        def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            hidden: Any = args[0] if args else None
            if not torch.is_grad_enabled() or not self._can_leave(hidden):
                return checkpoint(function, *args, **kwargs)
            with saved_tensors_hooks(functools.partial(self._pack, hidden), self._unpack):
                return checkpoint(function, *args, **kwargs)

        return checkpointed

    def _can_leave(self, hidden: Any) -> bool:
        """Plain floating-point activations; a parameter, or a view of one, would stay on the device all the same."""
        return (
            type(hidden) is Tensor
            and hidden.is_floating_point()
            and not isinstance(hidden._base, nn.Parameter)
            and self.transfer.takes(hidden)
        )

    def _pack(self, hidden: Tensor, tensor: Tensor) -> Tensor | _Saved:
        if not _same_memory(hidden, tensor):
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
    """Whether two tensors of one device are the same numbers in the same place."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )
