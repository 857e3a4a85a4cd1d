"""Steps of a Trainer with ringtile and without: losses, seconds, memory against the plan, and a trace of one step.

python tests/gpu/trainer.py FOLDER, or on several devices, which share each row,
torchrun --standalone --nproc-per-node gpu tests/gpu/trainer.py FOLDER. On a CPU a rehearsal with tiny sizes. Writes
FOLDER/trainer.json and traces.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

if __name__ == "__main__":
    ROOT = pathlib.Path(__file__).parents[2]
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "hf")]

from hf_training import GROUP_OF_ONE, enabled
from ringtile.config import Config
from ringtile.peak_memory import peak_bytes, reset_peak_bytes
from ringtile.planner.setup import Setup
from ringtile.planner.step import TrainingStep
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Trainer, TrainerCallback, TrainingArguments

ON_GPU = torch.cuda.is_available()
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
STEPS = 4  # the first one warms up and proves, the last one is traced
# Sums of float32 in another order, over a layer's 1,024 products or fewer: 1e-7 to 1e-6 measured on CPUs.
TOLERANCE = 1e-5
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "vocab_size": 1024}
# An eighth of Qwen3-8B's layers at its width, with its heads.
LARGE = (
    {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4, "vocab_size": 151936} if ON_GPU else SMALL
)
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128} if ON_GPU else {}
SMALL_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
KEYS: dict[str, Any] = {"tiled_mlp": True, "tiled_loss": True, "activation_offloading": ON_GPU}
ON: dict[str, Any] = (
    {"context_parallel_size": WORLD_SIZE, "first_batch_check": True} if WORLD_SIZE > 1 else GROUP_OF_ONE
)


def config_of(sizes: dict[str, int]) -> PretrainedConfig:
    heads = HEADS if sizes is LARGE and HEADS else SMALL_HEADS
    return AutoConfig.for_model("qwen3", **sizes, **heads, max_position_embeddings=2**20)


def rows_of(seq_len: int, vocab_size: int, packed: bool) -> list[dict[str, list[int]]]:
    """Rows of one document, or of eight of different lengths, which restarting positions tell apart."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(STEPS * WORLD_SIZE):
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
    """seconds: of each step; the last one is traced to a file."""

    def __init__(self, trace: pathlib.Path | None) -> None:
        self.seconds: list[float] = []
        self._trace = trace
        self._profile: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._trace and state.global_step + 1 == state.max_steps:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
            self._profile = profile(activities=kinds)
            self._profile.__enter__()
        self._began = self._now()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.seconds.append(self._now() - self._began)
        if self._profile:
            self._profile.__exit__(None, None, None)
            self._profile.export_chrome_trace(str(self._trace))

    @staticmethod
    def _now() -> float:
        if ON_GPU:
            torch.cuda.synchronize()
        return time.perf_counter()


def train(
    sizes: dict[str, int],
    seq_len: int,
    dtype: torch.dtype,
    keys: dict[str, Any] | None,
    packed: bool,
    trace: pathlib.Path | None,
) -> dict[str, Any]:
    """Return what a training logs, its seconds and its peak. keys: of ringtile; None: without, each rank with rows of
    its own."""
    torch.manual_seed(0)
    config = config_of(sizes)
    watch = Watch(trace)
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        reset_peak_bytes("cuda")
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=WORLD_SIZE if keys else 1,
            max_steps=STEPS,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not ON_GPU,
            remove_unused_columns=False,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
        with torch.device("cuda" if ON_GPU else "cpu"):  # 2e9 numbers drawn on a CPU would take most of the time
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=rows_of(seq_len, sizes["vocab_size"], packed),
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
    }


def planned(seq_len: int) -> int:
    """Bytes of a rank at the peak of a step of LARGE, as `ringtile plan` says."""
    setup = Setup(
        config_of(LARGE),
        devices=WORLD_SIZE,
        ringtile=Config(**KEYS, context_parallel_size=WORLD_SIZE),
        gradient_checkpointing=True,
        dtype=torch.bfloat16,
        on_gpu=ON_GPU,
    )
    with TrainingStep(setup) as step:
        return step.run(seq_len).total


def check(packed: bool) -> dict[str, Any]:
    """Float32 with ringtile and without: AssertionError where a loss or a norm differs."""
    plain, ours = (
        train(SMALL, 1024 if ON_GPU else 256, torch.float32, keys, packed, None) for keys in (None, KEYS | ON)
    )
    for name in ("loss", "grad_norm"):
        for mine, theirs in zip(ours[name], plain[name], strict=True):
            assert abs(mine - theirs) <= TOLERANCE * abs(theirs), f"{name}: got {ours[name]}, expected {plain[name]}"
    return {"loss": ours["loss"], "without": plain["loss"]}


def main(folder: pathlib.Path) -> None:
    if WORLD_SIZE > 1:
        if ON_GPU:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    rank = int(os.environ.get("RANK", "0"))
    seq_len = 32768 if ON_GPU else 512
    found: dict[str, Any] = {}
    for packed in (False, True):
        name = "packed" if packed else "plain"
        found[name] = check(packed)
        trace = folder / f"trace_{name}.json.gz" if rank == 0 else None
        found[name]["with"] = train(LARGE, seq_len, torch.bfloat16, KEYS | ON, packed, trace)
        try:
            found[name]["bare"] = train(LARGE, seq_len, torch.bfloat16, None, packed, None)
        except torch.cuda.OutOfMemoryError as error:
            found[name]["bare"] = str(error).splitlines()[0]
        if rank == 0:
            print(f"{name}, {seq_len} tokens a row, {WORLD_SIZE} ranks: {json.dumps(found[name])}", flush=True)
    found["planned"] = planned(seq_len)
    if rank == 0:
        print(f"planned peak {found['planned'] / 2**30:.2f} GiB", flush=True)
        (folder / "trainer.json").write_text(json.dumps(found, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
