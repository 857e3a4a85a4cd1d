"""What a recurrent layer must know of a sharded sequence: where documents start, and which pieces a state crosses.

Shape letters: Bm mask rows (B or 1), S global tokens, N local tokens.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.errors import Refused
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence


class StatePass(NamedTuple):
    """A cut between neighbouring pieces that some document crosses: source holds the token before it, target the next.

    A message where the two are different ranks: of one state in the forward, of its gradient, the other way, in the
    backward.
    """

    position: int  # global: the first token after the cut
    source: int
    target: int


class Piece(NamedTuple):
    """Local tokens that are neighbours in the sequence too."""

    begin: int
    length: int
    source: int | None  # the rank that passes its state to this piece; None: no document reaches into it
    target: int | None  # the rank that the state of this piece is passed to
    seq_idx: Tensor  # int32 CPU (Bm, length): each token's document, 0 for the one that reaches into the piece

    @property
    def tokens(self) -> slice:
        return slice(self.begin, self.begin + self.length)


@dataclass(frozen=True, eq=False)
class Facts:
    """Of one rank, computed once. Holds no sequence, so that remembering it keeps none alive."""

    mask: IntervalMask
    layout: Layout
    rank: int

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """In the order of the sequence. Refused: a state cannot follow this layout."""
        cuts = {cut.position: cut for cut in state_passes(self.mask, self.layout)}
        pieces = []
        for rank, begin, local_begin, length in pieces_of(self.layout):
            if rank == self.rank:
                before, after = cuts.get(begin), cuts.get(begin + length)
                seq_idx = _of_piece(self.seq_idx, begin, length)
                pieces.append(Piece(local_begin, length, before and before.source, after and after.target, seq_idx))
        return tuple(pieces)

    @functools.cached_property
    def seq_idx(self) -> Tensor:
        """Each token's document, from 1 on, and -1 for padding: int32 CPU (Bm, S). Refused: the mask has more than
        causal documents."""
        return _seq_idx(self.mask)

    @functools.cached_property
    def states_travel(self) -> bool:
        """Whether any rank passes a state to another one."""
        return bool(message_bytes(self.mask, self.layout, 1))


class Documents(NamedTuple):
    """Of a call on one rank."""

    sequence: ShardedSequence

    @property
    def facts(self) -> Facts:
        """Return the same object for the same sequence, whose layers ask for it one after another."""
        sequence, found = self.sequence, _facts.get(self.sequence)
        if found is None:
            found = _facts.setdefault(sequence, Facts(sequence.mask, sequence.layout, sequence.rank))
        return found

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.facts.pieces


_facts: weakref.WeakKeyDictionary[ShardedSequence, Facts] = weakref.WeakKeyDictionary()


def state_passes(mask: IntervalMask, layout: Layout) -> tuple[StatePass, ...]:
    """Return every cut that a state crosses, in the order of the sequence. Raises Refused."""
    seq_idx, pieces = _seq_idx(mask), pieces_of(layout)
    before, after = seq_idx[:, :-1], seq_idx[:, 1:]
    crossed = ((after == before) & (after > 0)).any(0)
    return tuple(
        StatePass(begin, before[0], rank)
        for before, (rank, begin, _, _) in itertools.pairwise(pieces)
        if crossed[begin - 1]
    )


def message_bytes(mask: IntervalMask, layout: Layout, state_bytes: int) -> dict[tuple[int, int], int]:
    """Count the bytes from rank to rank in the forward; in the backward as many go the other way."""
    sent: dict[tuple[int, int], int] = {}
    for cut in state_passes(mask, layout):
        if cut.source != cut.target:
            sent[cut.source, cut.target] = sent.get((cut.source, cut.target), 0) + state_bytes
    return sent


def pieces_of(layout: Layout) -> list[tuple[int, int, int, int]]:
    """Return (rank, global_begin, local_begin, length) of all ranks, in the order of the sequence; merge neighbours."""
    pieces: list[tuple[int, int, int, int]] = []
    for rank, begin, stride, local_begin, length in sorted(layout.tensor.tolist(), key=lambda run: run[1]):
        if stride != 1 and length > 1:
            raise Refused(
                f"a recurrent layer over a layout where rank {rank} holds every {stride}th token; expected runs of "
                "neighbouring tokens (the contiguous, zigzag, per_document or balanced layout), or the scheme heads, "
                "which a convolution does not have"
            )
        if pieces and pieces[-1][0] == rank and pieces[-1][2] + pieces[-1][3] == local_begin:
            _, first, local_first, so_far = pieces.pop()
            pieces.append((rank, first, local_first, so_far + length))
        else:
            pieces.append((rank, begin, local_begin, length))
    return pieces


def _seq_idx(mask: IntervalMask) -> Tensor:
    """int32 (Bm, S), -1 for padding: a token that does not attend itself. Refused: the mask is no causal documents."""
    if mask.key_begin is not None:
        raise Refused("a recurrent layer under a mask with two sides, as a tree's is; expected causal documents")
    begin, end = mask.begin, mask.end
    positions = torch.arange(mask.seq_len, dtype=torch.int32, device="cpu")
    holds = (begin <= positions) & (positions < end)
    starts = holds & (begin == positions)
    goes_on = torch.zeros_like(holds)
    goes_on[:, 1:] = holds[:, :-1] & (begin[:, 1:] == begin[:, :-1])
    wrong = holds & ((end != positions + 1) | ~(starts | goes_on))
    if bool(wrong.any()):
        row, token = wrong.nonzero()[0].tolist()
        raise Refused(
            f"a recurrent layer under a mask whose token {token} (row {row}) attends "
            f"[{int(begin[row, token])}, {int(end[row, token])}); expected causal documents, where a token attends "
            "from the first token of its document to itself: a recurrence has no window, so pass the sequence without "
            "it, and no prefix"
        )
    return torch.where(holds, starts.cumsum(1, dtype=torch.int32), -1)


def _of_piece(seq_idx: Tensor, begin: int, length: int) -> Tensor:
    """(Bm, length): a piece's tokens, with 0 for the document of the last token before it that is no padding."""
    before = seq_idx[:, :begin].amax(1, keepdim=True).clamp(min=0) if begin else 0
    of_piece = seq_idx[:, begin : begin + length]
    return torch.where(of_piece < 0, -1, of_piece - before)
