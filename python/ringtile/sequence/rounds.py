"""The rounds of a plan on one device: their masks there, and how libraries' kernels take them.

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


class DeviceTensors:
    """CPU tensors, copied to a device when they are first read; on a CPU, the tensors themselves.

    It may go while kernels that read it are still to run, on any stream: the allocator gives freed memory to the stream
    that it was allocated on at once, and on others waits for what they have been given to do if it knows of them.

    A CUDA graph reads the same memory again in every replay, and nothing tells when the last one was. So what a graph
    was captured with is never freed. For masks that adds 8 bytes a token for each sequence that graphs are captured
    with, a small part of the queries and outputs of the same tokens that every such graph holds.
    """

    def __init__(self, device: torch.device, *host: Tensor) -> None:
        self.device, self.host, self._is_cuda = device, host, device.type == "cuda"
        self._there: tuple[Tensor, ...] | None = host if device.type == "cpu" else None

    def read(self) -> tuple[Tensor, ...]:
        """Return the tensors there, for kernels that the caller launches on the current stream.

        RefusedError where that stream captures a CUDA graph, and they are not there yet.
        """
        if self._there is None:
            self._there = self._copied()
        elif self._is_cuda:  # asking a device for its type costs as much as the rest on a CPU
            stream = torch.cuda.current_stream(self.device)
            captures = torch.cuda.is_current_stream_capturing()
            if stream not in self._streams:
                if not captures:  # before a capture torch waits for the device
                    stream.wait_event(self._event)
                for x in self._there:
                    x.record_stream(stream)
                self._streams.add(stream)
            if captures:
                _in_graphs.setdefault(id(self), self)
        return self._there

    def _copied(self) -> tuple[Tensor, ...]:
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            raise RefusedError(
                f"the mask of this sequence is not on {self.device} yet, and cannot be copied there while a CUDA graph "
                f"is captured; make the same call once before the capture"
            )
        there = tuple(to_device(x, self.device) for x in self.host)
        if self._is_cuda:
            stream = torch.cuda.current_stream(self.device)
            self._streams, self._event = {stream}, stream.record_event()  # those that the allocator knows of
        return there


_in_graphs: dict[int, DeviceTensors] = {}  # by id; for the life of the process


class Round:
    """A round on one device: which keys of its block each local query attends. The same for all calls with one plan."""

    def __init__(
        self,
        bounds: DeviceTensors,
        positions: DeviceTensors,
        k_runs: Tensor,
        key_bounds: tuple[Tensor, ...] = (),
        planned: PlannedRound | None = None,
    ) -> None:
        """bounds: begin and end of the queries, int32 (Bm, N). positions: theirs, int64 (N); few kernels read them.

        k_runs: int64 CPU (R, 4), as of PlannedRound. key_bounds: two int32 CPU (Bm, K) of a mask with two
        sides. planned: what travels, if anything does.
        """
        self.bounds, self.positions, self.k_runs, self.device = bounds, positions, k_runs, bounds.device
        self.planned: PlannedRound = planned  # type: ignore[assignment]  # of a plan's rounds
        self.key_bounds = DeviceTensors(self.device, *key_bounds) if key_bounds else None
        self._tables: dict[Transfer, DeviceTensors] = {}
        self._packs: dict[tuple[int, int, int], tuple[tuple[Pack, ...], DeviceTensors]] = {}
        self._chunks: dict[tuple[int, int], Round] = {}

    @classmethod
    def all_of(cls, plan: RankPlan, device: torch.device) -> tuple[Round, ...]:
        """Return those of a plan that are not idle, made once for a device."""
        if device not in plan.on_devices:
            of_queries = DeviceTensors(device, plan.begin, plan.end), DeviceTensors(device, plan.positions)
            rounds = (cls(*of_queries, each.k_runs, each.key_bounds, each) for each in plan.busy_rounds)
            plan.on_devices[device] = tuple(rounds)
        return plan.on_devices[device]  # type: ignore[no-any-return]

    def of_queries(self, tokens: slice) -> Round:
        """Return the round of some of the queries."""
        key = tokens.start, tokens.stop
        if key not in self._chunks:
            with _disable_current_modes():  # of fake tensors: masks are real
                bounds, positions = (
                    DeviceTensors(self.device, *(x[..., tokens].contiguous() for x in of.host))
                    for of in (self.bounds, self.positions)
                )
                of_keys = self.key_bounds.host if self.key_bounds else ()
                self._chunks[key] = Round(bounds, positions, self.k_runs, of_keys, self.planned)
        return self._chunks[key]

    def table(self, transfer: Transfer) -> Tensor | None:
        """Return the runs of one of the transfers on the device, for `ops.rows_*`; None where they need none there."""
        if self.device.type != "cuda" or len(transfer.runs) <= ops.MAX_RUNS_WITHOUT_TABLE:
            return None
        if transfer not in self._tables:
            self._tables[transfer] = DeviceTensors(self.device, transfer.runs)
        (table,) = self._tables[transfer].read()
        return table

    @functools.cached_property
    def pieces(self) -> tuple[Sequence[Piece], ...] | None:
        """Return the pieces of each row of the mask; None where it takes too many."""
        (begin, end), (positions,) = self.bounds.host, self.positions.host
        of_keys = self.key_bounds.host if self.key_bounds else ()
        return find_pieces(begin, end, self.k_runs, of_keys, positions)

    @functools.cached_property
    def squares(self) -> list[tuple[slice, Square]]:
        """Return the pieces in squares, each with the rows of the batch that have it."""
        pieces = self.pieces or ()
        rows = [slice(None)] if len(pieces) == 1 else [slice(row, row + 1) for row in range(len(pieces))]
        return [(at, square) for at, of_row in zip(rows, pieces, strict=True) for square in squares(of_row)]

    def packs(self, q: Tensor, k: Tensor) -> tuple[Pack, ...]:
        """Return the pieces in packs, for q (B, N, ...) and k (B, K, ...) there. RefusedError as by `DeviceTensors`."""
        key = (q.size(0), q.size(1), k.size(1))
        if key not in self._packs:
            found = packs(self.pieces or (), *key)
            mask = DeviceTensors(self.device, *(x for pack in found for x in pack if isinstance(x, Tensor)))
            copies = iter(mask.read())
            there = (Pack._make(next(copies) if isinstance(x, Tensor) else x for x in pack) for pack in found)
            self._packs[key] = tuple(there), mask
        found, mask = self._packs[key]
        mask.read()  # on this stream too
        return found
