"""What a recurrent layer must know of a sharded sequence: what each token goes on from, and what states cross.

The tokens of a row are a forest: a token goes on from its parent, the token before it on its path, or is the first of
its path. In documents the parent is the token before; in a tree several branches go on from one token.

Shape letters: Bm mask rows (B or 1), S global tokens, N local tokens.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ringtile.errors import RefusedError
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence

_FIRST, _PADDING = -1, -2  # instead of a parent
_BRANCHES, _TOKENS = 32, 4096  # that one call computes, at most: it copies the tokens, and a state for each branch


class StatePass(NamedTuple):
    """A cut between neighboring stretches that some path crosses: source holds the token before it, target the next.

    A message where the two are different ranks: of the states that tokens after the cut go on from in the forward, of
    their gradients, the other way, in the backward.
    """

    position: int  # global: the first token after the cut
    source: int
    target: int
    num_states: int  # 1 in documents; in trees those of the open branches


class Segment(NamedTuple):
    """Neighboring tokens of a stretch that one call computes: documents, the first of which may go on from a state."""

    length: int
    seq_idx: Tensor  # int32 CPU (Bm or 1, length): as kernels.py takes it
    state: int | None  # the number of the state that it begins with; None: 0


class KernelCall(NamedTuple):
    """Segments that one call computes: one, or several as rows of a batch, which begin with the same state."""

    numbers: tuple[int, ...]  # of the segments; of several, nothing goes on from the final states
    seq_idx: Tensor  # int32 CPU (Bm or 1, length), or (segments, length of the longest), padded


class Walk(NamedTuple):
    """The segments of one row, or of all rows, in the order of the sequence, and the calls that compute them.

    The states that come into the stretch are numbered from 0 on, and after those the final states of the segments.
    """

    segments: tuple[Segment, ...]
    passed_on: tuple[int, ...]  # the numbers of the states that go out of the stretch
    calls: tuple[KernelCall, ...]


class Stretch(NamedTuple):
    """Local tokens that are neighbors in the sequence too."""

    begin: int
    length: int
    source: int | None  # the rank that passes its states to this stretch; None: no path reaches into it
    target: int | None  # the rank that states go to from this stretch
    num_received: int
    num_sent: int
    walks: tuple[Walk, ...]  # one for all rows, as in documents, or one for each

    @property
    def tokens(self) -> slice:
        return slice(self.begin, self.begin + self.length)

    @property
    def only(self) -> Segment | None:
        """Return the segment that is the whole stretch, if there is one and only its state goes out; as in
        documents."""
        (segments, passed_on, _), *others = self.walks
        alone = not others and len(segments) == 1 and passed_on in ((), (self.num_received,))
        return segments[0] if alone else None


@dataclass(frozen=True, eq=False)
class Facts:
    """Metadata of one rank's mask and layout for recurrences, computed once. Holds no sequence, which is its key."""

    mask: IntervalMask
    layout: Layout
    rank: int

    @functools.cached_property
    def forest(self) -> Forest:
        """RefusedError: the mask has more than causal documents, or trees."""
        return Forest.of(self.mask)

    @functools.cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """In the order of the sequence. RefusedError: a state cannot follow this layout."""
        cuts = {cut.position: cut for cut in self.passes}
        stretches = []
        for rank, begin, local_begin, length in stretches_of(self.layout):
            if rank == self.rank:
                before, after = cuts.get(begin), cuts.get(begin + length)
                stretch = Stretch(local_begin, length, before and before.source, after and after.target, 0, 0, ())
                stretches.append(self.forest.fill(stretch, begin))
        return tuple(stretches)

    @functools.cached_property
    def whole(self) -> Stretch:
        """Return the sequence as one stretch."""
        return self.forest.fill(Stretch(0, self.layout.seq_len, None, None, 0, 0, ()), 0)

    def windows(self, before: int) -> tuple[Tensor, ...]:
        """Return, of each stretch, where the last `before` inputs of each path that goes out of it are: int64 CPU (Bm,
        num_sent, before).

        0: nowhere, a 0; then the rows of the windows that came in, one after another; then the tokens of the stretch.
        """
        if before not in self._windows:
            places = [begin for rank, begin, _, _ in stretches_of(self.layout) if rank == self.rank]
            self._windows[before] = tuple(
                self.forest.windows(begin, stretch, before)
                for begin, stretch in zip(places, self.stretches, strict=True)
            )
        return self._windows[before]

    @functools.cached_property
    def _windows(self) -> dict[int, tuple[Tensor, ...]]:
        return {}

    @functools.cached_property
    def passes(self) -> tuple[StatePass, ...]:
        return state_passes(self.forest, self.layout)


class Documents(NamedTuple):
    """The documents of a call on one rank."""

    sequence: ShardedSequence

    @property
    def facts(self) -> Facts:
        """Return the same object for the same sequence, whose layers ask for it one after another."""
        sequence, found = self.sequence, _facts.get(self.sequence)
        if found is None:
            found = _facts.setdefault(sequence, Facts(sequence.mask, sequence.layout, sequence.rank))
        return found

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        return self.facts.stretches


