"""One call of a recurrence, which every scheme runs: its tensors, what computes it, and what ranks agree on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ringtile import ops
from ringtile.recurrent.documents import Documents, Stretch
from ringtile.recurrent.shares import HeadRange
from ringtile.transport.agreement import HeaderValue

EVERY_TOKEN = slice(None)


@dataclass(frozen=True)
class Operand:
    """A tensor that a recurrence takes. tokens: its dim 1 is that of the tokens. heads: its dim of heads, if any."""

    name: str
    tensor: Tensor
    tokens: bool
    heads: int | None

    def of(self, x: Tensor, tokens: slice, share: HeadRange) -> Tensor:
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
    options: Mapping[str, HeaderValue]  # of the function
    operands: list[Operand]
    out: Operand  # the first of them: a tensor of out's shape and dtype; never read
    function: Callable[..., tuple[Tensor, Tensor]]  # who computes it, from `function_for`
    state_shape: tuple[int, ...]  # (B, heads, ...)
    num_head_groups: int

    def states_of(self, share: HeadRange, count: int) -> tuple[int, ...]:
        """Return the shape of so many states."""
        begin, end, num_head_groups = share
        batch, num_heads, *rest = self.state_shape
        return (batch, count, num_heads // num_head_groups * (end - begin), *rest)

    @property
    def tensors(self) -> list[Tensor]:
        return [operand.tensor for operand in self.operands]

    def of(self, tensors: Sequence[Tensor]) -> Recurrence:
        """Return the same call on other tensors."""
        operands = [replace(operand, tensor=x) for operand, x in zip(self.operands, tensors, strict=True)]
        return replace(self, operands=operands, out=operands[0])

    def compute(self, given: list[Tensor], stretch: Stretch, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return out and the states that go out, for tensors of the operands of a stretch, of any heads."""
        return walk(stretch, given, [operand.tokens for operand in self.operands], states, self.of_segment)

    def of_segment(self, given: list[Tensor], seq_idx: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return out and the final state of neighboring tokens, as kernels.py."""
        named = {operand.name: x for operand, x in zip(self.operands, given, strict=True)}
        return self.function(**named, **self.options, seq_idx=seq_idx, initial_state=state)

    def gradients(
        self,
        given: list[Tensor],
        needed: tuple[bool, ...],
        stretch: Stretch,
        states: Tensor | None,
        dout: Tensor,
        dsent: Tensor | None,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Compute again; return the needed gradients of the given tensors, and that of states. None: unneeded, or 0."""
        with torch.enable_grad():
            given = [x.detach().requires_grad_(need) for x, need in zip(given, needed, strict=True)]
            states = states if states is None else states.detach().requires_grad_()
            out, sent = self.compute(given, stretch, states)
        # Padding has no graph.
        known = [(x, dx) for x, dx in ((out, dout), (sent, dsent)) if x is not None and dx is not None]
        known = [(x, dx) for x, dx in known if x.requires_grad]
        inputs = [*given, states]
        wanted = {i: x for i, x in enumerate(inputs) if x is not None and x.requires_grad}
        found: list[Tensor | None] = [None] * len(inputs)
        if known and wanted:
            outputs, incoming = zip(*known, strict=True)
            gradients = torch.autograd.grad(outputs, list(wanted.values()), incoming, allow_unused=True)
            for i, gradient in zip(wanted, gradients, strict=True):
                found[i] = gradient
        return found[:-1], found[-1]


def walk(
    stretch: Stretch,
    tensors: list[Tensor],
    has_tokens: list[bool],
    states: Tensor | None,
    compute: Callable[[list[Tensor], Tensor, Tensor | None], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor | None]:
    """Join compute(tensors of a segment, seq_idx, state) -> (out, final state) over the segments of a stretch.

    tensors: of the stretch's tokens (B, N, ...), or without tokens. states (B, num_received, ...): those that came in.
    Returns out (B, N, ...), and the states that go out (B, num_sent, ...), if any do.
    """
    if (segment := stretch.only) is not None:
        out, final = compute(tensors, segment.seq_idx, None if states is None else states[:, 0])
        return out, final[:, None] if stretch.num_sent else None
    outs, sent, walks = [], [], stretch.walks
    # The gradient of a parameter is a sum over the segments.
    given = [
        (x if tokens else x.to(ops.state_dtype(x.dtype)), tokens) for x, tokens in zip(tensors, has_tokens, strict=True)
    ]

    def by_row(x: Tensor, tokens: bool = True) -> Sequence[Tensor]:
        return torch.split(x, 1) if tokens and len(walks) > 1 else len(walks) * [x]

    of_rows = [by_row(x, tokens) for x, tokens in given]
    received = len(walks) * [()] if states is None else [x.unbind(1) for x in by_row(states)]
    for (segments, passed_on, calls), known, *of_row in zip(walks, received, *of_rows, strict=True):
        lengths = [segment.length for segment in segments]
        parts = dict[int, Tensor]()
        of_operands = [
            torch.split(x, lengths, dim=1) if tokens else len(lengths) * [x]
            for x, tokens in zip(of_row, has_tokens, strict=True)
        ]
        numbered = dict(enumerate(known))
        first = [segments[call.numbers[0]].state for call in calls]
        last_use = {number: i for i, number in enumerate(first)} | dict.fromkeys(passed_on, len(calls))
        for i, (call, begins_with) in enumerate(zip(calls, first, strict=True)):
            state = None if begins_with is None else numbered[begins_with]
            if len(call.numbers) == 1:
                (number,) = call.numbers
                parts[number], final = compute([x[number] for x in of_operands], call.seq_idx, state)
                numbered[stretch.num_received + number] = final
            else:
                of_call = [
                    _rows_of([x[number] for number in call.numbers], call.seq_idx.size(1)) if tokens else x[0]
                    for x, tokens in zip(of_operands, has_tokens, strict=True)
                ]
                batch = of_row[0].size(0)
                seq_idx = call.seq_idx if batch == 1 else call.seq_idx.repeat_interleave(batch, 0)
                out, final = compute(
                    of_call, seq_idx, None if state is None else torch.cat(len(call.numbers) * [state])
                )
                final = final[:batch]
                for number, part in zip(call.numbers, out.view(len(call.numbers), batch, *out.shape[1:]), strict=True):
                    parts[number] = part[:, : lengths[number]]
            numbered = {number: x for number, x in numbered.items() if last_use.get(number, -1) > i}
        outs.append(parts[0] if len(parts) == 1 else torch.cat([parts[i] for i in range(len(segments))], dim=1))
        if stretch.num_sent:
            of_paths = [numbered[number] for number in passed_on]
            of_paths += (stretch.num_sent - len(of_paths)) * [torch.zeros_like(final)]  # other rows have more
            sent.append(torch.stack(of_paths, dim=1))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    if not sent:
        return out, None
    return out, sent[0] if len(sent) == 1 else torch.cat(sent)


def _rows_of(parts: list[Tensor], length: int) -> Tensor:
    """Return (B, n, ...) of several branches -> (branches B, length, ...), padded."""
    widths = ((0, 0) * (parts[0].dim() - 2) + (0, length - part.size(1)) for part in parts)
    return torch.cat([functional.pad(part, width) for part, width in zip(parts, widths, strict=True)])


@contextlib.contextmanager
def agreed(
    op: str, documents: Documents, terms: Mapping[str, HeaderValue], x: Tensor, forward_call: int = 0
) -> Iterator[None]:
    """Agree with the other ranks that they make the same call, on tensors such as x, before the body exchanges any.

    forward_call: as in `Transport.agree`.
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
    with transport.agree(op, terms, x.device, forward_call=forward_call):
        yield
