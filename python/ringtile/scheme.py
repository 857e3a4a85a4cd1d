"""Schemes: how the ranks of a group share the work of attention. Names only; the plan makes rounds of them.

A scheme is a text, the same in Python, YAML and on the command line:

    ring          each rank: its own queries, all heads; keys rank by rank
    all_gather    each rank: its own queries, all heads; all keys at once
    ulysses       each rank: all queries, its share of the heads; all keys at once (arXiv:2309.14509)
    usp:M         each rank: the queries of its M neighbours, its share of the heads among them; keys from M ranks at a
                  time (arXiv:2405.07719)
    staged:T      ulysses in T stages, each of a part of the share
    usp           usp:M for the most neighbours M that always share a host
    auto          whichever a model of links and kernels finds fastest, for each call (sequence/price.py)
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from ringtile.errors import InputError, shown

EXPECTED = (
    "ring, all_gather, ulysses, usp:M (M ranks share the heads; usp: those of a host), staged:T (T stages) or auto"
)
_OPEN = ("auto", "usp")  # which one of the others it is depends on the hosts, for auto on the call too
_TEXT = re.compile(r"(?:(ring|all_gather|ulysses|auto|usp)|(usp|staged):([1-9]\d{0,5}))")


@dataclass(frozen=True)
class Scheme:
    """What a text says. Ranks share the heads of all their queries with their neighbours: group_size ranks a group."""

    text: str
    group_size: int | None = 1  # None: all ranks
    num_stages: int = 1
    at_once: bool = False  # the keys of all ranks in one round

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """InputError: the text names no scheme."""
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InputError(f"the scheme is {shown(text)}; expected {EXPECTED}")
        plain, numbered, number = match.groups()
        if plain is not None:
            return cls(text, None if plain == "ulysses" else 1, at_once=plain == "all_gather")
        return cls(text, int(number)) if numbered == "usp" else cls(text, None, int(number))

    @property
    def is_open(self) -> bool:
        """Whether a call has yet to settle which scheme it is."""
        return self.text in _OPEN

    def check(self, world_size: int) -> None:
        """InputError: so many ranks cannot have it."""
        if not self.is_open:
            self.groups(world_size)

    def groups(self, world_size: int) -> tuple[range, ...]:
        """The ranks that share heads, group by group. InputError: they do not come out even, or the scheme is open."""
        if self.is_open:
            raise InputError(
                f"the scheme is {self.text}, which depends on the ranks' hosts; expected a scheme that names itself: "
                f"ring, all_gather, ulysses, usp:M or staged:T"
            )
        size = world_size if self.group_size is None else self.group_size
        if world_size % size:
            raise InputError(
                f"the scheme is {self.text}, but the group has {world_size} ranks; expected a number that divides it"
            )
        return tuple(range(begin, begin + size) for begin in range(0, world_size, size))


# ---- shares of the heads ------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Query heads for one kernel call, as many for each kv head; both counted from the first of the share."""

    heads: range
    kv_heads: range


@dataclass(frozen=True)
class Share:
    """The query heads that a rank works on in a stage, and the kv heads that they attend."""

    heads: range
    kv_heads: range
    pieces: tuple[Piece, ...]


def share(num_heads: int, num_kv_heads: int, num_parts: int, part: int) -> Share:
    """The part-th of num_parts shares of H query heads.

    Shares are whole groups of query heads with one kv head where there are enough of them, so that each kv head goes to
    one rank; else a kv head goes to several. Sizes differ by at most one; where there are more parts than heads, the
    last ones are empty.
    """
    repeats = num_heads // num_kv_heads
    unit = repeats if num_kv_heads >= num_parts else 1
    at, rest = divmod(num_heads // unit, num_parts)
    begin = part * at + min(part, rest)
    end = begin + at + (part < rest)
    begin, end = begin * unit, end * unit
    first = begin // repeats
    kv_heads = range(first, -(-end // repeats)) if end > begin else range(0)
    # The query heads of a kv head that are in the share in part are a piece; all whole groups are one.
    whole = (-(-begin // repeats) * repeats, end // repeats * repeats)
    cuts = sorted({begin, end, *(min(max(cut, begin), end) for cut in whole)})
    pieces = tuple(
        Piece(range(a - begin, b - begin), range(a // repeats - first, -(-b // repeats) - first))
        for a, b in itertools.pairwise(cuts)
    )
    return Share(range(begin, end), kv_heads, pieces)
