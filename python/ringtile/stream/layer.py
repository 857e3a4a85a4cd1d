"""A layer that runs on chunks of tokens: in both passes, only one chunk's intermediates, and keys and values, exist.

Its input, its output and their gradients are on the device, or wait in host memory (tiled/host.py).

Shape letters: B batch, S tokens, t tokens of a chunk, E hidden size.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ringtile.errors import RefusedError
from ringtile.recurrent.carried import Carried
from ringtile.stream.attend import (
    WHOLE,
    CausalChunk,
    Chunk,
    EndedError,
    KeyValueCache,
    LoneChunk,
    MixingCall,
    PassChunk,
)
from ringtile.tiled.host import HostCopies, HostTensor, Reader, Writer, empty_like, in_order
from ringtile.tiled.module_state import drawn_since, random_states
from ringtile.tiled.replay import Output, RandomState, Recomputation, Replay, as_tuple, run
from ringtile.tiled.tiles import tiles


@dataclass(eq=False)
class LayerArguments:
    """A layer's arguments besides its hidden states, flat: each with the dim of its tokens; None: it has none."""

    leaves: list[Any]
    dims: list[int | None]
    spec: Any  # the way back to (args, kwargs)

    @property
    def differentiable(self) -> list[int]:
        """Return the indices of tensors that need a gradient."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def on(self, tokens: slice, instead: dict[int, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments on a chunk, some leaves replaced by those of the chunk."""
        leaves = [instead[i] if i in instead else self.cut(leaf, i, tokens) for i, leaf in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def cut(self, leaf: Any, index: int, tokens: slice) -> Any:
        dim = self.dims[index]
        return leaf if dim is None else leaf.narrow(dim, tokens.start, tokens.stop - tokens.start)


def run_chunks(
    name: str,
    module: nn.Module,
    forward: Callable[..., Any],
    x: Tensor,
    rest: LayerArguments,
    tokens: int,
    *,
    one_pass: bool,
    inside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    copies: HostCopies | None = None,
) -> Output:
    """forward(module, x, *rest), at most so many tokens at a time: the same outputs and gradients.

    x (B, S, E). Its attention must be `Chunk.attend`; everything else must process each token independently. An
    output, or each of a tuple, must be (B, S, ...) or flat, (B*S, ...), or None. name: of the layer, in errors.
    one_pass: no query attends a later chunk. inside: entered around both passes. copies: the first output waits in host
    memory, as x may do, and so do their gradients; None: on the device.

    RefusedError: an output is none of these, the layer does not attend, or attends a later chunk in one pass.
    """
    kind = _OnePass if one_pass else _Passes
    return run(name, kind(name, Replay(module, forward, x), x, rest, tokens, inside, copies), x)


def run_tokens(
    name: str,
    module: nn.Module,
    forward: Callable[..., Any],
    x: Tensor,
    tokens: int,
    copies: HostCopies | None = None,
) -> Output:
    """`run_chunks` of a module that takes x alone, (B, S) or (B, S, E), and processes each token independently."""
    rest = LayerArguments([], [], pytree.tree_structure(((), {})))
    return run(
        name, _TokenwiseChunks(name, Replay(module, forward, x), x, rest, tokens, contextlib.nullcontext, copies), x
    )


class _Chunks(abc.ABC):
    """One call of a streamed layer, from its forward to its backward."""

    def __init__(
        self,
        name: str,
        replay: Replay,
        x: Tensor,
        rest: LayerArguments,
        tokens: int,
        inside: Callable[[], AbstractContextManager[None]],
        copies: HostCopies | None,
    ) -> None:
        self.name, self.replay, self.rest, self.inside, self.copies = name, replay, rest, inside, copies
        self.batch, self.seq_len = x.shape[:2]
        self.tokens, self.order = tokens, in_order(x.size(1), tokens)  # all chunks: the planner leaves some out
        self.extra = rest.differentiable
        self.weights: tuple[Tensor | None, ...] = (*(rest.leaves[i] for i in self.extra), *replay.weights)
        self.random_states: dict[int, RandomState] = {}  # before each chunk, by its first token
        self.are_flat: list[bool] = []  # the outputs, (B*S, ...)

    def forward(self, x: Tensor, *weights: Tensor | None) -> Output:
        outputs: list[Writer | None] = []
        with self.inside():
            is_tuple = self._forward(x, outputs)
        filled = [None if out is None else out.close() for out in outputs]
        whole: list[Any] = [
            out.flatten(0, 1) if flat and out is not None else out
            for out, flat in zip(filled, self.are_flat, strict=True)
        ]
        return tuple(whole) if is_tuple else whole[0]

    @abc.abstractmethod
    def _forward(self, x: Tensor, outputs: list[Writer | None]) -> bool:
        """Fills the outputs. Whether the layer returns a tuple."""

    # A separate call per chunk frees the chunk's tensors before the next one starts.
    def _run(self, chunk: Chunk, x: Tensor, outputs: list[Writer | None]) -> bool:
        """Fills one chunk's rows of the outputs, which the first chunk allocates. Whether the layer returns a tuple."""
        tokens = chunk.tokens
        args, kwargs = self.rest.on(tokens, {})
        with chunk.running():
            result = self.replay.call(x.clone(), *args, **kwargs)  # the layer may modify it
        mixes = isinstance(chunk, LoneChunk) or (isinstance(chunk, CausalChunk) and chunk.carried.after)
        if chunk.num_calls == 0 and not mixes:
            raise self._refused(tokens, 0)
        rows = self._rows(result, tokens)
        if not outputs:
            self.are_flat = [out is not of_chunk for out, of_chunk in zip(as_tuple(result), rows, strict=True)]
            outputs += [None if y is None else Writer(self._empty(index, y)) for index, y in enumerate(rows)]
        for out, of_chunk in zip(outputs, rows, strict=True):
            if out is not None and of_chunk is not None:
                out.put(tokens, of_chunk)
        return isinstance(result, tuple)

    def _empty(self, index: int, of_chunk: Tensor) -> Tensor:
        """Room for an output of all tokens."""
        shape = (self.batch, self.seq_len, *of_chunk.shape[2:])
        if self.copies is None or index > 0 or self.are_flat[0] or not of_chunk.is_floating_point():
            return of_chunk.new_empty(shape)
        return HostTensor.empty(of_chunk, shape, self.copies)

    def _refused(self, tokens: slice, num_calls: int) -> RefusedError:
        return RefusedError(
            f"{self.name} attends {num_calls} times through transformers' AttentionInterface in tokens {tokens.start}.."
            f"{tokens.stop}; expected at least once, and as often in all chunks: {WHOLE}"
        )

    def _restore(self, tokens: slice) -> None:
        """Random numbers go on as before that chunk. The planner leaves out chunks that are like others."""
        if (state := self.random_states.get(tokens.start)) is not None:
            state.restore()

    def _end_at_call(self, call: Callable[..., Any], chunk: Chunk, x: Tensor, inputs: dict[int, Tensor]) -> None:
        args, kwargs = self.rest.on(chunk.tokens, inputs)
        with contextlib.suppress(EndedError), chunk.running():
            call(x.clone(), *args, **kwargs)
            raise self._refused(chunk.tokens, chunk.num_calls)

    def backward(
        self, douts: Sequence[Tensor | None], needed: Sequence[bool], x: Tensor, *weights: Any
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        num_extra = len(self.extra)
        grads = _Grads(
            [
                None if dout is None else self._by_rows(dout, self.seq_len) if flat else dout
                for dout, flat in zip(douts, self.are_flat, strict=True)
            ],
            Writer(empty_like(x)) if needed[0] else None,
            {i: torch.zeros_like(self.rest.leaves[i]) for i, need in zip(self.extra, needed[1:], strict=False) if need},
        )
        with self.replay.again(weights[num_extra:], self.random_states[0]) as again, self.inside():
            self._backward(again, x, grads)
        dx = None if grads.dx is None else grads.dx.close()
        return dx, [*(grads.dextra.get(i) for i in self.extra), *again.grads]

    @abc.abstractmethod
    def _backward(self, again: Recomputation, x: Tensor, grads: _Grads) -> None:
        """Adds to the gradients."""

    def _inputs(self, tokens: slice, x: Tensor, grads: _Grads) -> tuple[Tensor, dict[int, Tensor]]:
        """Return a chunk's leaves: x, and the arguments that need a gradient, by index."""
        cut = {i: self.rest.cut(self.rest.leaves[i], i, tokens) for i in grads.dextra}
        return x.detach().requires_grad_(grads.dx is not None), {
            i: leaf.detach().requires_grad_() for i, leaf in cut.items()
        }

    def _differentiate(
        self,
        again: Recomputation,
        outputs: Sequence[Tensor | None],
        douts: Sequence[Tensor | None],
        tokens: slice,
        leaves: tuple[Tensor, dict[int, Tensor]],
        grads: _Grads,
        besides: Sequence[Tensor] = (),
        before: Tensor | None = None,
    ) -> list[Tensor | None]:
        """Adds a chunk's part to all gradients. Returns those of what is besides. before: the part of dx so far."""
        of_x = [] if grads.dx is None else [leaves[0]]
        found = again.differentiate(outputs, douts, [*of_x, *leaves[1].values(), *besides])
        if grads.dx is not None:
            dx = found.pop(0)
            if before is not None:
                dx = before if dx is None else before + dx
            grads.dx.put(tokens, torch.zeros_like(leaves[0]) if dx is None else dx)
        for i in leaves[1]:
            if (grad := found.pop(0)) is not None:
                self.rest.cut(grads.dextra[i], i, tokens).add_(grad)
        return found

    def _backward_chunk(
        self, chunk: Chunk, again: Recomputation, x: Tensor, douts: Sequence[Reader | None], grads: _Grads
    ) -> list[Tensor | None]:
        """Runs a chunk again and differentiates it. Returns the gradients of what it takes besides: the states of
        recurrences, or in several passes what calls gave."""
        leaves, tokens = self._inputs(chunk.tokens, x, grads), chunk.tokens
        args, kwargs = self.rest.on(tokens, leaves[1])
        with chunk.running():
            result = again(leaves[0].clone(), *args, **kwargs)
        of_chunk = [None if dout is None else dout.take(tokens) for dout in douts]
        rows = self._rows(result, tokens)
        taken: Sequence[Tensor] = ()
        if isinstance(chunk, PassChunk):
            taken = chunk.taken
        elif isinstance(chunk, CausalChunk):
            taken = chunk.carried.before
            if grads.dstates:  # none of the last chunk
                rows, of_chunk = [*rows, *chunk.carried.after], [*of_chunk, *grads.dstates]
        return self._differentiate(again, rows, of_chunk, tokens, leaves, grads, taken)

    def _rows(self, result: Any, tokens: slice) -> list[Tensor | None]:
        """Return the outputs on a chunk, (B, t, ...) each: those that are so already themselves, others in that
        shape."""
        shape, rows = (self.batch, tokens.stop - tokens.start), list[Tensor | None]()
        for index, out in enumerate(as_tuple(result)):
            if out is None or (isinstance(out, Tensor) and out.shape[:2] == shape):
                rows.append(out)
            elif isinstance(out, Tensor) and out.dim() > 0 and out.size(0) == shape[0] * shape[1]:
                rows.append(self._by_rows(out, shape[1]))
            else:
                got = tuple(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
                raise RefusedError(
                    f"{self.name}: output {index} is {got} for a chunk of {shape} tokens; expected one row for each "
                    f"token, {(*shape, '...')} or ({shape[0] * shape[1]}, ...): {WHOLE}"
                )
        return rows

    def _by_rows(self, x: Tensor, num_tokens: int) -> Tensor:
        """Return (B*t, ...) -> (B, t, ...)"""
        return x.view(self.batch, num_tokens, *x.shape[1:])


class _TokenwiseChunks(_Chunks):
    """No token attends another."""

    def _forward(self, x: Tensor, outputs: list[Writer | None]) -> bool:
        read, is_tuple = Reader(x, self.order), False
        for tokens in tiles(self.seq_len, self.tokens):
            self.random_states[tokens.start] = RandomState(x)
            is_tuple = self._run(LoneChunk(tokens, self.seq_len), read.take(tokens), outputs)
        return is_tuple

    def _backward(self, again: Recomputation, x: Tensor, grads: _Grads) -> None:
        read, douts = Reader(x, self.order), grads.readers(self.order)
        for tokens in tiles(self.seq_len, self.tokens):
            self._restore(tokens)
            self._backward_chunk(LoneChunk(tokens, self.seq_len), again, read.take(tokens), douts, grads)


class _OnePass(_Chunks):
    """No query attends a later chunk."""

    num_calls = 0  # of attention, in a chunk

    def _forward(self, x: Tensor, outputs: list[Writer | None]) -> bool:
        keys: list[KeyValueCache] = []
        # With which recurrences begin, by the chunk's first token: kept for the backward, where it is another order.
        self.states: dict[int, list[Tensor]] = {0: []}
        read, is_tuple = Reader(x, self.order), False
        for tokens in tiles(self.seq_len, self.tokens):
            self.random_states[tokens.start] = RandomState(x)
            chunk = CausalChunk(tokens, self.seq_len, "forward", keys, self._carried(tokens))
            is_tuple = self._run(chunk, read.take(tokens), outputs)
            if chunk.num_calls != len(keys):
                raise self._refused(tokens, chunk.num_calls)
            self.states[tokens.stop] = chunk.carried.after
        self.num_calls = len(keys)
        return is_tuple

    def _carried(self, tokens: slice, *, requires_grad: bool = False) -> Carried:
        states = self.states.get(tokens.start, [])  # the planner leaves out chunks that are like others
        return Carried(tokens, [x.detach().requires_grad_() for x in states] if requires_grad else states)

    def _backward(self, again: Recomputation, x: Tensor, grads: _Grads) -> None:
        keys: list[KeyValueCache] = []
        with torch.no_grad():
            read = Reader(x, self.order)
            for tokens in tiles(self.seq_len, self.tokens) if self.num_calls else ():
                self._restore(tokens)
                chunk = CausalChunk(tokens, self.seq_len, "keys", keys, self._carried(tokens), self.num_calls)
                self._end_at_call(again, chunk, read.take(tokens), {})
        last = (self.seq_len - 1) // self.tokens * self.tokens
        read, douts = Reader(x, self.order[::-1]), grads.readers(self.order[::-1])
        for reverse in tiles(self.seq_len, self.tokens):
            begin = last - reverse.start
            tokens = slice(begin, min(begin + self.tokens, self.seq_len))
            self._restore(tokens)
            chunk = CausalChunk(tokens, self.seq_len, "backward", keys, self._carried(tokens, requires_grad=True))
            grads.dstates = self._backward_chunk(chunk, again, read.take(tokens), douts, grads)


class _Passes(_Chunks):
    """Any mask, and ranks that share the sequence."""

    num_calls = 0  # that mix tokens

    def _forward(self, x: Tensor, outputs: list[Writer | None]) -> bool:
        before, outs, is_tuple = random_states(), list[Tensor](), False
        while True:
            found, read = list[MixingCall](), Reader(x, self.order)
            for tokens in tiles(self.seq_len, self.tokens):
                self.random_states[tokens.start] = RandomState(x)
                chunk = PassChunk(tokens, self.seq_len, [out[:, tokens] for out in outs], found)
                with contextlib.suppress(EndedError):
                    is_tuple = self._run(chunk, read.take(tokens), outputs)
                if (found and outputs) or chunk.num_calls < len(outs):
                    raise self._refused(tokens, chunk.num_calls)
            if not found:
                self.num_calls = len(outs)
                return is_tuple
            if drawn_since(before):  # the next pass would draw others
                raise RefusedError(f"{self.name} draws random numbers before its attention: {WHOLE}")
            outs.append(found[0].forward())
            del found, chunk

    def _backward(self, again: Recomputation, x: Tensor, grads: _Grads) -> None:
        wholes, outs = list[MixingCall](), list[Tensor]()
        for _ in range(self.num_calls):
            wholes.append(self._whole(again, x, outs))
            outs.append(wholes[-1].forward(self.copies, self.tokens))
        douts = [Writer(empty_like(out)) for out in outs]
        self._backward_pass(again, x, outs, douts, grads, None, ())
        while wholes:
            of_inputs, has_tokens = wholes[-1].backward(douts.pop().close()), wholes.pop().has_tokens
            outs.pop()
            self._backward_pass(again, x, outs, douts, grads, of_inputs, has_tokens)

    def _whole(self, again: Recomputation, x: Tensor, outs: list[Tensor]) -> MixingCall:
        """Run the next call: a pass without gradients."""
        found, read, taken = list[MixingCall](), Reader(x, self.order), [Reader(out, self.order) for out in outs]
        with torch.no_grad():
            for tokens in tiles(self.seq_len, self.tokens):
                chunk = PassChunk(tokens, self.seq_len, [out.take(tokens) for out in taken], found)
                self._end_at_call(again, chunk, read.take(tokens), {})
        return found[0]

    def _backward_pass(
        self,
        again: Recomputation,
        x: Tensor,
        outs: list[Tensor],
        douts: list[Writer],
        grads: _Grads,
        of_inputs: list[Tensor | None] | None,
        has_tokens: Sequence[bool],
    ) -> None:
        """Run a pass with gradients. of_inputs: those of the call at which it ends; None: it is the last pass."""
        read, taken = Reader(x, self.order), [Reader(out, self.order) for out in outs]
        of_layer = grads.readers(self.order) if of_inputs is None else []
        so_far = [Reader(dout.close(), self.order) for dout in douts] if of_inputs is not None else []
        of_x = None if of_inputs is None or grads.dx is None else Reader(grads.dx.close(), self.order)
        of_call = [
            Reader(y, self.order) if y is not None and of_tokens else y
            for y, of_tokens in zip(of_inputs or (), has_tokens, strict=True)
        ]
        for tokens in tiles(self.seq_len, self.tokens):
            chunk = PassChunk(tokens, self.seq_len, [y.take(tokens).detach().requires_grad_() for y in taken])
            if of_inputs is None:
                self._restore(tokens)
                found = self._backward_chunk(chunk, again, read.take(tokens), of_layer, grads)
            else:
                of_chunk = [
                    y.take(tokens) if isinstance(y, Reader) else y if tokens.start == 0 else None for y in of_call
                ]
                before = None if of_x is None else of_x.take(tokens)
                found = self._backward_to_call(chunk, of_chunk, again, read.take(tokens), before, grads)
            for index, dout in enumerate(douts):
                dtaken = found[index]
                if so_far:
                    earlier = so_far[index].take(tokens)
                    dtaken = earlier if dtaken is None else earlier + dtaken
                dout.put(tokens, torch.zeros_like(chunk.taken[index]) if dtaken is None else dtaken)
            del chunk, found

    def _backward_to_call(
        self,
        chunk: PassChunk,
        of_chunk: Sequence[Tensor | None],
        again: Recomputation,
        x: Tensor,
        before: Tensor | None,
        grads: _Grads,
    ) -> list[Tensor | None]:
        """Go back through a chunk to its next call. of_chunk: the gradients of what that takes."""
        leaves = self._inputs(chunk.tokens, x, grads)
        self._end_at_call(again, chunk, leaves[0], leaves[1])
        return self._differentiate(again, chunk.made, of_chunk, chunk.tokens, leaves, grads, chunk.taken, before)


@dataclass(eq=False)
class _Grads:
    """Gradients of all tokens: of the outputs (B, S, ...), and those to be found."""

    douts: list[Tensor | None]
    dx: Writer | None
    dextra: dict[int, Tensor]  # by the index of the leaf
    dstates: list[Tensor | None] = field(default_factory=list)  # with which recurrences end on the chunk at work

    def readers(self, order: Sequence[slice]) -> list[Reader | None]:
        """Return the readers of the outputs' gradients."""
        return [None if dout is None else Reader(dout, order) for dout in self.douts]
