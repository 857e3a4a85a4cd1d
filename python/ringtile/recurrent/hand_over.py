"""States that travel along the pieces of a sharded sequence, from each rank to the one that goes on.

All ranks go through their pieces in the order of the sequence, and through the parts of a piece's heads in order. So a
piece waits only for what comes before it in the sequence, and no two ranks wait for each other. A state goes to the
next rank as soon as its part of the heads is done: with P parts, each of W ranks works in P of P + W - 1 steps. The
backward goes through the same steps the other way.

Shape letters: B batch, N local tokens, C channels, W width of a convolution.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringtile import arguments, derivatives, ops
from ringtile.errors import InputError
from ringtile.recurrent.documents import Documents, Piece
from ringtile.recurrent.resets import kept_after
from ringtile.transport.agreement import HeaderValue
from ringtile.transport.transport import Exchange, Transport

_PARTS_PER_RANK = 2  # of the heads: two keep W ranks at work for two thirds of the time or more


@dataclass(frozen=True)
class Operand:
    """A tensor that a recurrence takes. tokens: its dim 1 is that of the tokens. heads: its dim of heads, if any."""

    tensor: Tensor
    tokens: bool = True
    heads: int | None = 2

    def of(self, x: Tensor, piece: Piece, part: tuple[int, int, int]) -> Tensor:
        """The view of x, a tensor shaped like this one, for a piece and for a part of the heads."""
        if self.tokens:
            x = x[:, piece.tokens]
        begin, end, num_units = part
        if self.heads is None or num_units == 1:
            return x
        unit = x.size(self.heads) // num_units
        return x.narrow(self.heads, begin * unit, (end - begin) * unit)


@dataclass(frozen=True)
class Recurrence:
    """One call of a recurrence on this rank.

    compute: (tensors of the operands, resets, initial state or None) -> (out, final state), for any tokens and heads.
    num_units: what heads are parted into; the heads of an operand are a multiple of it.
    """

    op: str
    documents: Documents
    terms: Mapping[str, HeaderValue]
    compute: Callable[[list[Tensor], Tensor, Tensor | None], tuple[Tensor, Tensor]]
    operands: list[Operand]
    out: Operand  # a tensor of out's shape and dtype; never read
    state_shape: tuple[int, ...]  # (B, heads, ...)
    num_units: int

    @functools.cached_property
    def parts(self) -> list[tuple[int, int, int]]:
        """(begin, end, num_units) of each part of the heads."""
        world_size = self.documents.sequence.world_size
        num = min(self.num_units, _PARTS_PER_RANK * world_size) if world_size > 1 else 1
        bounds = [part * self.num_units // num for part in range(num + 1)]
        return [(begin, end, self.num_units) for begin, end in itertools.pairwise(bounds)]

    def state_of(self, part: tuple[int, int, int]) -> tuple[int, ...]:
        begin, end, num_units = part
        batch, num_heads, *rest = self.state_shape
        return (batch, num_heads // num_units * (end - begin), *rest)


def run(recurrence: Recurrence) -> Tensor:
    """out (B, N, ...) of the local tokens; a collective, differentiable."""
    documents = recurrence.documents
    tensors = [operand.tensor for operand in recurrence.operands]
    if documents.sequence.world_size == 1 and len(documents.pieces) == 1:
        return recurrence.compute(tensors, documents.resets, None)[0]
    out: Tensor = _Run.apply(recurrence, *tensors)  # type: ignore[no-untyped-call]
    return out


class _Run(torch.autograd.Function):
    """Keeps the inputs and the states that came in; the backward computes each part again."""

    @staticmethod
    def forward(ctx: Any, recurrence: Recurrence, *tensors: Tensor) -> Tensor:
        out, states = _forward(recurrence, tensors)
        ctx.save_for_backward(*tensors, *states.values())
        ctx.recurrence, ctx.keys = recurrence, list(states)
        ctx.number = recurrence.documents.sequence.transport.num_calls
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        recurrence: Recurrence = ctx.recurrence
        transport = recurrence.documents.sequence.transport
        with transport.telling(f"{recurrence.op} backward"):
            saved = ctx.saved_tensors
            tensors, states = saved[: -len(ctx.keys) or None], saved[len(saved) - len(ctx.keys) :]

            def compute() -> list[Tensor | None]:
                found = dict(zip(ctx.keys, states, strict=True))
                needed = ctx.needs_input_grad[1:]
                return _backward(recurrence, tensors, found, dout, needed, ctx.number)

            gradients = derivatives.gradients(recurrence.op, compute, dout, *saved, telling=transport.telling)
        return None, *gradients


_States = dict[tuple[int, int], Tensor]  # by piece and part


def _forward(recurrence: Recurrence, tensors: tuple[Tensor, ...]) -> tuple[Tensor, _States]:
    """out, and the states that pieces of this rank go on with."""
    documents, operands = recurrence.documents, recurrence.operands
    out = recurrence.out.tensor.new_empty(recurrence.out.tensor.shape)
    states: _States = {}
    with _call(recurrence, "forward", out, documents.sequence.data_of(*tensors)) as messages:
        resets = documents.resets
        for i, piece in enumerate(documents.pieces):
            for j, part in enumerate(recurrence.parts):
                if piece.source is not None:
                    like = out.new_empty(recurrence.state_of(part), dtype=ops.state_dtype(out.dtype))
                    states[i, j] = messages.receive(piece.source, j, like)
                given = [one.of(x, piece, part) for one, x in zip(operands, tensors, strict=True)]
                out_, state = recurrence.compute(given, resets[:, piece.tokens], states.get((i, j)))
                recurrence.out.of(out, piece, part).copy_(out_)
                if piece.target is not None:
                    messages.send(piece.target, j, state)
    return out, states


def _backward(
    recurrence: Recurrence,
    tensors: tuple[Tensor, ...],
    states: _States,
    dout: Tensor,
    needed: tuple[bool, ...],
    forward_call: int,
) -> list[Tensor | None]:
    documents, operands = recurrence.documents, recurrence.operands
    gradients = [
        x.new_zeros(x.shape, dtype=ops.state_dtype(x.dtype)) if need else None
        for x, need in zip(tensors, needed, strict=True)
    ]
    with _call(recurrence, "backward", dout, 0, forward_call) as messages:
        resets = documents.resets
        for i, piece in reversed(list(enumerate(documents.pieces))):
            for j, part in enumerate(recurrence.parts):
                dstate = None
                if piece.target is not None:
                    like = dout.new_empty(recurrence.state_of(part), dtype=ops.state_dtype(dout.dtype))
                    dstate = messages.receive(piece.target, j, like)
                with torch.enable_grad():
                    given = [
                        one.of(x, piece, part).detach().requires_grad_(need)
                        for one, x, need in zip(operands, tensors, needed, strict=True)
                    ]
                    state = states[i, j].detach().requires_grad_() if piece.source is not None else None
                    out, final = recurrence.compute(given, resets[:, piece.tokens], state)
                wanted = [x for x in (*given, state) if x is not None and x.requires_grad]
                outputs = [(out, recurrence.out.of(dout, piece, part)), (final, dstate)]
                known = [(x, dx) for x, dx in outputs if dx is not None and x.requires_grad]  # padding has no graph
                found = iter(_gradients(known, wanted))
                for one, total, need in zip(operands, gradients, needed, strict=True):
                    if need and total is not None and (gradient := next(found)) is not None:
                        one.of(total, piece, part).add_(gradient)
                if piece.source is not None and state is not None:
                    gradient = next(found)
                    messages.send(piece.source, j, torch.zeros_like(state) if gradient is None else gradient)
    return [None if total is None else total.to(x.dtype) for total, x in zip(gradients, tensors, strict=True)]


def _gradients(outputs: list[tuple[Tensor, Tensor]], wanted: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Of the wanted tensors, from the outputs and their gradients."""
    if not outputs:
        return (None,) * len(wanted)
    of_outputs, incoming = zip(*outputs, strict=True)
    return torch.autograd.grad(of_outputs, wanted, incoming, allow_unused=True)


