"""Interval masks: which keys a query attends, as one interval of global positions per query, and one per key.

In batch row b, the query at global position q attends the key at k if begin[b, q] <= k < end[b, q] and
key_begin[b, k] <= q < key_end[b, k]. Most masks need no interval of keys; those of trees do. A mask knows nothing of
ranks: it is the same for any layout.

Shape letters: B batch, S global tokens.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringtile import arguments, ops
from ringtile.errors import InputError, MaskNotExpressibleError
from ringtile.sequence import tree

_SHOWN_INTERVALS = 4  # an error names at most so many pieces of a row


@dataclass(frozen=True, eq=False, repr=False)
class IntervalMask:
    """Which keys each query attends: one interval, and for each key maybe one of queries; both sides must agree.

    int32 CPU tensors (B or 1, S), to be left as they are; one row serves every batch row.
    begin, end: of each query; 0 <= begin, end <= S. A query with end <= begin attends nothing and is stored as [0, 0).
    key_begin, key_end: of each key, the queries that may attend it; None where that says nothing more. With them, every
    interval is stored from its first to its last position that is attended, and they are dropped where they say
    nothing: two masks are equal if they let the same pairs attend.
    """

    begin: Tensor
    end: Tensor
    key_begin: Tensor | None = None
    key_end: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.key_begin is None) != (self.key_end is None):
            raise InputError("only one of key_begin and key_end is given; expected both or none")
        for name, bound in zip(("begin", "end", "key_begin", "key_end"), self.tensors, strict=False):
            arguments.check_tensor(name, bound)
            if bound.dim() != 2 or bound.dtype != torch.int32 or bound.device.type != "cpu" or bound.numel() == 0:
                raise InputError(
                    f"{name} is {bound.dtype} {tuple(bound.shape)} on {bound.device}; expected int32 (B or 1, S) on "
                    "cpu, not empty"
                )
            if bound.shape != self.begin.shape:
                raise InputError(f"begin is {tuple(self.begin.shape)} but {name} is {tuple(bound.shape)}; must agree")
        _check_seq_len(self.seq_len)
        self._check_positions("begin", self.begin, "end", self.end)
        if self.key_begin is not None and self.key_end is not None:
            self._check_positions("key_begin", self.key_begin, "key_end", self.key_end)
            self._tighten(self.key_begin, self.key_end)
        else:
            self._keep(*(x.clone(memory_format=torch.contiguous_format) for x in (self.begin, self.end)))
        # Made now: torch.compile would make them in every call, and cannot trace the lock of Python 3.11's property.
        _ = self.bounds

    def _check_positions(self, begin_name: str, begin: Tensor, end_name: str, end: Tensor) -> None:
        if int(begin.min()) < 0 or int(end.max()) > self.seq_len:
            raise InputError(
                f"{begin_name} goes down to {int(begin.min())} and {end_name} up to {int(end.max())}; expected global "
                f"positions in 0..{self.seq_len}"
            )

    def _tighten(self, key_begin: Tensor, key_end: Tensor) -> None:
        """Narrows every interval to what is attended, which changes no pair, and drops those of keys if the pairs are
        those of the queries' intervals alone."""
        begin, end, key_begin, key_end = (x.contiguous() for x in (self.begin, self.end, key_begin, key_end))
        num_keys, first, after = ops.mask_hulls(begin, end, key_begin, key_end)
        self._set(begin=first, end=after, key_begin=None, key_end=None)
        if not torch.equal(num_keys, (after - first).long()):
            _, first, after = ops.mask_hulls(key_begin, key_end, begin, end)
            self._set(key_begin=first, key_end=after)

    def _keep(self, begin: Tensor, end: Tensor) -> None:
        """Keep contiguous bounds in 0..S that nothing else holds."""
        if bool((end <= begin).any()):
            attends = end > begin
            begin, end = begin.mul_(attends), end.mul_(attends)
        self._set(begin=begin, end=end)

    @classmethod
    def _of(cls, begin: Tensor, end: Tensor) -> IntervalMask:
        """Return a mask with one side of bounds that `_keep` takes: each pass over 16M tokens costs tens of ms."""
        mask = object.__new__(cls)
        mask._keep(begin, end)
        _ = mask.bounds
        return mask

    def _set(self, **bounds: Tensor | None) -> None:
        for name, bound in bounds.items():
            object.__setattr__(self, name, bound)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """begin and end; and key_begin and key_end, if there are any."""
        of_keys = () if self.key_begin is None or self.key_end is None else (self.key_begin, self.key_end)
        return self.begin, self.end, *of_keys

    @functools.cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """begin and end as the ops take a mask: with two sides (2, B or 1, S), of queries, then of keys."""
        tensors = self.tensors
        if len(tensors) == 2:
            return self.begin, self.end
        return torch.stack(tensors[::2]), torch.stack(tensors[1::2])

    @classmethod
    def of_bounds(cls, begin: Tensor, end: Tensor) -> IntervalMask:
        """Return the mask with these bounds, the inverse of `bounds`; also with one side, (1, B or 1, S)."""
        if begin.dim() != 3 or end.shape != begin.shape or begin.size(0) not in (1, 2):
            return cls(begin, end)
        return cls(*(bound for side in zip(begin, end, strict=True) for bound in side))

    @property
    def seq_len(self) -> int:
        return self.begin.size(1)

    @functools.cached_property
    def num_keys(self) -> Tensor:
        """Return int64 (B or 1, S): how many keys each query attends."""
        if self.key_begin is None or self.key_end is None:
            return (self.end - self.begin).long()
        num_keys: Tensor = ops.mask_hulls(self.begin, self.end, self.key_begin, self.key_end)[0]
        return num_keys

    @functools.cached_property
    def loose_key_bounds(self) -> tuple[Tensor, ...]:
        """key_begin and key_end, but 0 and S where the queries' intervals say as much; none with one side.

        So the keys of a node of a tree have equal ones.
        """
        if self.key_begin is None or self.key_end is None:
            return ()
        begin = torch.zeros_like(self.begin)
        _, first, after = ops.mask_hulls(begin, begin + self.seq_len, self.begin, self.end)
        loose_end = torch.where(self.key_end == after, self.seq_len, self.key_end)
        return torch.where(self.key_begin == first, 0, self.key_begin), loose_end

    def __and__(self, other: IntervalMask) -> IntervalMask:
        """Let a query attend what both masks let it attend; a mask of one row meets every row of the other."""
        if not isinstance(other, IntervalMask):
            raise InputError(f"the other mask is a {type(other).__name__}; expected an IntervalMask")
        if self.seq_len != other.seq_len:
            raise InputError(f"masks of {self.seq_len} and {other.seq_len} tokens; expected one length")
        rows = {self.begin.size(0), other.begin.size(0)} - {1}
        if len(rows) > 1:
            raise InputError(f"masks of {self.begin.size(0)} and {other.begin.size(0)} rows; expected as many, or 1")
        of_queries = torch.maximum(self.begin, other.begin), torch.minimum(self.end, other.end)
        key_bounds = [mask.tensors[2:] for mask in (self, other) if mask.key_begin is not None]
        if not key_bounds:
            return IntervalMask._of(*of_queries)
        key_begin, key_end = key_bounds[0]
        for begin, end in key_bounds[1:]:
            key_begin, key_end = torch.maximum(key_begin, begin), torch.minimum(key_end, end)
        return IntervalMask(*of_queries, *(x.expand_as(of_queries[0]) for x in (key_begin, key_end)))

    def last_keys(self, window: int, *, first: int = 0) -> IntervalMask:
        """Let a query attend the last `window` of its keys: a causal sliding window along each way of a tree.

        `self & sliding_window` counts rows instead, among them those of other branches. first: and the first so many of
        its keys (StreamingLLM, arXiv:2309.17453), of a mask with one side. MaskNotExpressibleError names the first
        query whose keys two intervals cannot express.
        """
        window, first = arguments.check_int("window", window), arguments.check_int("first", first)
        if window < 1 or first < 0:
            raise InputError(
                f"window is {window} and first {first}; expected at least 1 token (the query itself) and 0"
            )
        if first > 0:
            return self._first_and_last_keys(first, window)
        key_begin = torch.zeros_like(self.begin) if self.key_begin is None else self.key_begin
        key_end = torch.full_like(self.end, self.seq_len) if self.key_end is None else self.key_end
        _, begin, end = ops.mask_hulls(self.begin, self.end, key_begin, key_end, min(window, self.seq_len))
        return IntervalMask(begin, end, *self.tensors[2:])

    def _first_and_last_keys(self, first: int, window: int) -> IntervalMask:
        if self.key_begin is not None:
            raise MaskNotExpressibleError(
                f"the first {first} keys beside the last {window}, in {self!r}; expected a mask with one side, without "
                "branches: leave one of the two out"
            )
        middle = torch.minimum(self.end, self.begin + min(first, self.seq_len))
        last = torch.maximum(middle, self.end - min(window, self.seq_len))
        begin, end = torch.stack((self.begin, last)), torch.stack((middle, self.end))  # (2, B or 1, S)

        def of_keys() -> tuple[Tensor, Tensor]:
            every = torch.zeros_like(middle), torch.full_like(middle, self.seq_len)
            found = [ops.mask_hulls(*every, *bounds) for bounds in zip(begin, end, strict=True)]
            num, first, stop = (torch.stack(part) for part in zip(*found, strict=True))
            return torch.where(num > 0, first, self.seq_len).amin(0), stop.amax(0)

        def attends(row: int, side: int, at: int) -> Tensor:
            if side == 1:
                return ((begin[:, row] <= at) & (at < end[:, row])).any(0)
            positions = torch.arange(self.seq_len, dtype=torch.int32, device="cpu")
            return ((begin[:, row, at, None] <= positions) & (positions < end[:, row, at, None])).any(0)

        return self._of_hulls((end - begin).sum(0), (self.begin, self.end), of_keys, attends)

    def padded(self, padding: int, *, attends: bool = False) -> IntervalMask:
        """Return the mask of a sequence with that many more tokens at its end, which attend nothing and are not
        attended.

        attends: they attend each other, causally, so that what a model makes of them is no vector of zeros.
        """
        if padding == 0:
            return self
        padded = [pad(bound, (0, padding)) for bound in self.tensors]
        first, after = self.seq_len, self.seq_len + padding
        if attends:
            padded[0][..., first:], padded[1][..., first:] = first, torch.arange(first, after, device="cpu") + 1
            for bound, value in zip(padded[2:], (first, after), strict=False):  # of keys
                bound[..., first:] = value
        return IntervalMask(*padded)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntervalMask):
            return NotImplemented
        pairs = zip(self.tensors, other.tensors, strict=False)
        return len(self.tensors) == len(other.tensors) and all(torch.equal(a, b) for a, b in pairs)

    def __hash__(self) -> int:
        return self.digest

    @functools.cached_property
    def digest(self) -> int:
        """64 bits, which ranks compare."""
        begin, end = self.bounds
        return ops.digest(begin, end, torch.tensor(begin.shape, device="cpu"))

    def __repr__(self) -> str:
        sides = "" if self.key_begin is None else ", two sides"
        return f"IntervalMask(rows={self.begin.size(0)}, seq_len={self.seq_len}{sides})"

    # ---- from numbers ---------------------------------------------------------------------------

    @classmethod
    def full(cls, seq_len: int) -> IntervalMask:
        """Let every query attend every key."""
        begin = torch.zeros_like(_positions(seq_len))
        return cls._of(begin, torch.full_like(begin, seq_len))

    @classmethod
    def causal(cls, seq_len: int) -> IntervalMask:
        """Let a query attend itself and all keys before it."""
        end = _positions(seq_len, 1)
        return cls._of(torch.zeros_like(end), end)

    @classmethod
    @functools.lru_cache(maxsize=64)
    def whole(cls, seq_len: int, causal: bool) -> IntervalMask:
        """Return `causal` or `full`: one object, with what it has remembered, for all rows of one document."""
        return cls.causal(seq_len) if causal else cls.full(seq_len)

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
        return cls._of((positions - window + 1).clamp_(min=0), end)

    @classmethod
    def prefix_lm(cls, seq_len: int, prefix_len: int) -> IntervalMask:
        """Let the first prefix_len tokens attend each other in both directions; the rest is causal
        (arXiv:1910.10683)."""
        seq_len, prefix_len = arguments.check_int("seq_len", seq_len), arguments.check_int("prefix_len", prefix_len)
        if not 0 <= prefix_len <= seq_len:
            raise InputError(f"prefix_len is {prefix_len}; expected 0..{seq_len}")
        positions = _positions(seq_len)
        return cls(torch.zeros_like(positions), (positions + 1).clamp(min=prefix_len))

    @classmethod
    def chunked(cls, seq_len: int, chunk: int, *, counted: Tensor | None = None) -> IntervalMask:
        """Causal within chunks of `chunk` tokens, nothing across them (the local layers of Llama 4).

        counted: integers (B or 1, S): a chunk begins where they are a multiple of `chunk`. They rise by one from token
            to token, but for the first of a document: intersect the result with `documents`, which keeps them apart.
            None: 0, 1, ... over the row.
        """
        chunk = arguments.check_int("chunk", chunk)
        if chunk < 1:
            raise InputError(f"chunk is {chunk}; expected at least 1 token")
        positions = _positions(seq_len)
        if counted is None:
            counted = positions
        _check_integers("counted", counted, 2)
        if counted.size(1) != seq_len:
            raise InputError(f"counted is {tuple(counted.shape)}; expected (B or 1, {seq_len})")
        in_chunk = (counted.cpu().long() % min(chunk, 2**63 - 1)).clamp(max=seq_len).int()
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
        return cls._of_documents([torch.tensor(row, dtype=torch.int64, device="cpu") for row in per_row], causal)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, causal: bool = True) -> IntervalMask:
        """One row of packed documents whose bounds are cu_seqlens: (documents + 1,) integers 0, ..., S, rising."""
        _check_integers("cu_seqlens", cu_seqlens, 1)
        bounds = cu_seqlens.cpu().long()
        if bounds.numel() < 2 or int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()):
            raise InputError(f"cu_seqlens is {bounds.tolist()}; expected 0, ..., S, rising")
        return cls.documents(bounds.diff().tolist(), causal)

    # ---- trees ----------------------------------------------------------------------------------

    @classmethod
    def tree(cls, parents: tree.Numbers, lengths: tree.Numbers, causal: bool = True) -> IntervalMask:
        """Let a token attend the tokens of its node's ancestors, and those of its node up to itself.

        parents: of each node, in depth-first order, or -1 for a root; lengths: tokens of each node. Or one such
        list per batch row, all of the same number of tokens. Several trees in a row do not attend each other. Not
        causal: the tokens of a node attend each other in both directions. `tree_position_ids` has the positions.
        """
        return cls(*tree.bounds(parents, lengths, causal))

    @classmethod
    def shared_prefix(cls, prompt: int, completions: Sequence[int]) -> IntervalMask:
        """Return the mask of a prompt and its completions: each attends the prompt and itself, causally."""
        return cls.tree([-1, *[0] * len(completions)], [prompt, *completions])

    @classmethod
    def block_diffusion(cls, seq_len: int, block: int) -> IntervalMask:
        """Block diffusion in training (arXiv:2503.09573), of seq_len tokens in blocks of `block` (the last: the rest).

        A row has 2 seq_len tokens: block after block, the noised tokens of the block, then its clean ones. Both attend
        their own block in both directions, and the clean tokens of all blocks before.
        """
        parents, lengths = tree.of_blocks(arguments.check_int("seq_len", seq_len), arguments.check_int("block", block))
        return cls.tree(parents, lengths, causal=False)

    # ---- from tensors of a batch ----------------------------------------------------------------

    @classmethod
    def from_position_ids(cls, position_ids: Tensor, causal: bool = True) -> IntervalMask:
        """position_ids (B, S) integers: a document starts where they do not go on by + 1."""
        _check_integers("position_ids", position_ids, 2)
        return cls._of_changes(position_ids.cpu().long().diff(dim=1) != 1, causal)

    @classmethod
    def from_padding(cls, attention_mask: Tensor, causal: bool = True) -> IntervalMask:
        """attention_mask (B, S): 0 padding, else a token; distinct numbers are distinct documents.

        Padding, wherever it stands, attends nothing and is attended by nothing. A document with a hole raises
        MaskNotExpressibleError.
        """
        _check_integers("attention_mask", attention_mask, 2)
        document = attention_mask.cpu().long()
        if int(document.min()) < 0:
            raise InputError(
                f"attention_mask holds {int(document.min())}; expected 0 for padding, numbers above for tokens"
            )
        mask = cls._of_changes(document.diff(dim=1) != 0, causal)
        # Sorted by number, the tokens of a document must still be neighbors in the sequence.
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

        MaskNotExpressibleError names the first query whose keys have a gap that no interval of queries can express.
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
        return cls._of_hulls(
            attend.sum(2), _hulls(attend), lambda: _hulls(attend.mT), lambda row, side, i: attend[row].select(side, i)
        )

    @classmethod
    def _of_hulls(
        cls,
        num_keys: Tensor,
        of_queries: tuple[Tensor, Tensor],
        of_keys: Callable[[], tuple[Tensor, Tensor]],
        attends: Callable[[int, int, int], Tensor],
    ) -> IntervalMask:
        """Return the mask of pairs: of num_keys keys of each query, between bounds of each query, or else of each key
        too.

        attends(row, 0, query): bool (S,), what that query attends; attends(row, 1, key): what attends that key.
        """
        mask = cls(*of_queries)
        if not torch.equal(mask.num_keys, num_keys):
            mask = cls(*of_queries, *of_keys())
            if not torch.equal(mask.num_keys, num_keys):
                row, query = (mask.num_keys != num_keys).nonzero()[0].tolist()
                raise _not_two_intervals(row, query, mask, functools.partial(attends, row))
        return mask

    @classmethod
    def _of_changes(cls, changes: Tensor, causal: bool) -> IntervalMask:
        """changes bool (B, S - 1): whether the next token is of another document."""
        seq_len = changes.size(1) + 1
        starts = [pad(row.nonzero()[:, 0] + 1, (1, 0)) for row in changes]
        return cls._of_documents([pad(row, (0, 1), value=seq_len).diff() for row in starts], causal)

    @classmethod
    def _of_documents(cls, lengths: Sequence[Tensor], causal: bool) -> IntervalMask:
        """lengths: of each row, int64 CPU (documents,)."""
        if causal:
            end = _positions(int(lengths[0].sum()), 1).expand(len(lengths), -1).contiguous()
        else:
            end = _of_each_token(lengths, lengths)
        return cls._of(_of_each_token(lengths, [pad(row, (1, -1)) for row in lengths]), end)


