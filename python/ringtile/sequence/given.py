"""How a call over ranks gets its sequence: a ShardedSequence, or mask, layout and group, from which one is made."""

from __future__ import annotations

import contextlib
from typing import Any

from ringtile.errors import InputError, RingtileError
from ringtile.sequence.layout import Layout, check_types
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.groups import only_group_of, transport_of


def check_given(op: str, sequence: Any, mask: Any, layout: Any, group: Any) -> None:
    """InputError unless op got one or the other."""
    if sequence is None:
        check_types(mask, layout)
    elif not isinstance(sequence, ShardedSequence):
        raise InputError(
            f"sequence is a {type(sequence).__name__}; expected a ShardedSequence, or mask=, layout= and group="
        )
    elif any(part is not None for part in (mask, layout, group)):
        raise InputError(f"{op} got a sequence and mask, layout or group; expected one or the other")


def tell_others(op: str, error: Exception, sequence: Any, layout: Any, group: Any) -> None:
    """Tells the other ranks, who would wait for this one, why it makes no call of op: if the group is known."""
    with contextlib.suppress(RingtileError):
        if isinstance(sequence, ShardedSequence):
            transport = sequence.transport
        elif group is None and isinstance(layout, Layout):  # forgotten?
            transport = transport_of(only_group_of(layout.world_size))
        else:
            transport = transport_of(group)
        transport.fail(f"{op} forward", error)