# ---- messages -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Messages:
    """Those of one call: at most one between two neighbouring pieces, for each part."""

    transport: Transport
    kept: dict[int, Tensor] = field(default_factory=dict)  # for the next piece, if it is of this rank too, by part
    sent: list[Exchange] = field(default_factory=list)
    arriving: list[Exchange] = field(default_factory=list)

    def send(self, rank: int, part: int, state: Tensor) -> None:
        if rank == self.transport.rank:
            self.kept[part] = state
        else:
            self.sent.append(self.transport.start({rank: state.contiguous()}, {}, f"a state for rank {rank}"))

    def start_receiving(self, rank: int, part: int, like: Tensor) -> Tensor:
        """A tensor like `like`, which may be it; it holds what was sent after `wait`."""
        if rank == self.transport.rank:
            return self.kept.pop(part)
        self.arriving.append(self.transport.start({}, {rank: like}, f"the state of rank {rank}"))
        return like

    def wait(self) -> None:
        """For all that is arriving, in the order in which it was sent."""
        while self.arriving:
            self.arriving.pop(0).wait()

    def receive(self, rank: int, part: int, like: Tensor) -> Tensor:
        state = self.start_receiving(rank, part, like)
        self.wait()
        return state


@contextlib.contextmanager
def _call(
    recurrence: Recurrence | Halos, direction: str, x: Tensor, data: int, forward_call: int = 0
) -> Iterator[_Messages]:
    """Agrees with the other ranks that they make the same call, and waits at the end for what was sent."""
    sequence = recurrence.documents.sequence
    transport = sequence.transport
    op = f"{recurrence.op} {direction}"
    messages = _Messages(transport)
    if transport.world_size == 1:
        yield messages
        return
    with transport.telling(op):
        transport.check_device(x.device)
        layout_digest, mask_digest = sequence.digests
    terms = {**recurrence.terms, "layout digest": layout_digest, "mask digest": mask_digest}
    with transport.call(op, terms, x.device, forward_call=forward_call, data=data):
        yield messages
        messages.wait()
        for exchange in messages.sent:
            exchange.wait()


