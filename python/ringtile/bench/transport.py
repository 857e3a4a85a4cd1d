"""`ringtile bench transport`: how fast messages travel within a host and between hosts, and how fast attention runs.

Each rank sends to one peer while it receives from another, as in a ring. A sample lasts as long as the slowest rank;
the median counts, because ranks that share cores also wait for each other in training. Messages go the way that
attention's go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import start_processes

from ringtile import ops
from ringtile.attn.attention import ring_attention
from ringtile.bench.rows import DTYPES
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.transport import shared_memory
from ringtile.transport.groups import transport_of
from ringtile.transport.placement import hosts_of
from ringtile.transport.process_group import ProcessGroupTransport
from ringtile.transport.rates import Kernel, Link, Rates, device_name
from ringtile.transport.transport import Transport

SIZES = tuple(1 << exponent for exponent in (10, 14, 18, 20, 22, 24, 26))  # bytes of a message
FITTED = (SIZES[0], 1 << 22)  # latency and bandwidth follow from these two
SAMPLE_SECONDS = 0.02  # a sample repeats its messages for about so long
KERNEL_TOKENS = (16, 1024)
HEADS, HEAD_DIM = 4, 64
COPIED_BYTES = 1 << 22


class Pattern(NamedTuple):
    """Who sends to whom: this rank's peers, none if it only waits."""

    link: str  # within: a host; between: one rank of each host; host: all of them, between hosts
    to: int | None
    source: int | None


class Report(NamedTuple):
    """What rank 0 found."""

    rates: Rates
    rows: list[dict[str, Any]]  # carrier, link, num_bytes, seconds, bytes_per_s


