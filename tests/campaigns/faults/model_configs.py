"""Hostile config.json: `ringtile plan --model` refuses each with one line and status 2, or answers, within a limit.

Each trial changes one value, at any depth, of the configuration of a type of transformers, in a process forked after
the imports.
"""

from __future__ import annotations

import json
import pathlib
import random
from typing import Any

from faults.counts import Counts
from faults.processes import BEGAN, VALUES, Trial, paths, put, trials_in_processes

TRIALS = 400
CPU_SECONDS = 60  # of one plan, which takes 1 to 5; a step is planned up to a dozen times
TYPES = (
    *("llama", "gpt2", "qwen3_moe", "gemma3_text", "deepseek_v3", "gpt_oss", "cohere2", "phi3", "granite"),
    *("qwen3_next", "bloom", "falcon", "longcat_flash", "olmo3", "glm4_moe", "mistral", "opt", "jamba"),
)
OPTIONS = (
    "--no-switches --devices=1",
    "--no-switches --devices=2",
    "--no-switches --devices=2 --engine=fsdp2",
    "--no-switches --devices=2 --bf16 --tiled-loss --tiled-mlp --memory=1GiB",
)
# Beside those of any file: what numbers, names and lists of a model can be too.
OWN_VALUES: tuple[Any, ...] = (
    *(4, 8, 16, 33, 100, 1000, 10_000, 100_000, 10**6, 10**7, 10**9, -2, -100, 1e-6, 1e9, "1", "auto", "float32"),
    *("someone/kernel", "kernels-community/flash-attn2", "flash_attention_2", "eager", "paged|sdpa", "relu", "gelu"),
    *([0], [0, 0], [64], [-1] * 4, [1e9] * 4, ["full_attention"] * 4, ["sliding_attention"] * 10_000, [[1, 2]] * 4),
    *({"rope_type": "yarn"}, {"rope_type": "x", "factor": 0}, {"rope_type": "linear", "factor": "x"}, {"0": 1}),
)
# Keys that a configuration may hold beside its own.
KEYS = (
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation"),
    *("_experts_implementation", "auto_map", "quantization_config", "dtype", "torch_dtype", "text_config"),
    *("per_layer_config", "layer_types", "rope_scaling", "rope_parameters", "num_labels", "pruned_heads", "id2label"),
    *("output_attentions", "use_cache", "is_decoder", "is_encoder_decoder", "tie_word_embeddings", "architectures"),
    *("base_model_tp_plan", "sub_configs", "attribute_map", "transformers_version", "problem_type", "to_dict"),
    *("gradient_checkpointing", "name_or_path", "_name_or_path", "torchscript", "_commit_hash", "return_dict"),
    *("chunk_size_feed_forward", "trust_remote_code", "kernel_config", "use_kernels", "model_type"),
)


def campaign(trials: int | None, seed: int) -> Counts:
    """Changes configurations that are valid, and counts what `ringtile plan --model` does with them."""
    configs = prepared()
    draw = random.Random(seed)
    left = [
        Trial(f"{name} {options}", text(options, config))
        for name, config in configs.items()
        for options in OPTIONS[:: len(OPTIONS) - 1]
    ]
    left += [mutant(draw, configs) for _ in range(trials or TRIALS)]
    return trials_in_processes(left, plan, CPU_SECONDS)


def prepared() -> dict[str, dict[str, Any]]:
    """The configurations. Imports what a plan needs, so that each trial takes a fraction of a second."""
    import torch
    import transformers
    from ringtile.planner.setup import Setup
    from ringtile.planner.step import TrainingStep

    from tools.models.tiny_models import tiny_config

    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for name in TYPES:
        config = tiny_config(name)
        found[name] = json.loads(json.dumps(config.to_dict()))
        transformers.AutoModelForCausalLM._model_mapping[type(config)]
    with TrainingStep(Setup(tiny_config("llama"))) as step:
        step.run(8)
    return found


def text(options: str, config: Any) -> bytes:
    return f"{options}\n{json.dumps(config)}".encode()


def plan(trial: Trial, place: pathlib.Path) -> int:
    """`ringtile plan` in a process of its own."""
    from ringtile.cli import main

    options, _, config = trial.content.partition(b"\n")
    (place / "config.json").write_bytes(config)
    status = main(["plan", "--model", str(place), "--seq-len=64", *options.decode().split()])
    return BEGAN if status == 0 else status


def mutant(draw: random.Random, configs: dict[str, dict[str, Any]]) -> Trial:
    """A configuration that differs from a valid one in one respect, or in two."""
    name = draw.choice(list(configs))
    config, labels = json.loads(json.dumps(configs[name])), []
    for _ in range(draw.choice((1, 1, 1, 2))):
        path = draw.choice(paths(config)) if draw.random() < 0.85 else [draw.choice(KEYS)]
        value = draw.choice(VALUES + OWN_VALUES)
        removed = draw.random() < 0.05
        put(config, path, value, removed)
        labels.append(f"{'.'.join(map(str, path))} {'removed' if removed else f'= {value!r:.60}'}")
    options = draw.choice(OPTIONS)
    content = text(options, config)
    if draw.random() < 0.03:
        content = content[: draw.randrange(len(options) + 1, len(content))]
        labels.append("cut")
    return Trial(f"{name}: {', '.join(labels)}", content)
