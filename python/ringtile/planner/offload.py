"""Activation offload on fake tensors, which have no address and no streams: what is on the device, what on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ringtile.hf.batch import STREAMED
from ringtile.hf.offload import hooks_of
from ringtile.hf.patches import Patches
from ringtile.planner.live import Live


class _Hidden:
    """A hidden state that a checkpoint saved: on the device, or only on the host."""

    def __init__(self, tensor: Tensor, previous: _Hidden | None) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self.shape, self.dtype, self.previous = tensor.shape, tensor.dtype, previous

    def fetch(self) -> Tensor:
        if self.tensor is None:
            self.tensor = torch.empty(self.shape, dtype=self.dtype)
        return self.tensor


class HostMemory:
    """`PinnedCopies` on fake tensors: counts the bytes of the host, and copies nothing."""

    def __init__(self, live: Live, fake: FakeTensorMode) -> None:
        self._live, self._fake = live, fake
        self.now = self.peak = 0

    def takes(self, tensor: Tensor) -> bool:
        return True

    def empty(self, like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        with _disable_current_modes(), self._fake:
            made = torch.empty(like.shape if shape is None else shape, dtype=like.dtype)
        self._live.ignore(made)
        self._add(made.nbytes)
        weakref.finalize(made.untyped_storage(), self._add, -made.nbytes)
        return made

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def begin(self, source: Tensor, target: Tensor) -> None:
        pass

    def wait(self, ticket: None) -> None:
        pass


class Offload:
    """`hf/offload.py` on fake tensors, which have no address and no streams: the same tensors at the same time."""

    def __init__(self, model: nn.Module, patches: Patches, ends: HostMemory) -> None:
        self.saved_bytes, self.ends = 0, ends
        self._recent: list[_Hidden] = []
        for module in model.modules():
            if STREAMED in vars(module):
                patches.set(module, STREAMED, ends)
                continue
            for name in ("_gradient_checkpointing_func", "checkpoint_fn"):
                if name in vars(module):
                    patches.set(module, name, self._wrap(getattr(module, name)))

    @property
    def host_bytes(self) -> int:
        return self.saved_bytes + self.ends.peak

    def _wrap(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with hooks_of(args[0], self._pack, self._unpack):
                return checkpoint(function, *args, **kwargs)

        return checkpointed

    def _pack(self, held: list[Tensor], tensor: Tensor) -> Any:
        if not held or tensor.untyped_storage()._cdata != held[0].untyped_storage()._cdata:
            return tensor
        if len(self._recent) == 2:
            self._recent.pop(0).tensor = None
        self._recent.append(_Hidden(tensor, self._recent[-1] if self._recent else None))
        self.saved_bytes += tensor.nbytes
        return self._recent[-1]

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Hidden):
            return packed  # type: ignore[no-any-return]
        tensor, packed.tensor = packed.fetch(), None
        if packed.previous is not None:
            packed.previous.fetch()
        else:
            self._recent = []
        return tensor
