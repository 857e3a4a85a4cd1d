"""The *states* scheme: each rank passes states to the ranks that hold the next stretches of a sharded sequence.

Where paths fork, all the states that later tokens go on from are passed, and on by stretches that do not need them.

All ranks go through their stretches in the order of the sequence, and through shares of a stretch's heads in order. So
a stretch waits only for what comes before it in the sequence, and no two ranks wait for each other. A state is passed
on as soon as its share of the heads is done: with P shares, each of W ranks works in P of P + W - 1 steps. The backward
goes through the same steps the other way.

Shape letters: B batch, N local tokens, C channels, W width of a convolution.
"""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringtile import derivatives, keep, ops
from ringtile.recurrent.documents import Documents, Stretch
from ringtile.recurrent.recurrence import Recurrence, agreed
from ringtile.recurrent.shares import shares_in_time
from ringtile.sequence.plan import to_device
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
        out, states, ctx.number = _forward(recurrence, tensors)
        ctx.save_for_backward(*tensors, *states.values())
        ctx.recurrence, ctx.keys = recurrence, list(states)
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


_States = dict[tuple[int, int], Tensor]  # by stretch and share


def _forward(recurrence: Recurrence, tensors: tuple[Tensor, ...]) -> tuple[Tensor, _States, int]:
    """Return out, the states that were passed to stretches of this rank, and the number of the call."""
    documents, operands = recurrence.documents, recurrence.operands
    shares = shares_in_time(recurrence.num_head_groups, documents.sequence.world_size)
    out = recurrence.out.tensor.new_empty(recurrence.out.tensor.shape)
    states: _States = {}
    slot = _slot(recurrence, math.prod(recurrence.state_shape), out)
    with _call(recurrence, "forward", out, slot=slot) as messages:
        for i, stretch in enumerate(documents.stretches):
            for j, share in enumerate(shares):
                if stretch.source is not None:
                    like = out.new_empty(
                        recurrence.states_of(share, stretch.num_received), dtype=ops.state_dtype(out.dtype)
                    )
                    states[i, j] = messages.receive(stretch.source, j, like)
                given = [one.of(x, stretch.tokens, share) for one, x in zip(operands, tensors, strict=True)]
                out_, sent = recurrence.compute(given, stretch, states.get((i, j)))
                recurrence.out.of(out, stretch.tokens, share).copy_(out_)
                if stretch.target is not None and sent is not None:
                    messages.send(stretch.target, j, sent)
    return out, states, messages.number


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
    with _call(recurrence, "backward", dout, forward_call) as messages:
        for i, stretch in reversed(list(enumerate(documents.stretches))):
            for j, share in enumerate(shares):
                dsent = None
                if stretch.target is not None:
                    like = dout.new_empty(
                        recurrence.states_of(share, stretch.num_sent), dtype=ops.state_dtype(dout.dtype)
                    )
                    dsent = messages.receive(stretch.target, j, like)
                given = [one.of(x, stretch.tokens, share) for one, x in zip(operands, tensors, strict=True)]
                received = states[i, j] if stretch.source is not None else None
                of_share = recurrence.out.of(dout, stretch.tokens, share)
                found, dreceived = recurrence.gradients(given, needed, stretch, received, of_share, dsent)
                for one, total, gradient in zip(operands, gradients, found, strict=True):
                    if total is not None and gradient is not None:
                        one.of(total, stretch.tokens, share).add_(gradient)
                if stretch.source is not None and received is not None:
                    messages.send(stretch.source, j, torch.zeros_like(received) if dreceived is None else dreceived)
    return [None if total is None else total.to(x.dtype) for total, x in zip(gradients, tensors, strict=True)]


