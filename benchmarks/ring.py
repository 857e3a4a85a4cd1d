"""`python -m benchmarks ring`: a ring, or another scheme, over processes of one machine; the same work without it.

Each rank is a process of a gloo group, or of an NCCL group with a GPU of its own. A sample starts at a barrier and
lasts as long as the slowest rank.

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
from ringtile import ops
from ringtile.attn.attention import ring_attention
from ringtile.errors import ConfigError
from ringtile.sequence.layout import Layout
from ringtile.sequence.plan import RankPlan
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport.groups import transport_of
from torch import Tensor
from torch.multiprocessing.spawn import ProcessContext, start_processes
from torch.nn.attention.bias import causal_lower_right

from benchmarks.attention import BACKENDS as IN_ONE_PROCESS
from benchmarks.attention import attend_candidate, sdpa
from benchmarks.cases import (
    Attend,
    Case,
    Inputs,
    Workload,
    attention_cost,
    attention_plan,
    check_kernel,
    leaves,
    make_case,
    make_inputs,
)
from benchmarks.compare import Candidate, timed
from benchmarks.measure import MatmulPeak, Sample, Sampler, mean_sample, take_turns
from benchmarks.peak import Peak
from benchmarks.rows import Comparison, Grid, Measured, Untimed, check_device, make_rows, why_skipped


class RankContext(NamedTuple):
    """A rank's view of a workload."""

    workload: Workload
    case: Case
    layout: Layout
    rank: int


class LocalAttention(NamedTuple):
    """The attention one rank runs, and its shard of the inputs."""

    attend: Attend
    inputs: Inputs

    @property
    def candidate(self) -> Candidate:
        return attend_candidate(self.attend, self.inputs)

    @property
    def timed(self) -> Callable[[], dict[str, float]]:
        return partial(timed, self.candidate, self.inputs.q.device.type)


def ringtile_local(context: RankContext, inputs: Inputs) -> LocalAttention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = ring_attention(q, k, v, sequence, attention_kernel="ringtile")
        return out

    sequence = ShardedSequence(context.case.mask, context.layout, dist.group.WORLD, scheme=context.workload.scheme)
    return LocalAttention(attend, shards(context.layout, context.rank, inputs))


def ringtile_alone_local(context: RankContext, inputs: Inputs) -> LocalAttention | None:
    """The blocks of keys that this rank computes in a ring, with its own keys standing in for its peers'."""
    if context.workload.scheme != "ring":
        return None
    plan_of_rank = RankPlan.of(context.case.mask, context.layout, context.rank)
    begin, end = plan_of_rank.rounds[0].bounds.on(inputs.q.device).read()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Blocks.apply(q, k, v, plan_of_rank, begin, end)  # type: ignore[no-untyped-call]
        return out

    return LocalAttention(attend, shards(context.layout, context.rank, inputs))