_facts: weakref.WeakKeyDictionary[ShardedSequence, Facts] = weakref.WeakKeyDictionary()


def state_passes(forest: Forest, layout: Layout) -> tuple[StatePass, ...]:
    """Return every cut that a state crosses, in the order of the sequence. Raises RefusedError."""
    cuts = itertools.pairwise(stretches_of(layout))
    passes = (StatePass(begin, before[0], rank, forest.num_open(begin)) for before, (rank, begin, _, _) in cuts)
    return tuple(each for each in passes if each.num_states)


def message_bytes(forest: Forest, layout: Layout, state_bytes: int) -> dict[tuple[int, int], int]:
    """Count the bytes from rank to rank in the forward; in the backward as many go the other way."""
    sent: dict[tuple[int, int], int] = {}
    for cut in state_passes(forest, layout):
        if cut.source != cut.target:
            sent[cut.source, cut.target] = sent.get((cut.source, cut.target), 0) + cut.num_states * state_bytes
    return sent


def stretches_of(layout: Layout) -> list[tuple[int, int, int, int]]:
    """Return (rank, global_begin, local_begin, length) of all ranks, in the order of the sequence; merge neighbors."""
    stretches: list[tuple[int, int, int, int]] = []
    for rank, begin, stride, local_begin, length in sorted(layout.tensor.tolist(), key=lambda run: run[1]):
        if stride != 1 and length > 1:
            raise RefusedError(
                f"a recurrent layer over a layout where rank {rank} holds every {stride}th token; expected runs of "
                "neighboring tokens (the contiguous, zigzag, per_document or balanced layout), or the scheme heads"
            )
        if stretches and stretches[-1][0] == rank and stretches[-1][2] + stretches[-1][3] == local_begin:
            _, first, local_first, so_far = stretches.pop()
            stretches.append((rank, first, local_first, so_far + length))
        else:
            stretches.append((rank, begin, local_begin, length))
    return stretches


class Forest:
    """The paths of each row, by the parent of each token: int64 CPU (Bm, S), _FIRST, or _PADDING.

    Rows are in depth-first order: a token that goes on from the one before it is its first child.
    """

    def __init__(self, parents: Tensor) -> None:
        positions = torch.arange(parents.size(1), dtype=torch.int64, device="cpu")
        self.parents = parents
        self._goes_on = parents == positions - 1
        self._goes_on[:, 0] = False
        jumps = (parents >= 0) & ~self._goes_on
        # By row: tokens that do not go on from the one before; and the last of those that go on from a token.
        self._jumps: list[list[int]] = [row.nonzero()[:, 0].tolist() for row in jumps]
        self._forks: list[dict[int, int]] = [
            {int(parents[row, token]): token for token in of_row} for row, of_row in enumerate(self._jumps)
        ]

    @classmethod
    def of(cls, mask: IntervalMask) -> Forest:
        """RefusedError: the mask has more than causal documents, or trees."""
        return cls(_parents_of(mask))

    def open_at(self, position: int) -> list[list[int]]:
        """Return, by row and in order, the tokens before a position that tokens from there on go on from."""
        found = []
        for row, forks in enumerate(self._forks):
            tokens = {token for token, last in forks.items() if token < position <= last}
            if position < self.parents.size(1) and self._goes_on[row, position]:
                tokens.add(position - 1)
            found.append(sorted(tokens))
        return found

    def num_open(self, position: int) -> int:
        return max(map(len, self.open_at(position)))

    def fill(self, stretch: Stretch, begin: int) -> Stretch:
        """Return a stretch that begins there in the sequence with its walks."""
        end, parents = begin + stretch.length, self.parents[:, begin : begin + stretch.length]
        received, sent = self.open_at(begin), self.open_at(end)
        num_received, num_sent = (max(map(len, of_rows)) for of_rows in (received, sent))
        starts = parents == _FIRST
        walks = []
        for row in range(parents.size(0)):
            forks = {token + 1 for token in self._forks[row] if begin <= token < end}
            cuts = {begin, end, *forks, *(token for token in self._jumps[row] if begin <= token < end)}
            numbers = {token: i for i, token in enumerate(received[row])}
            segments = []
            for first, after in itertools.pairwise(sorted(cuts)):
                tokens = slice(first - begin, after - begin)
                seq_idx = starts[row, tokens].cumsum(0, dtype=torch.int32)
                seq_idx = torch.where(parents[row, tokens] == _PADDING, -1, seq_idx)[None]
                segments.append(Segment(after - first, seq_idx, numbers.get(int(self.parents[row, first]))))
                numbers[after - 1] = num_received + len(segments) - 1
            passed_on = tuple(numbers[token] for token in sent[row])
            walks.append(Walk(tuple(segments), passed_on, _calls(segments, num_received, passed_on)))
        if all(len(walk.segments) == 1 and walk.passed_on in ((), (num_received,)) for walk in walks):
            seq_idx = torch.cat([walk.segments[0].seq_idx for walk in walks])
            every = Segment(stretch.length, seq_idx, 0 if num_received else None)
            passed_on = (num_received,) if num_sent else ()
            walks = [Walk((every,), passed_on, _calls([every], num_received, passed_on))]
        return stretch._replace(num_received=num_received, num_sent=num_sent, walks=tuple(walks))

    def windows(self, begin: int, stretch: Stretch, before: int) -> Tensor:
        """See `Facts.windows`; of a stretch that begins there in the sequence."""
        received, sent = self.open_at(begin), self.open_at(begin + stretch.length)
        windows = torch.zeros(self.parents.size(0), stretch.num_sent, before, dtype=torch.int64, device="cpu")
        for row, of_row in enumerate(sent):
            for i, token in enumerate(of_row):
                places: list[int] = []  # from the last input on
                while token >= begin and len(places) < before:
                    places.append(1 + stretch.num_received * before + token - begin)
                    token = int(self.parents[row, token])
                if 0 <= token < begin:
                    last = 1 + (received[row].index(token) + 1) * before
                    places += range(last - 1, last - 1 - (before - len(places)), -1)
                windows[row, i, before - len(places) :] = torch.tensor(places[::-1], dtype=torch.int64)
        return windows


