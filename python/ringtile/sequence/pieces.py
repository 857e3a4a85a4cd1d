"""The mask of a round as a few shapes that kernels of other libraries know: rectangles with slanted sides.

Full and causal masks, documents and windows take a few pieces each, in every layout: along the rows of a block of keys,
the keys that one query attends and those that the next one does differ by at most one at either end.

Shape letters: B batch, Bm rows of the mask, N local queries, R runs.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAX_PIECES = 4096  # of a round: more take longer to find than ringtile's kernel takes to run
MAX_STRETCHES = 256  # of keys with equal bounds, in a mask with two sides: likewise


class Piece(NamedTuple):
    """Query q_begin + t, t = 0 .. M - 1, attends rows k_begin .. k_end - 1 of the keys, but

    - drops: not the first t of them, as where a window slides over the keys;
    - gains: not the last M - 1 - t of them, as along the diagonal of a causal mask.
    """

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    drops: bool = False
    gains: bool = False

    @property
    def num_queries(self) -> int:
        return self.q_end - self.q_begin

    @property
    def num_keys(self) -> int:
        return self.k_end - self.k_begin


class Square(NamedTuple):
    """Queries that all attend all keys; or, causal, as many queries as keys, of which query t attends the first t + 1
    keys, or, where flipped, all but the first t."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    causal: bool = False
    flipped: bool = False


def find_pieces(
    begin: Tensor, end: Tensor, k_runs: Tensor, key_bounds: Sequence[Tensor] = (), at: Tensor | None = None
) -> tuple[tuple[Piece, ...], ...] | None:
    """Return the pieces of each row of a mask, which together hold each (query, key) that it lets attend once.

    begin, end: int32 CPU (Bm, N); k_runs: int64 CPU (R, 4); with two sides, key_bounds: two int32 CPU (Bm, K), and at:
    int64 CPU (N), the positions of the queries. None where it takes more than MAX_PIECES, or MAX_STRETCHES, or the rows
    of the keys are not in the order of their positions.
    """
    runs = k_runs[k_runs[:, 2].argsort()].tolist()  # in the order of rows
    nothing = torch.empty(0, dtype=torch.int64, device="cpu")
    rows = torch.cat([nothing, *(torch.arange(row, row + length, device="cpu") for _, _, row, length in runs)])
    positions = torch.cat([nothing, *(at + step * torch.arange(length, device="cpu") for at, step, _, length in runs)])
    if not (bool((positions.diff() > 0).all()) and bool((rows.diff() == 1).all())):
        return None
    first_row = int(rows[0]) if rows.numel() else 0
    found: list[tuple[Piece, ...]] = []
    for row, bounds in enumerate(zip(begin, end, strict=True)):
        # Query q attends keys [low[q], high[q]) in the order of rows.
        low, high = (torch.searchsorted(positions, bound.to(positions.dtype)) for bound in bounds)
        low, high = torch.where(high > low, low, 0), torch.where(high > low, high, 0)
        pieces = _pieces(low, high, first_row)
        if key_bounds and at is not None:
            of_keys = torch.stack([bound[row, rows].long() for bound in key_bounds])
            stretches, lengths = torch.unique_consecutive(of_keys, dim=1, return_counts=True)
            if len(lengths) > MAX_STRETCHES:
                return None
            pieces = itertools.chain.from_iterable(
                _of_stretch(low, high, first_row, key, key + length, (at >= key_begin) & (at < key_end))
                for (key_begin, key_end), key, length in zip(
                    stretches.T.tolist(), (lengths.cumsum(0) - lengths).tolist(), lengths.tolist(), strict=True
                )
            )
        found.append(tuple(itertools.islice(pieces, MAX_PIECES + 1)))
    return tuple(found) if sum(map(len, found)) <= MAX_PIECES else None


def _of_stretch(low: Tensor, high: Tensor, first_row: int, begin: int, end: int, meets: Tensor) -> Iterator[Piece]:
    """Return the pieces of the keys [begin, end) alone, for queries (N) that meet them."""
    low, high = low.clamp(min=begin), high.clamp(max=end)
    some = meets & (low < high)
    return _pieces(low.where(some, 0), high.where(some, 0), first_row)


