"""Attention inside a layer that runs on one chunk of tokens at a time.

One pass, where one rank holds the sequence and no query attends a later chunk:

    forward    chunks in order: each appends its keys and values, and attends all so far
    backward   keys and values of all chunks are made again; then chunks in reverse: when one is differentiated, all
               later ones have added their parts to its dk and dv, so that its q, k and v go back through one graph

Two passes, for any mask and any number of ranks:

    forward    A, up to attention: q, k and v of all chunks; attention of all tokens; B: each chunk goes on with its out
    backward   A and attention again; B with gradients, which gives dout; attention's backward; A with gradients

and one more for each further call that mixes tokens, such as a recurrence and its convolution. Between two passes all
ranks make one call on all their tokens, in the order in which the whole layer makes them: no rank waits for another
that waits for it.

Shape letters: B batch, S tokens, N tokens of a rank, t tokens of the chunk, H query heads, G kv heads, D head dim,
Dv value head dim.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ringtile import keep, ops
from ringtile.attn import choose, ring, ulysses
from ringtile.attn.attention import kept_forward
from ringtile.attn.backend import Final, Gradients
from ringtile.attn.call import Call, Options, check_tensors
from ringtile.attn.ulysses import Saved
from ringtile.errors import RefusedError
from ringtile.recurrent.carried import Carried, running_on
from ringtile.recurrent.recurrence import Recurrence
from ringtile.sequence.plan import DeviceTensors, Round
from ringtile.sequence.sharded import ShardedSequence
from ringtile.tiled.host import HostCopies, HostTensor, Reader, Writer, in_order, to_host
from ringtile.tiled.tiles import tiles

WHOLE = "leave the layer whole (stream: false)"  # what to do; ends a message


class EndedError(BaseException):
    """Ends a run of a layer at its attention. Not an Exception, which a model might catch."""


@dataclass(eq=False)
class Chunk(abc.ABC):
    """One chunk of a layer's tokens, of which it has so many, at work."""

    tokens: slice
    num_tokens: int
    num_calls: int = field(default=0, init=False)  # of attention so far

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the layer run inside."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    @abc.abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: ShardedSequence, *, sinks: Tensor | None = None, **options: Any
    ) -> Tensor:
        """`ring_attention` of a chunk's q (B, t, H, D), k (B, t, G, D), v (B, t, G, Dv) -> (B, t, H, Dv)."""

    def _check(self, q: Tensor, k: Tensor, sequence: ShardedSequence) -> None:
        begin, end = self.tokens.start, self.tokens.stop
        if sequence.local_len != self.num_tokens or not q.size(1) == k.size(1) == end - begin:
            raise RefusedError(
                f"a streamed layer attends with {q.size(1)} queries and {k.size(1)} keys in tokens {begin}..{end} of "
                f"{self.num_tokens}, in a sequence of {sequence.local_len}; expected each token's own: {WHOLE}"
            )


_running: contextvars.ContextVar[Chunk | None] = contextvars.ContextVar("running", default=None)


def running_chunk() -> Chunk | None:
    """Return the chunk on which a layer runs now, in this thread. Never in a compiled model: to ask would break its
    graph."""
    return None if torch.compiler.is_compiling() else _running.get()


class LoneChunk(Chunk):
    """Of a module that does not attend."""

    def attend(self, q: Tensor, *args: Any, **options: Any) -> Tensor:
        raise RefusedError(f"attention of {tuple(q.shape)} in a module beside the layers: {WHOLE}")


# ---- one pass: no query attends a later chunk ---------------------------------------------------


@dataclass(eq=False)
class KeyValueCache:
    """The keys and values of all tokens in one attention, and, in the backward, their gradients."""

    k: Tensor  # (B, S, G, D)
    v: Tensor  # (B, S, G, Dv)
    dk: Tensor | None = None  # of the state dtype
    dv: Tensor | None = None