def measure(world_size: int, repeats: int, device: str) -> Report | None:
    """With the ranks of torchrun, where this process is one of them: None on all but the first of each host.

    Otherwise with world_size processes of this machine.
    """
    if "RANK" in os.environ:
        with _joined("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device):
            report = _measure(repeats, device)
            hosts = hosts_of(transport_of(dist.group.WORLD))
            return report if hosts[dist.get_rank()] == dist.get_rank() else None
    results = get_context("spawn").SimpleQueue()
    with TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        arguments = (store, world_size, repeats, device, torch.get_num_threads(), results)
        start_processes(_serve, arguments, nprocs=world_size, daemon=True, start_method="spawn")  # type: ignore[no-untyped-call]
    of_ranks: Report = results.get()
    return of_ranks


def _serve(rank: int, store: str, world_size: int, repeats: int, device: str, threads: int, results: Any) -> None:
    torch.set_num_threads(threads)
    with _joined(store, rank, world_size, device):
        report = _measure(repeats, device)
    if rank == 0:
        results.put(report)


@contextlib.contextmanager
def _joined(init_method: str, rank: int, world_size: int, device: str) -> Iterator[None]:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _measure(repeats: int, device: str) -> Report:
    """On each rank; the same on all."""
    carriers = _carriers(device)
    hosts = hosts_of(carriers[0][1])
    rows = []
    best: dict[tuple[str, str], dict[int, float]] = {}
    for num_bytes in SIZES:
        for pattern in _patterns(hosts, dist.get_rank()):
            seconds = _alternately(carriers, pattern, num_bytes, repeats, device)
            for name, each in seconds.items():
                best.setdefault((name, pattern.link), {})[num_bytes] = each
                rows.append(
                    {
                        "carrier": name if pattern.link == "within" or device != "cpu" else "gloo",
                        "link": pattern.link,
                        "num_bytes": num_bytes,
                        "seconds": each,
                        "bytes_per_s": num_bytes / each,
                    }
                )
    kernels = _kernels(repeats, device)
    first, transport = carriers[0]
    links: dict[str, Link] = {}
    for link in ("within", "between"):
        if (first, link) in best:
            pattern = next(each for each in _patterns(hosts, dist.get_rank()) if each.link == link)
            overlap = _overlap(transport, pattern, best[first, link][FITTED[1]], repeats, device)
            links[link] = _fit(best[first, link], overlap)
    if (first, "host") in best:
        num_places = min(hosts.count(host) for host in set(hosts))
        of_host = num_places * _fit(best[first, "host"], 0.0).bytes_per_s
        together = {"host_bytes_per_s": max(of_host, links["between"].bytes_per_s)}
        links["between"] = dataclasses.replace(links["between"], **together)
    rates = Rates(
        within=links.get("within"),
        between=links.get("between"),
        kernels=kernels,
        message_s=_message_seconds(repeats, device, next(iter(links.values())).latency_s),
        copy_bytes_per_s=_copy_rate(repeats, device),
        threads=torch.get_num_threads() if device == "cpu" else None,
        machine=socket.gethostname(),
        device=device_name(device),
    )
    return Report(rates, rows)


def _carriers(device: str) -> list[tuple[str, Transport]]:
    """Groups of all ranks, first the one whose rates count; beside shared memory also gloo, to compare."""
    if device == "cuda":
        return [("nccl", _opened(dist.group.WORLD))]
    found = []
    given = os.environ.get(shared_memory.VARIABLE)
    for value in ("1", "0"):
        os.environ[shared_memory.VARIABLE] = value if value == "0" or given is None else given
        found.append(_opened(dist.new_group()))
    os.environ.pop(shared_memory.VARIABLE)
    if given is not None:
        os.environ[shared_memory.VARIABLE] = given
    shares = _slowest(float(isinstance(found[0], ProcessGroupTransport) and found[0].shares_memory))
    return [("shared memory", found[0]), ("gloo", found[1])] if shares else [("gloo", found[1])]


def _opened(group: dist.ProcessGroup | None) -> Transport:
    transport = transport_of(group)
    _kept.append(group)
    hosts_of(transport)
    return transport


_kept: list[Any] = []  # a transport does not keep its group alive


def _patterns(hosts: tuple[int, ...], rank: int) -> list[Pattern]:
    """Those that the hosts allow, the same on every rank."""
    names = sorted(set(hosts))
    of_host = [[each for each, host in enumerate(hosts) if host == name] for name in names]
    at = names.index(hosts[rank])
    mine, place = of_host[at], of_host[at].index(rank)
    found = []
    if max(map(len, of_host)) > 1:
        alone = len(mine) == 1
        to, source = mine[(place + 1) % len(mine)], mine[place - 1]
        found.append(Pattern("within", None, None) if alone else Pattern("within", to, source))
    if len(names) > 1:
        num_places = min(map(len, of_host))
        after, before = of_host[(at + 1) % len(names)], of_host[at - 1]
        for link, last in (("between", 1), ("host", num_places)):
            takes_part = place < last
            found.append(Pattern(link, *((after[place], before[place]) if takes_part else (None, None))))
    return found


# ---- messages -----------------------------------------------------------------------------------


def _alternately(
    carriers: list[tuple[str, Transport]], pattern: Pattern, num_bytes: int, repeats: int, device: str
) -> dict[str, float]:
    """By carrier, the seconds of a message; carriers take turns. Between hosts there is one way only."""
    if pattern.link != "within":
        carriers = carriers[:1]
    runs = {name: _messages(transport, pattern, num_bytes, device) for name, transport in carriers}
    counts = {name: _count(run) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(_slowest(run(counts[name], None)))
    return {name: statistics.median(of_name) for name, of_name in seconds.items()}


_Run = Callable[[int, "Callable[[], None] | None"], float]


def _messages(transport: Transport, pattern: Pattern, num_bytes: int, device: str) -> _Run:
    """A function that makes so many exchanges, each beside a kernel if there is one: the mean seconds of one."""
    sent = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    received = torch.zeros_like(sent)
    sends = {} if pattern.to is None else {pattern.to: sent}
    receives = {} if pattern.source is None else {pattern.source: received}

    def run(count: int, kernel: Callable[[], None] | None) -> float:
        dist.barrier()
        with transport.agree("bench transport", {"bytes": num_bytes, "link": pattern.link}, device):
            transport.compare_headers()
            began = time.perf_counter()
            for _ in range(count):
                exchange = transport.exchange(sends, receives, "a message")
                if kernel is not None:
                    kernel()
                exchange.wait()
            _synchronize(device)
            return (time.perf_counter() - began) / count

    return run


def _count(run: _Run) -> int:
    """How often a sample repeats it; the same on every rank. Warms up."""
    return max(1, int(SAMPLE_SECONDS / _slowest(run(1, None))))


def _fit(seconds: dict[int, float], overlap: float) -> Link:
    """seconds: of a message, by its bytes."""
    small, large = FITTED
    rest = max(seconds[large] - seconds[small], seconds[large] / 2)
    return Link(latency_s=seconds[small], bytes_per_s=(large - small) / rest, overlap=overlap)


def _overlap(transport: Transport, pattern: Pattern, seconds: float, repeats: int, device: str) -> float:
    """The share of a message's seconds in which a kernel that takes as long can run."""
    run = _messages(transport, pattern, FITTED[1], device)
    matrix = torch.randn(128, 128, device=device)

    def multiply(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    began = time.perf_counter()
    multiply(20)
    multiply(count := max(1, int(20 * seconds / max(time.perf_counter() - began, 1e-9))))

    def kernel() -> None:
        multiply(count)

    times = _count(run)
    samples: list[tuple[float, float, float]] = []
    for _ in range(repeats):
        alone = _slowest(run(times, None)), _slowest(_timed(kernel, times, device))
        samples.append((*alone, _slowest(run(times, kernel))))
    message, alone_kernel, both = (statistics.median(sample[i] for sample in samples) for i in range(3))
    return min(1.0, max(0.0, (message + alone_kernel - both) / min(message, alone_kernel)))


def _message_seconds(repeats: int, device: str, latency_s: float) -> float:
    """What a message costs each of its ranks, besides its latency.

    By attention of a few tokens in one stage and in two, which makes seven exchanges more in both passes, each with a
    message to every other rank and one from it.
    """
    world_size = dist.get_world_size()
    layout = Layout.contiguous(world_size, world_size)
    x = torch.ones(1, 1, 2 * world_size, 16, device=device)
    seconds = {}
    for scheme in ("ulysses", "staged:2"):
        sequence = ShardedSequence(IntervalMask.full(world_size), layout, dist.group.WORLD, scheme=scheme)
        leaves = [x.clone().requires_grad_() for _ in range(3)]

        def run(sequence: ShardedSequence = sequence, leaves: list[Tensor] = leaves) -> None:
            q, k, v = leaves
            torch.autograd.grad(ring_attention(q, k, v, sequence), leaves, x)

        _timed(run, 2, device)
        seconds[scheme] = statistics.median(_slowest(_timed(run, 4, device)) for _ in range(2 * repeats))
    return max(0.0, (seconds["staged:2"] - seconds["ulysses"]) / 7 - latency_s) / (2 * (world_size - 1))


def _copy_rate(repeats: int, device: str) -> float:
    x = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return COPIED_BYTES / statistics.median(_slowest(_timed(lambda: y.copy_(x), 4, device)) for _ in range(repeats))


# ---- kernels ------------------------------------------------------------------------------------


def _kernels(repeats: int, device: str) -> dict[str, Kernel]:
    """By dtype, on all ranks at once: they share the cores as they do in training."""
    found = {}
    for name, dtype in DTYPES.items():
        if device == "cuda" and name == "float64":
            continue
        seconds = {tokens: _attention_seconds(tokens, dtype, repeats, device) for tokens in KERNEL_TOKENS}
        small, large = (seconds[tokens] for tokens in KERNEL_TOKENS)
        pair_flops = KERNEL_TOKENS[1] ** 2 * HEADS * HEAD_DIM
        forward, backward = (
            flops * pair_flops / max(large[i] - small[i], large[i] / 2) for i, flops in enumerate((4, 10))
        )
        found[name] = Kernel(forward_flops_per_s=forward, backward_flops_per_s=backward, call_s=min(small))
    return found


def _attention_seconds(tokens: int, dtype: torch.dtype, repeats: int, device: str) -> tuple[float, float]:
    """Forward and backward of full attention in one block."""
    q, k, v, dout = (torch.randn(1, tokens, HEADS, HEAD_DIM, device=device).to(dtype) for _ in range(4))
    state = ops.state_dtype(dtype)
    out = torch.empty_like(q, dtype=state)
    lse = torch.empty(1, HEADS, tokens, dtype=torch.float64, device=device)
    begin = torch.zeros(1, tokens, dtype=torch.int32, device=device)
    mask = (begin, torch.full_like(begin, tokens), ops.runs_tensor([(0, 1, 0, tokens)]))
    dq, dk, dv = (torch.zeros_like(x, dtype=state) for x in (q, k, v))

    def forward() -> None:
        ops.attn_fwd_(q, k, v, *mask, out, lse, HEAD_DIM**-0.5, 0.0, True)

    forward()
    delta = ops.attn_delta(dout, out.to(dtype), torch.zeros_like(lse))

    def backward() -> None:
        ops.attn_bwd_(q, k, v, *mask, dout, lse, delta, dq, dk, dv, HEAD_DIM**-0.5, 0.0, True)

    seconds = []
    for run in (forward, backward):
        count = max(1, int(SAMPLE_SECONDS / _slowest(_timed(run, 2, device))))
        seconds.append(statistics.median(_slowest(_timed(run, count, device)) for _ in range(repeats)))
    return seconds[0], seconds[1]


def _timed(run: Callable[[], object], count: int, device: str) -> float:
    """The mean seconds of a run, all ranks together."""
    dist.barrier()
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        run()
    _synchronize(device)
    return (time.perf_counter() - began) / count


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _slowest(seconds: float) -> float:
    """The largest number of any rank."""
    number = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)
