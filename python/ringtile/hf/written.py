"""Buffers of a model that code of the user's writes while it trains: counts of tokens by expert, statistics, scales.

What a forward pass on a shard writes is a shard's, until the user reduces it over the ranks. What is written between
two steps is the same on all ranks of a group, as a weight is: they compare it where they compare their batches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ringtile.checksum import checksum
from ringtile.errors import InputError, RefusedError
from ringtile.hf.batch import ShardedBatch, active_batch
from ringtile.stream.attend import running_chunk

_Marks = dict[str, tuple[Tensor, int]]  # of each buffer, how often it was written to
_BETWEEN, _INSIDE = "the buffers that were written between two steps", "the buffers that were written beside padding"


class Written:
    """What was written to the buffers of one model, by the step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._marks: _Marks | None = None  # at the end of the last step
        self._names = {_BETWEEN: list[str](), _INSIDE: list[str]()}
        self.numbers: dict[str, int | Tensor] = dict.fromkeys(self._names, 0)  # what ranks compare next
        self.batches: list[ShardedBatch] = []  # of this step

    def begin_step(self) -> None:
        marks, before = self._now(), self._marks
        self._note(_BETWEEN, marks, marks if before is None else before)
        self._marks, self.batches = marks, []

    def end_step(self) -> None:
        marks, before = self._now(), self._marks
        is_padded = any(x.sequence.seq_len > x.seq_len and not x.told_padding for x in self.batches)
        self._note(_INSIDE, marks, before if before is not None and is_padded else marks)
        self._marks = marks

    def _note(self, what: str, marks: _Marks, before: _Marks) -> None:
        changed = {name: mark for name, mark in marks.items() if not _is_same(mark, before.get(name))}
        self._names[what] = [*changed]
        self.numbers[what] = checksum(*(x for x, _ in changed.values())) if changed else 0

    def _now(self) -> _Marks:
        buffers = self._model.named_buffers()
        return {name: (x, x._version) for name, x in buffers if type(x) is Tensor and not x.is_inference()}

    def refuse(self, what: str, first: int, other: int) -> None:
        """RefusedError: two ranks hold other numbers."""
        names = ", ".join(self._names[what]) or "a buffer of another rank"
        remedy = (
            "what a hook or a module counts in a forward pass is a shard's: sum it over the ranks before you use it "
            "(torch.distributed.all_reduce)"
            if what == _BETWEEN
            else "rows are padded to what the layout needs: where you count tokens, ask ringtile.real_tokens() which "
            "are real, or let your collator pad to a multiple of twice the ranks"
        )
        raise RefusedError(
            f"ranks {first} and {other} share a sequence, and differ in {what}: {names}; expected equal ones: {remedy}"
        )


def _is_same(mark: tuple[Tensor, int], other: tuple[Tensor, int] | None) -> bool:
    return other is not None and mark[0] is other[0] and mark[1] == other[1]


def real_tokens() -> Tensor | slice:
    """Return which of the tokens inside a sharded model are no padding of ringtile's, an index of their dimension.

    bool (N,) of the N tokens of this rank's shard; slice(None), all, where nothing is sharded. For hooks and modules
    that count tokens: `out.unflatten(0, (rows, -1))[:, ringtile.real_tokens()]`. Padding of the batch's own is the
    batch's to know. Asking for it declares that the caller's counts are of real tokens.
    """
    batch = active_batch()
    if batch is None:
        return slice(None)
    batch.told_padding = True
    return batch.places < batch.seq_len


def token_positions(num_tokens: int) -> Tensor:
    """Return where in its row each token stands that a hook or a module of a sharded model sees, int64 (num_tokens,).

    For tables with an entry for each token of a row: `table[:, ringtile.token_positions(x.size(1))]`, x (B, N, ...).
    0, 1, ..., num_tokens - 1 where nothing is sharded. Padding of ringtile's (`real_tokens`) has the row's last place.
    Raises InputError for another number of tokens than are here, as in a tile of an MLP; RefusedError for rows that
    share tokens.
    """
    batch, chunk = active_batch(), running_chunk()
    if batch is not None and batch.rows is not None and batch.rows.is_tree:
        raise RefusedError("token_positions: rows share tokens, each with several places; set shared_prefix: false")
    places = torch.arange(num_tokens) if batch is None else batch.places.clamp(max=batch.seq_len - 1)
    places = places if batch is None or batch.columns is None else batch.columns
    places = places if batch is None or chunk is None else places[chunk.tokens]
    if len(places) != num_tokens:
        raise InputError(f"token_positions of {num_tokens} tokens; {len(places)} of each row are here")
    return places