class _Blocks(torch.autograd.Function):
    """The kernel calls of a ring without its communication."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rank_plan: RankPlan, begin: Tensor, end: Tensor) -> Tensor:
        running, out = q.new_empty(q.shape, dtype=ops.state_dtype(q.dtype)), q.new_empty(q.shape)
        lse = q.new_empty((q.size(0), q.size(2), q.size(1)), dtype=torch.float64)
        scale = q.size(3) ** -0.5
        todo = list(blocks(rank_plan))
        for i, (block, k_runs) in enumerate(todo):
            keys = k[:, block], v[:, block], begin, end, k_runs
            rounded = out if i + 1 == len(todo) else None
            ops.attn_fwd_(q, *keys, running, lse, scale, 0.0, fresh=i == 0, rounded_out=rounded)
        ctx.save_for_backward(q, k, v, out, lse, begin, end)
        ctx.rank_plan = rank_plan
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, begin, end = ctx.saved_tensors
        rank_plan: RankPlan = ctx.rank_plan
        state = ops.state_dtype(q.dtype)
        delta = ops.attn_delta(dout, out)
        dq, dk, dv = (torch.zeros_like(x, dtype=state) for x in (q, k, v))
        for block, k_runs in blocks(rank_plan):
            keys = k[:, block], v[:, block], begin, end, k_runs
            ops.attn_bwd_(q, *keys, dout, lse, delta, dq, dk[:, block], dv[:, block], q.size(3) ** -0.5, 0.0)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def blocks(rank_plan: RankPlan) -> Iterator[tuple[slice, Tensor]]:
    """For each round, the rows of k that stand in for its keys, and the runs of those keys."""
    for i, round in enumerate(rank_plan.rounds):
        yield slice(0, round.positions.host[0].size(0) if i == 0 else round.num_keys), round.k_runs


def torch_local(context: RankContext, inputs: Inputs) -> LocalAttention | None:
    """torch's SDPA over the global sequence for this rank's share of the heads: no communication."""
    attend = IN_ONE_PROCESS["torch"].make(context.case, context.workload.device)
    return None if attend is None else LocalAttention(attend, share_of_heads(context, inputs))


def ringmaster_local(context: RankContext, inputs: Inputs) -> LocalAttention | None:
    """axolotl-ringmaster's point-to-point ring; on a CPU it supports only contiguous shards and plain math."""
    if context.case.is_causal is None:
        return None
    loop, config = (importlib.import_module(f"ringmaster.{name}") for name in ("ring.loop", "config"))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = loop.ring_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            group=dist.group.WORLD,
            causal=context.case.is_causal,
            scaling=None,
            dropout=0.0,
            provider="math",
            rotate_method=config.RotateMethod.ALLTOALL,
            attn_implementation="math",
        )
        return out

    layout = Layout.contiguous(context.workload.seq_len, context.workload.world_size)
    return LocalAttention(attend, shards(layout, context.rank, inputs))


def ringmaster_ulysses_local(context: RankContext, inputs: Inputs) -> LocalAttention | None:
    """axolotl-ringmaster's all-to-all between tokens and heads, around torch's SDPA."""
    is_causal = context.case.is_causal
    if is_causal is None:
        return None
    exchange = importlib.import_module("ringmaster.comm").seq_all_to_all

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (exchange(x, scatter_dim=2, gather_dim=1, group=dist.group.WORLD) for x in (q, k, v))
        out: Tensor = exchange(sdpa(q, k, v, is_causal=is_causal), scatter_dim=1, gather_dim=2, group=dist.group.WORLD)
        return out

    layout = Layout.contiguous(context.workload.seq_len, context.workload.world_size)
    return LocalAttention(attend, shards(layout, context.rank, inputs))


def all_gather_local(context: RankContext, inputs: Inputs) -> LocalAttention | None:
    """What one writes by hand: all keys to all ranks by torch's collectives, then torch's SDPA of the local queries."""
    if context.case.is_causal is None:
        return None
    workload, rank = context.workload, context.rank
    if workload.seq_len % workload.world_size:
        raise ConfigError(
            f"{workload.seq_len} tokens over {workload.world_size} ranks; gloo's all_gather expects a multiple of them"
        )
    layout = Layout.contiguous(workload.seq_len, workload.world_size)
    end = layout.runs(rank)[0].global_begin + layout.local_len(rank)
    mask = causal_lower_right(layout.local_len(rank), end) if context.case.is_causal else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (_AllGather.apply(x, layout) for x in (k, v))  # type: ignore[no-untyped-call]
        k, v = (x[:, :end] if mask is not None else x for x in (k, v))
        return sdpa(q, k, v, attn_mask=mask)

    return LocalAttention(attend, shards(layout, rank, inputs))


