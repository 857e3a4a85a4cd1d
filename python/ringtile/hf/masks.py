"""The interval mask of a batch, from the ways in which transformers' data collators describe one.

The rule is transformers' own: with an `attention_mask` (B, S), position ids say nothing about documents; without one,
a document starts wherever `position_ids` do not continue by one. `cu_seq_lens_*`, `seq_idx` and document ids in the
attention mask are explicit, and each of them narrows the mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ringtile.errors import InputError, MaskNotExpressible, Refused
from ringtile.mask import IntervalMask


def mask_of_batch(inputs: Mapping[str, Any], batch_size: int, seq_len: int) -> IntervalMask:
    """The causal mask of a batch (B, S), narrowed by padding and documents.

    Raises MaskNotExpressible, Refused for a batch that says two different things, InputError for wrong shapes.
    """
    mask = IntervalMask.causal(seq_len)
    attention_mask, position_ids = inputs.get("attention_mask"), inputs.get("position_ids")
    if attention_mask is not None:
        mask = mask & _of_attention_mask(attention_mask, position_ids, batch_size, seq_len)
    elif position_ids is not None:
        mask = mask & IntervalMask.from_position_ids(position_ids.cpu())
    cu_seq_lens = _cu_seq_lens(inputs)
    if cu_seq_lens is not None:
        mask = mask & _of_cu_seq_lens(cu_seq_lens, batch_size, seq_len)
    if inputs.get("seq_idx") is not None:
        mask = mask & IntervalMask.from_padding(inputs["seq_idx"].cpu() + 1)  # -1 is padding there
    return _one_row_if_equal(mask)


def _of_attention_mask(
    attention_mask: Tensor, position_ids: Tensor | None, batch_size: int, seq_len: int
) -> IntervalMask:
    if attention_mask.dim() != 2:
        raise Refused(
            f"attention_mask is {attention_mask.dim()}-D {tuple(attention_mask.shape)}; expected 2-D (B, S) with 0 for "
            f"padding, 1 or document ids for tokens: an S x S mask does not fit where the sequence does not"
        )
    if attention_mask.shape != (batch_size, seq_len):
        raise InputError(f"attention_mask is {tuple(attention_mask.shape)}; expected ({batch_size}, {seq_len})")
    ids = attention_mask.cpu().to(torch.int64)
    if position_ids is not None and seq_len > 1:
        restarts = position_ids.cpu().diff(dim=1) != 1
        same_document = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
        if bool((restarts & same_document).any()):
            raise Refused(
                "position_ids restart inside the tokens of one attention_mask; transformers' backends disagree on "
                "whether these are documents. Remove attention_mask to pack documents, or give document ids 1, 2, ... "
                "in attention_mask, or position_ids that continue"
            )
    return IntervalMask.from_padding(ids) if bool((ids > 1).any()) else _without_padding_keys(ids)


def _without_padding_keys(attention_mask: Tensor) -> IntervalMask:
    """Every query, of padding too, sees the keys between the first and the last 1, as in transformers' own masks."""
    attention_mask = attention_mask.ne(0).to(torch.int32)
    seq_len = attention_mask.size(1)
    first = attention_mask.argmax(dim=1, keepdim=True)
    last = seq_len - attention_mask.flip(1).argmax(dim=1, keepdim=True)
    count = attention_mask.sum(dim=1, keepdim=True)
    holes = (count > 0) & (count != last - first)
    if bool(holes.any()):
        row = int(holes.flatten().nonzero()[0])
        raise MaskNotExpressible(
            f"attention_mask row {row} has zeros between its first 1 at {int(first[row])} and its last 1 at "
            f"{int(last[row]) - 1}; expected padding on the left or right only"
        )
    begin = first.expand(-1, seq_len)
    end = torch.where(count > 0, last, first).expand(-1, seq_len)
    return IntervalMask(begin.to(torch.int32), end.to(torch.int32))


def _cu_seq_lens(inputs: Mapping[str, Any]) -> Tensor | None:
    q_lens, k_lens = inputs.get("cu_seq_lens_q"), inputs.get("cu_seq_lens_k")
    if q_lens is not None and k_lens is not None and not torch.equal(q_lens, k_lens):
        raise InputError("cu_seq_lens_q and cu_seq_lens_k differ; expected the same documents for queries and keys")
    return q_lens if q_lens is not None else k_lens


def _of_cu_seq_lens(cu_seq_lens: Tensor, batch_size: int, seq_len: int) -> IntervalMask:
    bounds = cu_seq_lens.flatten().tolist()
    lengths = [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]
    if batch_size != 1 or not bounds or bounds[0] != 0 or bounds[-1] != seq_len or min(lengths, default=0) < 0:
        raise InputError(
            f"cu_seq_lens are {bounds} for a batch of ({batch_size}, {seq_len}); expected one row, and bounds that rise "
            f"from 0 to {seq_len}"
        )
    return IntervalMask.documents([length for length in lengths if length > 0])


def _one_row_if_equal(mask: IntervalMask) -> IntervalMask:
    """The mask with its rows merged when they are equal: a plan is made for every row."""
    if bool((mask.begin == mask.begin[:1]).all()) and bool((mask.end == mask.end[:1]).all()):
        return IntervalMask(mask.begin[:1], mask.end[:1])
    return mask
