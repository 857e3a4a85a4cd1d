"""A layer that runs on chunks of tokens: in both passes, only one chunk's intermediates, and keys and values, exist.

Shape letters: B batch, S tokens, t tokens of a chunk, E hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ringtile.errors import RefusedError
from ringtile.stream.attend import WHOLE, Chunk, Keys, KeysMadeError
from ringtile.tiled.replay import Again, Output, RandomState, Replay, as_tuple, run
from ringtile.tiled.tiles import tiles


@dataclass(eq=False)
class Rest:
    """A layer's arguments besides its hidden states, flat: each with the dim of its tokens; None: it has none."""

    leaves: list[Any]
    dims: list[int | None]
    spec: Any  # the way back to (args, kwargs)

    @property
    def differentiable(self) -> list[int]:
        """The indices of tensors that need a gradient."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def on(self, tokens: slice, instead: dict[int, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments on a chunk, some leaves replaced by such of the chunk."""
        leaves = [instead[i] if i in instead else self.cut(leaf, i, tokens) for i, leaf in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def cut(self, leaf: Any, index: int, tokens: slice) -> Any:
        dim = self.dims[index]
        return leaf if dim is None else leaf.narrow(dim, tokens.start, tokens.stop - tokens.start)


def run_chunks(name: str, module: nn.Module, forward: Callable[..., Any], x: Tensor, rest: Rest, tokens: int) -> Output:
    """forward(module, x, *rest), at most so many tokens at a time: the same outputs and gradients.

    x (B, S, E). Its attention must be `Chunk.attend`; everything else must process each token independently. An
    output, or each of a tuple, must be (B, S, ...) or flat, (B*S, ...), or None. name: of the layer, in errors.

    RefusedError: an output is none of these, the layer does not attend, or attends a later chunk.
    """
    return run(name, _Chunks(name, Replay(module, forward, x), x, rest, tokens), x)


class _Chunks:
    """One call of a streamed layer, from its forward to its backward."""

    def __init__(self, name: str, replay: Replay, x: Tensor, rest: Rest, tokens: int) -> None:
        self.name, self.replay, self.rest = name, replay, rest
        self.batch, self.seq_len = x.shape[:2]
        self.chunks = list(tiles(self.seq_len, tokens))
        self.extra = rest.differentiable
        self.weights: tuple[Tensor | None, ...] = (*(rest.leaves[i] for i in self.extra), *replay.weights)
        self.random_states: list[RandomState] = []  # before each chunk
        self.are_flat: list[bool] = []  # the outputs, (B*S, ...)
        self.num_calls = 0  # of attention, in a chunk

    def forward(self, x: Tensor, *weights: Tensor | None) -> Output:
        outputs: list[Any] = []
        keys: list[Keys] = []
        is_tuple = False
        for tokens in self.chunks:
            self.random_states.append(RandomState(x))
            is_tuple = self._forward_chunk(Chunk(tokens, self.seq_len, "forward", keys), x, outputs)
        self.num_calls = len(keys)
        whole = [out.flatten(0, 1) if flat else out for out, flat in zip(outputs, self.are_flat, strict=True)]
        return tuple(whole) if is_tuple else whole[0]

    # A separate call per chunk frees the chunk's tensors before the next one starts.
    def _forward_chunk(self, chunk: Chunk, x: Tensor, outputs: list[Any]) -> bool:
        """Fills one chunk's rows of the outputs, which the first chunk allocates. Whether the layer returns a tuple."""
        tokens = chunk.tokens
        args, kwargs = self.rest.on(tokens, {})
        with chunk.running():
            result = self.replay.call(x[:, tokens].clone(), *args, **kwargs)  # the layer may modify it
        if chunk.num_calls == 0 or chunk.num_calls != len(chunk.keys):
            raise RefusedError(
                f"{self.name} attends {chunk.num_calls} times through transformers' AttentionInterface in tokens "
                f"{tokens.start}..{tokens.stop}, and {len(chunk.keys)} times before; expected at least once, and the "
                f"same in all chunks: {WHOLE}"
            )
        rows = self._rows(result, tokens)
        if not outputs:
            self.are_flat = [out is not of_chunk for out, of_chunk in zip(as_tuple(result), rows, strict=True)]
            outputs += [None if y is None else y.new_empty(self.batch, self.seq_len, *y.shape[2:]) for y in rows]
        for out, of_chunk in zip(outputs, rows, strict=True):
            if of_chunk is not None:
                out[:, tokens] = of_chunk
        return isinstance(result, tuple)

    def backward(
        self, douts: Sequence[Tensor | None], needed: Sequence[bool], x: Tensor, *weights: Any
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        num_extra, keys = len(self.extra), list[Keys]()
        grads = _Grads(
            [
                None if dout is None else self._by_rows(dout, self.seq_len) if flat else dout
                for dout, flat in zip(douts, self.are_flat, strict=True)
            ],
            torch.empty_like(x) if needed[0] else None,
            {i: torch.zeros_like(self.rest.leaves[i]) for i, need in zip(self.extra, needed[1:], strict=False) if need},
        )
        with self.replay.again(weights[num_extra:], self.random_states[0]) as again:
            with torch.no_grad():
                for tokens, state in zip(self.chunks, self.random_states, strict=True):
                    state.restore()
                    self._make_keys(Chunk(tokens, self.seq_len, "keys", keys, self.num_calls), again, x)
            for tokens, state in zip(reversed(self.chunks), reversed(self.random_states), strict=True):
                state.restore()
                self._backward_chunk(Chunk(tokens, self.seq_len, "backward", keys), again, x, grads)
        return grads.dx, [*(grads.dextra.get(i) for i in self.extra), *again.grads]

    def _make_keys(self, chunk: Chunk, again: Again, x: Tensor) -> None:
        args, kwargs = self.rest.on(chunk.tokens, {})
        with contextlib.suppress(KeysMadeError), chunk.running():
            again(x[:, chunk.tokens].clone(), *args, **kwargs)

    def _backward_chunk(self, chunk: Chunk, again: Again, x: Tensor, grads: _Grads) -> None:
        """Runs one chunk again, adds its weight gradients to the sums and fills its rows of the other gradients."""
        tokens, inputs = chunk.tokens, {}
        for i in grads.dextra:
            inputs[i] = self.rest.cut(self.rest.leaves[i], i, tokens).detach().requires_grad_()
        x_chunk = x[:, tokens].detach().requires_grad_(grads.dx is not None)
        args, kwargs = self.rest.on(tokens, inputs)
        with chunk.running():
            result = again(x_chunk.clone(), *args, **kwargs)
        of_chunk = [None if dout is None else dout[:, tokens] for dout in grads.douts]
        of_x = [] if grads.dx is None else [x_chunk]
        found = again.differentiate(self._rows(result, tokens), of_chunk, [*of_x, *inputs.values()])
        if grads.dx is not None:
            dx = found.pop(0)
            grads.dx[:, tokens] = 0 if dx is None else dx
        for i, grad in zip(inputs, found, strict=True):
            if grad is not None:
                self.rest.cut(grads.dextra[i], i, tokens).add_(grad)

    def _rows(self, result: Any, tokens: slice) -> list[Tensor | None]:
        """The outputs on a chunk, (B, t, ...) each: those that are so already themselves, others in that shape."""
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
        """(B*t, ...) -> (B, t, ...)"""
        return x.view(self.batch, num_tokens, *x.shape[1:])


@dataclass(eq=False)
class _Grads:
    """Gradients of all tokens: of the outputs (B, S, ...), and those to be found."""

    douts: list[Tensor | None]
    dx: Tensor | None
    dextra: dict[int, Tensor]  # by the index of the leaf
