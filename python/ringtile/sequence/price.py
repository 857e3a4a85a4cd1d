"""What each scheme costs by a model of links and kernels (csrc/seq/cost.c), and which one costs least.

Shape letters: B batch, H query heads, G kv heads, D head dim, Dv value head dim, W ranks, M ranks of a group, T stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile import ops
from ringtile.scheme import Scheme
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import UnitBytes, joined_layout, row_begins, shares_of
from ringtile.transport.rates import Link, Rates, kernel_of

_NO_LINK = Link(latency_s=0.0, bytes_per_s=1.0)  # where no two ranks have it
_ALIKE = 1.02  # no model knows it better; the ring, which is first, needs the least memory


@dataclass(frozen=True)
class Shape:
    """Of q (B, N, H, D), k (B, N, G, D) and v (B, N, G, Dv), whatever N is."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Shape:
        return cls(q.size(0), q.size(2), k.size(2), q.size(3), v.size(3), q.dtype)


COST_KINDS = ("kernel", "queries", "keys", "gradients", "results")  # the kernels' rt_cost_kind


class PassCost(NamedTuple):
    """One pass of attention by a scheme, as the model has it."""

    seconds: Tensor  # float64 (W,)
    num_bytes: Tensor  # int64 (W, W): from, to
    events: Tensor  # float64 (E, 6): index of COST_KINDS, from, to, bytes, begin and end in seconds