@dataclass(eq=False)
class CausalChunk(Chunk):
    """Attends all keys so far. keys: of the layer's calls of attention, the same in all chunks."""

    what: Literal["forward", "keys", "backward"]
    keys: list[KeyValueCache]
    carried: Carried  # by recurrences, from the chunk before
    ends_after: int = 0  # calls of attention: of a run that makes keys only

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with super().running(), running_on(self.carried):
            yield

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: ShardedSequence, *, sinks: Tensor | None = None, **options: Any
    ) -> Tensor:
        self._check(q, k, sequence)
        call, place = _call_of(q, k, v, sequence, sinks, **options), _round_of(sequence, self, q)
        index, self.num_calls = self.num_calls, self.num_calls + 1
        if self.what != "backward":
            self._append(index, k, v)
        if self.what == "keys" and self.num_calls == self.ends_after:
            raise EndedError
        out: Tensor = _Attend.apply(q, k, v, sinks, call, self, self.keys[index], *place)  # type: ignore[no-untyped-call]
        return out

    def slot(self, q: Tensor, v: Tensor) -> keep.Slot | None:
        """Return where the layer keeps out and lse of this call; None: they are computed again in the backward."""
        if self.what == "keys":
            return None
        num_bytes = q.shape[:3].numel() * (v.size(3) * v.itemsize + 8)
        return keep.slot(("stream", self.tokens.start, self.num_calls), num_bytes)

    def _append(self, index: int, k: Tensor, v: Tensor) -> None:
        if index == len(self.keys):
            if self.tokens.start > 0:
                raise RefusedError(
                    f"a streamed layer attends more than {index} times in tokens {self.tokens.start}.."
                    f"{self.tokens.stop}, and fewer before; expected the same in all chunks: {WHOLE}"
                )
            # Zeros: where rows are not sliced, keys that are not there yet are read, with a weight of 0.
            self.keys.append(KeyValueCache(*(x.new_zeros(x.size(0), self.num_tokens, *x.shape[2:]) for x in (k, v))))
        held = self.keys[index]
        held.k[:, self.tokens], held.v[:, self.tokens] = k.detach(), v.detach()


def _call_of(q: Tensor, k: Tensor, v: Tensor, sequence: ShardedSequence, sinks: Tensor | None, **options: Any) -> Call:
    """Return the call, checked. InputError."""
    checked = Options(sinks=sinks, returns_lse=False, **options).checked(q, k, v)
    shape = check_tensors(q, k, v, checked)
    sequence.check_call("q", q)
    return Call.kept(sequence, shape, q.device, checked)


def _forward(call: Call, round: Round, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, t, H, Dv) of q's dtype, lse (B, H, t), as `ring.forward` of one round."""
    state = ring.first_state(call, q, is_last=True)
    choose.forward(call, round, q, k, v, state)
    return state.out if state.rounded is None else state.rounded, state.lse


class _Attend(torch.autograd.Function):
    """A chunk's queries on all keys up to its end."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        call: Call,
        chunk: CausalChunk,
        keys: KeyValueCache,
        at: slice,
        round: Round,
    ) -> Tensor:
        slot = chunk.slot(q, v)
        kept = None if slot is None or chunk.what == "forward" else slot.take()
        out, lse = _forward(call, round, q, keys.k[:, at], keys.v[:, at]) if kept is None else kept[0]
        if chunk.what == "backward":
            ctx.save_for_backward(q, sinks, out, lse)
            ctx.call, ctx.tokens, ctx.keys, ctx.at, ctx.round = call, chunk.tokens, keys, at, round
        elif slot is not None:
            slot.fill((out, lse), 0)
        return out if kept is None else out.detach()  # not an output of this node yet

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
        return dq.to(q.dtype), dk, dv, dsinks, *[None] * 5


@dataclass(eq=False)
class _Rounds:
    """Of one sequence, which keys the chunks' queries attend; shared by the layers with this mask."""

    of: dict[tuple[int, int, torch.device, bool], tuple[slice, Round]] = field(default_factory=dict)
    is_causal: dict[int, bool] = field(default_factory=dict)  # by tokens of a chunk


_rounds: weakref.WeakKeyDictionary[ShardedSequence, _Rounds] = weakref.WeakKeyDictionary()


def _round_of(sequence: ShardedSequence, chunk: CausalChunk, q: Tensor) -> tuple[slice, Round]:
    """Return which keys the chunk's queries attend: from the first that one of them attends to the last; and
    the round."""
    # Slices of several rows are not one piece of memory, which libraries' kernels need of dk and dv.
    one_row, rounds = q.size(0) == 1, _rounds.setdefault(sequence, _Rounds()).of
    key = chunk.tokens.start, chunk.tokens.stop, q.device, one_row
    if key not in rounds:
        with _disable_current_modes():  # of fake tensors: masks are real
            begin, end = _bounds(sequence, chunk.tokens)
            low, high = 0, sequence.seq_len
            if one_row:
                some = end > begin
                low = int(begin[some].min()) if bool(some.any()) else 0
                high = max(int(end.max()), low + 1)
            positions = torch.arange(chunk.tokens.start, chunk.tokens.stop, device="cpu")
            queries = DeviceTensors(q.device, begin, end), DeviceTensors(q.device, positions)
            rounds[key] = slice(low, high), Round(*queries, ops.runs_tensor([(low, 1, 0, high - low)]))
    return rounds[key]