# ---- messages -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Messages:
    """The messages of one call: at most one between two neighboring stretches, for each share."""

    transport: Transport
    number: int = 0  # of the call
    known: list[Tensor] | None = None  # what the first run of a checkpointed layer received, if nothing is to travel
    received: list[Tensor] = field(default_factory=list)
    kept: dict[int, Tensor] = field(default_factory=dict)  # for the next stretch, if it is of this rank too, by share
    sent: list[Exchange] = field(default_factory=list)
    arriving: list[Exchange] = field(default_factory=list)

    def send(self, rank: int, share: int, state: Tensor) -> None:
        if self.known is not None:
            return
        if rank == self.transport.rank:
            self.kept[share] = state
        else:
            self.sent.append(self.transport.exchange({rank: state.contiguous()}, {}, f"a state for rank {rank}"))

    def start_receiving(self, rank: int, share: int, like: Tensor) -> Tensor:
        """Return a tensor like `like`, which may be it; after `wait` it holds what was sent."""
        if self.known is not None:
            return self.known.pop(0)
        if rank == self.transport.rank:
            like = self.kept.pop(share)
        else:
            self.arriving.append(self.transport.exchange({}, {rank: like}, f"the state of rank {rank}"))
        self.received.append(like)
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
    recurrence: Recurrence | Halos, direction: str, x: Tensor, forward_call: int = 0, slot: keep.Slot | None = None
) -> Iterator[_Messages]:
    """Agree with the other ranks that they make the same call; wait at the end for what was sent.

    slot: for what a checkpointed layer receives; where it holds that, nothing travels, and no rank agrees.
    """
    documents = recurrence.documents
    messages = _Messages(documents.sequence.transport)
    if slot is not None and (kept := slot.take()) is not None:
        messages.known, messages.number = list(kept[0]), kept[1]
        yield messages
        return
    terms = {**recurrence.terms, "scheme": "states"}
    with agreed(f"{recurrence.op} {direction}", documents, terms, x, forward_call):
        messages.number = messages.transport.num_calls
        yield messages
        messages.wait()
        for exchange in messages.sent:
            exchange.wait()
    if slot is not None:
        slot.fill(tuple(messages.received), messages.number)


def _slot(call: Recurrence | Halos, num_numbers: int, x: Tensor) -> keep.Slot | None:
    """Return where a checkpointed layer keeps the states that it receives, of so many numbers each, on tensors like x.

    Their bytes are those of the rank that receives most.
    """
    sequence = call.documents.sequence
    if keep.inside.kept is None or sequence.world_size == 1:
        return None
    of_ranks = collections.Counter[int]()
    for cut in call.documents.facts.passes:
        of_ranks[cut.target] += cut.num_states
    num_bytes = max(of_ranks.values(), default=0) * num_numbers * ops.state_dtype(x.dtype).itemsize
    return keep.slot((call.op, *sequence.digests, sequence.group_name, *call.terms.items()), num_bytes)


# ---- inputs of a convolution --------------------------------------------------------------------


