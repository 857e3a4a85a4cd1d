"""One call of a recurrence, which every scheme runs: its tensors, what computes it, and what ranks agree on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile.recurrent.choose import function_for
from ringtile.recurrent.costs import Share
from ringtile.recurrent.documents import Documents
from ringtile.transport.agreement import HeaderValue

EVERY_TOKEN = slice(None)


@dataclass(frozen=True)
class Operand:
    """A tensor that a recurrence takes. tokens: its dim 1 is that of the tokens. heads: its dim of heads, if any."""

    name: str
    tensor: Tensor
    tokens: bool
    heads: int | None

    def of(self, x: Tensor, tokens: slice, share: Share) -> Tensor:
        """Return the view of x, a tensor shaped like this one, for some tokens and for a share of the heads."""
        if self.tokens:
            x = x[:, tokens]
        begin, end, num_head_groups = share
        if self.heads is None or num_head_groups == 1:
            return x
        group = x.size(self.heads) // num_head_groups
        return x.narrow(self.heads, begin * group, (end - begin) * group)


@dataclass(frozen=True)
class Recurrence:
    """One call of a recurrence on this rank. num_head_groups: the heads of an operand are a multiple of it."""

    op: str  # a function of kernels.py
    documents: Documents
    terms: Mapping[str, HeaderValue]
    options: Mapping[str, float]  # of the function
    operands: list[Operand]
    out: Operand  # a tensor of out's shape and dtype; never read
    state_shape: tuple[int, ...]  # (B, heads, ...)
    num_head_groups: int

    def state_of(self, share: Share) -> tuple[int, ...]:
        begin, end, num_head_groups = share
        batch, num_heads, *rest = self.state_shape
        return (batch, num_heads // num_head_groups * (end - begin), *rest)

    @property
    def tensors(self) -> list[Tensor]:
        return [operand.tensor for operand in self.operands]

    def compute(self, given: list[Tensor], seq_idx: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return out and the final state, for tensors of the operands of any tokens and heads."""
        named = {operand.name: x for operand, x in zip(self.operands, given, strict=True)}
        key_dim = named["k" if "k" in named else "B"].size(-1)
        by_channel = "g" in named and named["g"].dim() == 4
        function = function_for(self.op, named[self.out.name], key_dim, by_channel)
        return function(**named, **self.options, seq_idx=seq_idx, initial_state=state)

    def gradients(
        self,
        given: list[Tensor],
        needed: tuple[bool, ...],
        seq_idx: Tensor,
        state: Tensor | None,
        dout: Tensor,
        dfinal: Tensor | None,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Compute again; return the needed gradients of the given tensors, and that of state. None: unneeded, or 0."""
        with torch.enable_grad():
            given = [x.detach().requires_grad_(need) for x, need in zip(given, needed, strict=True)]
            state = state if state is None else state.detach().requires_grad_()
            out, final = self.compute(given, seq_idx, state)
        of_outputs = [(out, dout), (final, dfinal)]
        known = [(x, dx) for x, dx in of_outputs if dx is not None and x.requires_grad]  # padding has no graph
        inputs = [*given, state]
        wanted = {i: x for i, x in enumerate(inputs) if x is not None and x.requires_grad}
        found: list[Tensor | None] = [None] * len(inputs)
        if known and wanted:
            outputs, incoming = zip(*known, strict=True)
            gradients = torch.autograd.grad(outputs, list(wanted.values()), incoming, allow_unused=True)
            for i, gradient in zip(wanted, gradients, strict=True):
                found[i] = gradient
        return found[:-1], found[-1]


@contextlib.contextmanager
def agreed(
    op: str, documents: Documents, terms: Mapping[str, HeaderValue], x: Tensor, data: int = 0, forward_call: int = 0
) -> Iterator[None]:
    """Agree with the other ranks that they make the same call, on tensors such as x, before the body exchanges any.

    data, forward_call: as in `Transport.agree`.
    """
    sequence = documents.sequence
    transport = sequence.transport
    if transport.world_size == 1:
        yield
        return
    with transport.propagate_errors(op):
        transport.check_device(x.device)
        layout_digest, mask_digest = sequence.digests
    terms = {**terms, "layout digest": layout_digest, "mask digest": mask_digest}
    with transport.agree(op, terms, x.device, forward_call=forward_call, data=data):
        yield