def _pieces(low: Tensor, high: Tensor, first_row: int) -> Iterator[Piece]:
    """Return the pieces where query q attends rows [low[q], high[q]) of the keys, counted from first_row."""
    # From one query to the next: 1 if it drops a key, 2 if it gains one, 3 if both, 0 if neither, -1 for all else.
    drops, gains = low.diff(), high.diff()
    steps = torch.where((drops | gains) >> 1 == 0, drops + 2 * gains, -1)
    changes = [*((steps[1:] != steps[:-1]).nonzero()[:, 0] + 1).tolist(), max(0, low.numel() - 1)]
    lows, highs, kinds = low.tolist(), high.tolist(), [*steps.tolist(), -1]
    q = 0
    while q < len(lows):
        kind, some = kinds[q], highs[q] > lows[q]
        if kind < 0 or (kind > 0 and not some):
            kind, after = 0, q + 1
        else:  # the steps from q on are of one kind up to the next change
            after = changes[bisect.bisect_right(changes, q)] + 1
        if some:
            yield Piece(q, after, first_row + lows[q], first_row + highs[after - 1], bool(kind & 1), bool(kind & 2))
        q = after


def squares(pieces: Sequence[Piece]) -> Iterator[Square]:
    """Cut pieces into squares, for kernels that know only full and causal blocks; from the first query on."""
    for piece in pieces:
        yield from _squares(piece)


def _squares(piece: Piece) -> Iterator[Square]:
    q_begin, q_end, k_begin, k_end, drops, gains = piece
    size = piece.num_queries
    if not drops and not gains:
        yield Square(q_begin, q_end, k_begin, k_end)
    elif not drops:
        if k_end - size > k_begin:
            yield Square(q_begin, q_end, k_begin, k_end - size)
        yield Square(q_begin, q_end, k_end - size, k_end, causal=True)
    elif not gains:
        yield Square(q_begin, q_end, k_begin, k_begin + size, causal=True, flipped=True)
        if k_begin + size < k_end:
            yield Square(q_begin, q_end, k_begin + size, k_end)
    else:  # a window of `width` keys, by as many queries at a time
        width = piece.num_keys - (size - 1)
        for q in range(q_begin, q_end, width):
            num, k = min(width, q_end - q), k_begin + q - q_begin
            yield Square(q, q + num, k, k + num, causal=True, flipped=True)
            if num < width:
                yield Square(q, q + num, k + num, k + width)
            if num > 1:
                yield Square(q + 1, q + num, k + width, k + width + num - 1, causal=True)


# ---- for kernels that take many sequences in one call -------------------------------------------


class Pack(NamedTuple):
    """Pieces for one call of a kernel of packed sequences: rows are those of (B N) queries and of (B K) keys.

    Query t of M attends key j of K if t + K - M - left <= j <= t + K - M + right, where -1 is no bound.
    """

    left: int
    right: int
    q_rows: Tensor | None  # int64; None: all of them, in order
    k_rows: Tensor | None
    q_offsets: Tensor  # int32 (sequences + 1)
    k_offsets: Tensor
    max_queries: int
    max_keys: int


def packs(pieces: Sequence[Sequence[Piece]], batch: int, num_queries: int, num_keys: int) -> tuple[Pack, ...]:
    """Pack all pieces of a block of (batch, num_keys) keys; no row is twice in one pack."""
    groups: dict[tuple[int, int], list[list[tuple[range, range]]]] = {}
    for row in range(batch):
        for piece in pieces[row if len(pieces) > 1 else 0]:
            left = piece.num_keys - piece.num_queries if piece.drops else -1
            queries, keys = (
                range(row * total + begin, row * total + end)
                for total, begin, end in (
                    (num_queries, piece.q_begin, piece.q_end),
                    (num_keys, piece.k_begin, piece.k_end),
                )
            )
            of_kind = groups.setdefault((left, 0 if piece.gains else -1), [])
            for group in of_kind:
                if group[-1][1].stop <= keys.start and group[-1][0].stop <= queries.start:
                    group.append((queries, keys))
                    break
            else:
                of_kind.append([(queries, keys)])
    found = []
    for (left, right), of_kind in groups.items():
        for group in of_kind:
            of_queries, of_keys = ([pair[side] for pair in group] for side in (0, 1))
            found.append(
                Pack(
                    left,
                    right,
                    _rows(of_queries, batch * num_queries),
                    _rows(of_keys, batch * num_keys),
                    _offsets(of_queries),
                    _offsets(of_keys),
                    max(map(len, of_queries)),
                    max(map(len, of_keys)),
                )
            )
    return tuple(found)


def _rows(ranges: Sequence[range], total: int) -> Tensor | None:
    if sum(map(len, ranges)) == total:
        return None
    return torch.cat([torch.arange(each.start, each.stop, device="cpu") for each in ranges])


def _offsets(ranges: Sequence[range]) -> Tensor:
    offsets = [0, *itertools.accumulate(map(len, ranges))]
    return torch.tensor(offsets, dtype=torch.int32, device="cpu")
