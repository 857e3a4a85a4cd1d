"""Schemes: how the ranks of a group share the work of attention. Names, and who works on which heads.

A scheme is a text, the same in Python, YAML and on the command line:

    ring          each rank: its own queries, all heads; keys rank by rank (arXiv:2310.01889)
    all_gather    each rank: its own queries, all heads; all keys at once
    ulysses       each rank: all queries, its share of the heads (arXiv:2309.14509)
    usp:M         M neighbors share the heads of their queries; keys come from M ranks at a time (arXiv:2405.07719)
    usp           usp:M for the most neighbors M that always share a host
    auto          whichever receives the fewest bytes over the slowest link (sequence/plan.py)
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass

from ringtile.errors import InputError, shown

EXPECTED = "ring, all_gather, ulysses, usp:M (M ranks share the heads; usp: those of a host) or auto"
_UNRESOLVED = ("auto", "usp")  # which one of the others it is depends on the hosts, for auto on the call too
_TEXT = re.compile(r"(?:(ring|all_gather|ulysses|auto|usp)|usp:([1-9]\d{0,5}))")


@dataclass(frozen=True)
class Scheme:
    """A parsed scheme name."""

    text: str
    group_size: int | None = 1  # neighbors that share the heads; None: all ranks
    at_once: bool = False  # the ring has one round, with the keys of all ranks

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Return the scheme of a text. InputError: it names none."""
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InputError(f"the scheme is {shown(text)}; expected {EXPECTED}")
        plain, number = match.groups()
        size = int(number) if plain is None else None if plain == "ulysses" else 1
        return cls(text, size, at_once=plain == "all_gather")

    @property
    def is_resolved(self) -> bool:
        return self.text not in _UNRESOLVED

    def check(self, world_size: int) -> None:
        """Raise InputError if so many ranks cannot have it."""
        if self.is_resolved:
            self.ranks_per_group(world_size)

    def ranks_per_group(self, world_size: int) -> int:
        """Return how many neighbors share heads. InputError: they do not come out even, or it is not resolved."""
        if not self.is_resolved:
            raise InputError(
                f"the scheme is {self.text}, which depends on the ranks' hosts; expected a scheme that names itself: "
                f"ring, all_gather, ulysses or usp:M"
            )
        size = world_size if self.group_size is None else self.group_size
        if world_size % size:
            raise InputError(
                f"the scheme is {self.text}, but the group has {world_size} ranks; expected a number that divides it"
            )
        return size


def candidates(hosts: tuple[int, ...], num_heads: int, num_kv_heads: int) -> list[str]:
    """Return what `auto` chooses from: ranks that share heads work on as many each.

    hosts: by rank, as in `Transport`. all_gather receives what the ring does.
    """
    sizes = _sizes_in_hosts(hosts)
    names = {"ring": 1, "ulysses": len(hosts)}
    if sizes[-1] < len(hosts):
        names |= {f"usp:{size}": size for size in sizes[1:]}
    heads = num_heads, num_kv_heads
    return [name for name, size in names.items() if len({len(each.heads) for each in shares_of(size, *heads)}) == 1]


def usp_of_hosts(hosts: tuple[int, ...]) -> str:
    """Return usp for the most neighbors that always share a host: ulysses within hosts, a ring between them."""
    return f"usp:{_sizes_in_hosts(hosts)[-1]}"


@functools.cache  # every call of a layer asks
def _sizes_in_hosts(hosts: tuple[int, ...]) -> list[int]:
    """Return how many neighbors may always share a host, 1 among them."""
    ranks = range(len(hosts))
    sizes = [size for size in range(1, len(hosts) + 1) if len(hosts) % size == 0]
    return [size for size in sizes if all(hosts[rank] == hosts[rank // size * size] for rank in ranks)]


# ---- shares of the heads ------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """The query heads that a rank works on, and the kv heads that they attend."""

    heads: range
    kv_heads: range
    # For each query head its kv head, counted from the first of the share, where these do not serve as many each.
    kv_of_heads: tuple[int, ...] | None


def share(num_heads: int, num_kv_heads: int, num_parts: int, part: int) -> Share:
    """Return the part-th of num_parts shares of H query heads.

    Shares are whole groups of query heads with one kv head where there are enough of them, so that each kv head goes to
    one rank; else a kv head goes to several. Sizes differ by at most one; where there are more parts than heads, the
    last ones are empty.
    """
    repeats = num_heads // num_kv_heads
    unit = repeats if num_kv_heads >= num_parts else 1
    size, rest = divmod(num_heads // unit, num_parts)
    begin = part * size + min(part, rest)
    heads = range(begin * unit, (begin + size + (part < rest)) * unit)
    of_heads = [head // repeats for head in heads]
    kv_heads = range(of_heads[0], of_heads[-1] + 1) if of_heads else range(0)
    is_even = len(set(Counter(of_heads).values())) <= 1
    return Share(heads, kv_heads, None if is_even else tuple(kv_head - of_heads[0] for kv_head in of_heads))


@functools.cache
def shares_of(group_size: int, num_heads: int, num_kv_heads: int) -> tuple[Share, ...]:
    """Return the share of each of the ranks that share heads."""
    return tuple(share(num_heads, num_kv_heads, group_size, part) for part in range(group_size))
