"""Tensors of all tokens that wait in host memory, of which a device holds a chunk of tokens at a time.

    reading    chunk      |  0  |  1  |  2  |  3  |     while a chunk is in use, the next one comes to the device
               to device | 0 | 1  |  2  |  3  |
    writing    chunk      |  0  |  1  |  2  |  3  |     and the one before goes to the host
               to host          |  0  |  1  |  2  | 3 |

Only the device waits for copies; the host never does.

Shape letters: B batch, S tokens, t tokens of a chunk, T rows, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ringtile.errors import RefusedError
from ringtile.tiled.tiles import tiles


class HostCopies(Protocol):
    """Copies between a device and host memory, in the order they are started, concurrently with compute."""

    def takes(self, tensor: Tensor) -> bool:
        """Return whether the tensor is on a device with memory of its own."""

    def empty(self, like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """Host memory for a copy of the tensor, or for one of its dtype and another shape."""

    def begin(self, source: Tensor, target: Tensor) -> Any:
        """Starts a copy after all work queued so far, and returns its ticket. Until that is waited for, both must stay,
        the source unmodified and the target unread."""

    def wait(self, ticket: Any) -> None:
        """Orders all later device work, and reuse of memory freed later, after that copy and all before it."""


class PinnedCopies:
    """Pinned memory, and one side stream per device; on a CPU, whose memory is the host's, a plain copy."""

    def __init__(self) -> None:
        self._side: dict[torch.device, torch.cuda.Stream] = {}

    def takes(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def empty(self, like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        if shape is None:
            return torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)
        return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)

    def begin(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        if not (source.is_cuda or target.is_cuda):
            target.copy_(source)
            return None
        device = source.device if source.is_cuda else target.device
        if device not in self._side:
            self._side[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side = self._side[device]
        # After the current stream's work: it wrote the source, or last used the target.
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = side.record_event()
            return event

    def wait(self, ticket: torch.cuda.Event | None) -> None:
        if ticket is not None:
            torch.cuda.current_stream(ticket.device).wait_event(ticket)


_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)
_NEW = (_aten.new_empty.default, _aten.new_zeros.default)  # of its dtype and device


class HostTensor(Tensor):
    """A tensor of a device whose numbers wait in host memory: `Reader` and `Writer` move chunks of it.

    Autograd, hooks and code that asks for shape, dtype or device see an ordinary tensor. An op that needs its numbers
    gets all of them, on the device. RefusedError: one that would write to it.
    """

    host: Tensor  # contiguous
    copies: HostCopies
    chunk_tokens = 0  # of queries, which attention takes chunk by chunk: tokens of one

    @staticmethod
    def __new__(cls, host: Tensor, device: torch.device, copies: HostCopies) -> HostTensor:
        made: HostTensor = Tensor._make_wrapper_subclass(cls, host.shape, dtype=host.dtype, device=device)
        return made

    def __init__(self, host: Tensor, device: torch.device, copies: HostCopies) -> None:
        self.host, self.copies = host, copies

    @classmethod
    def empty(cls, like: Tensor, shape: Sequence[int], copies: HostCopies) -> HostTensor:
        """Return memory of like's dtype and device."""
        return cls(copies.empty(like, shape), like.device, copies)

    def whole(self) -> Tensor:
        """Return all tokens, on the device."""
        self.check_unwritten()
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self.copies.wait(self.copies.begin(self.host, out))
        return out

    def check_unwritten(self) -> None:
        """RefusedError: somebody wrote to a view of it, which was of a copy on the device."""
        if self._version > 0:
            raise _written(tuple(self.shape))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SAME:
            return cls(args[0].host, args[0].device, args[0].copies)
        if func is _aten.view.default:
            return cls(args[0].host.view(args[1]), args[0].device, args[0].copies)
        if func in _NEW:
            return func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.is_write and isinstance(value, cls):
                    raise _written(tuple(value.shape))
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs))
        return func(*args, **kwargs)


def _written(shape: tuple[int, ...]) -> RefusedError:
    return RefusedError(
        f"activation_offloading: hidden states {shape} between streamed layers, which wait in host memory, were "
        "modified in place; expected them to stay unmodified: write x = x + y instead of x += y"
    )


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: HostCopies) -> Tensor:
        out, source = HostTensor.empty(x, x.shape, copies), x.detach().contiguous()
        copies.wait(copies.begin(source, out.host))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return dout, None


