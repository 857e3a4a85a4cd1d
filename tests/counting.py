"""What the tests of tiling measure: matrix products, the largest tensor made, errors against float64."""

import weakref

import torch
from ringtile.tiled.host import HostTensor
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counting(TorchDispatchMode):
    """Counts the flops of matrix products (2 per multiply-add), and the elements of the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_"):
            left, right = args[-2:]
            self.flops += 2 * left.numel() * right.size(-1)
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self.largest = max(self.largest, made.untyped_storage().nbytes() // made.itemsize)
        return result


def relative_error(actual: Tensor, oracle: Tensor) -> float:
    """max |actual - oracle| / max |oracle|, computed in float64."""
    error = (actual.detach().double() - oracle.detach().double()).abs().max().item()
    scale = oracle.detach().double().abs().max().item()
    return error if scale == 0 else error / scale


def assert_near(actual: Tensor, oracle: Tensor, num_terms: int, num_roundings: int = 4) -> None:
    """Actual equals the float64 oracle as far as sums of num_terms products in actual's dtype can.

    A sum of n products has an error of at most n * eps * sum |products|; with terms of random sign the sum of
    magnitudes is about sqrt(n) times the result, which n * eps more than covers for n below 1000. num_roundings:
    how many such sums follow each other.
    """
    assert actual.shape == oracle.shape
    eps = torch.finfo(actual.dtype).eps
    assert actual.numel() == 0 or relative_error(actual, oracle) <= num_roundings * max(1, num_terms) * eps


class Alive(TorchDispatchMode):
    """The most elements, and the most bytes, that tensors made inside held at one time; counts storages of at least
    `at_least` elements. A HostTensor has none."""

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.at_least, self.now, self.peak = at_least, 0, 0
        self.bytes_now = self.bytes_peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for made in tree_leaves(result):
            if not isinstance(made, Tensor) or isinstance(made, HostTensor):
                continue
            if made.untyped_storage()._cdata not in given | self._seen:
                self._count(made)
        return result

    def _count(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        num_elements = storage.nbytes() // made.itemsize
        if num_elements >= self.at_least:
            self._seen.add(storage._cdata)
            self.now += num_elements
            self.bytes_now += storage.nbytes()
            self.peak, self.bytes_peak = max(self.peak, self.now), max(self.bytes_peak, self.bytes_now)
            weakref.finalize(storage, self._free, storage._cdata, num_elements, storage.nbytes())

    def _free(self, key: int, num_elements: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_elements
        self.bytes_now -= num_bytes
