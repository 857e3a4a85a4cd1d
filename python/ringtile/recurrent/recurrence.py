"""One call of a recurrence, which every scheme runs: its tensors, what computes it, and what ranks agree on.

Shape letters: B batch, N local tokens, H heads.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ringtile import arguments, ops
from ringtile.errors import InputError
from ringtile.recurrent.costs import Size
from ringtile.recurrent.documents import Documents
from ringtile.transport.agreement import HeaderValue

Part = tuple[int, int, int]  # (begin, end, num_units) of the units that heads are parted into
EVERY_TOKEN = slice(None)


@dataclass(frozen=True)
class Operand:
    """A tensor that a recurrence takes. tokens: its dim 1 is that of the tokens. heads: its dim of heads, if any."""

    tensor: Tensor
    tokens: bool = True
    heads: int | None = 2

    def of(self, x: Tensor, tokens: slice, part: Part) -> Tensor:
        """The view of x, a tensor shaped like this one, for some tokens and for a part of the heads."""
        if self.tokens:
            x = x[:, tokens]
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

    def state_of(self, part: Part) -> tuple[int, ...]:
        begin, end, num_units = part
        batch, num_heads, *rest = self.state_shape
        return (batch, num_heads // num_units * (end - begin), *rest)

    @property
    def tensors(self) -> list[Tensor]:
        return [operand.tensor for operand in self.operands]

    @functools.cached_property
    def size(self) -> Size:
        num_tokens = self.out.tensor.size(1)
        token_bytes = {True: 0, False: 0}  # by whether heads are parted
        for operand in self.operands:
            if operand.tokens:
                token_bytes[operand.heads is not None] += operand.tensor.nbytes // num_tokens
        return Size(
            self.num_units,
            token_bytes[True] // self.num_units,
            token_bytes[False],
            self.out.tensor.nbytes // num_tokens // self.num_units,
            math.prod(self.state_shape),
            ops.state_dtype(self.out.tensor.dtype).itemsize,
        )

    def gradients(
        self,
        given: list[Tensor],
        needed: tuple[bool, ...],
        resets: Tensor,
        state: Tensor | None,
        dout: Tensor,
        dfinal: Tensor | None,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Computes again; the gradients of the given tensors that are needed, and of state. None: not needed, or 0."""
        with torch.enable_grad():
            given = [x.detach().requires_grad_(need) for x, need in zip(given, needed, strict=True)]
            state = state if state is None else state.detach().requires_grad_()
            out, final = self.compute(given, resets, state)
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
    """Agrees with the other ranks that they make the same call, on tensors such as x, before the body exchanges any.

    data, forward_call: as in `Transport.call`.
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