@dataclass(frozen=True)
class Halos:
    """The inputs that each stretch needs of the tokens before it: W - 1 tokens of each path, as a state of its own."""

    op: str
    documents: Documents
    terms: Mapping[str, HeaderValue]
    before: int  # W - 1

    def of(self, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Return x (B, N, C), to be used instead, so that a rank that only sends takes part in the backward too; and of
        each stretch the halos (B, num_received, W - 1, C) in the state dtype, or None where no path reaches into it."""
        x, *found = _Halos.apply(self, x)  # type: ignore[no-untyped-call]
        halos = iter(found)
        return x, [None if stretch.source is None else next(halos) for stretch in self.documents.stretches]

    def empty(self, x: Tensor, count: int) -> Tensor:
        return x.new_empty((x.size(0), count, self.before, x.size(2)), dtype=ops.state_dtype(x.dtype))


@dataclass(frozen=True)
class _Windows:
    """The last inputs of each path that goes out of a stretch, (B, num_sent, W - 1, C): where each is, or -1."""

    rows: Tensor  # (B, 1, 1)
    own: Tensor  # (Bm, num_sent, W - 1): the token of the stretch
    earlier: Tensor | None  # the same, rows of the halos that came in one after another; None: none is

    @classmethod
    def of(cls, stretch: Stretch, places: Tensor, before: int, x: Tensor) -> _Windows:
        """places: see Facts.windows."""
        num_earlier = stretch.num_received * before
        earlier = torch.where(places <= num_earlier, places - 1, -1)
        waits = bool((earlier >= 0).any())
        own, earlier = (to_device(each, x.device) for each in (places - 1 - num_earlier, earlier))
        return cls(torch.arange(x.size(0), device=x.device)[:, None, None], own, earlier if waits else None)

    def gather(self, x: Tensor, halo: Tensor | None) -> Tensor:
        """x (B, n, C): the inputs of the stretch."""
        found = torch.where((self.own >= 0)[..., None], x[self.rows, self.own.clamp(min=0)], 0)
        if self.earlier is None or halo is None:
            return found
        earlier = halo.flatten(1, 2)[self.rows, self.earlier.clamp(min=0)]
        return torch.where((self.earlier >= 0)[..., None], earlier, found)

    def scatter(self, dwindows: Tensor, dx: Tensor, dhalo: Tensor | None) -> None:
        """Add to the gradients of what `gather` takes, given those of what it returns."""
        self._add(dwindows, self.own, dx)
        if self.earlier is not None and dhalo is not None:
            batch, stretches, tokens, channels = dhalo.shape  # not -1, which a batch of 0 leaves open
            self._add(dwindows, self.earlier, dhalo.view(batch, stretches * tokens, channels))

    def _add(self, dwindows: Tensor, places: Tensor, to: Tensor) -> None:
        held = torch.where((places >= 0)[..., None], dwindows, 0)
        to.index_put_((self.rows, places.clamp(min=0)), held, accumulate=True)


class _Halos(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halos: Halos, x: Tensor) -> tuple[Tensor, ...]:
        documents, dtype = halos.documents, ops.state_dtype(x.dtype)
        received: list[Tensor] = []
        slot = _slot(halos, x.size(0) * halos.before * x.size(2), x)
        with _call(halos, "forward", x, slot=slot) as messages:
            for stretch, places in zip(documents.stretches, documents.facts.windows(halos.before), strict=True):
                halo = None
                if stretch.source is not None:
                    halo = messages.start_receiving(stretch.source, 0, halos.empty(x, stretch.num_received))
                    received.append(halo)
                if stretch.target is not None:
                    windows = _Windows.of(stretch, places, halos.before, x)
                    if windows.earlier is not None:
                        messages.wait()
                    messages.send(stretch.target, 0, windows.gather(x[:, stretch.tokens], halo).to(dtype))
        ctx.halos, ctx.number = halos, messages.number
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
    documents = halos.documents
    dx = dx_of_x.to(ops.state_dtype(dx_of_x.dtype), copy=True)
    incoming = iter(reversed(dhalos))
    arriving: list[tuple[_Windows, Tensor, Tensor]] = []
    stretches = list(zip(documents.stretches, documents.facts.windows(halos.before), strict=True))
    with _call(halos, "backward", dx, forward_call) as messages:
        for stretch, places in reversed(stretches):
            dhalo = next(incoming).clone(memory_format=torch.contiguous_format) if stretch.source is not None else None
            if stretch.target is not None:
                windows = _Windows.of(stretch, places, halos.before, dx)
                dwindows = messages.start_receiving(stretch.target, 0, halos.empty(dx, stretch.num_sent))
                if windows.earlier is not None:
                    messages.wait()
                    windows.scatter(dwindows, dx[:, stretch.tokens], dhalo)
                else:
                    arriving.append((windows, dwindows, dx[:, stretch.tokens]))
            if stretch.source is not None and dhalo is not None:
                messages.send(stretch.source, 0, dhalo)
        messages.wait()
        for windows, dwindows, of_stretch in arriving:
            windows.scatter(dwindows, of_stretch, None)
    return dx.to(dx_of_x.dtype)
