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
        self._note(_BETWEEN, self._marks)
        self.batches = []

    def end_step(self) -> None:
        is_padded = any(x.sequence.seq_len > x.seq_len and not x.told_padding for x in self.batches)
        self._note(_INSIDE, self._marks if is_padded else None)

    def _note(self, what: str, before: _Marks | None) -> None:
        """Remember what was written to since `before`; None: nothing that is compared."""
        marks, changed = _Marks(), list[str]()
        for name, x in self._model.named_buffers():
            if type(x) is Tensor and not x.is_inference():
                marks[name] = x, x._version
                old = (before or marks).get(name)
                if old is None or old[0] is not x or old[1] != x._version:
                    changed.append(name)
        self._marks, self._names[what] = marks, changed
        self.numbers[what] = checksum(*(marks[name][0] for name in changed)) if changed else 0

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
