"""Masks as intervals: of a batch, read off the keys that transformers' data collators produce; and those that a model
draws itself.

The rule is transformers' own: with an `attention_mask` (B, S), position ids do not separate documents; without one, a
document starts wherever `position_ids` do not continue by one, if the model looks at them
(`packing.positions_separate`). `cu_seq_lens_*`, `seq_idx` and document ids in the attention mask always separate
documents; each of them narrows the mask.

Shape letters: B batch, S global tokens.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import masking_utils

from ringtile.errors import InputError, RefusedError
from ringtile.hf.keys import DOCUMENTS
from ringtile.sequence.mask import IntervalMask

# Whether transformers draws the masks of packed rows by position ids: chunks then begin with each document. Older
# releases draw them by places in the row.
CHUNKS_FOLLOW_POSITIONS = hasattr(masking_utils, "remap_positions_for_packed_sequence")


def read(inputs: Mapping[str, Any], *numbers: Tensor) -> tuple[dict[str, Any], list[Tensor]]:
    """A batch with the tensors that describe its documents on the CPU, and numbers, int64, there too.

    In one copy from a GPU, for which the host waits once; one more for each of floats. What is too large to describe a
    row (an S x S mask), and will be refused, stays where it is.
    """
    found = {name: inputs[name] for name in sorted(DOCUMENTS) if isinstance(inputs.get(name), Tensor)}
    found = {name: x for name, x in found.items() if x.dim() < 3 or name == "position_ids"}
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
    """The mask of a batch (B, S), causal or full, narrowed by padding and documents.

    positions_separate: whether position ids that start again start a document.

    Raises MaskNotExpressibleError, RefusedError for a batch that contradicts itself, InputError for wrong shapes.
    """
    inputs, _ = read(inputs)
    mask = IntervalMask.causal(seq_len) if causal else IntervalMask.full(seq_len)
    attention_mask, position_ids = inputs.get("attention_mask"), documents_of(inputs.get("position_ids"))
    cu_seq_lens = _cu_seq_lens(inputs)
    if attention_mask is not None:
        begins = _begins(cu_seq_lens, inputs.get("seq_idx"), seq_len)
        mask = mask & _of_attention_mask(attention_mask, position_ids, begins, batch_size, seq_len, causal)
    elif position_ids is not None and positions_separate:
        mask = mask & IntervalMask.from_position_ids(position_ids, causal)
    if cu_seq_lens is not None:
        if batch_size != 1:
            raise InputError(f"cu_seq_lens with {batch_size} rows; expected one row that holds all documents")
        mask = mask & IntervalMask.from_cu_seqlens(cu_seq_lens, causal)
    if inputs.get("seq_idx") is not None:
        mask = mask & IntervalMask.from_padding(inputs["seq_idx"] + 1, causal)  # documents 0, 1, ..., -1 is padding
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


def _begins(cu_seq_lens: Tensor | None, seq_idx: Tensor | None, seq_len: int) -> Tensor:
    """bool (B or 1, S - 1): the tokens behind the first with which a document begins, by what names documents."""
    begins = torch.zeros(1, max(seq_len - 1, 0), dtype=torch.bool)
    if cu_seq_lens is not None:
        inner = cu_seq_lens.flatten().long()
        begins[0, inner[(inner > 0) & (inner < seq_len)] - 1] = True
    return begins if seq_idx is None else begins | (seq_idx.diff(dim=1) != 0)


def _of_attention_mask(
    attention_mask: Tensor,
    position_ids: Tensor | None,
    begins: Tensor,
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
    if position_ids is not None and seq_len > 1:
        restarts = position_ids.diff(dim=1) != 1
        same_document = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0)
        if bool((restarts & same_document & ~begins).any()):
            raise RefusedError(
                "position_ids restart where attention_mask does not start a document, and transformers' backends "
                "disagree on whether that separates documents. Remove attention_mask to pack documents, or give "
                "document ids 1, 2, ... in attention_mask, or position_ids that continue"
            )
    mask = IntervalMask.from_padding(ids, causal)
    if bool((ids > 1).any()):
        return mask
    # As in transformers' own masks, padding queries attend tokens too: all keys of the row here, which a causal mask
    # then narrows.
    begin, end = (bound.amax(dim=1, keepdim=True).expand_as(bound) for bound in (mask.begin, mask.end))
    return IntervalMask(begin, end)


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
    if bool((mask.begin == mask.begin[:1]).all()) and bool((mask.end == mask.end[:1]).all()):
        return IntervalMask(mask.begin[:1], mask.end[:1])
    return mask


# ---- masks that a model draws itself, such as Gemma 3's, in which the tokens of an image attend each other -----------

# transformers draws a mask from functions of two positions, which its masking_utils composes. Each of these is known by
# its name, with the numbers in its closure; a function that is not known is refused. No S x S mask is made.


class _Row(NamedTuple):
    """What a mask is drawn on."""

    seq_len: int
    is_token: Tensor | None  # bool (B, S): no padding, which nothing attends; None: all
    positions: Tensor | None = None  # int64 (B, S): by which functions count, inside a document; None: by places

    @property
    def places(self) -> Tensor:
        """int64 (1, S)"""
        return torch.arange(self.seq_len)[None]

    def mask(self, begin: Tensor, end: Tensor) -> IntervalMask:
        """begin, end: int64 (B or 1, S), whatever lies outside of the row."""
        return IntervalMask(*(bound.clamp(0, self.seq_len).int() for bound in (begin, end)))


def intervals_of(mask_function: Callable[..., Any], seq_len: int, attention_mask: Tensor | None) -> IntervalMask:
    """The mask that a composed function draws, on the host. attention_mask: bool (B, S); what it masks may be attended.

    Raises RefusedError for a function that is not known, and for a block of tokens that is not in one piece.
    """
    is_token = None if attention_mask is None else attention_mask[:, :seq_len].to("cpu", torch.bool)
    return _read(mask_function, _Row(seq_len, is_token))


def _read(function: Callable[..., Any], row: _Row) -> IntervalMask:
    name = getattr(function, "__qualname__", "").partition(".")[0]
    of_transformers = getattr(function, "__module__", "") == masking_utils.__name__
    if not of_transformers or name not in _KNOWN:
        raise RefusedError(
            f"the model draws a mask with {getattr(function, '__module__', '')}.{name or function}, which ringtile "
            f"does not know as intervals; expected functions of transformers.masking_utils: {', '.join(sorted(_KNOWN))}"
        )
    return _KNOWN[name](row, **inspect.getclosurevars(function).nonlocals)


def _and(row: _Row, mask_functions: tuple[Callable[..., Any], ...]) -> IntervalMask:
    return functools.reduce(operator.and_, (_read(function, row) for function in mask_functions))


def _or(row: _Row, mask_functions: tuple[Callable[..., Any], ...]) -> IntervalMask:
    """One interval: of all that is known here, each is empty or holds the query itself."""
    masks = [_read(function, row) for function in mask_functions]
    begins = [mask.begin.masked_fill(mask.end <= mask.begin, row.seq_len) for mask in masks]
    return row.mask(functools.reduce(torch.minimum, begins), functools.reduce(torch.maximum, [x.end for x in masks]))


def _window(row: _Row, sliding_window: int) -> IntervalMask:
    return row.mask(row.places - sliding_window + 1, torch.full_like(row.places, row.seq_len))


def _window_both_ways(row: _Row, sliding_window: int) -> IntervalMask:
    return row.mask(row.places - sliding_window, row.places + sliding_window + 1)


def _chunks(row: _Row, chunk_size: int, left_padding: Tensor) -> IntervalMask:
    counted = row.places if row.positions is None else row.positions
    begin = row.places - (counted - left_padding.cpu()[:, None]) % chunk_size
    return row.mask(begin, begin + chunk_size)


def _blocks(row: _Row, block_sequence_ids: Tensor) -> IntervalMask:
    if row.positions is not None:
        _refuse_moved(row.positions, block_sequence_ids[:, : row.seq_len].to("cpu", torch.int64))
    return _groups(row._replace(positions=None), block_sequence_ids, "block of tokens")


def _refuse_moved(positions: Tensor, ids: Tensor) -> None:
    """transformers 5.24 reads the blocks of some masks (the sliding ones of Gemma 3) by position id, after the first
    document those of other tokens. RefusedError where that is another mask than by place."""
    read = ids.expand_as(positions).gather(1, positions.clamp(0, ids.size(1) - 1))
    inside = positions.diff(dim=1) == 1
    bounds = [(x.diff(dim=1) != 0) & inside for x in (read, ids.expand_as(read))]
    if torch.equal(read < 0, (ids < 0).expand_as(read)) and torch.equal(*bounds):
        return
    raise RefusedError(
        f"transformers {transformers.__version__} draws the mask of packed documents with the blocks of tokens "
        f"(images) of other documents: it looks them up by position ids; expected no position_ids, with cu_seq_lens_q "
        f"and cu_seq_lens_k to tell the documents apart, or rows of one document"
    )


def _documents(row: _Row, packed_sequence_mask: Tensor) -> IntervalMask:
    return _groups(row, packed_sequence_mask, "document")


def _by_positions(row: _Row, mask_function: Callable[..., Any], position_ids: Tensor) -> IntervalMask:
    """A function of two positions. In a document these are places but for a constant, which chunks alone can tell; what
    it says of two documents is not known, and transformers keeps these apart."""
    positions = position_ids[:, : row.seq_len].to("cpu", torch.int64)
    starts = functional.pad(positions.diff(dim=1) != 1, (1, 0))
    own = _groups(row._replace(is_token=None), starts.long().cumsum(1), "document")
    return _read(mask_function, row._replace(positions=positions)) & own


def _groups(row: _Row, ids: Tensor, what: str) -> IntervalMask:
    """Of each query, the tokens with its id; none for an id below 0. Padding that nobody attends may lie between."""
    ids = ids[:, : row.seq_len].to("cpu", torch.int64)
    places = row.places.expand_as(ids)
    counted = ids >= 0 if row.is_token is None else (ids >= 0) & row.is_token
    index = ids.clamp(min=-1) + 1
    shape = ids.size(0), int(index.max()) + 1
    first = torch.full(shape, row.seq_len).scatter_reduce(1, index, places.masked_fill(~counted, row.seq_len), "amin")
    last = torch.full(shape, -1).scatter_reduce(1, index, places.masked_fill(~counted, -1), "amax")
    sizes = torch.zeros(shape, dtype=torch.int64).scatter_add(1, index, counted.long())
    broken = (sizes > 0) & (last - first + 1 != sizes)
    broken[:, 0] = False
    if broken.any():
        batch_row, group = broken.nonzero()[0].tolist()
        raise RefusedError(
            f"the model draws a mask in which the {what} {group - 1} of row {batch_row} has {sizes[batch_row, group]} "
            f"tokens between {first[batch_row, group]} and {last[batch_row, group]}; expected them one after another"
        )
    attends = ids >= 0
    begin, end = first.gather(1, index), last.gather(1, index) + 1
    return row.mask(begin.masked_fill(~attends, row.seq_len), end.masked_fill(~attends, 0))


# By the name of the function of masking_utils that returns it, with the names of what is in its closure.
_KNOWN: dict[str, Callable[..., IntervalMask]] = {
    "and_masks": _and,
    "or_masks": _or,
    "causal_mask_function": lambda row: IntervalMask.causal(row.seq_len),
    "bidirectional_mask_function": lambda row: IntervalMask.full(row.seq_len),
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _window_both_ways,
    "chunked_overlay": _chunks,
    "blockwise_overlay": _blocks,
    "packed_sequence_mask_function": _documents,
    "remap_positions_for_packed_sequence": _by_positions,
}