def _bounds(sequence: ShardedSequence, tokens: slice) -> tuple[Tensor, Tensor]:
    """Return int32 (B or 1, t), begin and end of the keys that the tokens attend. RefusedError: some are after the
    tokens."""
    begin, end = (x[..., tokens] for x in (sequence.begin, sequence.end))
    end = torch.maximum(begin, end)  # of a query that attends nothing, both are the same
    ahead = (end > begin) & (end > tokens.stop)
    if bool(ahead.any()):
        row, query = ahead.nonzero()[0].tolist()
        raise RefusedError(
            f"query {tokens.start + query} of row {row} attends keys up to {int(end[row, query])}, of a later chunk "
            f"than its own, {tokens.start}..{tokens.stop}, in a layer whose mask was causal: {WHOLE}"
        )
    return begin.contiguous(), end.contiguous()


def attends_no_later_chunk(sequence: ShardedSequence, num_tokens: int) -> bool:
    """Return whether this rank holds the sequence, in order, and no query attends a later chunk of so many tokens than
    its own, so that its layers take one pass."""
    of = _rounds.setdefault(sequence, _Rounds())
    if num_tokens not in of.is_causal:
        with _disable_current_modes():
            of.is_causal[num_tokens] = (
                sequence.world_size == 1
                and sequence.begin.dim() == 2
                and torch.equal(sequence.layout.positions(0), torch.arange(sequence.seq_len))
                and bool(((sequence.end <= sequence.begin) | (sequence.end <= _chunk_ends(sequence, num_tokens))).all())
            )
    return of.is_causal[num_tokens]


def _chunk_ends(sequence: ShardedSequence, num_tokens: int) -> Tensor:
    """Return (S,): where the chunk of each token ends."""
    return (torch.arange(sequence.seq_len) // num_tokens + 1) * num_tokens


# ---- a pass up to each call that mixes tokens: any mask, any number of ranks ---------------------


@dataclass(eq=False)
class MixingCall(abc.ABC):
    """A call that mixes tokens, of all of a rank's: `inputs` (B, N, ...), or such that are not of tokens."""

    inputs: list[Tensor]
    has_tokens: Sequence[bool]

    def put(self, tokens: slice, of_chunk: Sequence[Tensor]) -> None:
        """Fill in the inputs of a chunk."""
        for held, x, of_tokens in zip(self.inputs, of_chunk, self.has_tokens, strict=True):
            if of_tokens:
                held[:, tokens] = x

    @abc.abstractmethod
    def forward(self, copies: HostCopies | None = None, tokens: int = 0) -> Tensor:
        """out (B, N, ...). copies: that of attention goes to host memory, and in a ring q too, which the backward takes
        in chunks of so many tokens."""

    @abc.abstractmethod
    def backward(self, dout: Tensor) -> list[Tensor | None]:
        """Return the gradients of the inputs."""


@dataclass(eq=False)
class AttentionCall(MixingCall):
    """inputs: q, k, v, and sinks if there are."""

    call_of: Callable[..., Call]  # of these

    def forward(self, copies: HostCopies | None = None, tokens: int = 0) -> Tensor:
        call, (q, k, v) = self.call_of(*self.inputs), self.inputs[:3]
        out, saved = forward(call, q, k, v)
        if copies is not None:
            out = to_host(out, copies)
            if call.plan.heads is None:
                waiting: Any = to_host(q, copies)
                waiting.chunk_tokens = tokens
                saved = saved._replace(q=waiting, out=out)
        self._call, self._saved, self.inputs = call, saved, self.inputs[3:]
        return out

    def backward(self, dout: Tensor) -> list[Tensor | None]:
        found = backward(self._call, self._saved, dout, *self.inputs)
        return list(found[: len(self.has_tokens)])


@dataclass(eq=False)
class RecurrenceCall(MixingCall):
    call: Callable[..., Tensor]

    def forward(self, copies: HostCopies | None = None, tokens: int = 0) -> Tensor:
        self._out = self.call(*(x.requires_grad_() for x in self.inputs))
        return self._out.detach()

    def backward(self, dout: Tensor) -> list[Tensor | None]:
        return list(torch.autograd.grad(self._out, self.inputs, dout, allow_unused=True))


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Saved]:
    """`ring_attention`, without a graph: out, and what its backward takes."""
    with call.transport.propagate_errors("ring_attention forward"):
        call.transport.check_device(q.device)
        out, _, saved = kept_forward(call, q, k, v)
    return out, saved


