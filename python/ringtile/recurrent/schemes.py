"""Which scheme a recurrent layer runs in: the one place that decides."""

from __future__ import annotations

from torch import Tensor

from ringtile.errors import InputError, RefusedError, shown
from ringtile.recurrent import heads, state_passing
from ringtile.recurrent.recurrence import Recurrence
from ringtile.recurrent.shares import SCHEMES, check_heads
from ringtile.scheme import Scheme


def decide(recurrence: Recurrence, scheme: str | None) -> str:
    """Return "states" or "heads". None: what goes with the sequence's scheme of attention.

    By what is the same on all ranks. Raises InputError, and RefusedError where the scheme cannot compute this.
    """
    sequence, num_groups = recurrence.documents.sequence, recurrence.num_head_groups
    if scheme is None and sequence.scheme != "auto":
        shares_heads = Scheme.parse(sequence.scheme).group_size is None  # all ranks
        scheme = "heads" if shares_heads and 1 < sequence.world_size <= num_groups else "states"
    elif scheme is None or scheme == "auto":
        scheme = _of_auto(recurrence)
    if scheme not in SCHEMES:
        raise InputError(f"the scheme is {shown(scheme)}; expected {', '.join(SCHEMES)}, auto, or None")
    if scheme == "heads":
        check_heads(num_groups, sequence.world_size)
    else:
        _ = recurrence.documents.stretches  # refused here, where the other ranks are told
    return scheme


def _of_auto(recurrence: Recurrence) -> str:
    """Return states, whose bytes do not grow with the sequence; heads where no state can follow the layout."""
    try:
        _ = recurrence.documents.stretches
    except RefusedError:
        return "heads"
    return "states"


def run(recurrence: Recurrence, scheme: str) -> Tensor:
    """Return out (B, N, ...) of the local tokens; a collective, differentiable. scheme: as `decide` found."""
    documents = recurrence.documents
    if documents.sequence.world_size == 1 and scheme == "states" and len(documents.stretches) == 1:
        return recurrence.compute(recurrence.tensors, documents.stretches[0], None)[0]
    return heads.run(recurrence) if scheme == "heads" else state_passing.run(recurrence)