def to_host(x: Tensor, copies: HostCopies) -> Tensor:
    """x in host memory; itself, if it is there."""
    out: Tensor = x if isinstance(x, HostTensor) else _ToHost.apply(x, copies)  # type: ignore[no-untyped-call]
    return out


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory as torch.empty_like does; in host memory, if x is there, of its dtype."""
    return HostTensor.empty(x, x.shape, x.copies) if isinstance(x, HostTensor) else torch.empty_like(x, dtype=dtype)


def in_order(num_tokens: int, step: int) -> list[slice]:
    """Yield all chunks of so many tokens."""
    return [*tiles(num_tokens, step)]


class Reader:
    """Chunks of x (B, S, ...), in that order: of a HostTensor the next one comes while one is in use."""

    def __init__(self, x: Tensor, order: Sequence[slice]) -> None:
        self.x = x
        self._following = dict(zip((tokens.start for tokens in order), order[1:], strict=False))
        self._next: tuple[slice, Tensor, Any] | None = None
        if isinstance(x, HostTensor):
            x.check_unwritten()

    def take(self, tokens: slice) -> Tensor:
        """Return (B, t, ...) on the device: a view of x, or memory of its own."""
        if not isinstance(self.x, HostTensor):
            return self.x[:, tokens]
        if self._next is None or self._next[0] != tokens:  # the first, or the planner has left some out
            self.close()
            self._next = self._begin(self.x, tokens)
        _, chunk, ticket = self._next
        self.x.copies.wait(ticket)
        following = self._following.get(tokens.start)
        self._next = None if following is None else self._begin(self.x, following)
        return chunk

    def _begin(self, x: HostTensor, tokens: slice) -> tuple[slice, Tensor, Any]:
        shape = (x.size(0), tokens.stop - tokens.start, *x.shape[2:])
        chunk, ticket = torch.empty(shape, dtype=x.dtype, device=x.device), None
        for host, row in zip(x.host, chunk, strict=True):
            ticket = x.copies.begin(host[tokens], row)
        return tokens, chunk, ticket

    def close(self) -> None:
        """Forgets the chunk that is on its way."""
        if self._next is not None and isinstance(self.x, HostTensor):
            self.x.copies.wait(self._next[2])
        self._next = None

    def __del__(self) -> None:
        self.close()


class Writer:
    """Fills out (B, S, ...) chunk by chunk: of a HostTensor, one goes to the host while the next is made."""

    def __init__(self, out: Tensor) -> None:
        self.out = out
        self._last: tuple[Tensor, Any] | None = None

    def put(self, tokens: slice, chunk: Tensor) -> None:
        """chunk (B, t, ...), to stay unmodified."""
        if not isinstance(self.out, HostTensor):
            self.out[:, tokens] = chunk
            return
        chunk, ticket = chunk.detach().contiguous(), None
        for row, host in zip(chunk, self.out.host, strict=True):
            ticket = self.out.copies.begin(row, host[tokens])
        self.close()
        self._last = chunk, ticket

    def close(self) -> Tensor:
        """Returns out, filled."""
        if self._last is not None and isinstance(self.out, HostTensor):
            self.out.copies.wait(self._last[1])
        self._last = None
        return self.out

    def __del__(self) -> None:
        self.close()


class _Spans:
    """Map tiles of selected rows, int64 (R,), ascending, to spans of tokens 0..T-1: each ends at the next tile's first
    row, in parts of at most step tokens, as a tile has rows."""

    def __init__(self, num_tokens: int, rows: Tensor, step: int) -> None:
        starts = range(0, max(rows.numel(), 1), step)
        self.rows, self.step, self.is_all = rows, step, rows.numel() == num_tokens
        edges = [*starts] if self.is_all else [0, *rows[list(starts[1:])].tolist()]
        self.parts = [
            [slice(begin + part.start, begin + part.stop) for part in tiles(end - begin, step)]
            for begin, end in zip(edges, [*edges[1:], num_tokens], strict=True)
        ]
        self.order = [part for parts in self.parts for part in parts]

    def of(self, tile: slice) -> Iterator[tuple[slice, Tensor | None]]:
        """Return each part of a tile, and where in it the tile's rows are, int64 (t,): its length for those that are in
        another. None: they are all of it."""
        for part in self.parts[tile.start // self.step]:
            length = part.stop - part.start
            if self.is_all:
                yield part, None
            else:
                places = self.rows[tile] - part.start
                yield part, places.where((places >= 0) & (places < length), length)


class RowReader:
    """Some rows of x (T, E), int64 (R,), ascending, tile by tile of so many rows."""

    def __init__(self, x: Tensor, rows: Tensor, tile_tokens: int) -> None:
        self.x, self.rows = x, rows
        if isinstance(x, HostTensor):
            self._spans = _Spans(x.size(0), rows, tile_tokens)
            self._read = Reader(x.view(1, *x.shape), self._spans.order)

    def take(self, tile: slice) -> Tensor:
        """Return (t, E), on the device."""
        if not isinstance(self.x, HostTensor):
            return self.x[self.rows[tile]]
        out: Tensor | None = None
        for part, places in self._spans.of(tile):
            chunk = self._read.take(part)[0]
            if places is None:
                return chunk
            if out is None:
                out = chunk.new_empty(places.numel(), chunk.size(1))
            if chunk.size(0):
                is_here = (places < chunk.size(0))[:, None]
                out = torch.where(is_here, chunk[places.clamp(max=chunk.size(0) - 1)], out)
        assert out is not None
        return out


class RowWriter:
    """Fills such rows of out (T, E), and all others with zeros."""

    def __init__(self, out: Tensor, rows: Tensor, tile_tokens: int) -> None:
        self.out, self.rows = out, rows
        if isinstance(out, HostTensor):
            self._spans = _Spans(out.size(0), rows, tile_tokens)
            self._write = Writer(out.view(1, *out.shape))
        else:
            out.zero_()

    def put(self, tile: slice, values: Tensor) -> None:
        """values (t, E)"""
        if not isinstance(self.out, HostTensor):
            self.out[self.rows[tile]] = values
            return
        for part, places in self._spans.of(tile):
            chunk = values
            if places is not None:  # rows of other parts go behind the end
                chunk = values.new_zeros(part.stop - part.start + 1, values.size(1))
                chunk[places] = values
                chunk = chunk[:-1]
            self._write.put(part, chunk[None])

    def close(self) -> Tensor:
        """Returns out, filled."""
        if isinstance(self.out, HostTensor):
            self._write.close()
        return self.out


def multiply_(x: Tensor, factor: Tensor, tile_tokens: int) -> None:
    """x (T, E) times one number."""
    if not isinstance(x, HostTensor):
        x.mul_(factor)
        return
    rows = x.view(1, *x.shape)
    order = in_order(x.size(0), tile_tokens)
    read, write = Reader(rows, order), Writer(rows)
    for tokens in order:
        write.put(tokens, read.take(tokens).mul_(factor))
    write.close()
