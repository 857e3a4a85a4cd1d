"""Steps on documents of 100 to 64K tokens by fixed degrees of sharing and by one placement, into placement.json.

Measured on four CPU ranks, with documents an eighth as long, and simulated on 4 and 64 GPUs:

torchrun --standalone --nproc-per-node 4 -m tools.pictures.place_documents
python -m tools.pictures.place_documents
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import random
import tempfile
import time
from typing import Any

import ringtile
import torch
import torch.distributed as dist
from ringtile import IntervalMask, Layout
from ringtile.hf.config import Config
from ringtile.hf.feature import Enabled
from ringtile.hf.patches import Patches
from ringtile.hf.trainer import _shard
from ringtile.planner.simulate import simulate
from ringtile.planner.sizes import Rates
from ringtile.scheme import Scheme
from ringtile.sequence.plan import Counts, Shape
from ringtile.transport.groups import transport_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

FIGURES = pathlib.Path(__file__).with_name("placement.json")
RANKS, ROWS = 4, 8  # that are measured; documents of a rank and step
ONE = "one placement"
MEASURED = ("1", "2", "4", ONE, f"{ONE}, all_gather")  # ranks of a group; where all place their rows, the scheme
SIMULATED = {4: MEASURED, 64: ("1", "4", "8", "16", ONE, f"{ONE}, all_gather", f"{ONE}, usp:8")}  # by ranks
STEPS, REPEATS, SHORTER = 4, 2, 8
# Qwen3-8B: products of a token, forward and backward; layers and heads. Rates of plan_scale.py.
PRODUCTS, LAYERS, SHAPE = 6 * 7.57e9, 36, Shape(1, 32, 8, 128, 128, torch.bfloat16)
RATES = Rates(4e14, 2e11, 2.5e10)


def size_and_scheme(way: str, ranks: int) -> tuple[int, str]:
    return ranks if way.startswith(ONE) else int(way), way.partition(", ")[2] or "ring"


def documents(step: int, ranks: int = RANKS) -> list[int]:
    """The lengths of a step: nine of ten up to 4K tokens, one of ten from there to 64K, by their logarithm."""
    draw = random.Random(step)

    def length() -> int:
        ends = (100, 4096) if draw.random() < 0.9 else (4096, 65536)
        return int(math.exp(draw.uniform(*map(math.log, ends))))

    return [length() for _ in range(ranks * ROWS)]


# ---- simulated ----------------------------------------------------------------------------------------


def simulated(way: str, ranks: int, lengths: list[int]) -> dict[str, float]:
    size, scheme = size_and_scheme(way, ranks)
    rows = [lengths] if way.startswith(ONE) else [lengths[i : i + ROWS] for i in range(0, len(lengths), ROWS)]
    mean, sent, seconds = 0.0, 0, []
    for group in range(ranks // size):
        seconds.append(0.0)
        for of_pass in rows[group :: ranks // size]:  # as the Trainer deals rows
            mask = IntervalMask.documents(of_pass)
            layout = Layout.of_mask("whole_documents" if way.startswith(ONE) else "auto", mask, size)
            counts = Counts(mask, layout, SHAPE, Scheme.parse(scheme))
            attention = simulate(counts, RATES, tuple(rank // 8 for rank in range(size)))
            most = max(layout.local_len(rank) for rank in range(size))
            seconds[-1] += LAYERS * attention.together + PRODUCTS * most / RATES.flops
            mean += (LAYERS * attention.mean * size + PRODUCTS * mask.seq_len / RATES.flops) / ranks
            sent += LAYERS * sum(int(x.sum()) for x in counts.sent_bytes())
    return {
        "seconds": round(max(seconds), 3),
        "idle": round(1 - mean / max(seconds), 4),
        "megabytes": round(sent / ranks / 1e6, 1),
    }


def cut(ranks: int, lengths: list[int]) -> list[int]:
    """Of the documents that fit a rank's share of tokens and of pairs: all, those cut, and the tokens of both."""
    mask = IntervalMask.documents(lengths)
    layout, owners = Layout.whole_documents(mask, ranks), torch.empty(mask.seq_len, dtype=torch.int64)
    for rank in range(ranks):
        owners[layout.positions(rank)] = rank
    share, pairs = mask.seq_len / ranks, int(mask.num_keys.sum()) / ranks
    fits = [n <= share and n * (n + 1) / 2 <= pairs for n in lengths]
    both = [a and bool((x != x[0]).any()) for a, x in zip(fits, torch.split(owners, lengths), strict=True)]
    return [sum(fits), sum(both), *(sum(n for n, x in zip(lengths, xs, strict=True) if x) for xs in (fits, both))]


