"""The *heads* scheme: each rank computes whole sequences of its share of the heads, as one process does.

Inputs of local tokens go to the ranks that own the heads, and outputs come back; in the backward the outputs' gradients
go there, and those of the inputs come back. Messages are as those of `ulysses` in attention. What all heads take, such
as keys that they share, goes to every rank, and its gradients are added in the order of the ranks.

Shape letters: B batch, S global tokens, N local tokens, H heads, h heads of a share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringtile import derivatives, keep, ops
from ringtile.recurrent.recurrence import EVERY_TOKEN, Operand, Recurrence, agreed
from ringtile.recurrent.shares import HeadRange, shares
from ringtile.sequence.heads import HeadGroup, join
from ringtile.transport.agreement import HeaderValue


def run(recurrence: Recurrence) -> Tensor:
    """Return out (B, N, ...) of the local tokens; a collective, differentiable."""
    out: Tensor = _Heads.apply(recurrence, *recurrence.tensors)  # type: ignore[no-untyped-call]
    return out


class _Heads(torch.autograd.Function):
    """Keeps the inputs of the share, or where a checkpointed layer keeps the output those of the local tokens; the
    backward computes again."""

    @staticmethod
    def forward(ctx: Any, recurrence: Recurrence, *tensors: Tensor) -> Tensor:
        documents, terms, slot = recurrence.documents, _terms(recurrence), _slot(recurrence)
        ctx.recurrence, ctx.is_local = recurrence, slot is not None
        if slot is not None and (kept := slot.take()) is not None:
            (out,), ctx.number = kept
            ctx.save_for_backward(*tensors)
            return out
        with agreed(f"{recurrence.op} forward", documents, terms, recurrence.out.tensor):
            exchange = _Exchange(recurrence)
            given = exchange.to_heads(recurrence.operands, tensors, "the inputs")
            out, _ = recurrence.compute(given, documents.facts.whole, None)
            (out,) = exchange.to_tokens([recurrence.out], [out], "the outputs")
        ctx.number = documents.sequence.transport.num_calls
        if slot is not None:
            slot.fill((out,), ctx.number)
        ctx.save_for_backward(*(given if slot is None else tensors))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        recurrence: Recurrence = ctx.recurrence
        transport = recurrence.documents.sequence.transport
        with transport.propagate_errors(f"{recurrence.op} backward"):
            given = list(ctx.saved_tensors)

            def compute() -> list[Tensor | None]:
                return _backward(recurrence, given, dout, ctx.needs_input_grad[1:], ctx.number, ctx.is_local)

            gradients = derivatives.gradients(
                recurrence.op, compute, dout, *given, propagate_errors=transport.propagate_errors
            )
        return None, *gradients


def _terms(recurrence: Recurrence) -> dict[str, HeaderValue]:
    """With the dtypes of the inputs, from which the sizes of messages follow."""
    dtypes = ", ".join(str(x.dtype).removeprefix("torch.") for x in recurrence.tensors)
    return {**recurrence.terms, "scheme": "heads", "dtypes": dtypes}


def _slot(recurrence: Recurrence) -> keep.Slot | None:
    """Return where a checkpointed layer keeps the output."""
    sequence, out = recurrence.documents.sequence, recurrence.out.tensor
    if keep.inside.kept is None:
        return None
    numbers = out.size(0) * math.prod(out.shape[2:]) * -(-sequence.seq_len // sequence.world_size)
    key = recurrence.op, *sequence.digests, sequence.group_name, *_terms(recurrence).items()
    return keep.slot(key, numbers * out.itemsize)


def _backward(
    recurrence: Recurrence,
    given: list[Tensor],
    dout: Tensor,
    needed: tuple[bool, ...],
    forward_call: int,
    is_local: bool,
) -> list[Tensor | None]:
    documents, operands = recurrence.documents, recurrence.operands
    terms = _terms(recurrence)
    terms["inputs that need gradients"] = "".join("01"[need] for need in needed)  # only theirs travel
    with agreed(f"{recurrence.op} backward", documents, terms, dout, forward_call=forward_call):
        exchange = _Exchange(recurrence)
        if is_local:
            given = exchange.to_heads(operands, given, "the inputs")
        (whole,) = exchange.to_heads([recurrence.out], [dout], "the gradients of the outputs")
        gradients, _ = recurrence.gradients(given, needed, documents.facts.whole, None, whole, None)
        wanted = [i for i, need in enumerate(needed) if need]
        found = [given[i].new_zeros(given[i].shape) if (x := gradients[i]) is None else x for i in wanted]
        of_tokens = exchange.to_tokens([operands[i] for i in wanted], found, "the gradients of the inputs")
    result: list[Tensor | None] = [None] * len(needed)
    for i, gradient in zip(wanted, of_tokens, strict=True):
        result[i] = gradient
    return result


class _Exchange:
    """Between local tokens of all heads and whole sequences of this rank's share."""

    def __init__(self, recurrence: Recurrence) -> None:
        self._sequence = sequence = recurrence.documents.sequence
        self._shares = shares(recurrence.num_head_groups, sequence.world_size)
        ranks = range(sequence.world_size)
        self._group = HeadGroup(ranks, sequence.rank, join(sequence.layout, sequence.world_size)[1])

    def to_heads(self, operands: Sequence[Operand], tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """Return this rank's share (B, S, h, ...) of tensors like the operands' (B, N, H, ...).

        The share of one without tokens is a view.
        """
        result = [one.of(x, EVERY_TOKEN, self._own) for one, x in zip(operands, tensors, strict=True)]
        moving = [i for i, one in enumerate(operands) if one.tokens]
        parts = [[operands[i].of(tensors[i], EVERY_TOKEN, share) for i in moving] for share in self._shares]
        for i, x in zip(moving, self._group.to_heads(self._sequence.transport, parts, what), strict=True):
            result[i] = x
        return result

    def to_tokens(self, operands: Sequence[Operand], tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """Return tensors like the operands' (B, N, H, ...) from shares (B, S, h, ...): `to_heads` the other way.

        Where all ranks have the same heads, what they have is added; one without tokens is 0 in the other heads.
        """
        result = []
        for one, x in zip(operands, tensors, strict=True):
            shape = list(one.tensor.shape)
            if one.tokens:
                shape[1] = self._sequence.local_len
            result.append(x.new_zeros(shape, dtype=ops.state_dtype(x.dtype) if one.heads is None else x.dtype))
            if not one.tokens:
                one.of(result[-1], EVERY_TOKEN, self._own).copy_(x)
        moving = [i for i, one in enumerate(operands) if one.tokens]
        if moving:
            views = [[operands[i].of(result[i], EVERY_TOKEN, share) for i in moving] for share in self._shares]
            leaving = [tensors[i] for i in moving]
            self._group.to_tokens(self._sequence.transport, leaving, views, what, added=len(moving))
        return [total.to(x.dtype) for total, x in zip(result, tensors, strict=True)]

    @property
    def _own(self) -> HeadRange:
        return self._shares[self._sequence.rank]
