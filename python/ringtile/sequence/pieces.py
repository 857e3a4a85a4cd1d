"""The mask of a round as a few shapes that kernels of other libraries know: rectangles with slanted sides.

Full and causal masks, documents and windows take a few pieces each, in every layout: along the rows of a block of keys,
the keys that one query attends and those that the next one does differ by at most one at either end.

Shape letters: B batch, Bm rows of the mask, N local queries, R runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile import ops
from ringtile.sequence.plan import DeviceTensors, Round

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


def pieces_of(round: Round) -> tuple[tuple[Piece, ...], ...] | None:
    """Return the pieces of each row of a round's mask, which together hold each (query, key) that it lets attend once.

    Found once. None where it takes more than MAX_PIECES, or MAX_STRETCHES, or the rows of the keys are not in the order
    of their positions.
    """
    if "pieces" not in round.derived:
        k_runs = round.k_runs[round.k_runs[:, 2].argsort()]  # in the order of rows
        two_sides = (*round.key_bounds.host, *round.positions.host) if round.key_bounds else (None, None, None)
        found, counts = ops.pieces(*round.bounds.host, k_runs, *two_sides, MAX_PIECES, MAX_STRETCHES)
        pieces = (Piece(a, b, c, d, bool(drops), bool(gains)) for a, b, c, d, drops, gains in found.tolist())
        rows = tuple(tuple(itertools.islice(pieces, count)) for count in counts.tolist())
        round.derived["pieces"] = rows or None
    return round.derived["pieces"]  # type: ignore[no-any-return]


def squares_of(round: Round) -> list[tuple[slice, Square]]:
    """Return the pieces in squares, each with the rows of the batch that have it."""
    if "squares" not in round.derived:
        pieces = pieces_of(round) or ()
        rows = [slice(None)] if len(pieces) == 1 else [slice(row, row + 1) for row in range(len(pieces))]
        round.derived["squares"] = [(at, x) for at, row in zip(rows, pieces, strict=True) for x in squares(row)]
    return round.derived["squares"]  # type: ignore[no-any-return]


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
    q_rows: Tensor | slice  # int64, or neighbors
    k_rows: Tensor | slice
    q_offsets: Tensor  # int32 (sequences + 1)
    k_offsets: Tensor
    max_queries: int
    max_keys: int

    @property
    def num_queries(self) -> int:
        return self.q_rows.stop - self.q_rows.start if isinstance(self.q_rows, slice) else self.q_rows.numel()


def packs_of(round: Round, q: Tensor, k: Tensor) -> tuple[Pack, ...]:
    """Return the pieces in packs, for q (B, N, ...) and k (B, K, ...) there. RefusedError as by `DeviceTensors`."""
    key = q.size(0), q.size(1), k.size(1)
    if key not in round.derived:
        found = packs(pieces_of(round) or (), *key)
        mask = DeviceTensors(round.bounds.device, *(x for pack in found for x in pack if isinstance(x, Tensor)))
        copies = iter(mask.read())
        there = (Pack._make(next(copies) if isinstance(x, Tensor) else x for x in pack) for pack in found)
        round.derived[key] = tuple(there), mask
    found, mask = round.derived[key]
    mask.read()  # on this stream too
    return found  # type: ignore[no-any-return]


def packs(pieces: Sequence[Sequence[Piece]], batch: int, num_queries: int, num_keys: int) -> tuple[Pack, ...]:
    """Pack all pieces of a block of (batch, num_keys) keys; no row is twice in one pack."""
    groups: dict[tuple[int, int], list[list[tuple[range, range]]]] = {}
    for row in range(batch):
        for piece in pieces[row if len(pieces) > 1 else 0]:
            left = piece.num_keys - piece.num_queries if piece.drops else -1
            queries = range(row * num_queries + piece.q_begin, row * num_queries + piece.q_end)
            keys = range(row * num_keys + piece.k_begin, row * num_keys + piece.k_end)
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
            rows, offsets = (_rows(of_queries), _rows(of_keys)), (_offsets(of_queries), _offsets(of_keys))
            longest = max(map(len, of_queries)), max(map(len, of_keys))
            found.append(Pack(left, right, *rows, *offsets, *longest))
    return tuple(found)


def _rows(ranges: Sequence[range]) -> Tensor | slice:
    if all(before.stop == after.start for before, after in itertools.pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return torch.cat([torch.arange(each.start, each.stop, device="cpu") for each in ranges])


def _offsets(ranges: Sequence[range]) -> Tensor:
    offsets = [0, *itertools.accumulate(map(len, ranges))]
    return torch.tensor(offsets, dtype=torch.int32, device="cpu")
