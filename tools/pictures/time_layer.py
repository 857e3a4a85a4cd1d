"""Measure one layer on two ranks over a slow link, for a picture: python -m tools.pictures.time_layer.

For root, where `ip` and `tc` make two nodes of one machine. Each rank has one thread. A stamp is time.monotonic, which
processes of one machine share. A message's time is from its start to its arrival, which another thread waits for.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ringtile import IntervalMask, Layout, ShardedSequence, ring_attention
from ringtile.attn import ring
from ringtile.transport.transport import Transport
from torch import Tensor, nn
from torch.nn import functional

from tests.transport.nodes import TwoNodes, two_nodes

FIGURES = pathlib.Path(__file__).parent / "layer.json"
RATE, TOKENS, HIDDEN, HEADS, KV_HEADS, INNER = "250mbit", 8192, 1024, 8, 2, 2816
REPEATS = 5
Span = tuple[str, float, float]  # what, begin, end


class Layer(nn.Module):
    """A pre-norm layer of a Llama, but for rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.dim = HIDDEN // HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * self.dim, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor, seq: ShardedSequence) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.dim))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 2)
        x = x + self.out(ring_attention(q, k, v, seq).flatten(2))
        hidden = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


@contextlib.contextmanager
def stamped(spans: list[Span]) -> Iterator[None]:
    """Append (what, begin, end) of each block of keys, each message and each wait to spans."""
    kept = ring.choose.forward, ring.choose.backward, Transport.exchange

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            began = time.monotonic()
            try:
                return function(*args, **options)
            finally:
                spans.append((name, began, time.monotonic()))

        return run

    def exchange(self: Transport, sends: Any, receives: Any, what: str) -> Any:
        began, messages = time.monotonic(), kept[2](self, sends, receives, what)

        def arrive() -> None:
            messages.wait()
            spans.append((f"message: {what}", began, time.monotonic()))

        thread = threading.Thread(target=arrive)
        thread.start()
        return type("Arriving", (), {"wait": staticmethod(timed(f"wait: {what}", thread.join))})

    ring.choose.forward, ring.choose.backward = timed("keys", kept[0]), timed("keys", kept[1])  # type: ignore[assignment]
    Transport.exchange = exchange  # type: ignore[method-assign]
    try:
        yield
    finally:
        ring.choose.forward, ring.choose.backward, Transport.exchange = kept  # type: ignore[method-assign]


def run_rank(rank: int, nodes: TwoNodes) -> None:
    """Rank 0 writes what the ranks saw in the repeat of median time."""
    nodes.enter(rank, 1)
    torch.set_num_threads(1)
    address = f"tcp://{nodes.addresses[0]}:29400"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(1, TOKENS, HIDDEN)
    seq = ShardedSequence(IntervalMask.causal(TOKENS), Layout.zigzag(TOKENS, 2), dist.group.WORLD)
    local, runs = seq.shard(x, 1).requires_grad_(), []
    for _ in range(REPEATS):
        spans: list[Span] = []
        dist.barrier()
        with stamped(spans):
            start = time.monotonic()
            loss = layer(local, seq).square().sum()
            spans.append(("forward", start, time.monotonic()))
            dist.barrier()
            turn = time.monotonic()
            loss.backward()
            spans.append(("backward", turn, time.monotonic()))
        of_ranks: list[Any] = [None, None]
        dist.all_gather_object(of_ranks, (start, turn, sorted(spans, key=lambda span: span[1])))
        runs.append(of_ranks)
    if rank == 0:
        run = sorted(runs, key=lambda of_ranks: max(span[2] - start for start, _, spans in of_ranks for span in spans))[
            REPEATS // 2
        ]
        starts = [min(one[n] for one in run) for n in range(2)]  # of the forward, of the backward
        figures = [
            [
                (name, is_backward := begin >= starts[1], *(round(at - starts[is_backward], 4) for at in (begin, end)))
                for name, begin, end in spans
            ]
            for _, _, spans in run
        ]
        FIGURES.write_text(json.dumps(figures) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with two_nodes(RATE) as nodes:
        torch.multiprocessing.spawn(run_rank, (nodes,), 2)
    print(FIGURES.read_text())
