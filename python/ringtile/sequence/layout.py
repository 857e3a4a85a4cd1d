"""Layouts: which rank holds which global positions, as short lists of runs.

Shape letters: S global tokens, N local tokens, W ranks, R runs of all ranks.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringtile import arguments, ops
from ringtile.errors import InputError, LayoutError, shown
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.tree import MAX_SEQ_LEN
from ringtile.transport.groups import Group, all_gather_seq

logger = logging.getLogger("ringtile")
_MAX_SEARCHED = 2**22  # positions that are listed to name a wrong one
# The layouts that follow from S and W alone, with the chunks of a rank: what W is multiplied by to pad a sequence.
CHUNKS_PER_RANK = {"contiguous": 1, "zigzag": 2, "striped": 1}
# The layouts that depend on the mask, and the one whose multiple a sequence is padded to for them.
PADDED_LIKE = {"per_document": "zigzag", "balanced": "contiguous", "whole_documents": "contiguous"}
_UNEVEN = 1.05  # the most tokens, and work, of a rank over the mean where documents stay whole


class Run(NamedTuple):
    """Local tokens local_begin .. local_begin + length - 1 hold global_begin, global_begin + stride, ..."""

    global_begin: int
    stride: int
    local_begin: int
    length: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A partition of the global positions 0..S-1 over W ranks. Immutable; equal layouts hold equal runs.

    Build one with `contiguous`, `zigzag`, `striped`, `per_document` or `balanced`, or any other with `from_runs`. Every
    rank holds a token.

    tensor: int64 CPU (R, 5), rank after rank, each in the order of its local tokens: rank, global_begin, stride,
    local_begin, length; as the ops take it, and to be left as it is.
    """

    seq_len: int
    tensor: Tensor
    world_size: int = field(init=False)
    _offsets: list[int] = field(init=False)  # of the first run of each rank, and the number of all
    _numbers: list[int] = field(init=False)  # four of each run: a list for each would take ten times as long

    def __post_init__(self) -> None:
        if not 1 <= self.seq_len <= MAX_SEQ_LEN:
            raise LayoutError(f"seq_len is {self.seq_len}; expected 1..{MAX_SEQ_LEN}")
        try:
            ops.layout_check(self.tensor, self.seq_len, int(self.tensor[-1, 0]) + 1)
        except RuntimeError as error:
            raise LayoutError(_first_fault(self.tensor, self.seq_len) or str(error)) from None
        # Numbers of Python, made now: torch.compile traces what asks for them.
        num_runs = self.tensor[:, 0].bincount()
        object.__setattr__(self, "world_size", num_runs.numel())
        object.__setattr__(self, "_offsets", [0, *num_runs.cumsum(0).tolist()])
        object.__setattr__(self, "_numbers", self.tensor[:, 1:].flatten().tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return torch.equal(self.tensor, other.tensor)

    def __hash__(self) -> int:
        return self.digest

    @functools.cached_property
    def digest(self) -> int:
        """64 bits, which ranks compare."""
        return ops.digest(self.tensor, self.tensor[:0], self.tensor[:0])

    def __repr__(self) -> str:
        return f"Layout(seq_len={self.seq_len}, world_size={self.world_size}, runs={len(self.tensor)})"

    # ---- the layouts ----------------------------------------------------------------------------

    @classmethod
    def contiguous(cls, seq_len: int, world_size: int) -> Layout:
        """Rank r holds the r-th of W chunks. Causal work grows with r; a window needs only its halo."""
        bounds = _chunk_bounds("contiguous", seq_len, world_size, 1)
        return cls._of_ranks(seq_len, [[Run(b, 1, 0, e - b)] for b, e in itertools.pairwise(bounds)])

    @classmethod
    def zigzag(cls, seq_len: int, world_size: int) -> Layout:
        """Rank r holds chunks r and 2W-1-r of 2W: the same causal work on every rank (arXiv:2407.21783, 3.3.2)."""
        bounds = _chunk_bounds("zigzag", seq_len, world_size, 2)
        ranks = []
        for rank in range(world_size):
            tail = 2 * world_size - 1 - rank
            head_len, tail_len = (bounds[chunk + 1] - bounds[chunk] for chunk in (rank, tail))
            ranks.append([Run(bounds[rank], 1, 0, head_len), Run(bounds[tail], 1, head_len, tail_len)])
        return cls._of_ranks(seq_len, ranks)

    @classmethod
    def striped(cls, seq_len: int, world_size: int) -> Layout:
        """Rank r holds positions r, r+W, r+2W, ... (striped attention, arXiv:2311.09431)."""
        _chunk_bounds("striped", seq_len, world_size, 1)
        lengths = (len(range(rank, seq_len, world_size)) for rank in range(world_size))
        return cls._of_ranks(seq_len, [[Run(rank, world_size, 0, n)] for rank, n in enumerate(lengths)])

    @classmethod
    def per_document(cls, lengths: Sequence[int], world_size: int) -> Layout:
        """Zigzag inside every document of a packed row: the same causal work on every rank, whatever the lengths.

        A document of L tokens is cut into 2W chunks whose sizes differ by at most one; which rank gets the first of
        them moves on by one per document, so that left-over tokens spread. Raises LayoutError when a rank gets nothing.
        """
        numbers = _lengths(lengths)
        if any(length < 0 for length in numbers) or sum(numbers) > MAX_SEQ_LEN:
            raise LayoutError(
                f"lengths is {numbers!r:.200}, {sum(numbers)} tokens; expected lengths >= 0 of at most {MAX_SEQ_LEN}"
            )
        return cls._per_document(torch.tensor(numbers, dtype=torch.int64, device="cpu"), world_size)

    @classmethod
    def _per_document(cls, lengths: Tensor, world_size: int) -> Layout:
        """lengths: int64 CPU (documents,), each >= 0."""
        if arguments.check_int("world_size", world_size) < 1:
            raise LayoutError(f"world_size is {world_size}; expected at least 1")
        num_chunks = 2 * world_size
        chunk, document = (torch.arange(n, device="cpu") for n in (num_chunks, lengths.numel()))
        cuts = torch.arange(num_chunks + 1, device="cpu") * lengths[:, None] // num_chunks
        begins = (lengths.cumsum(0) - lengths)[:, None] + cuts[:, :-1]
        owners = (torch.minimum(chunk, num_chunks - 1 - chunk) + document[:, None]) % world_size
        return cls._of_chunks(owners.flatten(), begins.flatten(), cuts.diff(dim=1).flatten(), world_size)

    @classmethod
    def _of_chunks(cls, owners: Tensor, begins: Tensor, lengths: Tensor, world_size: int) -> Layout:
        """Deal chunks, in the order of the sequence: int64 CPU (C,), of which those without a token are left out."""
        held = torch.zeros(world_size, dtype=torch.int64, device="cpu").index_add_(0, owners, lengths)
        if int(held.min()) == 0:
            raise _no_token(int(held.argmin()))
        order = owners.argsort(stable=True)
        order = order[lengths[order] > 0]
        ranks, begins, lengths = owners[order], begins[order], lengths[order]
        rows = lengths.cumsum(0) - lengths - (held.cumsum(0) - held)[ranks]
        tensor = torch.stack((ranks, begins, torch.ones_like(ranks), rows, lengths), dim=1)
        return cls(int(held.sum()), tensor)

    @classmethod
    def balanced(cls, mask: IntervalMask, world_size: int, chunk: int | None = None) -> Layout:
        """Equal work on every rank for this very mask, and few keys that travel; as many tokens on every rank.

        The sequence is dealt in chunks of `chunk` tokens, one more or less per rank; the work of a rank is what its
        queries attend, summed over the rows of the mask, and ends within 3 % of the mean where chunks of that size
        allow it. None: at most 32 tokens, so that a rank gets 512 chunks where it has as many tokens, and no more than
        2,048. Every rank that holds the same mask finds the same layout. Logs a line where the busiest rank does 5 %
        more than the mean. Raises LayoutError when there are fewer chunks than ranks.
        """
        check_types(mask)
        world_size = arguments.check_int("world_size", world_size)
        if chunk is None:
            share = mask.seq_len // max(world_size, 1)
            most = max(1, min(32, share // 512), share // 1024)
            chunk = 1 << (most.bit_length() - 1)
        chunk = arguments.check_int("chunk", chunk)
        if chunk < 1 or world_size < 1 or mask.seq_len <= chunk * (world_size - 1):
            raise LayoutError(
                f"a balanced layout of {mask.seq_len} tokens over {world_size} ranks in chunks of {chunk}; expected "
                "at least a rank, a token in a chunk, and a chunk for every rank"
            )
        chunk = min(chunk, mask.seq_len)
        of_keys = None if mask.key_begin is None else mask.num_keys
        owners, loads = ops.balance(mask.begin, mask.end, of_keys, world_size, chunk)
        if (busiest := int(loads.max()) * world_size) > 1.05 * int(loads.sum()):
            logger.info(
                "ringtile: in a layout of %d tokens over %d ranks the busiest rank does %.2f times the mean of the "
                "ranks' attention",
                mask.seq_len,
                world_size,
                busiest / int(loads.sum()),
            )
        changes = (owners.diff() != 0).nonzero()[:, 0] + 1  # chunks of one rank after another are one run
        firsts = pad(changes, (1, 0))
        lengths = pad(firsts * chunk, (0, 1), value=mask.seq_len).diff()
        return cls._of_chunks(owners[firsts], firsts * chunk, lengths, world_size)

    @classmethod
    def whole_documents(cls, mask: IntervalMask, world_size: int) -> Layout:
        """`balanced`, with cuts moved to the nearest end of a document: what one rank holds whole is not sent.

        The cut that moves least comes first. One stays inside its document where a rank would have more than 1.05 times
        the mean of the tokens, or of the work: long documents are on as many ranks as balance needs.
        """
        layout = cls.balanced(mask, world_size)
        order = layout.tensor[:, 1].argsort()
        owners, begins = layout.tensor[order, 0].tolist(), layout.tensor[order, 1]
        cuts, work = [*begins.tolist(), mask.seq_len], pad(mask.num_keys.sum(0).cumsum(0), (1, 0))
        before = torch.stack((torch.arange(mask.seq_len + 1, device="cpu"), work))  # tokens and work before each token
        held = torch.zeros(world_size, 2, dtype=torch.int64, device="cpu")
        held.index_add_(0, layout.tensor[order, 0], before[:, cuts].diff(dim=1).T)
        most = _UNEVEN * held.double().mean(0)
        ends = _document_ends(mask)
        after = torch.searchsorted(ends, begins).tolist()  # the first end from each cut on
        moves = [
            (abs(cuts[i] - end), i, end)
            for i in range(1, len(owners))
            for end in ends[after[i] - 1 : after[i] + 1].tolist()
        ]
        moved = {i for distance, i, _ in moves if not distance}
        for _, i, end in sorted(moves):
            if i in moved or not cuts[i - 1] <= end <= cuts[i + 1]:
                continue
            gains, loses = (owners[i - 1], owners[i]) if end > cuts[i] else (owners[i], owners[i - 1])
            change = (before[:, end] - before[:, cuts[i]]).abs()
            if bool((held[gains] + change > most).any()) or held[loses, 0] == change[0]:
                continue
            held[gains] += change
            held[loses] -= change
            cuts[i] = end
            moved.add(i)
        at = torch.tensor(cuts, device="cpu")
        return cls._of_chunks(layout.tensor[order, 0], at[:-1], at.diff(), world_size)

    @classmethod
    def from_runs(cls, runs: Iterable[Iterable[Sequence[int]]]) -> Layout:
        """Any layout: for every rank its runs, each (global_begin, stride, local_begin, length), in any order.

        Raises LayoutError when a run is malformed, a rank holds nothing, a rank's local tokens have a hole, or a
        position is held by no rank or by two.
        """
        try:
            ranks = tuple(
                tuple(sorted((_run(rank, run) for run in of_rank), key=operator.attrgetter("local_begin")))
                for rank, of_rank in enumerate(runs)
            )
        except TypeError:
            raise InputError(f"runs is {runs!r:.200}; expected for every rank a list of runs") from None
        for rank, of_rank in enumerate(ranks):
            if not of_rank:
                raise _no_token(rank)
        return cls._of_ranks(sum(run.length for of_rank in ranks for run in of_rank), ranks)

    @classmethod
    def _of_ranks(cls, seq_len: int, ranks: Sequence[Sequence[Run]]) -> Layout:
        rows = [(rank, *run) for rank, of_rank in enumerate(ranks) for run in of_rank]
        return cls(seq_len, torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 5))

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Layout:
        """Make the layout of `Layout.tensor`: int64 (R, 5), rank, global_begin, stride, local_begin, length."""
        arguments.check_on_cpu("layout", tensor)
        if tensor.dim() != 2 or tensor.size(1) != 5 or tensor.size(0) == 0 or tensor.dtype != torch.int64:
            raise InputError(f"layout is {tensor.dtype} {tuple(tensor.shape)}; expected int64 (R, 5), not empty")
        ranks, num_runs = (x.tolist() for x in torch.unique_consecutive(tensor[:, 0], return_counts=True))
        if ranks != list(range(len(ranks))):
            raise LayoutError(f"ranks of the runs are {ranks}; expected 0, ..., W-1, rank after rank")
        return cls.from_runs(of_rank.tolist() for of_rank in torch.split(tensor[:, 1:], num_runs))

    @classmethod
    def named(cls, name: str, seq_len: int, world_size: int) -> Layout:
        """Return the layout a configuration names: "contiguous", "zigzag" or "striped"."""
        cls.multiple(name, world_size)
        layout: Layout = getattr(cls, name)(seq_len, world_size)
        return layout

    @classmethod
    def of_mask(cls, name: str, mask: IntervalMask, world_size: int) -> Layout:
        """Return the layout a configuration names, for this mask: by `named`, "per_document", "balanced",
        "whole_documents" or "auto".

        Documents are those of the mask's first row.
        """
        name = resolved(name, mask)
        if name == "per_document":
            changes = pad(mask.begin[0].diff() != 0, (1, 0), value=True)
            begins = {0, *mask.begin[0][changes].tolist()}  # 0 where nothing is attended
            bounds = torch.tensor([*sorted(begins), mask.seq_len], device="cpu")
            return cls._per_document(bounds.diff(), world_size)
        if name in ("balanced", "whole_documents"):
            made: Layout = getattr(cls, name)(mask, world_size)
            return made
        return named_layout(name, mask.seq_len, world_size)

    @staticmethod
    def multiple(name: str, world_size: int) -> int:
        """Return what S should be padded to a multiple of, so that all ranks hold equally many tokens."""
        if name not in CHUNKS_PER_RANK:
            raise LayoutError(f"layout is {shown(name)}; expected one of {', '.join(CHUNKS_PER_RANK)}")
        return CHUNKS_PER_RANK[name] * world_size

    # ---- one rank of it -------------------------------------------------------------------------

    def runs(self, rank: int) -> tuple[Run, ...]:
        """Return the runs of a rank. Raise LayoutError when there is no such rank."""
        numbers = self._of_rank(rank)
        return tuple(Run(*numbers[i : i + 4]) for i in range(0, len(numbers), 4))

    def local_len(self, rank: int) -> int:
        """Return N, the number of tokens a rank holds."""
        return sum(self._of_rank(rank)[3::4])

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return int64 (N,): the global position of each local token."""
        numbers = torch.tensor(self._of_rank(rank), dtype=torch.int64, device="cpu")
        positions: Tensor = ops.run_positions(numbers.view(-1, 4))
        return positions.to(device)

    def _of_rank(self, rank: int) -> list[int]:
        """Return the numbers of the runs of a rank, one after another."""
        if not 0 <= arguments.check_int("rank", rank) < self.world_size:
            raise LayoutError(f"rank is {rank}; expected 0..{self.world_size - 1}")
        return self._numbers[4 * self._offsets[rank] : 4 * self._offsets[rank + 1]]

    # ---- tensors --------------------------------------------------------------------------------

    def shard(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Return the tokens of `rank`: any dtype, any shape with size S in `dim` -> with size N. Differentiable.

        x is global, the same on every rank. Raises InputError when x has not S tokens in `dim`.
        """
        dim = arguments.check_dim("x", x, dim)
        if x.size(dim) != self.seq_len:
            raise InputError(f"x is {tuple(x.shape)}, dim {dim}; expected size {self.seq_len} in dim")
        return ops.shard_seq(x, [self._of_rank(rank)], dim)

    def unshard(self, local: Tensor, dim: int, group: Group | None = None) -> Tensor:
        """Return the pieces of all ranks in global order: size N in `dim` -> size S, the same tensor on every rank.

        Every rank of the group calls it, and the backward of it. A rank's gradient is the sum of what all ranks
        have for its tokens, added in rank order. Any dtype, any dim; group None is one rank.
        InputError: local has not N tokens in `dim`, or W is not the group's. RingMismatchError, PeerLostError.
        """
        return all_gather_seq(local, self.tensor, dim, self.seq_len, group)


def _document_ends(mask: IntervalMask) -> Tensor:
    """Return int64 (D + 1,), rising: 0, S, and the positions across which no token attends."""
    attends, places = mask.end > mask.begin, torch.arange(mask.seq_len + 1, device="cpu")
    begin = torch.where(attends, mask.begin, mask.seq_len).amin(0)
    end = pad(torch.where(attends, mask.end, 0).amax(0).cummax(0).values, (1, 0))
    earliest = pad(begin.flip(0).cummin(0).values.flip(0), (0, 1), value=mask.seq_len)
    return ((end <= places) & (earliest >= places)).nonzero()[:, 0]


def _no_token(rank: int) -> LayoutError:
    return LayoutError(f"rank {rank} holds no token; expected at least one run for every rank")


def resolved(name: str, mask: IntervalMask | None = None) -> str:
    """Return the name of a layout: for "auto" zigzag where each row of the mask is one document or tree, else balanced.

    None: a causal document. All ranks have the same mask, and so the same answer.
    """
    if name != "auto":
        return name
    if mask is None or bool((mask.begin.amin(1) == mask.begin.amax(1)).all()):  # a tenth of what the rest takes
        return "zigzag"
    attends = mask.end > mask.begin
    # Of a packed row a few tokens show that it is one; at 16M tokens to look at all takes a quarter of a second.
    few = slice(None, None, mask.seq_len // 1024 or 1)
    begins = mask.begin[0, few][attends[0, few]]
    if begins.numel() and int(begins.min()) < int(begins.max()):
        return "balanced"
    first, last = (torch.where(attends, mask.begin, none) for none in (mask.seq_len, -1))
    return "zigzag" if bool((first.amin(1) >= last.amax(1)).all()) else "balanced"


@functools.lru_cache(maxsize=64)
def named_layout(name: str, seq_len: int, world_size: int) -> Layout:
    """Return `Layout.named`: one object, with what it has remembered, for all sequences of one length."""
    return Layout.named(name, seq_len, world_size)


def check_types(mask: object, *layout: object) -> None:
    """Raise InputError, with what to write instead, unless mask is an IntervalMask and layout, if given, a Layout."""
    if not isinstance(mask, IntervalMask):
        boolean = isinstance(mask, Tensor) and mask.dtype == torch.bool
        raise InputError(
            f"mask is a {type(mask).__name__}; expected an IntervalMask, such as "
            + ("IntervalMask.from_bool(mask)" if boolean else "IntervalMask.causal(S)")
        )
    for each in layout:
        if not isinstance(each, Layout):
            raise InputError(f"layout is a {type(each).__name__}; expected a Layout, such as Layout.zigzag(S, W)")


def _chunk_bounds(name: str, seq_len: int, world_size: int, chunks_per_rank: int) -> list[int]:
    """Return bounds of W chunks_per_rank chunks of 0..S-1 whose sizes differ by at most one."""
    if arguments.check_int("world_size", world_size) < 1:
        raise LayoutError(f"world_size is {world_size}; expected at least 1")
    seq_len = arguments.check_int("seq_len", seq_len)
    num_chunks = chunks_per_rank * world_size
    if not num_chunks <= seq_len <= MAX_SEQ_LEN:
        raise LayoutError(
            f"a {name} layout of {seq_len} tokens over {world_size} ranks: expected {num_chunks}..{MAX_SEQ_LEN} "
            f"tokens; pad the sequence or use fewer ranks"
        )
    return [chunk * seq_len // num_chunks for chunk in range(num_chunks + 1)]


def _lengths(lengths: Sequence[int]) -> list[int]:
    try:
        return [operator.index(length) for length in lengths]
    except TypeError:
        raise InputError(f"lengths is {lengths!r:.200}; expected the lengths of the documents, integers") from None


def _run(rank: int, values: Sequence[int]) -> Run:
    try:
        run = Run(*(operator.index(value) for value in values))
    except TypeError:
        run = None
    if run is None or not all(0 <= value <= MAX_SEQ_LEN for value in run):
        raise LayoutError(
            f"rank {rank} has the run {values!r}; expected (global_begin, stride, local_begin, length), integers "
            f"in 0..{MAX_SEQ_LEN}"
        )
    return run


def _first_fault(layout: Tensor, seq_len: int) -> str | None:
    """Return what `ops.layout_check` refused, in words."""
    before, filled = 0, 0
    for rank, *numbers in layout.tolist():
        run = Run(*numbers)
        before, filled = rank, filled if rank == before else 0
        last = run.global_begin + (run.length - 1) * run.stride
        if run.length < 1 or run.stride < 1 or last >= seq_len:
            return (
                f"rank {rank} has {run}; expected length >= 1, stride >= 1 and positions in 0..{seq_len - 1} "
                f"(the lengths of all runs add up to {seq_len})"
            )
        if run.local_begin != filled:
            return f"rank {rank} has {run}; expected local_begin {filled}, where its previous run ends"
        filled += run.length
    if seq_len > _MAX_SEARCHED:
        return None
    begin, stride, _, length = layout[:, 1:].T
    every = ops.run_positions(torch.stack((begin, stride, length.cumsum(0) - length, length), dim=1))
    held = torch.bincount(every, minlength=seq_len)
    wrong = (held != 1).nonzero()
    if wrong.numel() == 0:
        return None
    position = int(wrong[0])
    return f"global position {position} is held {int(held[position])} times; expected every position exactly once"
