"""`ringtile bench ring`: the ring over processes of this machine, and the same work without a ring.

Every rank is a process of a gloo group. A sample begins at a barrier and lasts as long as the slowest rank.

Shape letters: B batch, S global tokens, N local tokens, H query heads, G kv heads, D head dim, W ranks.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessContext, start_processes

from ringtile import ops
from ringtile.bench.attention import PROVIDERS as IN_ONE_PROCESS
from ringtile.bench.attention import attend_candidate, sdpa
from ringtile.bench.compare import Candidate, timed
from ringtile.bench.measure import Peak, Sample, Sampler, mean_sample, take_turns
from ringtile.bench.points import (
    DTYPES,
    Attend,
    Case,
    Entry,
    Found,
    Inputs,
    Measured,
    Point,
    attention_work,
    check_kernel,
    leaves,
    make_case,
    make_inputs,
    make_rows,
    why_skipped,
)
from ringtile.errors import ConfigError
from ringtile.layout import Layout
from ringtile.plan import Plan, RankPlan, plan, rounds_of
from ringtile.ring import ring_attention
from ringtile.transport import transport_of


class Place(NamedTuple):
    """Where a provider works: one rank of a point."""

    point: Point
    case: Case
    layout: Layout
    rank: int


class Local(NamedTuple):
    """What one rank runs, on its part of the inputs."""

    attend: Attend
    inputs: Inputs

    @property
    def candidate(self) -> Candidate:
        return attend_candidate(self.attend, self.inputs)


def ringtile_local(place: Place, inputs: Inputs) -> Local:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, mask=place.case.mask, layout=place.layout, group=dist.group.WORLD)

    return Local(attend, shards(place.layout, place.rank, inputs))


def ringtile_alone_local(place: Place, inputs: Inputs) -> Local:
    """The blocks that this rank of the ring computes, with its own keys in the place of those of its peers."""
    mask = place.case.mask
    rank_plan = rounds_of(mask.begin, mask.end, place.layout.tensor, place.rank)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Blocks.apply(q, k, v, rank_plan)  # type: ignore[no-untyped-call]
        return out

    return Local(attend, shards(place.layout, place.rank, inputs))


class _Blocks(torch.autograd.Function):
    """The kernel calls of a ring, and nothing else."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rank_plan: RankPlan) -> Tensor:
        out = torch.empty_like(q, dtype=ops.state_dtype(q.dtype))
        lse = q.new_empty((q.size(0), q.size(2), q.size(1)), dtype=torch.float64)
        begin, end, scale = rank_plan.begin, rank_plan.end, q.size(3) ** -0.5
        for i, (block, k_runs) in enumerate(blocks(rank_plan)):
            ops.attn_fwd_(q, k[:, block], v[:, block], begin, end, k_runs, out, lse, scale, 0.0, fresh=i == 0)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rank_plan = rank_plan
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank_plan: RankPlan = ctx.rank_plan
        state = ops.state_dtype(q.dtype)
        delta = ops.attn_delta(dout, out, torch.zeros_like(lse))
        dq, dk, dv = (torch.zeros_like(x, dtype=state) for x in (q, k, v))
        for block, k_runs in blocks(rank_plan):
            ops.attn_bwd_(
                q,
                k[:, block],
                v[:, block],
                rank_plan.begin,
                rank_plan.end,
                k_runs,
                dout,
                lse,
                delta,
                dq,
                dk[:, block],
                dv[:, block],
                q.size(3) ** -0.5,
                0.0,
            )
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def blocks(rank_plan: RankPlan) -> Iterator[tuple[slice, Tensor]]:
    """The rows of k that stand in for the keys of each round, and those keys' runs."""
    for i, round in enumerate(rank_plan.rounds):
        yield slice(0, rank_plan.local_len if i == 0 else round.num_keys), round.k_runs


def torch_local(place: Place, inputs: Inputs) -> Local | None:
    """torch's SDPA over the whole sequence, for this rank's share of the heads: no communication."""
    attend = IN_ONE_PROCESS["torch"].make(place.case)
    return None if attend is None else Local(attend, share_of_heads(place, inputs))


