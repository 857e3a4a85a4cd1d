"""Device copies of mask bounds, kept alive until every stream and CUDA graph that reads them is done."""

from __future__ import annotations

import torch
from torch import Tensor

from ringtile.errors import RefusedError


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device. For a copy to a GPU from memory that is not pinned, the host would wait.

    torch uses pinned memory again only when the copy was made. On the current stream: another one has to wait for it.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class DeviceMask:
    """Tensors that say a mask, copied to a device when this object is made; on a CPU, the tensors themselves.

    It may go while kernels that read it are still to run, on any stream: the allocator gives freed memory to the stream
    that it was allocated on at once, and on others waits for what they have been given to do if it knows of them.

    A CUDA graph reads the same memory again in every replay, and nothing tells when the last one was. So a mask that a
    graph was captured with is never freed. That adds 8 bytes a token for each sequence that graphs are captured with,
    a small part of the queries and outputs of the same tokens that every such graph holds.
    """

    def __init__(self, device: torch.device, *tensors: Tensor) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            raise RefusedError(
                f"the mask of this sequence is not on {device} yet, and cannot be copied there while a CUDA graph "
                f"is captured; make the same call once before the capture"
            )
        self._tensors = tuple(to_device(x, device) for x in tensors)
        if self._is_cuda:
            stream = torch.cuda.current_stream(device)
            self._streams, self._copied = {stream}, stream.record_event()  # those that the allocator knows of

    def read(self) -> tuple[Tensor, ...]:
        """Return the tensors, for kernels that the caller launches on the current stream."""
        if self._is_cuda:  # asking a device for its type costs as much as the rest on a CPU
            stream = torch.cuda.current_stream(self._device)
            captures = torch.cuda.is_current_stream_capturing()
            if stream not in self._streams:
                if not captures:  # before a capture torch waits for the device
                    stream.wait_event(self._copied)
                for x in self._tensors:
                    x.record_stream(stream)
                self._streams.add(stream)
            if captures:
                _in_graphs.setdefault(id(self), self)
        return self._tensors


_in_graphs: dict[int, DeviceMask] = {}  # by id; for the life of the process