@dataclass(frozen=True, eq=False)
class Price:
    """What attention with one scheme takes, forward and backward."""

    scheme: str
    num_steps: int  # rounds of all stages, of a pass
    forward: PassCost
    backward: PassCost
    flops: Tensor  # float64 (W,), of both passes
    memory: int  # bytes that the busiest rank holds besides its own q, k, v, out and their gradients

    @property
    def seconds(self) -> float:
        """Until the last rank is done."""
        return float(self.forward.seconds.max() + self.backward.seconds.max())

    @property
    def num_bytes(self) -> Tensor:
        """int64 (W, W): from, to."""
        return self.forward.num_bytes + self.backward.num_bytes

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean; 1 if there is none."""
        return float(self.flops.max() / self.flops.mean()) if self.flops.sum() > 0 else 1.0


def candidates(world_size: int, num_heads: int) -> list[str]:
    """The schemes that `ringtile plan` compares, and `auto` but for staged ones, which save memory and never were the
    fastest where it was measured; of those that cost about the same, the first is taken."""
    sizes = [size for size in range(2, world_size) if world_size % size == 0]
    stages = [count for count in (2, 4) if count * world_size <= num_heads]
    return ["ring", "all_gather", *(f"usp:{size}" for size in sizes), "ulysses", *(f"staged:{t}" for t in stages)]


def usp_of_hosts(hosts: tuple[int, ...]) -> str:
    """usp for the most neighbours that always share a host: ulysses within hosts, a ring between them."""
    world_size = len(hosts)
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    within = [size for size in sizes if all(hosts[rank] == hosts[rank // size * size] for rank in range(world_size))]
    return f"usp:{within[-1]}"


class Prices:
    """The prices of schemes for one mask and layout. hosts: by rank, as in `hosts_of`."""

    def __init__(self, mask: IntervalMask, layout: Layout, hosts: tuple[int, ...], rates: Rates) -> None:
        self._mask, self._layout, self._rates = mask, layout, rates
        self._of_groups: dict[int, tuple[Tensor, Tensor]] = {}  # what _counts found, by their size
        self.hosts = hosts
        self._tokens = torch.tensor([layout.local_len(rank) for rank in range(layout.world_size)])

    def cheapest(self, shape: Shape, *, whole: bool) -> str:
        """The scheme that takes the least time. whole: ranks cannot share heads."""
        names = candidates(self._layout.world_size, shape.num_heads)
        names = [name for name in names if Scheme.parse(name).num_stages == 1]
        names = [name for name in names if not whole or name in ("ring", "all_gather")]
        seconds = {name: self.of(name, shape).seconds for name in names}
        return next(name for name in names if seconds[name] <= _ALIKE * min(seconds.values()))

    def of(self, name: str, shape: Shape, *, events: bool = False) -> Price:
        """name: of a scheme that is not open."""
        scheme = Scheme.parse(name)
        size = len(scheme.groups(self._layout.world_size)[0])
        keys, pairs = self._counts(size)
        pairs = pairs * (shape.batch // self._mask.begin.size(0))
        shares = shares_of(scheme.num_stages, size, shape.num_heads, shape.num_kv_heads)
        of_shares = torch.tensor([[[len(x.heads), len(x.kv_heads), len(x.pieces)] for x in stage] for stage in shares])
        unit = UnitBytes.of(shape.batch, shape.head_dim, shape.v_head_dim, shape.dtype)
        kernel, dim, v_dim = kernel_of(self._rates, shape.dtype), shape.head_dim, shape.v_head_dim
        within, between = self._rates.within or _NO_LINK, self._rates.between or _NO_LINK
        links = [within.latency_s, within.bytes_per_s, within.overlap, between.latency_s, between.bytes_per_s]
        links += [between.host_bytes_per_s or between.bytes_per_s, between.overlap]
        message_s, copy_bytes_per_s = self._rates.message_s, self._rates.copy_bytes_per_s
        flops = (2 * (dim + v_dim), 2 * (3 * dim + 2 * v_dim))  # of a pair, as in RankCost

        def play(backward: bool, query: int, result: int, flops_per_s: float) -> PassCost:
            sizes = torch.tensor([unit.key, unit.gradient, query, result])
            kernels = [flops[backward], flops_per_s, kernel.call_s]
            rates = torch.tensor([*kernels, message_s, copy_bytes_per_s, *links], dtype=torch.float64)
            of_plan = (torch.tensor(self.hosts), self._tokens, keys, pairs, of_shares, sizes, rates)
            return _pass_cost(*of_plan, at_once=scheme.at_once, backward=backward, events=events)

        heads = of_shares[:, :, 0].sum(0).repeat(self._layout.world_size // size)
        return Price(
            scheme=name,
            num_steps=scheme.num_stages * (1 if scheme.at_once else self._layout.world_size // size),
            forward=play(False, unit.query, unit.result, kernel.forward_flops_per_s),
            backward=play(True, unit.query_again, unit.result_again, kernel.backward_flops_per_s),
            flops=pairs.sum(1).double() * heads * sum(flops),
            memory=self._memory(scheme, shape, unit, keys, of_shares),
        )

    def _counts(self, size: int) -> tuple[Tensor, Tensor]:
        """(W, W) each: the keys of a rank that the group of another needs, and pairs of both in a row of the mask."""
        if size not in self._of_groups:
            self._of_groups[size] = self._count(size)
        return self._of_groups[size]

    def _count(self, size: int) -> tuple[Tensor, Tensor]:
        layout, mask = self._layout, self._mask
        world_size = layout.world_size
        groups = [range(begin, begin + size) for begin in range(0, world_size, size)]
        joined = joined_layout(layout, groups)
        needed, pairs = ops.plan(mask.begin, mask.end, joined.tensor)
        if size > 1:
            pairs = ops.plan(mask.begin, mask.end, layout.tensor)[1]
            pairs = pairs.view(-1, size, world_size).sum(1).repeat_interleave(size, 0)
        query_group, key_group, first, last = needed[:, 0], needed[:, 1], needed[:, 4], needed[:, 4] + needed[:, 5]
        keys = torch.zeros(len(groups), world_size, dtype=torch.int64)
        for at, group in enumerate(groups):
            for rank, begin in row_begins(layout, group).items():
                count = last.clamp(max=begin + layout.local_len(rank)) - first.clamp(min=begin)
                here = (key_group == at) & (count > 0)
                keys[:, rank].index_add_(0, query_group[here], count[here])
        return keys.repeat_interleave(size, 0), pairs

    def _memory(self, scheme: Scheme, shape: Shape, unit: UnitBytes, keys: Tensor, shares: Tensor) -> int:
        """In the backward, which holds more: gradients in the state dtype, and messages of this step and the next."""
        world_size, size = self._layout.world_size, shares.size(1)
        query_heads, kv_heads = (shares[:, :, part].amax(0).repeat(world_size // size) for part in (0, 1))
        queries = self._tokens.view(-1, size).sum(1).repeat_interleave(size)
        others = keys * ~torch.eye(world_size, dtype=torch.bool)
        by_group = others.view(world_size, -1, size).sum(2)
        block = (by_group.sum(1) if scheme.at_once else by_group.amax(1)) * kv_heads
        steps = min(2, scheme.num_stages * (1 if scheme.at_once else world_size // size))
        state = ops.state_dtype(shape.dtype).itemsize * shape.batch * shape.head_dim
        held = queries * query_heads * state + self._tokens * shape.num_kv_heads * unit.gradient
        held = held + steps * block * (unit.key + unit.gradient)
        if size > 1 or scheme.num_stages > 1:
            held = held + queries * query_heads * (min(2, scheme.num_stages) * unit.query_again + unit.result_again)
        return int(held.max())


# ---- the op -------------------------------------------------------------------------------------


def _pass_cost(
    hosts: Tensor,
    tokens: Tensor,
    keys: Tensor,
    pairs: Tensor,
    shares: Tensor,
    sizes: Tensor,
    rates: Tensor,
    *,
    at_once: bool,
    backward: bool,
    events: bool,
) -> PassCost:
    """Plays a pass on a model of links and kernels: csrc/seq/cost.c, whose rt_cost_params these are.

    hosts, tokens (W,), keys, pairs (W, W), shares (T, M, 3), sizes (4,): int64; rates (12,): float64; all on the CPU.
    events: whether they are wanted.
    """
    of_plan = (hosts, tokens, keys, pairs, shares)
    return PassCost(*torch.ops.ringtile.scheme_cost(*of_plan, sizes, rates, at_once, backward, events))


def _scheme_cost_fake(
    hosts: Tensor, tokens: Tensor, keys: Tensor, *of_plan: Tensor | bool | int
) -> tuple[Tensor, Tensor, Tensor]:
    num_events = torch.library.get_ctx().new_dynamic_size()
    of_ranks = hosts.new_empty(hosts.size(0), dtype=torch.float64)
    return of_ranks, torch.empty_like(keys), of_ranks.new_empty(num_events, 6)


torch.library.register_fake("ringtile::scheme_cost", _scheme_cost_fake)
