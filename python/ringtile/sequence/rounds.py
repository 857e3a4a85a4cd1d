"""The rounds of a plan on one device: what says their masks there, and what has been found out about them.

Shape letters: B batch, Bm mask rows (B or 1), N local queries, K keys of a block, R runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringtile import ops
from ringtile.sequence.device_mask import DeviceMask
from ringtile.sequence.pieces import Pack, Piece, Square, find_pieces, packs, squares
from ringtile.sequence.plan import PlannedRound, RankPlan, Transfer


class Queries:
    """The mask of a rank's queries, and their positions, on one device. RefusedError as by `DeviceMask`."""

    def __init__(self, device: torch.device, begin: Tensor, end: Tensor, positions: Tensor) -> None:
        """begin, end: int32 CPU (Bm, N). positions: int64 CPU (N)."""
        self.device, self.begin, self.end, self.positions = device, begin, end, positions
        self._bounds = DeviceMask(device, begin, end)
        self._positions: DeviceMask | None = None  # only dropout and masks with two sides ask for them

    def bounds_there(self) -> tuple[Tensor, ...]:
        """Return begin and end on the device, for kernels on the current stream."""
        return self._bounds.read()

    def positions_there(self) -> Tensor:
        """Return the positions on the device, for kernels on the current stream."""
        if self._positions is None:
            self._positions = DeviceMask(self.device, self.positions)
        (positions,) = self._positions.read()
        return positions


class Round:
    """A round on one device: which keys of its block each local query attends. The same for all calls with one plan.

    planned: what travels, if anything does. able: who computes it, by kind of call (attn/choose.py).
    """

    def __init__(
        self,
        queries: Queries,
        k_runs: Tensor,
        key_bounds: tuple[Tensor, ...] = (),
        planned: PlannedRound | None = None,
    ) -> None:
        """k_runs: int64 CPU (R, 4), as of PlannedRound. key_bounds: two int32 CPU (Bm, K) of a mask with two sides."""
        self.queries, self.k_runs, self.key_bounds = queries, k_runs, key_bounds
        self._planned = planned
        self._key_bounds = DeviceMask(queries.device, *key_bounds)
        self._tables: dict[Transfer, DeviceMask] = {}
        self._packs: dict[tuple[int, int, int], tuple[tuple[Pack, ...], DeviceMask]] = {}
        self.able: dict[object, Any] = {}

    @classmethod
    def all_of(cls, plan: RankPlan, device: torch.device) -> tuple[Round, ...]:
        """Return those of a plan that are not idle."""
        queries = Queries(device, plan.begin, plan.end, plan.positions)
        return tuple(cls(queries, each.k_runs, each.key_bounds, each) for each in plan.busy_rounds)

    @property
    def planned(self) -> PlannedRound:
        assert self._planned is not None
        return self._planned

    def key_bounds_there(self) -> tuple[Tensor, ...]:
        """Return key_begin and key_end on the device, if the mask has two sides, for kernels on the current stream."""
        return self._key_bounds.read() if self.key_bounds else ()

    def table(self, transfer: Transfer) -> Tensor | None:
        """Return the runs of one of the transfers on the device, for `ops.rows_*`; None where they need none there."""
        if self.queries.device.type != "cuda" or len(transfer.runs) <= ops.MAX_RUNS_WITHOUT_TABLE:
            return None
        if transfer not in self._tables:
            self._tables[transfer] = DeviceMask(self.queries.device, transfer.runs)
        (table,) = self._tables[transfer].read()
        return table

    @functools.cached_property
    def pieces(self) -> tuple[Sequence[Piece], ...] | None:
        """The pieces of each row of the mask; None where it takes too many."""
        of = self.queries
        return find_pieces(of.begin, of.end, self.k_runs, self.key_bounds, of.positions)

    @functools.cached_property
    def squares(self) -> list[tuple[slice, Square]]:
        """The pieces in squares, each with the rows of the batch that it is of."""
        pieces = self.pieces or ()
        rows = [slice(None)] if len(pieces) == 1 else [slice(row, row + 1) for row in range(len(pieces))]
        return [(at, square) for at, of_row in zip(rows, pieces, strict=True) for square in squares(of_row)]

    def packs(self, q: Tensor, k: Tensor) -> tuple[Pack, ...]:
        """Return the pieces in packs, for q (B, N, ...) and k (B, K, ...) there. RefusedError as by `DeviceMask`."""
        key = (q.size(0), q.size(1), k.size(1))
        if key not in self._packs:
            found = packs(self.pieces or (), *key)
            mask = DeviceMask(self.queries.device, *(x for pack in found for x in pack if isinstance(x, Tensor)))
            copies = iter(mask.read())
            there = (Pack._make(next(copies) if isinstance(x, Tensor) else x for x in pack) for pack in found)
            self._packs[key] = tuple(there), mask
        found, mask = self._packs[key]
        mask.read()  # on this stream too
        return found
