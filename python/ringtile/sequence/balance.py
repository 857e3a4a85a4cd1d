"""Which rank holds which chunk of tokens, so that all ranks do the same work and few keys travel.

Attention costs what the mask lets attend, so the work of a chunk of queries is a sum over the mask, and the keys that
it needs lie between its smallest begin and its largest end. Every rank gets as many chunks as another (give or take
one): what a layer does token by token is then even too. That is number partitioning, which has no fast exact solution;
here is a greedy local search. It starts from the layout that moves least and trades chunks away from the busiest rank,
each time those two whose trade evens out most for the keys that it makes travel.

Shape letters: S global tokens, W ranks, C chunks of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringtile.sequence.mask import IntervalMask

TOLERANCE = 1.03  # busiest rank over the mean at which the search ends
_MAX_TRADES = 400
_MAX_GIVEN, _MAX_TAKEN = 128, 512  # chunks that a trade chooses among, spread over those that there are


def deal(mask: IntervalMask, world_size: int, chunk: int) -> Tensor:
    """Return int64 (C,): the rank of each chunk of `chunk` tokens (the last may be shorter), for C >= W."""
    work, first, last = _needs(mask, chunk)
    index = torch.arange(work.numel(), device="cpu")
    contiguous = index * world_size // work.numel()
    half = index * 2 * world_size // work.numel()
    zigzag = torch.minimum(half, 2 * world_size - 1 - half)
    table = _Table(work, first, last, world_size)
    # Trades spoil the neighbourhood that makes a layout cheap, so a named layout that is even as it is comes first.
    even = [owner for owner in (contiguous, zigzag) if table.imbalance(owner) <= TOLERANCE and _counts_even(owner)]
    return min(even or [table.trade(contiguous)], key=table.num_travelling)


def _needs(mask: IntervalMask, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each chunk, all int64 (C,): its unmasked pairs, and the key chunks first .. last - 1 that it needs.

    With two sides it may need fewer of them: the pairs are exact, what travels is an estimate.
    """
    begin, end, seq_len = mask.begin, mask.end, mask.seq_len
    attends = end > begin
    missing = -seq_len % chunk

    def by_chunk(x: Tensor, filler: int) -> Tensor:
        return pad(x, (0, missing), value=filler).view(-1, chunk)

    pairs = mask.num_keys.sum(0)
    smallest = torch.where(attends, begin, seq_len).amin(0)
    largest = torch.where(attends, end, 0).amax(0)
    first = by_chunk(smallest, seq_len).amin(1).long() // chunk
    last = (by_chunk(largest, 0).amax(1).long() + chunk - 1) // chunk
    return by_chunk(pairs, 0).sum(1), torch.minimum(first, last), last


def _counts_even(owner: Tensor) -> bool:
    counts = owner.bincount()
    return int(counts.max() - counts.min()) <= 1


def _some(flags: Tensor, most: int) -> Tensor:
    """Return at most so many of the places where flags are set, evenly spread."""
    places = flags.nonzero()[:, 0]
    return places[:: -(-places.numel() // most) or 1]


class _Table:
    """Work and needs of the chunks, and what follows from giving each an owner, int64 (C,)."""

    def __init__(self, work: Tensor, first: Tensor, last: Tensor, world_size: int) -> None:
        self.work, self.first, self.last, self.world_size = work, first, last, world_size
        self.index = torch.arange(work.numel(), device="cpu")
        # Chunk c needs the keys of chunks first[c] .. last[c] - 1: no table of C x C says so.
        self.needs_itself = ((first <= self.index) & (self.index < last)).long()

    def loads(self, owner: Tensor) -> Tensor:
        """Return int64 (W,): the work of each rank."""
        return torch.zeros(self.world_size, dtype=torch.int64, device="cpu").index_add_(0, owner, self.work)

    def imbalance(self, owner: Tensor) -> float:
        loads = self.loads(owner)
        return int(loads.max()) * self.world_size / max(int(loads.sum()), 1)

    def users(self, owner: Tensor) -> tuple[Tensor, Tensor]:
        """Return (W, C) each: how many chunks of a rank need the keys of chunk k; whether the rank holds chunk k."""
        held = owner == torch.arange(self.world_size, device="cpu")[:, None]
        changes = torch.zeros(self.world_size, owner.numel() + 1, dtype=torch.int64, device="cpu")
        one = torch.ones_like(owner)
        changes.index_put_((owner, self.first), one, accumulate=True)
        changes.index_put_((owner, self.last), -one, accumulate=True)
        return changes.cumsum(1)[:, :-1], held

    def num_travelling(self, owner: Tensor) -> int:
        """Return how many chunks of keys ranks need of other ranks."""
        users, held = self.users(owner)
        return int(((users > 0) & ~held).sum())

    def trade(self, owner: Tensor) -> Tensor:
        """Trade chunks of the busiest rank for those of others until the work is even or no trade helps."""
        owner = owner.clone()
        loads = self.loads(owner)
        users, held = self.users(owner)
        work, first, last = self.work.tolist(), self.first.tolist(), self.last.tolist()
        target = TOLERANCE * int(loads.sum()) / self.world_size
        for _ in range(_MAX_TRADES):
            busiest = int(loads.argmax())
            if loads[busiest] <= target:
                break
            mine, others = _some(held[busiest], _MAX_GIVEN), _some(~held[busiest], _MAX_TAKEN)
            other_ranks = owner[others]
            # Giving g units of work away when the receiver has r less: the sum of squares falls by 2 g (r - g).
            given = self.work[mine][:, None] - self.work[others]
            gain = given.double() * (loads[busiest] - loads[other_ranks] - given)
            cost = self.travel_of_moving(owner, users, held)
            travel = cost[:, mine].t()[:, other_ranks] + cost[busiest, others]
            i, j = divmod(int((gain / (travel.clamp(min=0) + 1)).argmax()), others.numel())
            if gain[i, j] <= 0:
                break
            other = int(other_ranks[j])
            for chunk, giver, receiver in ((int(mine[i]), busiest, other), (int(others[j]), other, busiest)):
                owner[chunk] = receiver
                for rank, sign in ((giver, -1), (receiver, 1)):
                    loads[rank] += sign * work[chunk]
                    users[rank, first[chunk] : last[chunk]] += sign
                    held[rank, chunk] = sign > 0
        return owner

    def travel_of_moving(self, owner: Tensor, users: Tensor, held: Tensor) -> Tensor:
        """Return (W, C): by how many chunks travel grows when chunk c moves to rank w. Of a trade it is an estimate."""
        own = users[owner, self.index]  # (C,) users of chunk c on its own rank, itself maybe among them
        itself = self.needs_itself
        # The old rank no longer receives what only c needed, but may now have to receive c.
        spared = self._sum_over_needs((users == 1) & ~held)[owner, self.index]
        still_needed = (own > itself).long()
        # The new rank receives what none of its chunks needed, c excepted, which it no longer has to receive.
        fetched = self._sum_over_needs((users == 0) & ~held) - (users == 0) * itself - (users > 0).long()
        return fetched - spared + still_needed

    def _sum_over_needs(self, flags: Tensor) -> Tensor:
        """flags bool (W, C) -> int64 (W, C): how many flags of rank w are set among the keys that chunk c needs."""
        total = pad(flags.cumsum(1), (1, 0))
        return total[:, self.last] - total[:, self.first]
