"""Masks that a model draws itself, such as Gemma 3's, in which the tokens of an image attend each other, as intervals.

transformers draws a mask from functions of two positions, which its masking_utils composes. Each of these is known by
its name, with the numbers in its closure; a function, or a number, that is not known is refused. Asking the function
for each pair of positions would take no names, but S^2 calls: 10^12 for a streamed row of a million tokens.

Shape letters: B batch, S global tokens.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import masking_utils

from ringtile.errors import RefusedError
from ringtile.sequence.mask import IntervalMask


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


def intervals_of_drawn(attention_mask: Tensor) -> IntervalMask | None:
    """Of a mask (B, 1, S, S): bool, or added to the scores."""
    attend = attention_mask[:, 0]
    if attend.dtype != torch.bool:
        if not bool(((attend == 0) | (attend == torch.finfo(attend.dtype).min) | (attend == -torch.inf)).all()):
            return None
        attend = attend == 0
    counts, begin = attend.sum(-1), attend.int().argmax(-1)
    end = begin + counts
    keys = torch.arange(attend.size(-1), device=attend.device)
    if not torch.equal(attend, (begin[..., None] <= keys) & (keys < end[..., None])):
        return None
    return IntervalMask(begin.to("cpu", torch.int32), end.to("cpu", torch.int32))


def _read(function: Callable[..., Any], row: _Row) -> IntervalMask:
    name = getattr(function, "__qualname__", "").partition(".")[0]
    of_transformers = getattr(function, "__module__", "") == masking_utils.__name__
    if not of_transformers or name not in _KNOWN:
        raise RefusedError(
            f"the model draws a mask with {getattr(function, '__module__', '')}.{name or function}, which ringtile "
            f"does not know as intervals; expected functions of transformers.masking_utils: {', '.join(sorted(_KNOWN))}"
        )
    try:
        return _KNOWN[name](row, **inspect.getclosurevars(function).nonlocals)
    except TypeError as error:
        raise RefusedError(
            f"transformers {transformers.__version__} draws the mask {name} from other numbers than ringtile knows "
            f"({error}); expected transformers 5.17 to 5.24"
        ) from error


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
