"""Steps of a Trainer with ringtile and without: losses, seconds, memory against the plan, where a step's time goes.

python tests/gpu/trainer.py FOLDER, or on several devices, which share each row,
torchrun --standalone --nproc-per-node gpu tests/gpu/trainer.py FOLDER. On a CPU a rehearsal with tiny sizes. Each part
runs whatever became of the others. Writes FOLDER/NAME.json and a trace of the last step of each large part.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import json
import logging
import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

if __name__ == "__main__":
    ROOT = pathlib.Path(__file__).parents[2]
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "hf")]

from failures import how_of, line
from hf_engines import engine
from hf_training import GROUP_OF_ONE, enabled
from ringtile.hf.config import Config
from ringtile.planner.setup import Setup
from ringtile.planner.step import TrainingStep
from step_time import shares, watched
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Trainer, TrainerCallback, TrainingArguments

from tools.peak_memory import peak_bytes, reset_peak_bytes

ON_GPU = torch.cuda.is_available()
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
STEPS = 4  # the first one warms up and proves, the last one is traced
# Sums of float32 in another order, over a layer's 1,024 products or fewer: 1e-7 to 1e-6 measured on CPUs.
TOLERANCE = 1e-5
SMALL = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 1024}
SMALL_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
# Of the width of Qwen3-8B, with its heads.
LARGE = {"hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936} if ON_GPU else SMALL
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128} if ON_GPU else SMALL_HEADS
KEYS: dict[str, Any] = {"tiled_mlp": True, "tiled_loss": True, "activation_offloading": ON_GPU}
ON: dict[str, Any] = (
    {"context_parallel_size": WORLD_SIZE, "first_batch_check": True} if WORLD_SIZE > 1 else GROUP_OF_ONE
)
ENGINES: dict[str, dict[str, Any]] = {
    "DDP": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "FSDP2": {"fsdp": True, "fsdp_config": {"version": 2, "activation_checkpointing": True}},
}


def config_of(large: bool, num_layers: int) -> PretrainedConfig:
    sizes, heads = (LARGE, HEADS) if large else (SMALL, SMALL_HEADS)
    return AutoConfig.for_model("qwen3", **sizes, **heads, num_hidden_layers=num_layers, max_position_embeddings=2**20)


def rows_of(num_rows: int, seq_len: int, vocab_size: int, packed: bool) -> list[dict[str, list[int]]]:
    """Rows of one document, or of eight of different lengths, which restarting positions tell apart."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(num_rows):
        ids = torch.randint(vocab_size, (seq_len,), generator=generator).tolist()
        row = {"input_ids": ids, "labels": ids}
        if packed:
            cuts = [0, *sorted((torch.randperm(seq_len - 1, generator=generator)[:7] + 1).tolist()), seq_len]
            lengths = [end - begin for begin, end in itertools.pairwise(cuts)]
            row["position_ids"] = [position for length in lengths for position in range(length)]
            row["labels"] = [
                -100 if position == 0 else token for position, token in zip(row["position_ids"], ids, strict=True)
            ]
        rows.append(row)
    return rows


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


class Watch(TrainerCallback):
    """seconds: of each step. shares: of the last step, which is traced, by part of the model."""

    def __init__(self, trace: pathlib.Path | None, modules: tuple[str, ...]) -> None:
        self.seconds: list[float] = []
        self.shares: dict[str, float] = {}
        self._trace, self._modules = trace, modules
        self._stack = contextlib.ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._trace and state.global_step + 1 == state.max_steps:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
            self._stack.enter_context(watched(more["model"], self._modules))
            self._profile = self._stack.enter_context(profile(activities=kinds))
        self._began = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.seconds.append(self._now() - self._began)
        if self._trace and state.global_step == state.max_steps:
            self._stack.close()
            self.shares = shares(self._profile.events())
            if RANK == 0:
                self._profile.export_chrome_trace(str(self._trace))

    @staticmethod
    def _now() -> float:
        if ON_GPU:
            torch.cuda.synchronize()
        return time.perf_counter()


def train(
    config: PretrainedConfig,
    seq_len: int,
    dtype: torch.dtype,
    keys: dict[str, Any] | None,
    packed: bool,
    *,
    rows_a_step: int = WORLD_SIZE,
    engine_name: str = "DDP",
    trace: pathlib.Path | None = None,
) -> dict[str, Any]:
    """Return what a training logs, its seconds, its peak in bytes and where its time goes. keys: of ringtile; None:
    without, each rank with rows of its own."""
    torch.manual_seed(0)
    watch = Watch(trace, ("mlp",) if keys else ("mlp", "lm_head"))  # a tiled loss refuses hooks of the projection
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        reset_peak_bytes("cuda")
    on_cpu = contextlib.nullcontext({}) if ON_GPU else engine(engine_name)
    with tempfile.TemporaryDirectory() as folder, on_cpu as arguments:
        given = {"use_cpu": not ON_GPU, **arguments, **ENGINES[engine_name]}
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=rows_a_step // (1 if keys else WORLD_SIZE),
            max_steps=STEPS,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            **given,
        )
        with torch.device("cuda" if ON_GPU else "cpu"):  # 2e9 numbers drawn on a CPU would take most of the time
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=rows_of(STEPS * rows_a_step, seq_len, config.vocab_size, packed),
            data_collator=collate,
            callbacks=[watch],
        )
        with enabled(trainer, keys):
            trainer.train()
        logged = [each for each in trainer.state.log_history if "loss" in each]
    return {
        "loss": [each["loss"] for each in logged],
        "grad_norm": [each["grad_norm"] for each in logged],
        "seconds": min(watch.seconds[1:-1]),
        "peak": peak_bytes("cuda") if ON_GPU else 0,
        "shares": watch.shares,
    }


