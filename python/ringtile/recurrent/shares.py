"""How the heads of a recurrent layer are shared out in each scheme.

    states   states are passed from rank to rank, in the order of the sequence; bytes do not grow with it
    heads    each rank computes whole sequences of its share of the heads; all inputs and outputs travel

A head group is what cannot be split: heads that share a head of q and k (B and C); if all heads share one, or there are
none as in Mamba, a single head, or 64 channels of a selective scan.
"""

from __future__ import annotations

import itertools

from ringtile import ops
from ringtile.errors import RefusedError

SCHEMES = ("states", "heads")
_SHARES_PER_RANK = 2  # of the heads, in states: two keep W ranks at work for two thirds of the time or more

HeadRange = tuple[int, int, int]  # (begin, end, num_head_groups): the head groups begin .. end of as many


def groups_of_channels(num_channels: int) -> int:
    """Return the number of head groups of a selective scan: of as many channels as its kernel takes at once, or one."""
    return num_channels if num_channels % ops.SELECTIVE_CHANNELS else num_channels // ops.SELECTIVE_CHANNELS


def shares(num_head_groups: int, num_shares: int) -> list[HeadRange]:
    """Return shares of the head groups whose sizes differ by at most one."""
    bounds = [share * num_head_groups // num_shares for share in range(num_shares + 1)]
    return [(begin, end, num_head_groups) for begin, end in itertools.pairwise(bounds)]


def shares_in_time(num_head_groups: int, world_size: int) -> list[HeadRange]:
    """Return the shares of the heads that a rank computes one after another in the scheme states."""
    return shares(num_head_groups, min(num_head_groups, _SHARES_PER_RANK * world_size) if world_size > 1 else 1)


def check_heads(num_head_groups: int, world_size: int) -> None:
    """Raise RefusedError: there are fewer head groups than ranks."""
    if num_head_groups < world_size:
        raise RefusedError(
            f"the scheme heads with {num_head_groups} heads, or groups of heads that share q and k (B and C), over "
            f"{world_size} ranks; expected as many as ranks or more: use the scheme states, or fewer ranks"
        )
