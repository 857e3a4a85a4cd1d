"""How good `scheme: auto` is: what it chooses in many settings over two nodes, against every scheme measured there.

    python tests/campaigns/auto_choices.py [--rounds 5] [--settings 40] [--json FILE]

For root, where `ip` and `tc` work (nodes.py). First a call with `auto` resolves its scheme; then all schemes take
turns, forward and backward; the median round of each counts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from ringtile import IntervalMask, Layout, ShardedSequence, ring_attention
from ringtile.attn.auto import candidates, known_scheme
from ringtile.sequence.plan import Shape
from ringtile.transport.groups import transport_of
from ringtile.transport.measure import hosts_of

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "transport")]
from nodes import two_nodes
from pool import Pool, start_server

LINKS = ("1gbit", "40gbit")  # the second is more than two network namespaces of one machine reach
RANKS_PER_NODE = {2: 1, 4: 2}
MASKS = {
    "causal": lambda seq_len: (IntervalMask.causal(seq_len), "zigzag"),
    "full": lambda seq_len: (IntervalMask.full(seq_len), "contiguous"),
    "window": lambda seq_len: (IntervalMask.sliding_window(seq_len, seq_len // 8), "contiguous"),
    "documents": lambda seq_len: (IntervalMask.documents([seq_len // 4] * 4), "contiguous"),
}
LENGTHS, HEADS, HEAD_DIM = (512, 2048), ((8, 8), (8, 2)), 64


class Setting(NamedTuple):
    link: str
    world_size: int
    mask: str
    seq_len: int
    heads: tuple[int, int]


def settings(count: int) -> list[Setting]:
    """So many of all, spread evenly."""
    found = [Setting(*each) for each in itertools.product(LINKS, RANKS_PER_NODE, MASKS, LENGTHS, HEADS)]
    return [found[i * len(found) // count] for i in range(count)] if count < len(found) else found


def seconds_of_schemes(setting: Setting, rounds: int) -> tuple[dict[str, float], str]:
    """Return the median round of each, until the last rank is done, and the scheme that `auto` takes."""
    torch.set_num_threads(1)
    mask, layout_name = MASKS[setting.mask](setting.seq_len)
    layout, group = Layout.named(layout_name, setting.seq_len, setting.world_size), dist.group.WORLD
    num_heads, num_kv_heads = setting.heads
    shape = Shape(1, num_heads, num_kv_heads, HEAD_DIM, HEAD_DIM, torch.float32)
    names = candidates(hosts_of(transport_of(group)))
    generator = torch.Generator().manual_seed(0)
    local_len = layout.local_len(dist.get_rank())
    sequences = {name: ShardedSequence(mask, layout, group, scheme=name) for name in names}
    q, k, v, dout = (
        torch.randn(1, local_len, heads, HEAD_DIM, generator=generator)
        for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run(sequence: ShardedSequence) -> float:
        dist.barrier()
        began = time.perf_counter()
        torch.autograd.grad(ring_attention(*leaves, sequence), leaves, dout)
        slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    auto = ShardedSequence(mask, layout, group, scheme="auto")
    run(auto)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds + 1):
        for name in names if i % 2 else names[::-1]:
            took = run(sequences[name])
            if i:  # the first warms up
                seconds[name].append(took)
    measured = {name: statistics.median(of_name) for name, of_name in seconds.items()}
    return measured, known_scheme(auto, shape, "cpu", "auto", False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start_server()
    rows, ratios = [], []
    for (link, world_size), group in itertools.groupby(settings(args.settings), key=lambda each: each[:2]):
        with two_nodes(link) as nodes:
            enter = functools.partial(nodes.enter, ranks_per_node=RANKS_PER_NODE[world_size])
            pool = Pool(world_size, prepare=enter)
            try:
                print(f"{link}, {world_size} ranks, load {os.getloadavg()[0]:.1f}", flush=True)
                for setting in group:
                    measured, chosen = pool.run(seconds_of_schemes, setting, args.rounds, timeout=600)[0]
                    best = min(measured, key=measured.__getitem__)
                    ratios.append(measured[chosen] / measured[best])
                    numbers = "  ".join(f"{name} {measured[name] * 1e3:.1f}" for name in measured)
                    print(
                        f"{' '.join(map(str, setting))}: auto {chosen}, best {best}, {ratios[-1]:.2f} | {numbers}",
                        flush=True,
                    )
                    rows.append({**setting._asdict(), "measured": measured, "auto": chosen})
            finally:
                pool.close()
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    close = sum(ratio <= 1.05 for ratio in ratios)
    print(f"within 5 % of the best in {close} of {len(ratios)}, at most {max(ratios):.2f} times it")


if __name__ == "__main__":
    main()