def planned(config: PretrainedConfig, seq_len: int) -> int:
    """Return the bytes of a rank at the peak of a step, as `ringtile plan` says."""
    setup = Setup(
        config,
        devices=WORLD_SIZE,
        ringtile=Config(**KEYS, context_parallel_size=WORLD_SIZE),
        gradient_checkpointing=True,
        dtype=torch.bfloat16,
        on_gpu=ON_GPU,
    )
    with TrainingStep(setup) as step:
        return step.run(seq_len).total


# ---- the parts ----------------------------------------------------------------------------------


def small(args: argparse.Namespace, packed: bool) -> dict[str, Any]:
    """Float32, against a training without ringtile, of args.reference or here. ValueError: a loss or norm differs."""
    config, seq_len = config_of(False, 2), 1024 if ON_GPU else 128
    run = functools.partial(train, config, seq_len, torch.float32, packed=packed, rows_a_step=args.rows)
    if args.without:
        return run(None, engine_name=args.engine)
    name = "small-packed" if packed else "small"
    plain = json.loads(args.reference.read_text())[name] if args.reference else run(None)
    ours = run(KEYS | ON, engine_name=args.engine)
    for what in ("loss", "grad_norm"):
        for mine, theirs in zip(ours[what], plain[what], strict=True):
            if not abs(mine - theirs) <= TOLERANCE * abs(theirs):
                raise ValueError(f"{what}: got {ours[what]}, expected {plain[what]}")
    return ours | {"without": {name: plain[name] for name in ("loss", "seconds")}}


def large(args: argparse.Namespace, name: str, tokens: int, num_layers: int, packed: bool = False) -> dict[str, Any]:
    """Bfloat16, of an 8B model's width, with ringtile or without."""
    config, seq_len = config_of(True, num_layers), tokens if ON_GPU else tokens // 256
    trace = args.folder / f"trace_{args.name}_{name}.json.gz"
    keys = None if args.without else KEYS | ON
    found = train(config, seq_len, torch.bfloat16, keys, packed, engine_name=args.engine, trace=trace)
    if not args.without:
        found["planned"] = planned(config, seq_len)
    return found


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "small": functools.partial(small, packed=False),
    "small-packed": functools.partial(small, packed=True),
    "32k": lambda args: large(args, "32k", 32768, 4),
    "32k-packed": lambda args: large(args, "32k-packed", 32768, 4, packed=True),
    "128k": lambda args: large(args, "128k", 131072, 2),
}


def in_words(found: dict[str, Any]) -> str:
    said = f"losses {found['loss']}, norms {found['grad_norm']}, {found['seconds']:.3f} s a step"
    if "planned" in found:
        said += f", peak {found['peak'] / 2**30:.2f} GiB, planned {found['planned'] / 2**30:.2f}"
    return said + "".join(f", {part} {share:.1%}" for part, share in found["shares"].items())


def run_parts(args: argparse.Namespace) -> int:
    """Run each part, and say what became of it; what failed does not end the others. Return whether one failed."""
    results: dict[str, Any] = {}
    for part in args.parts:
        name = f"{args.name} {part}"
        try:
            results[part] = PARTS[part](args)
            said = f"{name}, {WORLD_SIZE} ranks: {in_words(results[part])}"
        except Exception as error:
            traceback.print_exc()
            results[part] = {"failed": said} if (said := line(name, how_of(error), str(error))) else {}
        if RANK == 0 or "failed" in results[part]:
            print(said, flush=True)
        if RANK == 0:
            (args.folder / f"{args.name}.json").write_text(json.dumps(results, indent=1))
    return int(any("failed" in found for found in results.values()))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("trainer.py", description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", type=pathlib.Path)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--name", default="trainer", help="of the files, and of this run in what it prints")
    parser.add_argument("--engine", choices=ENGINES, default="DDP")
    parser.add_argument("--backend", default="cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    parser.add_argument("--rows", type=int, default=WORLD_SIZE, help="of a step of the small parts")
    parser.add_argument("--without", action="store_true", help="train without ringtile")
    parser.add_argument("--reference", type=pathlib.Path, help="NAME.json of a run --without, for the small parts")
    args = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("ringtile").setLevel(logging.INFO)  # what the first batch has shown, whom "auto" takes
    if WORLD_SIZE > 1:
        if ON_GPU:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(args.backend)
    status = run_parts(args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
