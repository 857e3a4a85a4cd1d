"""Recurrences on one chunk of a rank's tokens at a time, each of which goes on from the states of the chunk before."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringtile.errors import RefusedError
from ringtile.recurrent.documents import Documents


@dataclass(eq=False)
class Carried:
    """The states with which the recurrences of a layer begin, in the order of its calls, and those with which they end.

    before: empty for the first chunk, whose states are 0.
    """

    tokens: slice
    before: list[Tensor]
    after: list[Tensor] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The layer runs on the chunk inside."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    def compute(
        self, documents: Documents, function: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
    ) -> Tensor:
        """out of function(seq_idx, state) -> (out, final state), as of kernels.py. RefusedError: a tree of tokens, or
        several ranks."""
        whole = documents.facts.whole.only
        if whole is None or documents.sequence.world_size > 1:
            raise RefusedError(
                "a recurrence in a streamed layer over several ranks, or a tree of tokens; expected one rank and "
                "documents: leave the layer whole (stream: false)"
            )
        number = len(self.after)
        out, final = function(
            _numbered(whole.seq_idx, self.tokens), self.before[number] if number < len(self.before) else None
        )
        self.after.append(final)
        return out


_running: contextvars.ContextVar[Carried | None] = contextvars.ContextVar("running", default=None)


def carried() -> Carried | None:
    """What the chunk that a layer runs on now goes on from, in this thread; None: it runs on all tokens of the rank."""
    return None if torch.compiler.is_compiling() else _running.get()


def _numbered(seq_idx: Tensor, tokens: slice) -> Tensor:
    """The chunk's part of seq_idx (B or 1, N), as kernels.py takes it: a first document that goes on is 0."""
    of_chunk = seq_idx[:, tokens]
    if tokens.start == 0:
        return of_chunk
    last = seq_idx[:, tokens.start - 1 : tokens.start]
    # Behind padding a document begins, which no number above 0 lets go on.
    return torch.where(of_chunk < 0, of_chunk, of_chunk - torch.where(last < 0, of_chunk.new_tensor(-1), last))
