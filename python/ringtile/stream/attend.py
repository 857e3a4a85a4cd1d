"""Attention inside a layer that runs on one chunk of tokens at a time, where no query attends a later chunk.

    forward    chunks in order: each appends its keys and values, and attends all so far
    backward   keys and values of all chunks are made again; then chunks in reverse: when one is differentiated, all
               later ones have added their parts to its dk and dv, so that its q, k and v go back through one graph

Shape letters: B batch, S tokens, t tokens of the chunk, H query heads, G kv heads, D head dim, Dv value head dim.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ringtile import ops
from ringtile.attn import choose, ring
from ringtile.attn.backend import Final, Gradients, Running
from ringtile.attn.call import AttentionCall, AttentionDropout, check_options, check_tensors
from ringtile.errors import RefusedError
from ringtile.sequence.rounds import Queries, Round
from ringtile.sequence.sharded import ShardedSequence

WHOLE = "leave the layer whole (stream: false)"  # what to do; ends a message

Pass = Literal["forward", "keys", "backward"]


class KeysMadeError(BaseException):
    """Ends a run that is to make the keys of a chunk only. Not an Exception, which a model might catch."""


@dataclass(eq=False)
class Keys:
    """The keys and values of all tokens in one attention, and, in the backward, their gradients."""

    k: Tensor  # (B, S, G, D)
    v: Tensor  # (B, S, G, Dv)
    dk: Tensor | None = None  # of the state dtype
    dv: Tensor | None = None


@dataclass(eq=False)
class Chunk:
    """One chunk of a layer at work. keys: of the layer's calls of attention, the same in all chunks."""

    tokens: slice
    seq_len: int
    what: Pass
    keys: list[Keys]
    ends_after: int = 0  # calls of attention: of a run that makes keys only
    num_calls: int = 0  # so far

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The layer runs inside."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequence: ShardedSequence,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        dropout: AttentionDropout | None = None,
        attention_kernel: str = "auto",
    ) -> Tensor:
        """`ring_attention` of a chunk's q (B, t, H, D), k (B, t, G, D), v (B, t, G, Dv) -> (B, t, H, Dv).

        RefusedError: the mask lets a query attend keys of a later chunk.
        """
        scale, softcap = check_options(q, k, v, scale, softcap, sinks, dropout, attention_kernel)
        check_tensors(q, k, v, scale, softcap, sinks, None if dropout is None else dropout.rows)
        sequence.check_call("q", q)
        begin, end = self.tokens.start, self.tokens.stop
        if sequence.seq_len != self.seq_len or not q.size(1) == k.size(1) == end - begin:
            raise RefusedError(
                f"a streamed layer attends with {q.size(1)} queries and {k.size(1)} keys in tokens {begin}..{end} of "
                f"{self.seq_len}, under a mask of {sequence.seq_len}; expected each token's own: {WHOLE}"
            )
        index, self.num_calls = self.num_calls, self.num_calls + 1
        if self.what != "backward":
            self._append(index, k, v)
        if self.what == "keys" and self.num_calls == self.ends_after:
            raise KeysMadeError
        in_numbers = None if sinks is None else sinks.detach().to(ops.state_dtype(q.dtype))
        call = AttentionCall(
            sequence, scale, softcap, attention_kernel, in_numbers, dropout and dropout.in_numbers(), returns_lse=False
        )
        out: Tensor = _Attend.apply(q, k, v, sinks, call, self, self.keys[index])  # type: ignore[no-untyped-call]
        return out

    def _append(self, index: int, k: Tensor, v: Tensor) -> None:
        if index == len(self.keys):
            if self.tokens.start > 0:
                raise RefusedError(
                    f"a streamed layer attends more than {index} times in tokens {self.tokens.start}.."
                    f"{self.tokens.stop}, and fewer before; expected the same in all chunks: {WHOLE}"
                )
            # Zeros: where rows are not sliced, keys that are not there yet are read, with a weight of 0.
            self.keys.append(Keys(*(x.new_zeros(x.size(0), self.seq_len, *x.shape[2:]) for x in (k, v))))
        held = self.keys[index]
        held.k[:, self.tokens], held.v[:, self.tokens] = k.detach(), v.detach()


_running: contextvars.ContextVar[Chunk | None] = contextvars.ContextVar("running", default=None)