# ---- inputs of a convolution --------------------------------------------------------------------


@dataclass(frozen=True)
class Halos:
    """The inputs that each piece needs of the tokens before it: W - 1 tokens, as a state of its own."""

    op: str
    documents: Documents
    terms: Mapping[str, HeaderValue]
    before: int  # W - 1

    def of(self, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """x (B, N, C) -> x, to be used instead, so that a rank that only sends takes part in the backward too; and for
        each piece (B, W - 1, C) in the state dtype, or None where no document reaches into it."""
        x, *found = _Halos.apply(self, x)  # type: ignore[no-untyped-call]
        halos = iter(found)
        return x, [None if piece.source is None else next(halos) for piece in self.documents.pieces]

    def is_long(self, piece: Piece) -> bool:
        """Whether a piece holds all that the next one needs, so that it need not wait for its own halo."""
        return piece.length >= self.before


class _Halos(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halos: Halos, x: Tensor) -> tuple[Tensor, ...]:
        documents, before, dtype = halos.documents, halos.before, ops.state_dtype(x.dtype)
        resets = documents.resets
        received: list[Tensor] = []
        with _call(halos, "forward", x, documents.sequence.data_of(x)) as messages:
            for piece in documents.pieces:
                halo = None
                if piece.source is not None:
                    like = x.new_empty((x.size(0), before, x.size(2)), dtype=dtype)
                    halo = messages.start_receiving(piece.source, 0, like)
                    received.append(halo)
                if piece.target is not None:
                    own = x[:, piece.tokens][:, -before:].to(dtype)
                    if not halos.is_long(piece):
                        messages.wait()
                        earlier = own.new_zeros(x.size(0), before, x.size(2)) if halo is None else halo
                        own = torch.cat([earlier[:, piece.length :], own], dim=1)
                    kept = kept_after(resets[:, piece.tokens], before)[..., None].to(x.device)
                    messages.send(piece.target, 0, torch.where(kept, own, 0))
        ctx.halos, ctx.number = halos, documents.sequence.transport.num_calls
        return (x.view_as(x), *received)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, *dhalos: Tensor) -> tuple[None, Tensor | None]:
        halos: Halos = ctx.halos
        transport = halos.documents.sequence.transport
        with transport.telling(f"{halos.op} backward"):
            (total,) = derivatives.gradients(
                halos.op,
                lambda: (_halos_backward(halos, dx, dhalos, ctx.number),),
                *(dx, *dhalos),
                telling=transport.telling,
            )
        return None, total