class _AllGather(torch.autograd.Function):
    """Contiguous shards (B, N, G, D) of all ranks, one after another; backward, the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        gathered = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(layout.world_size)]
        dist.all_gather(gathered, x.contiguous())
        return torch.cat(gathered, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)  # gloo has no reduce-scatter
        run = ctx.layout.runs(dist.get_rank())[0]
        return total[:, run.global_begin : run.global_begin + run.length], None


def shards(layout: Layout, rank: int, inputs: Inputs) -> Inputs:
    """A rank's tokens, all heads."""
    return leaves(layout.shard(x.detach(), dim=1, rank=rank) for x in inputs)


def share_of_heads(context: RankContext, inputs: Inputs) -> Inputs:
    """A rank's heads, all tokens. ConfigError: the heads do not divide evenly."""
    world_size = context.workload.world_size
    if context.workload.num_kv_heads % world_size:
        raise ConfigError(
            f"{context.workload.num_kv_heads} kv heads over {world_size} ranks; expected a multiple of the ranks"
        )
    return leaves(x.detach().chunk(world_size, dim=2)[context.rank].contiguous() for x in inputs)


BACKENDS: dict[str, Callable[[RankContext, Inputs], LocalAttention | None]] = {
    "ringtile": ringtile_local,
    "ringtile_alone": ringtile_alone_local,
    "torch": torch_local,
    "ringmaster": ringmaster_local,
    "ringmaster_ulysses": ringmaster_ulysses_local,
    "all_gather_by_hand": all_gather_local,
}

MEMORY = False  # whether memory is measured by default
GRID: Grid = {
    "case": ("causal", "window-1024", "documents-8"),
    "dtype": ("float32", "bfloat16"),
    "seq_len": (2048, 8192),
    "head_dim": (64, 128),
    "num_heads": (8,),
    "num_kv_heads": (8, 2),
    "world_size": (2,),
    "scheme": ("ring",),
    "device": ("cpu",),
}


def quick_comparisons() -> Iterator[Comparison]:
    """The comparisons quoted in the documentation."""
    yield Comparison(Workload("causal", "float32", 8192, 64, world_size=2), tuple(BACKENDS))
    for case in ("window-1024", "documents-8"):
        yield Comparison(Workload(case, "float32", 8192, 64, world_size=2), ("ringtile", "ringtile_alone"))
    for case in ("causal", "documents-8"):
        for scheme in ("ring", "all_gather", "ulysses"):
            workload = Workload(case, "bfloat16", 65536, 128, 32, 8, 2, "cuda", scheme)
            yield Comparison(workload, ("ringtile", "ringtile_alone"))


def check(workload: Workload) -> None:
    """ConfigError, InputError, LayoutError: the workload cannot be measured."""
    check_device(workload, workload.world_size)
    attention_plan(workload, make_case(workload.case, workload.seq_len).mask, make_layout(workload))
    check_kernel(workload)


def make_layout(workload: Workload) -> Layout:
    """Zigzag, the named layout that balances causal work."""
    return Layout.zigzag(workload.seq_len, workload.world_size)


# ---- the ranks ----------------------------------------------------------------------------------


def measure(comparisons: Sequence[Comparison], repeats: int) -> Iterator[Measured]:
    """Measures the comparisons; those of one world size share a group of processes."""
    for world_size in dict.fromkeys(comparison.workload.world_size for comparison in comparisons):
        mine = [comparison for comparison in comparisons if comparison.workload.world_size == world_size]
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
                    if ranks.join(timeout=0.1):  # raises if a rank has failed
                        break
                yield results.get()
            while not ranks.join():
                pass