def simulate_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ranks, ways in SIMULATED.items():
        steps = [documents(step, ranks) for step in range(max(3, 80 // ranks))]
        found[str(ranks)] = {
            "cut": [cut(ranks, lengths) for lengths in steps],
            **{way: [simulated(way, ranks, lengths) for lengths in steps] for way in ways},
        }
    return found


# ---- measured -----------------------------------------------------------------------------------------


class Clock(TrainerCallback):
    """Seconds of this process, and the bytes that it has sent to those that share its rows, after each pass."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []

    def _mark(self, *args: Any, **kwargs: Any) -> None:
        sent = sum(transport_of(group).bytes_sent for group in list(dist.distributed_c10d._world.pg_map))
        self.marks.append((time.process_time(), sent))

    on_step_begin = on_substep_end = on_step_end = _mark


def measured(way: str) -> dict[str, Any]:
    (size, scheme), clock = size_and_scheme(way, RANKS), Clock()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=256, **sizes))
    lengths = [max(n // SHORTER, 2) for step in range(STEPS) for n in documents(step)]
    rows = [{"input_ids": (ids := torch.randint(256, (n,)).tolist()), "labels": ids} for n in lengths]
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        **{"per_device_train_batch_size": ROWS, "max_steps": STEPS, "train_sampling_strategy": "sequential"},
        gradient_accumulation_steps=1 if way.startswith(ONE) else size,
        **{"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1},
    )
    trainer = Trainer(
        model, arguments, train_dataset=rows, data_collator=DataCollatorWithFlattening(), callbacks=[clock]
    )
    keys: dict[str, Any] = {"context_parallel_scheme": scheme, "first_batch_check": False}
    keys |= {"dynamic_context_parallel": True} if way.startswith(ONE) else {"context_parallel_size": size}
    ringtile.enable(trainer, keys)
    patches = Patches()
    if size == 1:  # ringtile's kernels too, which know no token of another document
        run = Enabled(trainer, model, model, Config.load(keys))
        patches = Patches.of(lambda new: _shard(run, new))
    trainer.train()
    patches.restore()
    ringtile.restore(trainer)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    marks: list[Any] = [None] * RANKS
    dist.all_gather_object(marks, clock.marks)
    passes = 1 if way.startswith(ONE) else size
    seconds = torch.tensor([[x for x, _ in of_rank] for of_rank in marks]).view(RANKS, STEPS, passes + 1).diff(dim=2)
    sent = torch.tensor([[x for _, x in of_rank] for of_rank in marks]).view(RANKS, STEPS, passes + 1)
    # Ranks of a group wait for each other in each pass, groups in each step. The first step is warming up.
    of_step = seconds.view(RANKS // size, size, STEPS, passes).amax(1).sum(2).amax(0)[1:]
    busy = seconds.sum(2)[:, 1:]
    return {
        "seconds": round(float(of_step.mean()), 4),
        "idle": [round(x, 4) for x in (1 - busy.sum(1) / of_step.sum()).tolist()],
        "megabytes": float((sent[:, 1:, -1] - sent[:, 1:, 0]).double().mean() / 1e6),
        "losses": losses,
    }


def measure_all() -> dict[str, Any]:
    found: dict[str, list[Any]] = {way: [] for way in MEASURED}
    for _ in range(REPEATS):  # one after another
        for way, runs in found.items():
            runs.append(measured(way))
    return found


def main() -> None:
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    if os.environ.get("WORLD_SIZE") is None:
        figures["simulated"] = simulate_all()
    else:
        dist.init_process_group("gloo")
        figures["measured"] = measure_all()
    if os.environ.get("RANK", "0") == "0":
        FIGURES.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