def ringmaster_local(place: Place, inputs: Inputs) -> Local | None:
    """axolotl-ringmaster's point-to-point ring; on a CPU it has contiguous shards and plain math blocks only."""
    if place.case.is_causal is None:
        return None
    loop, config = (importlib.import_module(f"ringmaster.{name}") for name in ("ring.loop", "config"))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = loop.ring_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            group=dist.group.WORLD,
            causal=place.case.is_causal,
            scaling=None,
            dropout=0.0,
            provider="math",
            rotate_method=config.RotateMethod.ALLTOALL,
            attn_implementation="math",
        )
        return out

    layout = Layout.contiguous(place.point.seq_len, place.point.world_size)
    return Local(attend, shards(layout, place.rank, inputs))


def ringmaster_ulysses_local(place: Place, inputs: Inputs) -> Local | None:
    """axolotl-ringmaster's exchange of tokens for heads, around torch's SDPA."""
    is_causal = place.case.is_causal
    if is_causal is None:
        return None
    exchange = importlib.import_module("ringmaster.comm").seq_all_to_all

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (exchange(x, scatter_dim=2, gather_dim=1, group=dist.group.WORLD) for x in (q, k, v))
        out: Tensor = exchange(sdpa(q, k, v, is_causal=is_causal), scatter_dim=1, gather_dim=2, group=dist.group.WORLD)
        return out

    layout = Layout.contiguous(place.point.seq_len, place.point.world_size)
    return Local(attend, shards(layout, place.rank, inputs))


def shards(layout: Layout, rank: int, inputs: Inputs) -> Inputs:
    """The tokens of a rank."""
    return leaves(layout.shard(x.detach(), dim=1, rank=rank) for x in inputs)


def share_of_heads(place: Place, inputs: Inputs) -> Inputs:
    """The heads of a rank, all tokens. ConfigError: they cannot be shared evenly."""
    world_size = place.point.world_size
    if place.point.num_kv_heads % world_size:
        raise ConfigError(f"{place.point.num_kv_heads} kv heads over {world_size} ranks; expected a multiple")
    return leaves(x.detach().chunk(world_size, dim=2)[place.rank].contiguous() for x in inputs)


PROVIDERS: dict[str, Callable[[Place, Inputs], Local | None]] = {
    "ringtile": ringtile_local,
    "ringtile_alone": ringtile_alone_local,
    "torch": torch_local,
    "ringmaster": ringmaster_local,
    "ringmaster_ulysses": ringmaster_ulysses_local,
}

MEMORY = False  # measured without being asked to
GRID: dict[str, tuple[str, ...] | tuple[int, ...]] = {
    "case": ("causal", "window-1024", "documents-8"),
    "dtype": ("float32", "bfloat16"),
    "seq_len": (2048, 8192),
    "head_dim": (64, 128),
    "num_heads": (8,),
    "num_kv_heads": (8, 2),
    "world_size": (2,),
}


def quick_entries() -> Iterator[Entry]:
    """What docs/performance.md quotes."""
    yield Entry(Point("causal", "float32", 8192, 64, world_size=2), tuple(PROVIDERS))
    for case in ("window-1024", "documents-8"):
        yield Entry(Point(case, "float32", 8192, 64, world_size=2), ("ringtile", "ringtile_alone"))


def check(point: Point) -> None:
    """Refuses what cannot be measured: ConfigError, InputError, LayoutError."""
    ring_plan(point, make_case(point.case, point.seq_len), make_layout(point))
    check_kernel(point)


def make_layout(point: Point) -> Layout:
    """Zigzag: of the named layouts the one that balances causal work."""
    return Layout.zigzag(point.seq_len, point.world_size)


def ring_plan(point: Point, case: Case, layout: Layout) -> Plan:
    """What the ring of a point moves and computes."""
    return plan(
        case.mask,
        layout,
        num_heads=point.num_heads,
        num_kv_heads=point.num_kv_heads,
        head_dim=point.head_dim,
        dtype=DTYPES[point.dtype],
    )


# ---- the ranks ----------------------------------------------------------------------------------


def measure(entries: Sequence[Entry], repeats: int) -> Iterator[Measured]:
    """Measures every entry, in groups of processes; a group serves all entries of one world size."""
    for world_size in dict.fromkeys(entry.point.world_size for entry in entries):
        mine = [entry for entry in entries if entry.point.world_size == world_size]
        results = multiprocessing.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            arguments = (
                world_size,
                str(pathlib.Path(folder) / "store"),
                mine,
                repeats,
                torch.get_num_threads(),
                results,
            )
            ranks: ProcessContext = start_processes(  # type: ignore[no-untyped-call]
                serve_rank, arguments, nprocs=world_size, join=False, daemon=True, start_method="spawn"
            )
            for _ in mine:
                while results.empty():
                    if ranks.join(timeout=0.1):  # raises when a rank has failed
                        break
                yield results.get()
            while not ranks.join():
                pass