def serve_rank(
    rank: int, world_size: int, store: str, comparisons: list[Comparison], repeats: int, num_threads: int, results: Any
) -> None:
    """The process of one rank: measures together with the others; rank 0 reports."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # or torch's profiler prints a line each time it starts
    torch.set_num_threads(num_threads)
    backend = "gloo"
    if any(comparison.workload.device == "cuda" for comparison in comparisons):
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    for comparison in comparisons:
        measured = measure_comparison(comparison, repeats, rank)
        if rank == 0:
            results.put(measured)
    dist.destroy_process_group()


def measure_comparison(comparison: Comparison, repeats: int, rank: int) -> Measured:
    """Measures one comparison; times are reduced over the ranks, so all ranks return the same."""
    workload: Workload = comparison.workload
    case = make_case(workload.case, workload.seq_len)
    context = RankContext(workload, case, make_layout(workload), rank)
    inputs = make_inputs(workload)
    peak: Peak | MatmulPeak
    if workload.device == "cuda":
        peak = MatmulPeak()
    else:
        peak = Peak(workload.dtype)
        peak.iterations = int(reduced([peak.iterations], dist.ReduceOp.MAX)[0])
    samplers: dict[str, Sampler] = {"peak": partial(sample_together, peak.run)}
    locals_: dict[str, LocalAttention] = {}
    skipped = {}
    for name in comparison.backends:
        try:
            local = BACKENDS[name](context, inputs)
            if local is None:
                continue
            local.timed()  # warm up
        except (ConfigError, ImportError) as error:
            skipped[name] = why_skipped(error)
            continue
        locals_[name] = local
        samplers[name] = partial(sample_together, local.timed)
    seconds = take_turns(samplers, repeats)
    peak_flops_per_s = workload.world_size * peak.flops / seconds.pop("peak")["peak"].median
    rows = make_rows(attention_cost(workload, case), seconds, peak_flops_per_s, dict.fromkeys(locals_, Untimed()))
    if "ringtile" in locals_:
        row = next(row for row in rows if row["backend"] == "ringtile" and row["pass"] == "forward+backward")
        row.update(moved(locals_["ringtile"], context))
        if workload.device == "cpu":  # on a GPU the host only queues what the profiler would count
            row.update(shares(locals_["ringtile"], repeats))
    return Measured(workload, rows, skipped)


def sample_together(run: Callable[[], dict[str, float]]) -> Sample:
    """One run on all ranks at once: the slowest rank's seconds, and the longest any main thread waited for a core.

    Only main threads count: gloo's threads share their cores, so their waiting is a cost of the ring and not a
    disturbance.
    """
    dist.barrier()
    sample = mean_sample(run, at_least=0.0, threads=str(os.getpid()))
    *seconds, waited = reduced([*sample.seconds.values(), sample.waited], dist.ReduceOp.MAX)
    return Sample(dict(zip(sample.seconds, seconds, strict=True)), waited)


def reduced(numbers: list[float], how: Any) -> list[float]:
    """Reduces the numbers elementwise over the ranks."""
    tensor = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(tensor, how)
    result: list[float] = tensor.tolist()
    return result


def shares(local: LocalAttention, repeats: int) -> dict[str, float]:
    """The shares of the ring's time in kernels, in waiting for peers, and in the rest, over all ranks and runs."""
    compute = wait = total = 0.0
    for _ in range(repeats):
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            total += local.timed()["forward+backward"]
        spent = {event.key: event.cpu_time_total / 1e6 for event in profile.key_averages()}
        compute += spent["ringtile::attn_fwd_"] + spent["ringtile::attn_bwd_"]
        wait += spent.get("ringtile::wait", 0.0)
    compute, wait, total = reduced([compute, wait, total], dist.ReduceOp.SUM)
    return {
        "compute_share": compute / total,
        "wait_share": wait / total,
        "overhead_share": (total - compute - wait) / total,
    }


def moved(local: LocalAttention, context: RankContext) -> dict[str, int]:
    """The bytes that all ranks together send in one forward and backward, and the bytes planned."""
    transport = transport_of(dist.group.WORLD)
    before = transport.bytes_sent
    local.timed()
    (bytes_moved,) = reduced([transport.bytes_sent - before], dist.ReduceOp.SUM)
    planned = attention_plan(context.workload, context.case.mask, context.layout)
    return {"bytes_moved": int(bytes_moved), "plan_bytes": planned.forward_bytes + planned.backward_bytes}