def _of_each_token(lengths: Sequence[Tensor], steps: Sequence[Tensor]) -> Tensor:
    """Return int32 (B, S): the sum of the steps up to the document of each token; both int64 CPU (documents,) of each
    row."""
    sums = torch.zeros(len(lengths), int(lengths[0].sum()), dtype=torch.int32, device="cpu")
    for row, length, step in zip(sums, lengths, steps, strict=True):
        some = length > 0  # of empty ones at the end of the row there is no first token
        row.index_add_(0, (length.cumsum(0) - length)[some], step.cumsum(0)[some].diff(prepend=step[:1] * 0).int())
        torch.cumsum(row, 0, out=row)
    return sums


def _positions(seq_len: int, first: int = 0) -> Tensor:
    """Return int32 (1, S): first, first + 1, ..."""
    _check_seq_len(arguments.check_int("seq_len", seq_len))
    return torch.arange(first, first + seq_len, dtype=torch.int32, device="cpu")[None]


def _check_seq_len(seq_len: int) -> None:
    if not 1 <= seq_len <= tree.MAX_SEQ_LEN:
        raise InputError(f"seq_len is {seq_len}; expected 1..{tree.MAX_SEQ_LEN}")


def _check_integers(name: str, x: Tensor, dim: int) -> None:
    arguments.check_tensor(name, x)
    if x.device.type == "meta":
        raise InputError(f"{name} is on meta, which holds no data; expected a real device")
    if x.dim() != dim or x.numel() == 0 or x.is_floating_point() or x.is_complex():
        raise InputError(f"{name} is {x.dtype} {tuple(x.shape)}; expected integers of {dim} dimension(s), not empty")


