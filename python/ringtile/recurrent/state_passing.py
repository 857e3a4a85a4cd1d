"""The *states* scheme: each rank passes states to the ranks that hold the next pieces of a sharded sequence.

All ranks go through their pieces in the order of the sequence, and through shares of a piece's heads in order. So a
piece waits only for what comes before it in the sequence, and no two ranks wait for each other. A state is passed on as
soon as its share of the heads is done: with P shares, each of W ranks works in P of P + W - 1 steps. The backward goes
through the same steps the other way.

Shape letters: B batch, N local tokens, C channels, W width of a convolution.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ringtile import derivatives, ops
from ringtile.recurrent.costs import shares_in_time
from ringtile.recurrent.documents import Documents, Piece
from ringtile.recurrent.recurrence import Recurrence, agreed
from ringtile.sequence.device_mask import to_device
from ringtile.transport.agreement import HeaderValue
from ringtile.transport.transport import Exchange, Transport


def run(recurrence: Recurrence) -> Tensor:
    """Return out (B, N, ...) of the local tokens; a collective, differentiable."""
    out: Tensor = _Run.apply(recurrence, *recurrence.tensors)  # type: ignore[no-untyped-call]
    return out


class _Run(torch.autograd.Function):
    """Keeps the inputs and the states that came in; the backward computes each share again."""

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
        with transport.propagate_errors(f"{recurrence.op} backward"):
            saved = ctx.saved_tensors
            tensors, states = saved[: -len(ctx.keys) or None], saved[len(saved) - len(ctx.keys) :]

            def compute() -> list[Tensor | None]:
                found = dict(zip(ctx.keys, states, strict=True))
                needed = ctx.needs_input_grad[1:]
                return _backward(recurrence, tensors, found, dout, needed, ctx.number)

            gradients = derivatives.gradients(
                recurrence.op, compute, dout, *saved, propagate_errors=transport.propagate_errors
            )
        return None, *gradients


_States = dict[tuple[int, int], Tensor]  # by piece and share


def _forward(recurrence: Recurrence, tensors: tuple[Tensor, ...]) -> tuple[Tensor, _States]:
    """Return out, and the states that were passed to pieces of this rank."""
    documents, operands = recurrence.documents, recurrence.operands
    shares = shares_in_time(recurrence.num_head_groups, documents.sequence.world_size)
    out = recurrence.out.tensor.new_empty(recurrence.out.tensor.shape)
    states: _States = {}
    with _call(recurrence, "forward", out, documents.sequence.data_of(*tensors)) as messages:
        for i, piece in enumerate(documents.pieces):
            for j, share in enumerate(shares):
                if piece.source is not None:
                    like = out.new_empty(recurrence.state_of(share), dtype=ops.state_dtype(out.dtype))
                    states[i, j] = messages.receive(piece.source, j, like)
                given = [one.of(x, piece.tokens, share) for one, x in zip(operands, tensors, strict=True)]
                out_, state = recurrence.compute(given, piece.seq_idx, states.get((i, j)))
                recurrence.out.of(out, piece.tokens, share).copy_(out_)
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
    shares = shares_in_time(recurrence.num_head_groups, documents.sequence.world_size)
    gradients = [
        x.new_zeros(x.shape, dtype=ops.state_dtype(x.dtype)) if need else None
        for x, need in zip(tensors, needed, strict=True)
    ]
    with _call(recurrence, "backward", dout, 0, forward_call) as messages:
        for i, piece in reversed(list(enumerate(documents.pieces))):
            for j, share in enumerate(shares):
                dstate = None
                if piece.target is not None:
                    like = dout.new_empty(recurrence.state_of(share), dtype=ops.state_dtype(dout.dtype))
                    dstate = messages.receive(piece.target, j, like)
                given = [one.of(x, piece.tokens, share) for one, x in zip(operands, tensors, strict=True)]
                state = states[i, j] if piece.source is not None else None
                of_share = recurrence.out.of(dout, piece.tokens, share)
                found, dinitial = recurrence.gradients(given, needed, piece.seq_idx, state, of_share, dstate)
                for one, total, gradient in zip(operands, gradients, found, strict=True):
                    if total is not None and gradient is not None:
                        one.of(total, piece.tokens, share).add_(gradient)
                if piece.source is not None and state is not None:
                    messages.send(piece.source, j, torch.zeros_like(state) if dinitial is None else dinitial)
    return [None if total is None else total.to(x.dtype) for total, x in zip(gradients, tensors, strict=True)]


# ---- messages -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Messages:
    """Those of one call: at most one between two neighbouring pieces, for each share."""

    transport: Transport
    kept: dict[int, Tensor] = field(default_factory=dict)  # for the next piece, if it is of this rank too, by share
    sent: list[Exchange] = field(default_factory=list)
    arriving: list[Exchange] = field(default_factory=list)

    def send(self, rank: int, share: int, state: Tensor) -> None:
        if rank == self.transport.rank:
            self.kept[share] = state
        else:
            self.sent.append(self.transport.exchange({rank: state.contiguous()}, {}, f"a state for rank {rank}"))

    def start_receiving(self, rank: int, share: int, like: Tensor) -> Tensor:
        """Return a tensor like `like`, which may be it; after `wait` it holds what was sent."""
        if rank == self.transport.rank:
            return self.kept.pop(share)
        self.arriving.append(self.transport.exchange({}, {rank: like}, f"the state of rank {rank}"))
        return like

    def wait(self) -> None:
        """Wait for all that is arriving, in the order in which it was sent."""
        while self.arriving:
            self.arriving.pop(0).wait()

    def receive(self, rank: int, share: int, like: Tensor) -> Tensor:
        state = self.start_receiving(rank, share, like)
        self.wait()
        return state


@contextlib.contextmanager
def _call(
    recurrence: Recurrence | Halos, direction: str, x: Tensor, data: int, forward_call: int = 0
) -> Iterator[_Messages]:
    """Agree with the other ranks that they make the same call; wait at the end for what was sent."""
    documents = recurrence.documents
    messages = _Messages(documents.sequence.transport)
    terms = {**recurrence.terms, "scheme": "states"}
    with agreed(f"{recurrence.op} {direction}", documents, terms, x, data, forward_call):
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
        """Return x (B, N, C), to be used instead, so that a rank that only sends takes part in the backward too; and of
        each piece the halo (B, W - 1, C) in the state dtype, or None where no document reaches into it."""
        x, *found = _Halos.apply(self, x)  # type: ignore[no-untyped-call]
        halos = iter(found)
        return x, [None if piece.source is None else next(halos) for piece in self.documents.pieces]

    def is_long(self, piece: Piece) -> bool:
        """Return whether a piece holds all that the next one needs, so that it need not wait for its own halo."""
        return piece.length >= self.before


class _Halos(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halos: Halos, x: Tensor) -> tuple[Tensor, ...]:
        documents, before, dtype = halos.documents, halos.before, ops.state_dtype(x.dtype)
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
                    kept = to_device(_kept_after(piece.seq_idx, before)[..., None], x.device)
                    messages.send(piece.target, 0, torch.where(kept, own, 0))
        ctx.halos, ctx.number = halos, documents.sequence.transport.num_calls
        return (x.view_as(x), *received)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, *dhalos: Tensor) -> tuple[None, Tensor | None]:
        halos: Halos = ctx.halos
        transport = halos.documents.sequence.transport
        with transport.propagate_errors(f"{halos.op} backward"):
            (total,) = derivatives.gradients(
                halos.op,
                lambda: (_halos_backward(halos, dx, dhalos, ctx.number),),
                *(dx, *dhalos),
                propagate_errors=transport.propagate_errors,
            )
        return None, total


def _halos_backward(halos: Halos, dx_of_x: Tensor, dhalos: tuple[Tensor, ...], forward_call: int) -> Tensor:
    documents, before = halos.documents, halos.before
    dx = dx_of_x.to(ops.state_dtype(dx_of_x.dtype), copy=True)
    incoming = iter(reversed(dhalos))
    arriving: list[tuple[Piece, Tensor]] = []

    def add(piece: Piece, dwindow: Tensor) -> Tensor:
        """Add the gradient of what was sent to that of the piece's inputs; return that of its own halo."""
        kept = to_device(_kept_after(piece.seq_idx, before)[..., None], dx.device)
        dwindow = torch.where(kept, dwindow, 0)
        own = min(before, piece.length)
        dx[:, piece.tokens][:, -own:].add_(dwindow[:, before - own :])
        return functional.pad(dwindow[:, : before - own], (0, 0, own, 0))

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


def _kept_after(seq_idx: Tensor, before: int) -> Tensor:
    """Return which of the last inputs, with those before the first token, are of the last document: (Bm, before)."""
    last = functional.pad(seq_idx, (before, 0))[:, -before:]
    return (last == last[:, -1:]) & (last >= 0)
