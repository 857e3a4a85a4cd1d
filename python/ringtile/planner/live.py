"""Counts the bytes of all storages that live while code runs on fake tensors, by part, and their peak."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from ringtile.planner.memo import Memo
from ringtile.tiled.tiles import tiles

PARTS = (
    *("weights", "gradients", "optimizer", "reference", "activations", "attention", "tower", "logits", "kv cache"),
    *("buffers", "engine"),
)

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_PLAIN = (Tensor, nn.Parameter, FakeTensor)
# Measured: gloo holds one more copy of the whole buffer while these run, NCCL none.
_COPIED_BY_GLOO = (torch.ops.c10d._allgather_base_, torch.ops.c10d._reduce_scatter_base_)
_PRODUCTS = {  # matrix products, and the position of their first factor among the arguments
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten._grouped_mm, torch.ops.ringtile.weight_grad_add_), 0),
    **dict.fromkeys((_aten.addmm, _aten.addmm_, _aten.baddbmm, _aten.baddbmm_), 1),
}
_MEMO = Memo()  # of all plans of this process


class _Storage:
    """One storage, while it lives."""

    def __init__(self, num_bytes: int, part: str) -> None:
        self.num_bytes, self.part = num_bytes, part


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts each storage once, from the op that makes it until nobody holds it.

    Numbers that ops would read from data are answered: a truth is true, a count is of everything, a number is 1. So
    every token has a label, no mask hides one, and data is never needed.
    """

    def __init__(self, vocab_size: int, *, over_gloo: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab_size, self._over_gloo = vocab_size, over_gloo
        self.parts = dict.fromkeys(PARTS, 0)
        self.total = self.peak = 0
        self.at_peak = dict(self.parts)
        self.flops = 0  # of matrix products
        self.attention_flops = 0  # of a tower's forward
        self.has_numbers = False  # whether some tensors are not fake, and ops on these compute
        self._reads_numbers = False  # whether new tensors are not fake
        self.gradients_made_by_engine: Callable[[], int] = lambda: 0  # bytes of gradients that no hook has seen
        self.in_backward = False
        self._gradients_at_peak = 0
        self._storages: Any = WeakIdKeyDictionary()
        self._part: str | None = None
        self._at_new_peak = False

    def reset_peak(self) -> None:
        """Forgets the peak and the flops so far."""
        self.peak, self.flops, self.attention_flops, self._at_new_peak = 0, 0, 0, False
        self._grow(0)

    @contextlib.contextmanager
    def making(self, part: str) -> Iterator[None]:
        """New storages inside are of this part."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    @contextlib.contextmanager
    def reading_numbers(self) -> Iterator[None]:
        """Inside, tensors are real that are made of real ones, or of none: small ones, of the sizes of images."""
        before, self._reads_numbers = self._reads_numbers, True
        try:
            yield
        finally:
            self._reads_numbers = before

    def count(self, x: Tensor, part: str) -> None:
        """Counts the storage of a tensor, or moves it to another part."""
        x = getattr(x, "_local_tensor", x)  # of a DTensor
        storage = x.untyped_storage()
        known: _Storage | None = self._storages.get(storage)
        if known is not None:
            self.parts[known.part] -= known.num_bytes
            self.parts[part] += known.num_bytes
            known.part = part
            return
        known = _Storage(storage.nbytes(), part)
        self._storages[storage] = known
        self.parts[part] += known.num_bytes
        weakref.finalize(storage, self._free, known)
        self._grow(known.num_bytes)

    def ignore(self, x: Tensor) -> None:
        """Does not count the storage of a tensor, nor of its views."""
        self._storages[x.untyped_storage()] = _Storage(0, "weights")

    def tiles(self, num_tokens: int, tile_tokens: int) -> Iterator[slice]:
        """As tiles() of tiled/tiles.py, but skip to the last tile once two tiles leave the same live bytes."""
        ranges, before, i = list(tiles(num_tokens, tile_tokens)), dict[str, int](), 0
        while i < len(ranges):
            flops = self.flops
            yield ranges[i]
            skipped = len(ranges) - 2 - i
            if self.parts == before and skipped > 0:
                self.flops += skipped * (self.flops - flops)
                i = len(ranges) - 2
            before, i = dict(self.parts), i + 1

    def finish(self) -> dict[str, int]:
        """The parts at the peak, which is their sum."""
        self._note()
        return self.at_peak

    def _grow(self, num_bytes: int) -> None:
        self.total += num_bytes
        if self.total > self.peak:
            self.peak, self._at_new_peak = self.total, True
            # Here and not where something is freed: that may be a gradient which is being taken from its parameter.
            self._gradients_at_peak = self.gradients_made_by_engine() if self.in_backward else 0

    def _free(self, storage: _Storage) -> None:
        self._note()
        self.parts[storage.part] -= storage.num_bytes
        self.total -= storage.num_bytes

    def _note(self) -> None:
        """Keeps the parts of a peak, once, before anything is freed."""
        if self._at_new_peak and self.total == self.peak:
            self.at_peak = dict(self.parts)
            self.at_peak["activations"] -= self._gradients_at_peak
            self.at_peak["gradients"] += self._gradients_at_peak
        self._at_new_peak = False

    # ---- what runs ------------------------------------------------------------------------------

    def __enter__(self) -> Live:
        self._resize = torch.UntypedStorage.resize_
        resize, storages = self._resize, self._storages

        def resized(storage: Any, num_bytes: int) -> Any:
            """FSDP2 frees gathered weights so, and later makes them anew."""
            known: _Storage | None = storages.get(storage)
            result = resize(storage, num_bytes)
            if known is not None:
                self._free(known)
                known.num_bytes, known.part = int(num_bytes), "engine"
                self.parts["engine"] += known.num_bytes
                self._grow(known.num_bytes)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would wrap each call; nothing is compiled here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # most calls, and each would go through the fake mode
            return args[0].fake_device
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor, whose local ops come here
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if self._is_of_numbers(args, kwargs):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if packet is _aten._local_scalar_dense:
            return {torch.bool: True}.get(args[0].dtype, 1.0 if args[0].is_floating_point() else 1)
        if packet in (_aten.nonzero, _aten.nonzero_static):
            out = args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        elif packet is _aten.bincount:
            out = _counts(*args, **kwargs)
        elif packet is _aten._grouped_mm:
            out = _grouped_product(*args, **kwargs)
        else:
            out = _MEMO.run(func, args, kwargs)
        if packet in _COPIED_BY_GLOO and self._over_gloo:
            copy = _Storage(max(x.nbytes for x in tree_iter(args) if isinstance(x, Tensor)), "engine")
            self.parts["engine"] += copy.num_bytes
            self._grow(copy.num_bytes)
            self._free(copy)
        if self._part == "tower" and "scaled_dot_product" in func.name():
            q, k, v = args[:3]
            self.attention_flops += 2 * (q.numel() + q[..., :1].numel() * v.size(-1)) * k.size(-2)
        if (first := _PRODUCTS.get(packet)) is not None:
            self.flops += 2 * args[first].numel() * args[first + 1].size(-1)
        for x in tree_iter(out):
            if isinstance(x, Tensor) and x.untyped_storage() not in self._storages:
                self.count(x, self._part_of(func, x))
        return out

    def _is_of_numbers(self, args: Any, kwargs: Any) -> bool:
        if not self._reads_numbers and not self.has_numbers:
            return False
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        return (self._reads_numbers or bool(tensors)) and not any(isinstance(x, FakeTensor) for x in tensors)

    def _part_of(self, func: Any, x: Tensor) -> str:
        if self._part is not None:
            return self._part
        if "attention" in func.name():
            return "attention"
        return "logits" if x.dim() > 1 and x.size(-1) == self.vocab_size else "activations"


def _counts(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Of a balancing loss: as many classes as it names, not as many as the largest number that x would hold."""
    return x.new_empty(minlength) if weights is None else weights.new_empty(minlength)


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """A mixture's product: a (T, K) b (G, K, F) -> (T, F), or the weights' gradient a (K, T) b (T, F) -> (G, K, F).

    torch's own fake kernel takes bfloat16 only; a CPU's takes float32 too.
    """
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        return a.new_empty((offs.numel(), a.size(0), b.size(1)))
    return a.new_empty((*a.shape[:-1], b.size(-1)))