def _hulls(attend: Tensor) -> tuple[Tensor, Tensor]:
    """attend bool (B, S, S) -> int32 (B, S): the first True of each row, and the last plus 1; or 0 and 0."""
    some = attend.any(2)
    begin = attend.byte().argmax(2).int()
    end = (attend.size(2) - attend.flip(2).byte().argmax(2)).int()
    return begin * some, end * some


def _intervals(attends: Tensor) -> tuple[int, str]:
    """attends bool (S,): how many intervals it has, and the first ones as text."""
    steps = pad(attends.int(), (1, 1)).diff()
    pieces = torch.stack(((steps == 1).nonzero().flatten(), (steps == -1).nonzero().flatten()), dim=1).tolist()
    shown = ", ".join(f"[{begin}, {end})" for begin, end in pieces[:_SHOWN_INTERVALS])
    return len(pieces), shown + (", ..." if len(pieces) > _SHOWN_INTERVALS else "")


def _not_expressible(row: int, query: int, keys: Tensor) -> MaskNotExpressibleError:
    """keys bool (S,): what that query would attend."""
    num, shown = _intervals(keys)
    return MaskNotExpressibleError(
        f"row {row}, query {query} needs the keys {shown}: {num} intervals; expected one interval for "
        "every query. Pack tokens so that a document has no hole, or run this model without ringtile's attention"
    )


def _not_two_intervals(
    row: int, query: int, mask: IntervalMask, attends: Callable[[int, int], Tensor]
) -> MaskNotExpressibleError:
    """mask: what lies between; attends as in `_of_hulls`. Some key that the query must not attend is in the mask."""
    positions = torch.arange(mask.seq_len, device="cpu")
    between = (mask.begin[row, query] <= positions) & (positions < mask.end[row, query])
    if mask.key_begin is not None and mask.key_end is not None:
        between &= (mask.key_begin[row] <= query) & (query < mask.key_end[row])
    key = int((between & ~attends(0, query)).nonzero()[0])
    (num_keys, keys), (num_queries, queries) = _intervals(attends(0, query)), _intervals(attends(1, key))
    return MaskNotExpressibleError(
        f"row {row}, query {query} needs the keys {keys}: {num_keys} intervals; and key {key}, which is between them, "
        f"is needed by the queries {queries}: {num_queries} intervals. Expected one interval for either. Change the "
        "order of the tokens, or run this model without ringtile's attention"
    )