def _calls(segments: list[Segment], num_received: int, passed_on: tuple[int, ...]) -> tuple[KernelCall, ...]:
    """Return the calls that compute segments: leaves of one fork together, where the first of them is."""
    used = {*passed_on, *(segment.state for segment in segments)}
    leaves: dict[int, list[int]] = {}  # by state
    calls: list[list[int]] = []
    for i, segment in enumerate(segments):
        if segment.state is None or num_received + i in used:
            calls.append([i])
        else:
            leaves.setdefault(segment.state, []).append(i)
    for of_fork in leaves.values():
        call: list[int] = []
        for i in sorted(of_fork, key=lambda i: segments[i].length):
            length = segments[i].length
            fits = len(call) < _BRANCHES and (len(call) + 1) * length <= _TOKENS
            if call and fits and length <= 2 * segments[call[0]].length:
                call.append(i)
            else:
                call = [i]
                calls.append(call)
    return tuple(KernelCall(tuple(call), _seq_idx([segments[i] for i in call])) for call in sorted(calls, key=min))


def _seq_idx(segments: list[Segment]) -> Tensor:
    longest = max(segment.length for segment in segments)
    if len(segments) == 1:
        return segments[0].seq_idx
    return torch.cat([functional.pad(each.seq_idx, (0, longest - each.length), value=-1) for each in segments])


def _parents_of(mask: IntervalMask) -> Tensor:
    """Return the parent of each token, as a `Forest` takes it: a token that does not attend itself is padding."""
    begin, end = mask.begin, mask.end
    positions = torch.arange(mask.seq_len, dtype=torch.int64, device="cpu")
    holds = (begin <= positions) & (positions < end)
    key_begin, key_end = mask.key_begin, mask.key_end
    if key_begin is not None and key_end is not None:
        holds &= (key_begin <= positions) & (positions < key_end)
    starts = holds & (begin == positions)
    goes_on = torch.zeros_like(holds)
    goes_on[:, 1:] = holds[:, :-1] & (begin[:, 1:] == begin[:, :-1])
    wrong = holds & ((end != positions + 1) | ~(starts | goes_on))
    if bool(wrong.any()):
        row, token = wrong.nonzero()[0].tolist()
        raise RefusedError(
            f"a recurrent layer under a mask whose token {token} (row {row}) attends "
            f"[{int(begin[row, token])}, {int(end[row, token])}); expected causal documents, where a token attends "
            "from the first token of its document to itself, or causal trees: a recurrence has no window, so pass the "
            "sequence without it, and no prefix"
        )
    parents = torch.where(holds, positions - 1, _PADDING).masked_fill(starts, _FIRST)
    if key_end is not None:
        for row in range(parents.size(0)):
            _hang_branches(parents[row], key_end[row], row)
    return parents


def _hang_branches(parents: Tensor, key_end: Tensor, row: int) -> None:
    """Set the parents (S,) of the first tokens of branches. key_end (S,): where the tokens that go on from each end."""
    changes = torch.ones_like(parents, dtype=torch.bool)
    changes[1:] = key_end[1:] != key_end[:-1]
    firsts = ((parents > _PADDING) & (changes | (parents == _FIRST))).nonzero()[:, 0].tolist()
    path: list[tuple[int, int]] = []  # the last token of each open node, and where its subtree ends
    for first, after in itertools.pairwise([*firsts, parents.numel()]):
        subtree_end = int(key_end[first])
        while path and (path[-1][1] <= first or parents[first] == _FIRST):
            path.pop()
        if path and subtree_end > path[-1][1]:
            (parent, parent_end), *_ = reversed(path)
            raise RefusedError(
                f"a recurrent layer under a mask whose token {first} (row {row}) is attended up to token "
                f"{subtree_end - 1}, but token {parent}, which it goes on from, up to token {parent_end - 1}; expected "
                "a tree, where a branch ends where the one that it hangs from does, or before"
            )
        parents[first] = path[-1][0] if path else _FIRST
        path.append((after - 1, subtree_end))