def serve_rank(
    rank: int, world_size: int, store: str, entries: list[Entry], repeats: int, num_threads: int, results: Any
) -> None:
    """One rank's process: measures with the others; rank 0 reports."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # torch's profiler writes a line each time it starts
    torch.set_num_threads(num_threads)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for entry in entries:
        measured = measure_entry(entry, repeats, rank)
        if rank == 0:
            results.put(measured)
    dist.destroy_process_group()


def measure_entry(entry: Entry, repeats: int, rank: int) -> Measured:
    """The same on every rank, up to what `reduced` makes one."""
    point: Point = entry.point
    case = make_case(point.case, point.seq_len)
    place = Place(point, case, make_layout(point), rank)
    inputs = make_inputs(point)
    peak = Peak()
    peak.iterations = int(reduced([peak.iterations], dist.ReduceOp.MAX)[0])
    samplers: dict[str, Sampler] = {"peak": partial(sample_together, peak.run)}
    locals_: dict[str, Local] = {}
    skipped = {}
    for name in entry.providers:
        try:
            local = PROVIDERS[name](place, inputs)
            if local is None:
                continue
            timed(local.candidate)  # warm
        except (ConfigError, ImportError) as error:
            skipped[name] = why_skipped(error)
            continue
        locals_[name] = local
        samplers[name] = partial(sample_together, partial(timed, local.candidate))
    seconds = take_turns(samplers, repeats)
    peak_flops_per_s = point.world_size * peak.flops / seconds.pop("peak")["peak"].median
    rows = make_rows(attention_work(point, case), seconds, peak_flops_per_s, dict.fromkeys(locals_, Found()))
    if "ringtile" in locals_:
        row = next(row for row in rows if row["provider"] == "ringtile" and row["pass"] == "forward+backward")
        row.update(shares(locals_["ringtile"], repeats), **moved(locals_["ringtile"], place))
    return Measured(point, rows, skipped)


def sample_together(run: Callable[[], dict[str, float]]) -> Sample:
    """One run on all ranks at once: the slowest rank's seconds, and the most that any rank's main thread waited.

    gloo's threads have no core of their own: what they wait is a cost of the ring, no disturbance.
    """
    dist.barrier()
    sample = mean_sample(run, at_least=0.0, threads=str(os.getpid()))
    *seconds, waited = reduced([*sample.seconds.values(), sample.waited], dist.ReduceOp.MAX)
    return Sample(dict(zip(sample.seconds, seconds, strict=True)), waited)


def reduced(numbers: list[float], how: Any) -> list[float]:
    """Numbers of all ranks made one."""
    tensor = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(tensor, how)
    result: list[float] = tensor.tolist()
    return result


def shares(local: Local, repeats: int) -> dict[str, float]:
    """Where the time of the ring goes, mean over ranks and runs: in kernels, waiting for peers, and the rest."""
    compute = wait = total = 0.0
    for _ in range(repeats):
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            total += timed(local.candidate)["forward+backward"]
        spent = {event.key: event.cpu_time_total / 1e6 for event in profile.key_averages()}
        compute += spent["ringtile::attn_fwd_"] + spent["ringtile::attn_bwd_"]
        wait += spent.get("ringtile::wait", 0.0)
    compute, wait, total = reduced([compute, wait, total], dist.ReduceOp.SUM)
    return {
        "compute_share": compute / total,
        "wait_share": wait / total,
        "overhead_share": (total - compute - wait) / total,
    }


def moved(local: Local, place: Place) -> dict[str, int]:
    """Bytes that all ranks together send in one forward and backward, and what the plan says of it."""
    transport = transport_of(dist.group.WORLD)
    before = transport.bytes_sent
    timed(local.candidate)
    (bytes_moved,) = reduced([transport.bytes_sent - before], dist.ReduceOp.SUM)
    cost = ring_plan(place.point, place.case, place.layout)
    return {"bytes_moved": int(bytes_moved), "plan_bytes": cost.forward_bytes + cost.backward_bytes}
