"""Which scheme a recurrent layer runs in: the one place that decides."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from ringtile.errors import InputError, RefusedError, shown
from ringtile.recurrent import heads, state_passing
from ringtile.recurrent.costs import SCHEMES, check_heads
from ringtile.recurrent.recurrence import Recurrence
from ringtile.scheme import Scheme
from ringtile.transport.measure import measure


def decide(recurrence: Recurrence, scheme: str | None) -> str:
    """Return "states", "heads", or "auto" where time decides. None: what goes with the sequence's scheme of attention.

    By what is the same on all ranks. Raises InputError, and RefusedError where the scheme cannot compute this.
    """
    sequence, num_groups = recurrence.documents.sequence, recurrence.num_head_groups
    if scheme is None and sequence.scheme != "auto":
        shares_heads = Scheme.parse(sequence.scheme).group_size is None  # all ranks: ulysses, staged
        scheme = "heads" if shares_heads and 1 < sequence.world_size <= num_groups else "states"
    elif scheme is None or scheme == "auto":
        scheme = _of_auto(recurrence)
    if scheme not in (*SCHEMES, "auto"):
        raise InputError(f"the scheme is {shown(scheme)}; expected {', '.join(SCHEMES)}, auto, or None")
    if scheme == "heads":
        check_heads(num_groups, sequence.world_size)
    elif scheme == "states":
        _ = recurrence.documents.pieces  # refused here, where the other ranks are told
    return scheme


def _of_auto(recurrence: Recurrence) -> str:
    """Return the scheme that needs no clock: the only possible one, or states where none travels; else "auto"."""
    documents = recurrence.documents
    try:
        _ = documents.pieces
    except RefusedError:
        return "heads"
    enough_heads = 1 < documents.sequence.world_size <= recurrence.num_head_groups
    return "auto" if enough_heads and documents.facts.states_travel else "states"


def run(recurrence: Recurrence, scheme: str) -> Tensor:
    """Return out (B, N, ...) of the local tokens; a collective, differentiable. scheme: as `decide` found."""
    documents = recurrence.documents
    if scheme == "auto":
        scheme = _measured(recurrence)
    if documents.sequence.world_size == 1 and scheme == "states" and len(documents.pieces) == 1:
        return recurrence.compute(recurrence.tensors, documents.pieces[0], None)[0]
    return heads.run(recurrence) if scheme == "heads" else state_passing.run(recurrence)


def _measured(recurrence: Recurrence) -> str:
    """Return the scheme whose forward and backward took the slowest rank less time, when this kind was first called."""
    sequence, device = recurrence.documents.sequence, recurrence.out.tensor.device
    known = sequence.transport.fastest
    kind = (recurrence.op, device.type, *recurrence.terms.values(), sequence.digests[0])
    if kind not in known:
        candidates = [partial(_forward_and_backward, recurrence, scheme) for scheme in SCHEMES]
        seconds = measure(candidates, sequence.transport, device)
        known[kind] = SCHEMES[seconds.index(min(seconds))]
    return known[kind]


def _forward_and_backward(recurrence: Recurrence, scheme: str) -> None:
    with torch.enable_grad():
        operands = [
            dataclasses.replace(operand, tensor=operand.tensor.detach().requires_grad_())
            for operand in recurrence.operands
        ]
        out = run(dataclasses.replace(recurrence, operands=operands), scheme)
        torch.autograd.grad(out, [operand.tensor for operand in operands], out.detach())
