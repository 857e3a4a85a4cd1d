"""Slices of a mask: a range of queries, a range of keys, and which of their pairs attend.

So MagiAttention says masks; the docstring of its `flex_flash_attn_func` draws the types
(https://sandai-org.github.io/MagiAttention/docs/main/user_guide/magi_api.html).

Shape letters: S tokens of a row.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.errors import InputError

Numbers = Tensor | Sequence[int]
Ranges = Tensor | Sequence[Sequence[int]]


class Slice(NamedTuple):
    """Query q in [begin, end) attends key k in [key_begin, key_end) if low <= k - q <= high."""

    begin: int
    end: int
    key_begin: int
    key_end: int
    low: int
    high: int

    @property
    def transposed(self) -> Slice:
        """The slice whose queries are the keys of this one."""
        return Slice(self.key_begin, self.key_end, self.begin, self.end, -self.high, -self.low)

    def keys_of(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The first key of each of its queries, and the one after the last; not above the first: none."""
        first = (queries + self.low).clamp(min=self.key_begin)
        return first, (queries + self.high + 1).clamp(max=self.key_end)


def of_ranges(q_ranges: Ranges, k_ranges: Ranges, mask_types: Numbers, seq_len: int) -> list[Slice]:
    """The slices, as `IntervalMask.from_slices` takes them. InputError: bad numbers, or a pair in two slices."""
    queries, keys = _pairs("q_ranges", q_ranges, seq_len), _pairs("k_ranges", k_ranges, seq_len)
    kinds = _integers("mask_types", mask_types)
    if not len(queries) == len(keys) == len(kinds):
        raise InputError(
            f"{len(queries)} q_ranges, {len(keys)} k_ranges and {len(kinds)} mask_types; expected as many of each"
        )
    slices = []
    for i, ((begin, end), (key_begin, key_end), kind) in enumerate(zip(queries, keys, kinds, strict=True)):
        if not 0 <= kind <= 3:
            raise InputError(
                f"mask_types[{i}] is {kind}; expected 0 (full), 1 (causal), 2 (inverse causal) or 3 (bidirectional "
                "causal)"
            )
        low = key_begin - begin if kind & 2 else -seq_len  # the diagonal of its first query and key
        high = key_end - end if kind & 1 else seq_len  # of its last
        slices.append(Slice(begin, end, key_begin, key_end, low, high))
    _check_apart(slices)
    return slices


def hulls(slices: Sequence[Slice], seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """num_keys int64 (1, S) of each query, if no pair is in two slices; and int32 (1, S), where its keys begin and
    end, maybe with gaps."""
    num_keys = torch.zeros(1, seq_len, dtype=torch.int64, device="cpu")
    begin, end = torch.full_like(num_keys, seq_len), torch.zeros_like(num_keys)
    for one in slices:
        first, after = one.keys_of(torch.arange(one.begin, one.end, device="cpu"))
        some, at = after > first, (0, slice(one.begin, one.end))
        num_keys[at] += (after - first).clamp(min=0)
        begin[at] = torch.minimum(begin[at], torch.where(some, first, seq_len))
        end[at] = torch.maximum(end[at], torch.where(some, after, 0))
    return num_keys, begin.int(), end.int()


def keys_of(slices: Sequence[Slice], query: int, seq_len: int) -> Tensor:
    """bool (S): what that query attends."""
    attends = torch.zeros(seq_len, dtype=torch.bool, device="cpu")
    for one in slices:
        if one.begin <= query < one.end:
            first, after = (int(x) for x in one.keys_of(torch.tensor(query, device="cpu")))
            attends[first : max(first, after)] = True
    return attends


def _check_apart(slices: Sequence[Slice]) -> None:
    """InputError: a pair is in two slices."""
    bounds = torch.tensor([one[:4] for one in slices], dtype=torch.int64, device="cpu").view(-1, 4)
    for i, one in enumerate(slices):
        begin, end, key_begin, key_end = bounds[:i].unbind(1)
        meets = (begin < one.end) & (one.begin < end) & (key_begin < one.key_end) & (one.key_begin < key_end)
        for j in meets.nonzero().flatten().tolist():
            other = slices[j]
            queries = torch.arange(max(one.begin, other.begin), min(one.end, other.end), device="cpu")
            both = zip(one.keys_of(queries), other.keys_of(queries), strict=True)
            (first, other_first), (after, other_after) = both
            first, after = torch.maximum(first, other_first), torch.minimum(after, other_after)
            shared = (first < after).nonzero().flatten()
            if shared.numel() > 0:
                at = int(shared[0])
                raise InputError(
                    f"slices {j} and {i} both hold query {int(queries[at])} and key {int(first[at])}; expected each "
                    "pair in one slice at most: flex_flash_attn would count it twice"
                )


def _pairs(name: str, ranges: Ranges, seq_len: int) -> list[list[int]]:
    """InputError: not pairs of integers, of tokens in a row, rising."""
    try:
        listed = ranges.tolist() if isinstance(ranges, Tensor) else ranges
        pairs = [[operator.index(x) for x in pair] for pair in listed]
    except (TypeError, NotImplementedError):
        pairs = [[]]
    for i, pair in enumerate(pairs):
        if len(pair) != 2:
            raise InputError(f"{name} is {ranges!r:.200}; expected pairs of integers, (n, 2)")
        if not 0 <= pair[0] <= pair[1] <= seq_len:
            raise InputError(f"{name}[{i}] is {pair}; expected [begin, end], rising, in 0..{seq_len}")
    return pairs


def _integers(name: str, numbers: Numbers) -> list[int]:
    try:
        listed = numbers.tolist() if isinstance(numbers, Tensor) else numbers
        return [operator.index(x) for x in listed]
    except (TypeError, NotImplementedError):
        raise InputError(f"{name} is {numbers!r:.200}; expected integers, (n)") from None
