"""The simulator's figures of scale.svg and docs/guide/scaling.md: Qwen3-8B on 8 to 1,024 GPUs, into scale.json.

16K tokens a GPU: the products of a step are planned once, on 8 GPUs; each number of GPUs has its own attention. And
what others have published, simulated with their numbers.

python tools/pictures/plan_scale.py
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import torch
from plan_memory import TILES, setup_of
from ringtile import IntervalMask, Layout
from ringtile.cli.plan import filled
from ringtile.planner.advice import step_seconds
from ringtile.planner.layer import flops_of_pair
from ringtile.planner.setup import Setup
from ringtile.planner.simulate import LayerSeconds, simulate
from ringtile.planner.sizes import Rates
from ringtile.planner.step import StepMemory, TrainingStep
from ringtile.scheme import Scheme
from ringtile.sequence.plan import Counts, Shape

FIGURES = pathlib.Path(__file__).with_name("scale.json")
RANKS = [8, 16, 64, 256, 1024]
TOKENS = 2**14  # of a GPU
# An H100: 0.4 of 989e12 in bfloat16, 0.44 of NVLink's 450e9 one way, half of a card of 400 Gbit/s for each GPU.
RATES = Rates(4e14, 2e11, 2.5e10)
CASES = [("one document", "zigzag", scheme) for scheme in ("ring", "usp:8")]
CASES += [("source files", layout, "usp:8") for layout in ("contiguous", "zigzag", "balanced")]
CASES += [("source files", layout, "ring") for layout in ("contiguous", "balanced")]
NAMES = ("computing", "mean", "sending", "exposed", "together")


def planned() -> tuple[Setup, StepMemory]:
    setup = setup_of(TILES | {"context_parallel_size": 8})
    setup = dataclasses.replace(setup, ringtile=setup.ringtile.changed(keep_attention="auto"))
    with TrainingStep(setup) as step:
        return setup, step.run(8 * TOKENS)


def seconds(setup: Setup, memory: StepMemory, ranks: int, case: tuple[str, str, str], lengths: list[int]) -> Any:
    data, layout, scheme = case
    keys = {"context_parallel_size": ranks, "layout": layout, "context_parallel_scheme": scheme}
    there = dataclasses.replace(setup, devices=ranks, ringtile=setup.ringtile.changed(**keys))
    mask = IntervalMask.causal(ranks * TOKENS)
    calls = tuple(call._replace(mask=mask) for call in memory.attention)
    of_step = dataclasses.replace(memory, seq_len=mask.seq_len, attention=calls)
    documents = IntervalMask.documents(filled(lengths, mask.seq_len)) if data == "source files" else None
    found = step_seconds(there, of_step, RATES, tuple(rank // 8 for rank in range(ranks)), documents)
    return {name: round(getattr(found, name), 4) for name in NAMES}


# ---- published --------------------------------------------------------------------------------------


def layer(layout: Layout, shape: Shape, rates: Rates, backwards: float, per_host: int) -> LayerSeconds:
    hosts = tuple(rank // per_host for rank in range(layout.world_size))
    counts = Counts(IntervalMask.causal(layout.seq_len), layout, shape, Scheme.parse("ring"))
    return simulate(counts, rates, hosts, backwards)


def ring_flash_attention() -> dict[str, Any]:
    """github.com/zhuzilin/ring-flash-attention, README: 8 H800, 8K tokens each, heads of Llama-3.1-8B.

    Flops per second of its own line for one GPU; 200e9 bytes per second one way, what NVIDIA says of an H800's NVLink.
    """
    shape = Shape(1, 32, 8, 128, 128, torch.bfloat16)
    of_pair, rows = flops_of_pair(shape), {}
    for name, one_gpu, backwards, published in (
        ("forward", 591.5, 0.0, (0.521, 0.852, 0.744)),
        ("forward and backward", 154.7, 1.0, (0.539, 0.902, 0.829)),
    ):
        flops = one_gpu * 32 * (2**13 * (2**13 + 1) // 2) * (of_pair[0] + backwards * of_pair[1])
        for kind, share in zip(("contiguous", "zigzag", "striped"), published, strict=True):
            found = layer(Layout.named(kind, 2**16, 8), shape, Rates(flops, 2e11, 2e11), backwards, 8)
            rows[f"{name}, {kind}"] = [share, round(found.mean / found.together, 3)]
    return rows


def nemo() -> dict[str, Any]:
    """NeMo's guide, Long Sequence Performance: LLAMA2-7B in FP8 on H100, TFLOP/s of a GPU from 64K to 1M tokens.

    Ranks of TP GPUs; the flops per second of its line of 64K; a card of 400 Gbit/s for each GPU, 450e9 of NVLink.
    """
    rows, rate = {}, 574.0
    for length, tensor, context, published in (
        (64, 4, 2, 574), (128, 4, 4, 555), (256, 4, 8, 549), (512, 8, 16, 549), (1024, 8, 32, 536),
    ):  # fmt: skip
        shape = Shape(1, 32 // tensor, 32 // tensor, 128, 128, torch.bfloat16)
        rates = Rates(rate * 1e12, 4.5e11, 5e10)
        found = layer(Layout.zigzag(length << 10, context), shape, rates, 1.0, 8 // tensor)
        products = 6 * 6.6e9 * (length << 10) / context / tensor / rates.flops / 32  # of a layer
        rows[f"{length}K tokens"] = [published, round(rate * (products + found.mean) / (products + found.together))]
    return rows


def trl(memory: StepMemory) -> dict[str, Any]:
    """TRL's guide, Training Beyond 1M Tokens: Qwen3-8B, 1M tokens, 8 H100; attention runs again in the backward."""
    shape = memory.attention[0].shape
    layout = Layout.zigzag(2**20, 8)
    of_layers = [36 * layer(layout, shape, RATES, backwards, 8).together for backwards in (0.0, 1.0)]
    return {"1M tokens": [380, round(memory.product_flops / RATES.flops * 8 + sum(of_layers))]}


if __name__ == "__main__":
    lengths = json.loads(FIGURES.read_text())["lengths"]
    setup, memory = planned()
    of_cases = {}
    for case in CASES:
        of_cases[", ".join(case)] = {str(ranks): seconds(setup, memory, ranks, case, lengths) for ranks in RANKS}
        print(case, flush=True)
    published = {"ring-flash-attention": ring_flash_attention(), "NeMo": nemo(), "TRL": trl(memory)}
    figures = {"lengths": lengths, "seconds": of_cases, "published": published}
    FIGURES.write_text(json.dumps(figures) + "\n", encoding="ascii")
