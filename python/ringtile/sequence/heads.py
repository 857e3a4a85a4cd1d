"""All-to-all between tokens and heads (arXiv:2309.14509): M neighbors with their own tokens of all heads each become
M ranks with all their tokens of a share of the heads each, and back.

Shape letters: B batch, N local tokens, Nq tokens of all M ranks, H heads, h heads of a share, R runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringtile import ops
from ringtile.sequence.layout import Layout, Run
from ringtile.transport.transport import Message, Transport

Rows = list[Run]  # global_begin: a row among the tokens of the group


def join(layout: Layout, size: int) -> tuple[Layout, list[Rows]]:
    """Return the layout of groups of `size` neighbors, and by rank where its tokens are among those of its group.

    A group holds its tokens in global order, as far as that takes no more runs than its ranks have.
    """
    world_size = layout.world_size
    if size == world_size:
        return Layout.contiguous(layout.seq_len, 1), [[*layout.runs(rank)] for rank in range(size)]
    if size == 1:
        return layout, []
    rows: list[Rows] = [[] for _ in range(world_size)]
    groups = []
    for first in range(0, world_size, size):
        runs = sorted((run, rank) for rank in range(first, first + size) for run in layout.runs(rank))
        joined: list[Run] = []
        row = 0
        for run, rank in runs:
            rows[rank].append(Run(row, 1, run.local_begin, run.length))
            last = joined[-1] if joined else None
            if last and last.stride == run.stride and last.global_begin + last.stride * last.length == run.global_begin:
                joined[-1] = last._replace(length=last.length + run.length)
            else:
                joined.append(run._replace(local_begin=row))
            row += run.length
        groups.append(tuple(joined))
    return Layout.from_runs(groups), rows


class HeadGroup:
    """The ranks that share heads, this one among them."""

    def __init__(self, ranks: range, rank: int, rows: Sequence[Rows]) -> None:
        """rows: by rank of the whole group, as from `join`."""
        self.ranks, self.place = ranks, rank - ranks.start
        self._rows = [ops.runs_tensor(rows[rank]) for rank in ranks]
        self._lens = [sum(run.length for run in rows[rank]) for rank in ranks]
        self._all_rows = ops.runs_tensor([(0, 1, 0, self._lens[self.place])] if self._lens[self.place] else [])
        self.num_tokens = sum(self._lens)

    def to_heads(self, transport: Transport, parts: Sequence[Sequence[Tensor]], what: str) -> list[Tensor]:
        """Return, of the heads that this rank works on, all tokens (B, Nq, h, ...); a collective of these ranks.

        parts: for each of them, this rank's tokens (B, N, h, ...) of the heads that it works on.
        """
        own = parts[self.place]
        sends, receives, arriving = {}, {}, []
        for place, rank in enumerate(self.ranks):
            if place == self.place:
                arriving.append(tuple(own))
                continue
            message = Message.empty(own[0], [(_resized(x, self._lens[place]), x.dtype) for x in own])
            leaving = Message.empty(own[0], [(x.shape, x.dtype) for x in parts[place]])
            ops.rows_pack_(parts[place], self._all_rows, 1, leaving.parts)
            sends[rank], receives[rank] = leaving.flat, message.flat
            arriving.append(message.parts)
        exchange = transport.exchange(sends, receives, what)
        whole = [x.new_empty(_resized(x, self.num_tokens)) for x in own]
        exchange.wait()
        for rows, of_rank in zip(self._rows, arriving, strict=True):
            ops.rows_unpack_(whole, rows, 1, of_rank)
        return whole

    def to_tokens(
        self, transport: Transport, tensors: Sequence[Tensor], into: Sequence[Sequence[Tensor]], what: str, added: int
    ) -> None:
        """Write the other way: for each rank the heads that it works on into this rank's tokens; a collective.

        tensors: of the heads that this rank works on, all tokens (B, Nq, h, ...). into: for each rank a view (B, N, h,
        ...) of each. The last `added` of them are added to what is there, in the order of the ranks.
        """
        sends, receives, arriving = {}, {}, []
        for place, rank in enumerate(self.ranks):
            message = leaving = Message.empty(tensors[0], [(_resized(x, self._lens[place]), x.dtype) for x in tensors])
            if place != self.place:
                kinds = [(tuple(there.shape), x.dtype) for there, x in zip(into[place], tensors, strict=True)]
                message = Message.empty(tensors[0], kinds)
                sends[rank], receives[rank] = leaving.flat, message.flat
            arriving.append(message.parts)
            ops.rows_pack_(tensors, self._rows[place], 1, leaving.parts)
        transport.exchange(sends, receives, what).wait()
        for views, parts in zip(into, arriving, strict=True):
            for i, (there, part) in enumerate(zip(views, parts, strict=True)):
                there.add_(part) if i >= len(tensors) - added else there.copy_(part)


def _resized(x: Tensor, num_tokens: int) -> tuple[int, ...]:
    """Return the shape of x (B, tokens, ...) with another number of tokens."""
    return (x.size(0), num_tokens, *x.shape[2:])
