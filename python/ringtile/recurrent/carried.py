"""Recurrences inside a layer that runs on one chunk of a rank's tokens at a time: who answers their calls there.

On one rank each goes on from the states of the chunk before; over several, and on a tree of tokens, the layer ends at
each call, and goes on with what that gives for all tokens of the rank (ringtile/stream).
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ringtile.errors import RefusedError
from ringtile.recurrent.recurrence import Recurrence


class Recurring(Protocol):
    """A chunk that answers the calls of recurrences."""

    tokens: slice

    def compute(self, recurrence: Recurrence, of_all: Callable[..., Tensor]) -> Tensor:
        """Return out (B, t, ...). of_all: the same call on such tensors of all tokens of the rank."""


@dataclass(eq=False)
class Carried:
    """The states with which the recurrences of a layer begin, in the order of its calls, and those with which they end.

    before: empty for the first chunk, whose states are 0.
    """

    tokens: slice
    before: list[Tensor]
    after: list[Tensor] = field(default_factory=list)

    def compute(self, recurrence: Recurrence, of_all: Callable[..., Tensor]) -> Tensor:
        """RefusedError: a tree of tokens, or several ranks."""
        documents = recurrence.documents
        whole = documents.facts.whole.only
        if whole is None or documents.sequence.world_size > 1:
            raise RefusedError(
                "a recurrence whose states go from chunk to chunk over several ranks, or in a tree of tokens; expected "
                "one rank and documents: leave the layer whole (stream: false)"
            )
        number = len(self.after)
        state = self.before[number] if number < len(self.before) else None
        out, final = recurrence.of_segment(recurrence.tensors, _numbered(whole.seq_idx, self.tokens), state)
        self.after.append(final)
        return out


_running: contextvars.ContextVar[Recurring | None] = contextvars.ContextVar("running", default=None)


@contextlib.contextmanager
def running_on(chunk: Recurring) -> Iterator[None]:
    """Let the layer run on the chunk inside."""
    token = _running.set(chunk)
    try:
        yield
    finally:
        _running.reset(token)


def running_chunk() -> Recurring | None:
    """Return the chunk on which a layer runs now, in this thread; None: it runs on all tokens of the rank."""
    return None if torch.compiler.is_compiling() else _running.get()


def _numbered(seq_idx: Tensor, tokens: slice) -> Tensor:
    """Return the chunk's part of seq_idx (B or 1, N), as kernels.py takes it: a first document that goes on is 0."""
    of_chunk = seq_idx[:, tokens]
    if tokens.start == 0:
        return of_chunk
    # Behind padding, -1, a document begins, which no number above 0 lets go on.
    return torch.where(of_chunk < 0, of_chunk, of_chunk - seq_idx[:, tokens.start - 1 : tokens.start])