def backward(call: Call, saved: Saved, dout: Tensor, sinks: Tensor | None = None) -> tuple[Tensor | None, ...]:
    with call.transport.propagate_errors("ring_attention backward"):
        q, k, v, out, lse = saved[:5]
        if not isinstance(q, HostTensor):
            return ulysses.backward(call, saved, dout, None, sinks)
        with ulysses.agreed("backward", call, q, saved.number):
            final = Final.of(dout, None, out, lse)
            chunks, unused = _Chunks(q), q.new_zeros(0, dtype=ops.state_dtype(q.dtype))
            of_keys = ring.backward(call.but(blocks=chunks), final, q, k, v, unused)
            return chunks.dq, *of_keys, None if sinks is None else ring.sink_gradient(sinks, final)


class _Chunks:
    """Queries in host memory, with out, dout and dq: a backward takes them chunk by chunk in each round."""

    def __init__(self, q: HostTensor) -> None:
        self._q = q
        self.dq = HostTensor.empty(q, q.shape, q.copies)
        self._sums = HostTensor.empty(q.new_empty(0, dtype=ops.state_dtype(q.dtype)), q.shape, q.copies)

    def backward(
        self, call: Call, round: Round, q: Tensor, k: Tensor, v: Tensor, final: Final, grads: Gradients
    ) -> None:
        """Add the gradients of a round: `grads` but for its dq, which is rounded after the last one."""
        is_first, is_last = round is call.rounds[0], round is call.rounds[-1]
        num_tokens, step, dtype = q.size(1), self._q.chunk_tokens, q.dtype
        of_queries = self._q, final.dout, final.out, self._sums
        read, dout, out, sums = (Reader(x, in_order(num_tokens, step)) for x in of_queries)
        write = Writer(self.dq if is_last else self._sums)
        for tokens in tiles(num_tokens, step):  # all of them: the planner leaves some out
            of_chunk, lse = read.take(tokens), final.lse[..., tokens].contiguous()
            of_round = Final.of(dout.take(tokens), None, out.take(tokens), lse)
            dq = of_chunk.new_zeros(of_chunk.shape, dtype=grads.dk.dtype) if is_first else sums.take(tokens)
            added = Gradients(dq, grads.dk, grads.dv, fresh=grads.fresh and tokens.start == 0)
            choose.backward(call, round.of_queries(tokens), of_chunk, k, v, of_round, added)
            write.put(tokens, dq.to(dtype) if is_last else dq)
        write.close()
        if grads.rounded is not None:
            for rounded, x in zip(grads.rounded, grads[1:3], strict=True):
                rounded.copy_(x)


@dataclass(eq=False)
class PassChunk(Chunk):
    """Replays the layer with the results of its first n token-mixing calls and stops at call n + 1, whose inputs it
    stores: in `found` without a graph, in `made` with one. taken: the n results, (B, t, ...), of the chunk."""

    taken: list[Tensor]
    found: list[MixingCall] | None = None  # empty in the first chunk
    made: list[Tensor] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with super().running(), running_on(self):
            yield

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sequence: ShardedSequence, *, sinks: Tensor | None = None, **options: Any
    ) -> Tensor:
        self._check(q, k, sequence)

        def call_of(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Call:
            return _call_of(q, k, v, sequence, sinks, **options)

        inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
        return self._take(
            inputs, [True, True, True, False][: len(inputs)], functools.partial(AttentionCall, call_of=call_of)
        )

    def compute(self, recurrence: Recurrence, of_all: Callable[..., Tensor]) -> Tensor:
        has_tokens = [operand.tokens for operand in recurrence.operands]
        return self._take(recurrence.tensors, has_tokens, functools.partial(RecurrenceCall, call=of_all))

    def _take(
        self,
        inputs: list[Tensor],
        has_tokens: Sequence[bool],
        whole: Callable[[list[Tensor], Sequence[bool]], MixingCall],
    ) -> Tensor:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if number < len(self.taken):
            return self.taken[number]
        if self.found is None:
            self.made = inputs
            raise EndedError
        if not self.found:
            of_all = [
                x.new_empty(x.size(0), self.num_tokens, *x.shape[2:]) if of_tokens else x.detach()
                for x, of_tokens in zip(inputs, has_tokens, strict=True)
            ]
            self.found.append(whole(of_all, has_tokens))
        self.found[0].put(self.tokens, inputs)
        raise EndedError
