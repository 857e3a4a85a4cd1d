"""The planner's figures of memory.svg and of the guide: Qwen3-8B on 8 GPUs by length and key, into memory.json.

A quarter of an hour.

python tools/pictures/plan_memory.py
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
from ringtile.hf.config import Config
from ringtile.planner.setup import Setup
from ringtile.planner.step import TrainingStep
from transformers import Qwen3Config

FIGURES = pathlib.Path(__file__).with_name("memory.json")
LENGTHS = [2**power for power in range(15, 21)]  # 32K to 1M
MLP = {"tiled_loss": True, "tiled_mlp": True}
TILES = MLP | {"tiled_norm": True}
# In place of checkpoints, tiled_mlp and tiled_norm.
STREAM = {"tiled_loss": True, "activation_offloading": True, "stream": True, "tile_tokens": 8192}
# A name: what it turns on beside the line before it, and its Setup.
VARIANTS: dict[str, dict[str, Any]] = {
    "checkpointing alone": {},
    "tiled_loss": {"tiled_loss": True},
    "tiled_mlp": MLP,
    "tiled_norm": TILES,
    "context_parallel_size: 8": TILES | {"context_parallel_size": 8},
    "activation_offloading": TILES | {"context_parallel_size": 8, "activation_offloading": True},
    "stream": STREAM | {"context_parallel_size": 8},
}


def qwen3_8b() -> Qwen3Config:
    """Its published configuration, with rotary embeddings scaled for 1M tokens."""
    return Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=2**20,
        tie_word_embeddings=False,
    )


def setup_of(keys: dict[str, Any]) -> Setup:
    return Setup(
        qwen3_8b(),
        devices=8,
        engine="fsdp2",
        ringtile=Config(**keys, keep_attention=False),
        gradient_checkpointing="stream" not in keys,
        dtype=torch.bfloat16,
        bf16=True,
        on_gpu=True,
    )


def parts_of(keys: dict[str, Any], lengths: list[int]) -> dict[str, dict[str, int]]:
    """Bytes of a rank by part, for each length."""
    with TrainingStep(setup_of(keys)) as step:
        found = {length: step.run(length) for length in lengths}
    return {str(length): one.parts | {"host": one.host_bytes} for length, one in found.items()}


if __name__ == "__main__":
    figures = {}
    for name, keys in VARIANTS.items():
        figures[name] = parts_of(keys, LENGTHS)
        print(name, flush=True)
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="ascii")