def _halos_backward(halos: Halos, dx_of_x: Tensor, dhalos: tuple[Tensor, ...], forward_call: int) -> Tensor:
    documents, before = halos.documents, halos.before
    dx = dx_of_x.to(ops.state_dtype(dx_of_x.dtype), copy=True)
    resets = documents.resets
    incoming = iter(reversed(dhalos))
    arriving: list[tuple[Piece, Tensor]] = []

    def add(piece: Piece, dwindow: Tensor) -> Tensor:
        """Adds the gradient of what was sent to that of the piece's inputs; returns that of its own halo."""
        kept = kept_after(resets[:, piece.tokens], before)[..., None].to(dx.device)
        dwindow = torch.where(kept, dwindow, 0)
        own = min(before, piece.length)
        dx[:, piece.tokens][:, -own:] += dwindow[:, before - own :]
        return torch.nn.functional.pad(dwindow[:, : before - own], (0, 0, own, 0))

    with _call(halos, "backward", dx, 0, forward_call) as messages:
        for piece in reversed(documents.pieces):
            dhalo = next(incoming).contiguous() if piece.source is not None else None
            if piece.target is not None:
                like = dx.new_empty((dx.size(0), before, dx.size(2)))
                dwindow = messages.start_receiving(piece.target, 0, like)
                if halos.is_long(piece):
                    arriving.append((piece, dwindow))
                else:
                    messages.wait()
                    through = add(piece, dwindow)
                    dhalo = None if dhalo is None else dhalo + through
            if piece.source is not None and dhalo is not None:
                messages.send(piece.source, 0, dhalo)
        messages.wait()
        for piece, dwindow in arriving:
            add(piece, dwindow)
    return dx.to(dx_of_x.dtype)


# ---- checks -------------------------------------------------------------------------------------


def check_tensors(documents: Documents, tensors: Mapping[str, tuple[Tensor | None, tuple[int | None, ...]]]) -> None:
    """InputError for tensors that are no float tensors of these shapes, on one device. None: any size."""
    first_name, (first, _) = next(iter(tensors.items()))
    for name, (x, shape) in tensors.items():
        if x is None:
            continue
        arguments.check_tensor(name, x)
        if x.dtype not in ops.FLOAT_DTYPES:
            raise InputError(f"{name} is {x.dtype}; expected one of {', '.join(map(str, ops.FLOAT_DTYPES))}")
        if x.dim() != len(shape) or any(want not in (None, size) for size, want in zip(x.shape, shape, strict=True)):
            expected = ", ".join("any" if size is None else str(size) for size in shape)
            raise InputError(f"{name} is {tuple(x.shape)}; expected ({expected})")
        assert first is not None
        arguments.check_devices(first_name, first, **{name: x})
    assert first is not None
    sequence = documents.sequence
    rows = sequence.mask.begin.size(0)
    if rows not in (1, first.size(0)):
        raise InputError(f"the mask has {rows} rows, the batch {first.size(0)}; expected the same number, or 1")
    if first.device.type == "meta" and sequence.world_size > 1:
        raise InputError(f"{first_name} is on meta, which holds no data for the other ranks; expected a real device")
    sequence.check_unchanged()
