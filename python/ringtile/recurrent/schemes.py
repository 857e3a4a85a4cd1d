"""Which scheme a recurrent layer runs in: the one place that decides."""

from __future__ import annotations

from torch import Tensor

from ringtile.errors import InputError, shown
from ringtile.recurrent import heads, state_passing
from ringtile.recurrent.costs import SCHEMES, cheaper, check_heads
from ringtile.recurrent.recurrence import Recurrence
from ringtile.scheme import Scheme


def decide(recurrence: Recurrence, scheme: str | None) -> str:
    """ "states" or "heads". None: what goes with the sequence's scheme of attention, "auto": the cheaper one.

    By numbers that are the same on all ranks. Raises InputError, and Refused where the scheme cannot compute this.
    """
    documents, size = recurrence.documents, recurrence.size
    sequence = documents.sequence
    if scheme == "auto" or (scheme is None and sequence.scheme == "auto"):
        device, known = recurrence.out.tensor.device.type, documents.facts.schemes
        if (size, device) not in known:
            known[size, device] = cheaper(sequence.mask, sequence.layout, size, device)
        scheme = known[size, device]
    elif scheme is None:
        shares_heads = Scheme.parse(sequence.scheme).group_size is None  # all ranks: ulysses, staged
        scheme = "heads" if shares_heads and 1 < sequence.world_size <= size.num_units else "states"
    if scheme not in SCHEMES:
        raise InputError(f"the scheme is {shown(scheme)}; expected {', '.join(SCHEMES)}, auto, or None")
    if scheme == "heads":
        check_heads(size.num_units, sequence.world_size)
    else:
        _ = documents.pieces  # refused here, where the other ranks are told
    return scheme


def run(recurrence: Recurrence, scheme: str) -> Tensor:
    """out (B, N, ...) of the local tokens; a collective, differentiable. scheme: as `decide` found."""
    documents = recurrence.documents
    if documents.sequence.world_size == 1 and scheme == "states" and len(documents.pieces) == 1:
        return recurrence.compute(recurrence.tensors, documents.pieces[0].seq_idx, None)[0]
    return heads.run(recurrence) if scheme == "heads" else state_passing.run(recurrence)
