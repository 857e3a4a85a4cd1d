"""The mask of a batch as intervals, read off the keys that transformers' data collators produce.

The rule is transformers' own: with an `attention_mask` (B, S), position ids do not separate documents; without one, a
document starts wherever `position_ids` do not continue by one, if the model looks at them
(`reading.positions_separate`). `cu_seq_lens_*`, `seq_idx` and document ids 1, 2, ... in the attention mask always
separate documents; each of them narrows the mask, and beside them positions are free: they may jump or start again.

Shape letters: B batch, S global tokens.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from ringtile.errors import InputError, RefusedError
from ringtile.hf.keys import DOCUMENTS, MASK
from ringtile.sequence.mask import IntervalMask

# Whether transformers draws the masks of packed rows by position ids: chunks then begin with each document. Older
# releases draw them by places in the row.
CHUNKS_FOLLOW_POSITIONS = hasattr(masking_utils, "remap_positions_for_packed_sequence")


def read(inputs: Mapping[str, Any], *numbers: Tensor) -> tuple[dict[str, Any], list[Tensor]]:
    """A batch with the tensors that describe its documents on the CPU, and numbers, int64, there too.

    In one copy from a GPU, for which the host waits once; one more for each of floats. What is too large to describe a
    row (an S x S mask), and will be refused, stays where it is.
    """
    found = {
        name: x
        for name in sorted(DOCUMENTS)
        if isinstance(x := inputs.get(name), Tensor) and (x.dim() < 3 or name == "position_ids")
    }
    tensors = [x.cpu() if x.is_floating_point() and not x.is_meta else x for x in (*numbers, *found.values())]
    away = [x for x in tensors if x.device.type not in ("cpu", "meta")]
    if away:
        packed = torch.cat([x.detach().reshape(-1).to(away[0].device, torch.int64) for x in away]).cpu()
        parts = iter(torch.split(packed, [x.numel() for x in away]))
        tensors = [next(parts).view(x.shape).to(x.dtype) if any(x is y for y in away) else x for x in tensors]
    on_host = dict(zip(found, tensors[len(numbers) :], strict=True))
    return {**inputs, **on_host}, tensors[: len(numbers)]


def mask_of_batch(
    inputs: Mapping[str, Any], batch_size: int, seq_len: int, positions_separate: bool = True, causal: bool = True
) -> IntervalMask:
    """The mask of a batch (B, S) that `read` has put on the host, causal or full, narrowed by padding and documents.

    positions_separate: whether position ids that start again start a document.

    Raises MaskNotExpressibleError, RefusedError for a batch that contradicts itself, InputError for wrong shapes.
    """
    masks = []
    attention_mask, position_ids = inputs.get("attention_mask"), documents_of(inputs.get("position_ids"))
    cu_seq_lens, seq_idx, own = _cu_seq_lens(inputs), inputs.get("seq_idx"), inputs.get(MASK)
    if cu_seq_lens is not None or seq_idx is not None or own is not None:
        position_ids = None  # these name documents
    if own is not None:
        if not isinstance(own, IntervalMask) or own.begin.size(0) not in (1, batch_size):
            raise InputError(f"{MASK} is {own!r:.80}; expected a ringtile.IntervalMask of 1 or {batch_size} rows")
        masks.append(own)
        causal = False  # what else is said is of documents
    is_one_document = (
        attention_mask is not None
        and own is None
        and attention_mask.shape == (batch_size, seq_len)
        and position_ids is cu_seq_lens is seq_idx is None
        and bool((attention_mask == 1).all())
    )
    if is_one_document:
        return IntervalMask.whole(seq_len, causal)
    if attention_mask is not None:
        masks.append(_of_attention_mask(attention_mask, position_ids, batch_size, seq_len, causal))
    elif position_ids is not None and positions_separate:
        masks.append(IntervalMask.from_position_ids(position_ids, causal))
    if cu_seq_lens is not None:
        if batch_size != 1:
            raise InputError(f"cu_seq_lens with {batch_size} rows; expected one row that holds all documents")
        masks.append(IntervalMask.from_cu_seqlens(cu_seq_lens, causal))
    if seq_idx is not None:
        masks.append(_documents(seq_idx.long() + 1, causal))  # documents 0, 1, ..., -1 is padding
    if not masks:
        return IntervalMask.whole(seq_len, causal)
    for mask in masks:
        if mask.seq_len != seq_len:
            raise InputError(f"the documents are of {mask.seq_len} tokens, the batch of {seq_len}; expected one length")
    mask = functools.reduce(operator.and_, masks)
    return _one_row_if_equal(mask)


def documents_of(position_ids: Tensor | None) -> Tensor | None:
    """The position ids (B, S) that count the tokens of each document; None where no ids do.

    position_ids: (B, S); or of M-RoPE, (4, B, S), whose first row is that of text, or (3, B, S), the same for text.
    """
    if position_ids is None or position_ids.dim() != 3:
        return position_ids
    if position_ids.size(0) == 4 or bool((position_ids == position_ids[:1]).all()):
        return position_ids[0]
    return None


def positions_restart(inputs: Mapping[str, Any]) -> bool:
    """Whether a batch packs documents that position ids which start again tell apart, to transformers too."""
    documents = documents_of(inputs.get("position_ids"))
    if documents is None or inputs.get("attention_mask") is not None:
        return False
    return bool((documents.diff(dim=-1) != 1).any())


def is_packed(inputs: Mapping[str, Any]) -> bool:
    """Whether anything in a batch says that a row holds several documents."""
    attention_mask = inputs.get("attention_mask")
    numbered = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 and bool((attention_mask > 1).any())
    named = any(inputs.get(name) is not None for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"))
    return numbered or named or positions_restart(inputs)


def positions_alone_separate(inputs: Mapping[str, Any]) -> bool:
    """Whether a batch packs documents that nothing but position ids which start again tells apart."""
    others = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
    return all(inputs.get(name) is None for name in others) and positions_restart(inputs)


def chunks_count(inputs: Mapping[str, Any], seq_len: int, positions_separate: bool) -> Tensor:
    """int64 (B or 1, S): what transformers counts the chunks of chunked attention by, in a batch on the host.

    positions_separate: as in `mask_of_batch`.
    """
    attention_mask, places = inputs.get("attention_mask"), torch.arange(seq_len, device="cpu")[None]
    if CHUNKS_FOLLOW_POSITIONS and positions_separate and positions_restart(inputs):
        documents = documents_of(inputs["position_ids"])
        assert documents is not None  # they start again
        return _one_row(documents.long())
    return places if attention_mask is None else _one_row(places - (attention_mask.cumsum(1) == 0).sum(1, keepdim=True))


def _of_attention_mask(
    attention_mask: Tensor,
    position_ids: Tensor | None,
    batch_size: int,
    seq_len: int,
    causal: bool,
) -> IntervalMask:
    if attention_mask.dim() != 2:
        raise RefusedError(
            f"attention_mask is {attention_mask.dim()}-D {tuple(attention_mask.shape)}; expected 2-D (B, S) with 0 for "
            f"padding, 1 or document ids for tokens: an S x S mask needs more memory than the sequence itself"
        )
    if attention_mask.shape != (batch_size, seq_len):
        raise InputError(f"attention_mask is {tuple(attention_mask.shape)}; expected ({batch_size}, {seq_len})")
    ids = attention_mask.to(torch.int64)
    if position_ids is not None and bool((ids < 2).all()):  # else they name documents
        restarts = position_ids.diff(dim=1) < 1  # ids that jump forward, as in PoSE, separate nothing beside a mask
        same_document = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
        if bool((restarts & same_document).any()):
            raise RefusedError(
                "position_ids restart where attention_mask does not start a document, and transformers' backends "
                "disagree on whether that separates documents. Remove attention_mask to pack documents, or give "
                "document ids 1, 2, ... in attention_mask, or seq_idx, beside which positions are free"
            )
    return _documents(ids, causal)


def _documents(ids: Tensor, causal: bool) -> IntervalMask:
    """The mask of documents 1, 2, ...; 0 is padding, which nothing attends.

    As in transformers' own masks, padding behind tokens attends those of its row: a model may not be able to
    differentiate what it makes of a token that attends nothing, where its embedding is 0.
    """
    mask, is_padding = IntervalMask.from_padding(ids, causal), ids == 0
    begin = mask.begin.masked_fill(is_padding, ids.size(1)).amin(1, keepdim=True)
    end = mask.end.amax(1, keepdim=True)
    if causal:
        end = end.minimum(torch.arange(ids.size(1), dtype=end.dtype, device="cpu"))
    begin, end = begin.minimum(end), end.expand_as(mask.end)
    return IntervalMask(torch.where(is_padding, begin, mask.begin), torch.where(is_padding, end, mask.end))


def _cu_seq_lens(inputs: Mapping[str, Any]) -> Tensor | None:
    q_lens, k_lens = inputs.get("cu_seq_lens_q"), inputs.get("cu_seq_lens_k")
    if q_lens is not None and k_lens is not None and not torch.equal(q_lens, k_lens):
        raise InputError("cu_seq_lens_q and cu_seq_lens_k differ; expected the same documents for queries and keys")
    return q_lens if q_lens is not None else k_lens


def _one_row(counted: Tensor) -> Tensor:
    """(B, S) -> (1, S) where all rows are equal."""
    return counted[:1] if bool((counted == counted[:1]).all()) else counted


def _one_row_if_equal(mask: IntervalMask) -> IntervalMask:
    """Merges the rows when they are equal: a plan costs work for every row."""
    if mask.begin.size(0) == 1 or mask.key_begin is not None:
        return mask
    if bool((mask.begin == mask.begin[:1]).all()) and bool((mask.end == mask.end[:1]).all()):
        return IntervalMask(mask.begin[:1], mask.end[:1])
    return mask
