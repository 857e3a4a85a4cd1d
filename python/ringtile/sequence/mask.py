"""Interval masks: which keys a query attends, as one interval of global positions per query.

The query at global position i of batch row b attends the keys whose global position lies in
[begin[b, i], end[b, i]). A mask knows nothing of ranks: it is the same for any layout.

Shape letters: B batch, S global tokens.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringtile import arguments, ops
from ringtile.errors import InputError, MaskNotExpressible

MAX_SEQ_LEN = 2**31 - 1  # positions are int32
_SHOWN_INTERVALS = 4  # an error names at most so many pieces of a row


@dataclass(frozen=True, eq=False, repr=False)
class IntervalMask:
    """Two int32 CPU tensors (B or 1, S), to be left as they are. One row serves every batch row.

    0 <= begin, end <= S; a query with end <= begin attends nothing and is stored as [0, 0).
    """

    begin: Tensor
    end: Tensor

    def __post_init__(self) -> None:
        for name, bound in (("begin", self.begin), ("end", self.end)):
            arguments.check_tensor(name, bound)
            if bound.dim() != 2 or bound.dtype != torch.int32 or bound.device.type != "cpu" or bound.numel() == 0:
                raise InputError(
                    f"{name} is {bound.dtype} {tuple(bound.shape)} on {bound.device}; expected int32 (B or 1, S) on "
                    "cpu, not empty"
                )
        if self.begin.shape != self.end.shape:
            raise InputError(f"begin is {tuple(self.begin.shape)} but end is {tuple(self.end.shape)}; must agree")
        _check_seq_len(self.seq_len)
        if int(self.begin.min()) < 0 or int(self.end.max()) > self.seq_len:
            raise InputError(
                f"begin goes down to {int(self.begin.min())} and end up to {int(self.end.max())}; expected global "
                f"positions in 0..{self.seq_len}"
            )
        attends = self.end > self.begin
        object.__setattr__(self, "begin", (self.begin * attends).contiguous())
        object.__setattr__(self, "end", (self.end * attends).contiguous())

    @property
    def seq_len(self) -> int:
        return self.begin.size(1)

    def __and__(self, other: IntervalMask) -> IntervalMask:
        """A query attends what both masks let it attend; a mask of one row meets every row of the other."""
        if not isinstance(other, IntervalMask):
            raise InputError(f"the other mask is a {type(other).__name__}; expected an IntervalMask")
        if self.seq_len != other.seq_len:
            raise InputError(f"masks of {self.seq_len} and {other.seq_len} tokens; expected one length")
        rows = {self.begin.size(0), other.begin.size(0)} - {1}
        if len(rows) > 1:
            raise InputError(f"masks of {self.begin.size(0)} and {other.begin.size(0)} rows; expected as many, or 1")
        return IntervalMask(torch.maximum(self.begin, other.begin), torch.minimum(self.end, other.end))

    def padded(self, padding: int) -> IntervalMask:
        """The mask of a sequence with that many more tokens at its end, which attend nothing and are not attended."""
        return IntervalMask(*(torch.nn.functional.pad(bound, (0, padding)) for bound in (self.begin, self.end)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntervalMask):
            return NotImplemented
        return torch.equal(self.begin, other.begin) and torch.equal(self.end, other.end)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return ops.digest(self.begin, self.end, self.begin[:0])

    def __repr__(self) -> str:
        return f"IntervalMask(rows={self.begin.size(0)}, seq_len={self.seq_len})"

    # ---- from numbers ---------------------------------------------------------------------------

    @classmethod
    def full(cls, seq_len: int) -> IntervalMask:
        """Every query attends every key."""
        begin = torch.zeros_like(_positions(seq_len))
        return cls(begin, begin + seq_len)

    @classmethod
    def causal(cls, seq_len: int) -> IntervalMask:
        """A query attends itself and all keys before it."""
        positions = _positions(seq_len)
        return cls(torch.zeros_like(positions), positions + 1)

    @classmethod
    def sliding_window(cls, seq_len: int, window: int, *, causal: bool = True) -> IntervalMask:
        """At most `window` keys up to the query's own: q - window < k <= q, as in transformers.

        Not causal: as many after it too, q - window < k < q + window.
        """
        window = arguments.check_int("window", window)
        if window < 1:
            raise InputError(f"window is {window}; expected at least 1 token (the query itself)")
        positions, window = _positions(seq_len), min(window, seq_len)
        # Not causal: min(q + window, S), which could overflow int32 before the minimum.
        end = positions + 1 if causal else seq_len - (seq_len - window - positions).clamp(min=0)
        return cls((positions - window + 1).clamp(min=0), end)

    @classmethod
    def prefix_lm(cls, seq_len: int, prefix_len: int) -> IntervalMask:
        """The first prefix_len tokens attend each other in both directions; the rest is causal (arXiv:1910.10683)."""
        seq_len, prefix_len = arguments.check_int("seq_len", seq_len), arguments.check_int("prefix_len", prefix_len)
        if not 0 <= prefix_len <= seq_len:
            raise InputError(f"prefix_len is {prefix_len}; expected 0..{seq_len}")
        positions = _positions(seq_len)
        return cls(torch.zeros_like(positions), (positions + 1).clamp(min=prefix_len))

    @classmethod
    def chunked(cls, seq_len: int, chunk: int, *, first: Sequence[int] = (0,)) -> IntervalMask:
        """Causal within chunks of `chunk` tokens, nothing across them (the local layers of Llama 4).

        first: where the first chunk of each row begins, in a batch whose rows begin with padding.
        """
        chunk = arguments.check_int("chunk", chunk)
        if chunk < 1:
            raise InputError(f"chunk is {chunk}; expected at least 1 token")
        positions = _positions(seq_len)
        starts = torch.tensor([[arguments.check_int("first", one)] for one in first], dtype=torch.int32, device="cpu")
        in_chunk = (positions - starts) % min(chunk, torch.iinfo(torch.int32).max)
        return cls((positions - in_chunk).clamp(min=0), (positions + 1).expand_as(in_chunk))

    @classmethod
    def documents(cls, lengths: Sequence[int] | Sequence[Sequence[int]], causal: bool = True) -> IntervalMask:
        """Packed documents: a token attends its own document only.

        lengths: of the documents, one after another; or one such list per batch row, all of the same sum S.
        """
        try:
            rows: Any = lengths if any(isinstance(row, Sequence) for row in lengths) else [lengths]
            per_row = [[operator.index(length) for length in row] for row in rows]
        except TypeError:
            raise InputError(
                f"lengths is {lengths!r:.200}; expected integers, the lengths of one row, or a list of them per row"
            ) from None
        sums = [sum(row) for row in per_row]
        if any(length < 0 for row in per_row for length in row) or len(set(sums)) > 1:
            raise InputError(
                f"lengths is {lengths!r:.200}, rows of {sums!r:.200} tokens; expected lengths >= 0 and as many "
                "tokens in every row"
            )
        _check_seq_len(sums[0])
        document = [_document_numbers(row) for row in per_row]
        return cls._of_documents(torch.stack(document), causal)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, causal: bool = True) -> IntervalMask:
        """One row of packed documents whose bounds are cu_seqlens: (documents + 1,) integers 0, ..., S, rising."""
        _check_integers("cu_seqlens", cu_seqlens, 1)
        bounds = cu_seqlens.cpu().long()
        if bounds.numel() < 2 or int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()):
            raise InputError(f"cu_seqlens is {bounds.tolist()}; expected 0, ..., S, rising")
        return cls.documents(bounds.diff().tolist(), causal)

    # ---- from tensors of a batch ----------------------------------------------------------------

    @classmethod
    def from_position_ids(cls, position_ids: Tensor, causal: bool = True) -> IntervalMask:
        """position_ids (B, S) integers: a document starts where they do not go on by + 1."""
        _check_integers("position_ids", position_ids, 2)
        starts = position_ids.cpu().long().diff(dim=1) != 1
        document = torch.nn.functional.pad(starts.cumsum(1), (1, 0))
        return cls._of_documents(document, causal)

    @classmethod
    def from_padding(cls, attention_mask: Tensor, causal: bool = True) -> IntervalMask:
        """attention_mask (B, S): 0 padding, else a token; distinct numbers are distinct documents.

        Padding, wherever it stands, attends nothing and is attended by nothing. A document with a hole raises
        MaskNotExpressible.
        """
        _check_integers("attention_mask", attention_mask, 2)
        document = attention_mask.cpu().long()
        if int(document.min()) < 0:
            raise InputError(
                f"attention_mask holds {int(document.min())}; expected 0 for padding, numbers above for tokens"
            )
        mask = cls._of_documents(document, causal)
        # Sorted by number, the tokens of a document must still be neighbours in the sequence.
        number, position = document.sort(dim=1, stable=True)
        resumes = (number.diff(dim=1) == 0) & (position.diff(dim=1) != 1) & (number[:, 1:] > 0)
        if bool(resumes.any()):
            row = int(resumes.any(dim=1).nonzero()[0])
            queries = position[row, 1:][resumes[row]]  # tokens right after a hole of their document
            if not causal:
                queries = torch.isin(document[row], document[row, queries]).nonzero()
            query = int(queries.min())
            keys = document[row] == document[row, query]
            keys[query + 1 :] &= not causal
            raise _not_expressible(row, query, keys)
        token = (document > 0).int()
        return cls(mask.begin * token, mask.end * token)

    @classmethod
    def from_bool(cls, attend: Tensor) -> IntervalMask:
        """attend (S, S), (B, S, S) or (B, 1, S, S) bool, [query, key], True = attend. Costs what such a mask costs.

        Raises MaskNotExpressible, naming the first query whose keys are not one interval.
        """
        arguments.check_tensor("attend", attend)
        shape = tuple(attend.shape)
        if attend.dim() == 4 and shape[1] == 1:
            attend = attend[:, 0]
        if attend.dim() == 2:
            attend = attend[None]
        if attend.dim() != 3 or attend.size(1) != attend.size(2) or attend.numel() == 0 or attend.dtype != torch.bool:
            raise InputError(
                f"attend is {attend.dtype} {shape}; expected bool (S, S), (B, S, S) or (B, 1, S, S), True = attend"
            )
        if attend.device.type == "meta":
            raise InputError("attend is on meta, which holds no data; expected a real device")
        attend = attend.cpu()
        num_keys = attend.sum(2, dtype=torch.int32)
        begin = attend.byte().argmax(2).int()
        end = (attend.size(2) - attend.flip(2).byte().argmax(2)).int()
        wrong = (num_keys > 0) & (end - begin != num_keys)
        if bool(wrong.any()):
            row, query = wrong.nonzero()[0].tolist()
            raise _not_expressible(row, query, attend[row, query])
        attends = num_keys > 0
        return cls(begin * attends, end * attends)

    @classmethod
    def _of_documents(cls, document: Tensor, causal: bool) -> IntervalMask:
        """document (B, S): a document is a stretch of equal numbers."""
        changes = document.diff(dim=1) != 0
        positions = _positions(document.size(1))
        never = torch.zeros_like(document[:, :1], dtype=torch.bool)
        starts = torch.cat((~never, changes), dim=1)
        begin = torch.where(starts, positions, 0).cummax(1).values
        if causal:
            return cls(begin, (positions + 1).expand_as(begin))
        stops = torch.cat((changes, ~never), dim=1)
        stop = torch.where(stops, positions + 1, document.size(1))
        return cls(begin, stop.flip(1).cummin(1).values.flip(1))


def _positions(seq_len: int) -> Tensor:
    """int32 (1, S): 0, ..., S-1."""
    _check_seq_len(arguments.check_int("seq_len", seq_len))
    return torch.arange(seq_len, dtype=torch.int32, device="cpu")[None]


def _document_numbers(lengths: list[int]) -> Tensor:
    """int64 (S,): 0 for each token of the first document, 1 for the second, ..."""
    return torch.repeat_interleave(torch.arange(len(lengths), device="cpu"), torch.tensor(lengths, device="cpu"))


def _check_seq_len(seq_len: int) -> None:
    if not 1 <= seq_len <= MAX_SEQ_LEN:
        raise InputError(f"seq_len is {seq_len}; expected 1..{MAX_SEQ_LEN}")


def _check_integers(name: str, x: Tensor, dim: int) -> None:
    arguments.check_tensor(name, x)
    if x.device.type == "meta":
        raise InputError(f"{name} is on meta, which holds no data; expected a real device")
    if x.dim() != dim or x.numel() == 0 or x.is_floating_point() or x.is_complex():
        raise InputError(f"{name} is {x.dtype} {tuple(x.shape)}; expected integers of {dim} dimension(s), not empty")


def _not_expressible(row: int, query: int, keys: Tensor) -> MaskNotExpressible:
    """keys bool (S,): what that query would attend."""
    steps = torch.nn.functional.pad(keys.int(), (1, 1)).diff()
    pieces = torch.stack(((steps == 1).nonzero().flatten(), (steps == -1).nonzero().flatten()), dim=1).tolist()
    shown = ", ".join(f"[{begin}, {end})" for begin, end in pieces[:_SHOWN_INTERVALS])
    more = ", ..." if len(pieces) > _SHOWN_INTERVALS else ""
    return MaskNotExpressible(
        f"row {row}, query {query} needs the keys {shown}{more}: {len(pieces)} intervals; expected one interval for "
        "every query. Pack tokens so that a document has no hole, or run this model without ringtile's attention"
    )
