"""FlashMask's column bounds: of each key, which queries may not attend it (https://arxiv.org/abs/2410.01359).

They are `startend_row_indices` of Paddle's `flashmask_attention`, whose documentation draws their four forms
(https://www.paddlepaddle.org.cn/documentation/docs/en/api/paddle/nn/functional/flashmask_attention_en.html).

Shape letters: B rows, S tokens of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ringtile import arguments, ops
from ringtile.errors import InputError


class Columns(NamedTuple):
    """Which queries attend each key: intervals [begin, end) that do not overlap, int32 (intervals, B, S)."""

    begin: Tensor
    end: Tensor

    @classmethod
    def of_indices(cls, indices: Tensor, causal: bool) -> Columns:
        """As `IntervalMask.from_flashmask` takes them. InputError."""
        arguments.check_tensor("startend_row_indices", indices)
        forms = (1, 2) if causal else (2, 4)
        if indices.dim() != 4 or indices.dtype != torch.int32 or indices.numel() == 0 or indices.size(3) not in forms:
            raise InputError(
                f"startend_row_indices is {indices.dtype} {tuple(indices.shape)}; expected int32 (B, heads or 1, S, "
                f"{forms[0]} or {forms[1]}) with causal={causal}, not empty"
            )
        if indices.device.type == "meta":
            raise InputError("startend_row_indices is on meta, which holds no data; expected a real device")
        indices, seq_len = indices.cpu(), indices.size(2)
        if int(indices.min()) < 0 or int(indices.max()) > seq_len or not torch.equal(*indices.aminmax(dim=1)):
            raise InputError(
                f"startend_row_indices are in {int(indices.min())}..{int(indices.max())} and maybe not those of one "
                f"mask for all heads; expected queries, 0..{seq_len}, the same for each head"
            )
        bounds = indices[:, 0].unbind(2)
        first, last = torch.zeros_like(bounds[0]), torch.full_like(bounds[0], seq_len)
        lower, upper = (bounds[0], last), (first, bounds[-1])  # one bound of each
        if causal:
            lower = bounds[0], bounds[1] if len(bounds) == 2 else last
            upper = first, torch.arange(seq_len, dtype=torch.int32, device="cpu").expand_as(first)
        elif len(bounds) == 4:
            lower, upper = (bounds[0], bounds[1]), (bounds[2], bounds[3])
        # Between and around what is masked, where an empty interval is at the end.
        (a, a_end), (b, b_end) = (
            [torch.where(begin < end, bound, last) for bound in (begin, end)] for begin, end in (lower, upper)
        )
        between = torch.where(a <= b, a_end, b_end)
        begin = torch.stack((first, between, torch.maximum(a_end, b_end)))
        return cls(begin, torch.stack((torch.minimum(a, b), torch.maximum(a, b), last)))

    def hulls(self) -> tuple[Tensor, Tensor]:
        """Of each key, the first query and the last plus 1: int32 (B, S), maybe with gaps."""
        some = self.begin < self.end
        begin = torch.where(some, self.begin, self.begin.size(2)).amin(0)
        return begin, torch.where(some, self.end, 0).amax(0)

    def across(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each query, how many keys, int64, the first one, and the last plus 1: int32 (B, S), maybe with gaps."""
        first = torch.zeros_like(self.begin[0])
        every = first, first + first.size(1)
        found = [ops.mask_hulls(*every, begin, end) for begin, end in zip(self.begin, self.end, strict=True)]
        num, begin, end = (torch.stack(part) for part in zip(*found, strict=True))
        return num.sum(0), torch.where(num > 0, begin, first.size(1)).amin(0), end.amax(0)

    def attends(self, row: int, side: int, at: int) -> Tensor:
        """bool (S): the keys of a query (side 0), or the queries of a key (side 1)."""
        begin, end = self.begin[:, row], self.end[:, row]
        if side == 0:
            return ((begin <= at) & (at < end)).any(0)
        positions = torch.arange(begin.size(1), dtype=torch.int32, device="cpu")
        return ((begin[:, at, None] <= positions) & (positions < end[:, at, None])).any(0)
