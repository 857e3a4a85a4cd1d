"""The rounds of a plan on one device: what says their masks there, and what has been found out about them.

Copies of masks are kept alive until every stream and CUDA graph that reads them is done.

Shape letters: B batch, Bm mask rows (B or 1), N local queries, K keys of a block, R runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ringtile import ops
from ringtile.errors import RefusedError
from ringtile.sequence.pieces import Pack, Piece, Square, find_pieces, packs, squares
from ringtile.sequence.plan import PlannedRound, RankPlan, Transfer


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device. For a copy to a GPU from memory that is not pinned, the host would wait.

    torch uses pinned memory again only when the copy was made. On the current stream: another one has to wait for it.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


class DeviceMask:
    """Tensors that say a mask, copied to a device when this object is made; on a CPU, the tensors themselves.

    It may go while kernels that read it are still to run, on any stream: the allocator gives freed memory to the stream
    that it was allocated on at once, and on others waits for what they have been given to do if it knows of them.

    A CUDA graph reads the same memory again in every replay, and nothing tells when the last one was. So a mask that a
    graph was captured with is never freed. That adds 8 bytes a token for each sequence that graphs are captured with,
    a small part of the queries and outputs of the same tokens that every such graph holds.
    """

    def __init__(self, device: torch.device, *tensors: Tensor) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            raise RefusedError(
                f"the mask of this sequence is not on {device} yet, and cannot be copied there while a CUDA graph "
                f"is captured; make the same call once before the capture"
            )
        self._tensors = tuple(to_device(x, device) for x in tensors)
        if self._is_cuda:
            stream = torch.cuda.current_stream(device)
            self._streams, self._copied = {stream}, stream.record_event()  # those that the allocator knows of

    def read(self) -> tuple[Tensor, ...]:
        """Return the tensors, for kernels that the caller launches on the current stream."""
        if self._is_cuda:  # asking a device for its type costs as much as the rest on a CPU
            stream = torch.cuda.current_stream(self._device)
            captures = torch.cuda.is_current_stream_capturing()
            if stream not in self._streams:
                if not captures:  # before a capture torch waits for the device
                    stream.wait_event(self._copied)
                for x in self._tensors:
                    x.record_stream(stream)
                self._streams.add(stream)
            if captures:
                _in_graphs.setdefault(id(self), self)
        return self._tensors


_in_graphs: dict[int, DeviceMask] = {}  # by id; for the life of the process


class Queries:
    """The mask of a rank's queries, and their positions, on one device. RefusedError as by `DeviceMask`."""

    def __init__(self, device: torch.device, begin: Tensor, end: Tensor, positions: Tensor) -> None:
        """begin, end: int32 CPU (Bm, N). positions: int64 CPU (N)."""
        self.device, self.begin, self.end, self.positions = device, begin, end, positions
        self.bounds = DeviceMask(device, begin, end)  # read before each kernel, on its stream
        self._positions: DeviceMask | None = None  # only dropout and masks with two sides ask for them

    def positions_there(self) -> Tensor:
        """Return the positions on the device, for kernels on the current stream."""
        if self._positions is None:
            self._positions = DeviceMask(self.device, self.positions)
        (positions,) = self._positions.read()
        return positions


class Round:
    """A round on one device: which keys of its block each local query attends. The same for all calls with one plan.

    planned: what travels, if anything does.
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
        self.planned: PlannedRound = planned  # type: ignore[assignment]  # of a plan's rounds
        self._key_bounds = DeviceMask(queries.device, *key_bounds)
        self._tables: dict[Transfer, DeviceMask] = {}
        self._packs: dict[tuple[int, int, int], tuple[tuple[Pack, ...], DeviceMask]] = {}
        self._chunks: dict[tuple[int, int], Round] = {}

    @classmethod
    def all_of(cls, plan: RankPlan, device: torch.device) -> tuple[Round, ...]:
        """Return those of a plan that are not idle."""
        queries = Queries(device, plan.begin, plan.end, plan.positions)
        return tuple(cls(queries, each.k_runs, each.key_bounds, each) for each in plan.busy_rounds)

    def of_queries(self, tokens: slice) -> Round:
        """Return the round of some of the queries."""
        key = tokens.start, tokens.stop
        if key not in self._chunks:
            of = self.queries
            with _disable_current_modes():  # of fake tensors: masks are real
                bounds = (x[..., tokens].contiguous() for x in (of.begin, of.end, of.positions))
                self._chunks[key] = Round(Queries(of.device, *bounds), self.k_runs, self.key_bounds, self.planned)
        return self._chunks[key]

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
        """Return the pieces of each row of the mask; None where it takes too many."""
        of = self.queries
        return find_pieces(of.begin, of.end, self.k_runs, self.key_bounds, of.positions)

    @functools.cached_property
    def squares(self) -> list[tuple[slice, Square]]:
        """Return the pieces in squares, each with the rows of the batch that have it."""
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