def running_chunk() -> Chunk | None:
    """The chunk on which a layer runs now, in this thread."""
    return _running.get()


class _Attend(torch.autograd.Function):
    """A chunk's queries on all keys up to its end."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: AttentionCall, chunk: Chunk, keys: Keys
    ) -> Tensor:
        at, round = _round_of(call.sequence, chunk, q)
        state = ops.state_dtype(q.dtype)
        out, lse = ring.empty_outputs(q, v, state)
        if call.sinks is not None:  # as in the ring
            out.zero_()
            lse.copy_(call.sinks[None, :, None])
        rounded = torch.empty_like(out, dtype=q.dtype) if state != q.dtype else None
        running = Running(out, lse, fresh=call.sinks is None, rounded=rounded)
        choose.forward(call, round, q, keys.k[:, at], keys.v[:, at], running)
        out = out if rounded is None else rounded
        if chunk.what == "backward":
            ctx.save_for_backward(q, sinks, out, lse)
            ctx.call, ctx.tokens, ctx.keys, ctx.at, ctx.round = call, chunk.tokens, keys, at, round
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, sinks, out, lse = ctx.saved_tensors
        keys, at, dtype = ctx.keys, ctx.at, ops.state_dtype(q.dtype)
        if keys.dk is None:
            keys.dk, keys.dv = (torch.zeros_like(x, dtype=dtype) for x in (keys.k, keys.v))
        final = Final.of(dout, None, out, lse)
        dq = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
        grads = Gradients(dq, keys.dk[:, at], keys.dv[:, at], fresh=False)
        choose.backward(ctx.call, ctx.round, q, keys.k[:, at], keys.v[:, at], final, grads)
        dsinks = ring.sink_gradient(sinks, final) if ctx.needs_input_grad[3] else None
        dk, dv = (x[:, ctx.tokens].to(q.dtype) for x in (keys.dk, keys.dv))  # complete: later chunks came before
        return dq.to(q.dtype), dk, dv, dsinks, None, None, None


@dataclass(eq=False)
class _Rounds:
    """Of one sequence, which keys the chunks' queries attend; shared by the layers with this mask."""

    of: dict[tuple[int, int, torch.device, bool], tuple[slice, Round]] = field(default_factory=dict)


_rounds: weakref.WeakKeyDictionary[ShardedSequence, _Rounds] = weakref.WeakKeyDictionary()


def _round_of(sequence: ShardedSequence, chunk: Chunk, q: Tensor) -> tuple[slice, Round]:
    """Which keys the chunk's queries attend: from the first that one of them attends to the last; and the round."""
    # Slices of several rows are not one piece of memory, which libraries' kernels need of dk and dv.
    one_row, rounds = q.size(0) == 1, _rounds.setdefault(sequence, _Rounds()).of
    key = chunk.tokens.start, chunk.tokens.stop, q.device, one_row
    if key not in rounds:
        begin, end = _bounds(sequence, chunk.tokens)
        low, high = 0, sequence.seq_len
        if one_row:
            some = end > begin
            low = int(begin[some].min()) if bool(some.any()) else 0
            high = max(int(end.max()), low + 1)
        positions = torch.arange(chunk.tokens.start, chunk.tokens.stop, device="cpu")
        queries = Queries(q.device, begin, end, positions)
        rounds[key] = slice(low, high), Round(queries, ops.runs_tensor([(low, 1, 0, high - low)]))
    return rounds[key]


def _bounds(sequence: ShardedSequence, tokens: slice) -> tuple[Tensor, Tensor]:
    """int32 (B or 1, t), begin and end of the keys that the tokens attend. RefusedError: some are after the tokens."""
    if sequence.begin.dim() == 3:
        raise RefusedError("streamed layers take no mask with two sides, as a tree's is: set stream: false")
    begin, end = (x[:, tokens] for x in (sequence.begin, sequence.end))
    end = torch.maximum(begin, end)  # of a query that attends nothing, both are the same
    ahead = (end > begin) & (end > tokens.stop)
    if bool(ahead.any()):
        row, query = ahead.nonzero()[0].tolist()
        raise RefusedError(
            f"query {tokens.start + query} of row {row} attends keys up to {int(end[row, query])}, of a later chunk "
            f"than its own, {tokens.start}..{tokens.stop}; expected a causal mask: {WHOLE}"
        )
    return begin.contiguous(), end.contiguous()
