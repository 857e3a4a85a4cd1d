"""A checksum of tensors, by which ranks notice that they hold different numbers.

Every 64-bit word is mixed with its place by multiplications and shifts (splitmix64's finalizer, arXiv:1410.0530 has the
family), and the results are added: in any order, hence the same on every device. A sum of words times places instead,
without the mixing, cannot tell `+1, -2, +1` on three neighbors from nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

_PIECE_BYTES = 8 << 20  # read at once; two buffers of that size are all that a checksum needs


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


_PLACE = _signed(0x9E3779B97F4A7C15)  # odd, so that places differ
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def checksum(*tensors: Tensor, device: torch.device | None = None) -> Tensor:
    """Return int64 (): 64 bits of the numbers, dtypes, shapes and order of tensors of any strides.

    Equal tensors have equal checksums; others collide by chance, once in 2^64. NaN and -0.0 count as the bits that they
    are. device: of the result; by default that of the first tensor. The host waits for nothing.
    """
    device = device or (tensors[0].device if tensors else torch.device("cpu"))
    total = torch.zeros((), dtype=torch.int64, device=device)
    for x in tensors:
        kind = zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode())
        total = (total * _PLACE + kind) * _PLACE + _of_numbers(x.detach()).to(device)
    return total


def _of_numbers(x: Tensor) -> Tensor:
    total, place = torch.zeros((), dtype=torch.int64, device=x.device), 1
    for piece in _pieces(x):
        words = _words(piece)
        words += torch.arange(place, place + words.numel(), device=x.device).mul_(_PLACE)
        for shift, factor in zip((30, 27), _FACTORS, strict=True):
            _fold(words, shift)
            words *= factor
        _fold(words, 31)
        total += words.sum()
        place += words.numel()
    return total


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Yield x in row-major order, cut by its shape alone."""
    if x.nbytes <= _PIECE_BYTES:
        yield x
        return
    dim = next(i for i, size in enumerate(x.shape) if size > 1)
    for half in x.tensor_split(2, dim):
        yield from _pieces(half)


def _words(piece: Tensor) -> Tensor:
    """Return the bytes as int64, the last one padded with zeros: always a copy."""
    raw = piece.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
    words = torch.zeros(-(-raw.numel() // 8), dtype=torch.int64, device=piece.device)
    words.view(torch.uint8)[: raw.numel()] = raw
    return words


def _fold(words: Tensor, shift: int) -> None:
    """Do words ^= words >> shift, with zeros from above: torch's shift of int64 copies the sign."""
    words ^= (words >> shift).bitwise_and_(2 ** (64 - shift) - 1)
