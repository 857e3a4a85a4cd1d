"""`ringtile plan --model` against measured peaks: 57 trainings on CPU ranks, each in fresh processes. By hand:

    PYTHONPATH=.:tests:tests/hf python tests/campaigns/planner_memory.py [--json FILE] [--markdown FILE] [NAME ...]

A rank trains a tiny model of the same type under the same engine first, so that every library is loaded and started;
its resident memory is then the baseline. What is compared is the peak of two or three steps of the real Trainer above
it, on the rank that holds most. The processes are forked from one that has imported the libraries and run nothing.
glibc is told to map every block of 64 KiB or more, so that freed tensors leave the process, as they leave the allocator
of a GPU; without that a heap keeps holes.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import importlib
import json
import os
import pathlib
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
    "moe": {
        **{"model_type": "qwen3_moe", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    },
    "qwen3_next": {
        **{"model_type": "qwen3_next", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
        **{"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_value_head_dim": 32},
        **{"linear_key_head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
        "shared_expert_intermediate_size": 256,
    },
    "bamba": {
        **{"model_type": "bamba", "num_attention_heads": 8, "num_key_value_heads": 4, "attn_layer_indices": [1]},
        **{"mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_d_state": 64},
    },
    "qwen3_vl": {"model_type": "qwen3_vl", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
    "gemma3": {"model_type": "gemma3", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
}
# Of models of images and text: a tower, and images of a row with their side in pixels.
VISION: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        **{"hidden_size": 256, "intermediate_size": 1024, "depth": 6, "num_heads": 8, "patch_size": 16},
        **{"out_hidden_size": 256, "deepstack_visual_indexes": [1, 2], "num_position_embeddings": 256},
    },
    "gemma3": {
        **{"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8},
        **{"patch_size": 16, "image_size": 256, "vision_use_head": False},
    },
}
NUM_IMAGES, SIDE = 8, 256
SIZES: dict[str, dict[str, Any]] = {  # activations that outweigh the weights, and the other way round
    "long": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 8192},
    "wide": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 16384},
    # as many classes as TRL's tile has, of which a CPU's pages exist only where they are written
    "grpo": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 32768},
}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
CP = {"context_parallel_size": 2}
MLP, LOSS = {"tiled_mlp": True, "tile_tokens": 512}, {"tiled_loss": True, "tile_tokens": 512}
NORM = {"tiled_norm": True}
# engine or "single", model and its adapters' rank, size, tokens, rows, gradient checkpointing, ringtile's keys; of
# a GRPO step also the tokens of a completion, rows of a generation batch, and whether it has a reference model
CASES: list[tuple[Any, ...]] = [
    ("single", "llama", "long", 4096, 1, False, {}),
    ("single", "llama", "long", 2048, 4, False, {}),
    ("single", "qwen3", "long", 4096, 1, False, {}),
    ("single", "moe", "long", 4096, 1, False, {}),
    ("single", "llama", "long", 4096, 2, True, {}),
    ("single", "llama", "long", 4096, 2, False, LOSS),
    ("single", "llama", "long", 4096, 2, False, MLP | LOSS),
    ("single", "qwen3", "long", 4096, 4, True, MLP | LOSS),
    ("single", "llama", "long", 4096, 4, True, MLP | LOSS),
    ("single", "llama", "long", 4096, 4, True, MLP | NORM | LOSS),
    ("single", "moe", "long", 4096, 2, True, MLP | LOSS),
    ("single", "llama", "wide", 512, 1, False, {}),
    ("single", "qwen3", "wide", 1024, 1, True, LOSS),
    ("ddp", "llama", "wide", 512, 1, False, {}),
    ("ddp", "llama", "long", 8192, 1, False, CP),
    ("ddp", "qwen3", "long", 8192, 1, False, CP),
    ("ddp", "moe", "long", 4096, 1, False, CP),
    ("ddp", "llama", "long", 8192, 2, True, CP | MLP | LOSS),
    ("ddp", "llama", "long", 4096, 2, False, CP | LOSS | {"context_parallel_scheme": "ulysses"}),
    ("fsdp2", "llama", "wide", 512, 1, False, {}),
    ("fsdp2", "qwen3", "wide", 1024, 1, False, CP),
    ("fsdp2", "moe", "long", 4096, 1, False, CP),
    ("fsdp2", "llama", "long", 8192, 2, True, CP),
    ("fsdp2", "llama", "long", 8192, 2, True, CP | MLP | LOSS),
    ("fsdp2", "llama", "long", 8192, 2, True, CP | MLP | NORM | LOSS),
    ("zero1", "llama", "wide", 512, 1, False, {}),
    ("experts", "moe", "long", 4096, 1, False, CP),
    ("zero1", "moe", "long", 4096, 1, False, CP),
    ("zero2", "llama", "wide", 512, 1, False, {}),
    ("zero2", "qwen3", "long", 8192, 1, False, CP),
    ("zero2", "llama", "long", 8192, 2, True, CP | MLP | LOSS),
    ("zero3", "llama", "wide", 512, 1, False, {}),
    ("zero3", "qwen3", "wide", 1024, 1, False, CP),
    ("zero3", "llama", "long", 8192, 2, True, CP | MLP | LOSS),
    ("single", "qwen3_vl", "long", 1024, 1, False, {}),
    ("single", "gemma3", "long", 3072, 1, False, LOSS),
    ("ddp", "gemma3", "long", 3072, 1, False, CP | LOSS | {"first_batch_check": False}),
    ("ddp", "qwen3_vl", "long", 1024, 2, False, CP | LOSS | {"first_batch_check": False}),
    ("ddp", "qwen3_vl", "long", 1024, 2, True, CP | LOSS | {"first_batch_check": False}),
    ("fsdp2", "qwen3_vl", "long", 1024, 2, False, CP | LOSS | {"first_batch_check": False}),
    ("single", "qwen3_next", "long", 4096, 1, False, {}),
    ("single", "bamba", "long", 4096, 1, False, {}),
    ("single", "bamba", "long", 4096, 4, True, MLP | LOSS),
    ("ddp", "qwen3_next", "long", 8192, 1, False, CP | LOSS | {"first_batch_check": False}),
    ("ddp", "bamba", "long", 8192, 1, False, CP | {"first_batch_check": False}),
    ("fsdp2", "bamba", "long", 8192, 2, True, CP | MLP | LOSS | {"first_batch_check": False}),
    ("ddp", "bamba", "long", 8192, 1, False, CP | {"context_parallel_scheme": "ulysses", "first_batch_check": False}),
    ("single", "llama+lora8", "wide", 1024, 1, False, {}),
    ("single", "llama+lora8", "long", 4096, 2, True, MLP | LOSS),
    ("fsdp2", "llama+lora8", "wide", 1024, 1, True, CP | {"first_batch_check": False}),
    ("zero2", "llama+lora8", "wide", 1024, 1, False, CP | {"first_batch_check": False}),
    ("single", "llama+qlora8", "long", 4096, 1, False, {}),  # bitsandbytes is not among the tests' packages
    ("single", "llama+qlora8", "long", 4096, 4, True, MLP | LOSS),
    ("single", "llama", "grpo", 2048, 1, False, {}, 32, 8, True),
    ("single", "llama", "grpo", 512, 1, True, MLP, 32, 64, False),
    ("ddp", "llama", "grpo", 4096, 1, False, CP | {"first_batch_check": False}, 32, 8, True),
    ("fsdp2", "llama", "grpo", 512, 1, False, CP | {"first_batch_check": False}, 32, 4, True),
]
_ENVIRONMENT = {
    **{"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"},
    **{"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
}
_IMPORTS = ("hf_engines", "ringtile.hf.trainer", "ringtile.planner.step", "deepspeed", "deepspeed.ops")
_ENGINES = {"single": "DDP", "ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
_ENGINES["experts"] = "mesh"  # FSDP2 by transformers, where two ranks hold all experts


def name_of(case: tuple[Any, ...]) -> str:
    """Name a run, without spaces."""
    engine, model, size, seq_len, rows, checkpointing, keys, *grpo = case
    on = [name for name in ("tiled_mlp", "tiled_norm", "tiled_loss") if name in keys]
    on += ["checkpointing"] if checkpointing else []
    scheme = keys.get("context_parallel_scheme", "ring")
    on = [f"cp2:{scheme}" if scheme != "ring" else "cp2", *on] if "context_parallel_size" in keys else on
    kind = "grpo{}x{}{}/".format(*grpo[:2], "+reference" * grpo[2]) if grpo else ""
    return f"{engine}/{model}-{size}/{seq_len}x{rows}/{kind}{'+'.join(on) or 'plain'}"


# ---- one rank of a run --------------------------------------------------------------------------


def _config(model: str, sizes: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    text = {**MODELS[model], **sizes, "max_position_embeddings": 2**14}
    if model not in VISION:
        return AutoConfig.for_model(**text)
    text["model_type"] += "_text"
    vision = VISION[model] | ({"out_hidden_size": sizes["hidden_size"]} if model == "qwen3_vl" else {})
    last = sizes["vocab_size"] - 1
    return AutoConfig.for_model(
        model, text_config=text, vision_config=vision, image_token_id=last, video_token_id=last - 1,
        vision_start_token_id=last - 2, vision_end_token_id=last - 3, mm_tokens_per_image=64, image_token_index=last,
    )  # fmt: skip


def _with_images(config: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows of tokens, the first of which are images, as their processor makes them."""
    import torch

    batch = _batch(rows)
    side = SIDE // 16
    for image in range(NUM_IMAGES):
        batch["input_ids"][:, 66 * image] = config.get_text_config().vocab_size - 3
        batch["input_ids"][:, 66 * image + 1 : 66 * image + 65] = config.get_text_config().vocab_size - 1
    types = (batch["input_ids"] == config.get_text_config().vocab_size - 1).long()
    count = NUM_IMAGES * len(rows)
    if config.model_type == "gemma3":
        return batch | {"pixel_values": torch.randn(count, 3, SIDE, SIDE), "token_type_ids": types}
    grid = torch.tensor([[1, side, side]] * count)
    return batch | {
        **{"pixel_values": torch.randn(count * side * side, 2 * 3 * 16 * 16), "image_grid_thw": grid},
        "mm_token_type_ids": types,
    }


def _train(case: tuple[Any, ...], sizes: dict[str, Any], seq_len: int, steps: int) -> None:
    import ringtile
    import torch
    from hf_engines import engine as engine_arguments
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Trainer, TrainingArguments

    engine, model, _, _, rows, checkpointing, keys, *grpo = case
    with engine_arguments(_ENGINES[engine]) as arguments:
        arguments: dict[str, Any] = dict(arguments)
        if engine == "fsdp2":
            arguments["fsdp_config"] = {
                **{"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True},
                "activation_checkpointing": checkpointing,
            }
        elif checkpointing:
            arguments |= {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": False},
            }
        torch.manual_seed(0)
        model, _, adapters = model.partition("+")
        config = _config(model, sizes)
        made: Any = AutoModelForImageTextToText if model in VISION else AutoModelForCausalLM
        network = made.from_config(config, dtype=torch.float32)
        if engine == "experts":
            network = _over_ranks(network)
        if adapters.startswith("q"):
            network = _in_4bit(network)
        if adapters:
            rank = int(adapters.partition("lora")[2])
            network = get_peft_model(network, LoraConfig(r=rank, target_modules="all-linear"))
        common = {
            **{"per_device_train_batch_size": rows, "max_steps": steps, "report_to": [], "use_cpu": True},
            **{"disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, **arguments},
        }
        if grpo:
            trainer = _grpo_trainer(network, common, seq_len, *grpo)
        else:
            if model in VISION:
                seq_len = max(seq_len, 66 * NUM_IMAGES)
                common["remove_unused_columns"] = False
            data = [{"input_ids": torch.randint(3, 90, (seq_len,)).tolist()} for _ in range(8)]
            trainer = Trainer(
                model=network,
                args=TrainingArguments(tempfile.mkdtemp(), **common),
                train_dataset=[{**row, "labels": row["input_ids"]} for row in data],
                data_collator=functools.partial(_with_images, config) if model in VISION else _batch,
            )
        ringtile.enable(trainer, keys)
        trainer.train()
        ringtile.restore(trainer)


def _over_ranks(network: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    alone = mock.patch("transformers.distributed.mixin._is_torch_distributed_initialized", return_value=False)
    with tempfile.TemporaryDirectory() as folder:
        with alone:  # each rank writes its own
            network.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(fsdp_size=2, ep_size=2)
        ).train()


def _in_4bit(network: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with tempfile.TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        keys: dict[str, Any] = {"quantization_config": settings, "dtype": torch.float32, "attn_implementation": "sdpa"}
        return AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", **keys).train()


def _batch(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def _grpo_trainer(
    network: Any, common: dict[str, Any], seq_len: int, completion: int, rows: int, has_reference: bool
) -> Any:
    """Prompts of seq_len - completion tokens or one less, and completions that do not end early, of one group."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, **{f"w{i}": i for i in range(1, 90)}}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    settings: dict[str, Any] = {
        **{"num_generations": 2, "beta": 0.1 * has_reference, "max_completion_length": completion, "bf16": False},
        **{"generation_kwargs": {"min_new_tokens": completion}, "gradient_checkpointing": False, **common},
        "ddp_find_unused_parameters": False,  # else DDP hands the entropies a gradient of zeros
        "steps_per_generation": rows // common["per_device_train_batch_size"],
    }
    prompts = [
        {"prompt": " ".join(f"w{(i + j) % 80 + 3}" for j in range(seq_len - completion - i % 2))} for i in range(64)
    ]
    with mock.patch("trl.trainer.grpo_trainer.create_model_from_path", return_value=copy.deepcopy(network)):
        return GRPOTrainer(
            model=network,
            reward_funcs=lambda completions, **columns: [float(i % 2) for i in range(len(completions))],
            args=GRPOConfig(tempfile.mkdtemp(), shuffle_dataset=False, **settings),
            train_dataset=Dataset.from_list(prompts),
            processing_class=wrapped,
        )


def measure(case: tuple[Any, ...]) -> int:
    """The peak above the baseline, in bytes."""
    import transformers

    from tools.peak_memory import peak_bytes, reset_peak_bytes

    transformers.logging.set_verbosity_error()
    _train(case, TINY, 128, 3)
    gc.collect()
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    baseline = int(next(line for line in status if line.startswith("VmRSS:")).split()[1]) * 1024
    reset_peak_bytes()
    # DDP makes its buckets anew in the second step; their pages count when gradients have been copied to all of them.
    _train(case, SIZES[case[2]], case[3], 3 if case[0] == "ddp" else 2)
    return peak_bytes() - baseline


# ---- all runs -----------------------------------------------------------------------------------


def _start(function: Callable[..., Any], *arguments: Any, environment: dict[str, str]) -> tuple[int, Any]:
    """Forks a process; returns its id and the end of a pipe from which its result can be read as JSON."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, os.fdopen(reader)
    status = 1
    try:
        os.environ.update(environment)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        os.write(writer, json.dumps(function(*arguments)).encode())
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _results(started: list[tuple[int, Any]]) -> list[Any]:
    found = [pipe.read() for _, pipe in started]
    for process, _ in started:
        os.waitpid(process, 0)
    return [json.loads(text) for text in found]


def _run(case: tuple[Any, ...]) -> int:
    """The peak of the rank that holds most, in bytes."""
    world_size = 1 if case[0] == "single" else 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(world_size):
        environment = {}
        if world_size > 1:
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started.append(_start(measure, case, environment=environment))
    return max(_results(started))


def predict(case: tuple[Any, ...]) -> dict[str, int]:
    """The parts of the peak, as `ringtile plan --model` has them."""
    from ringtile.hf.config import Config
    from ringtile.planner.grpo import Grpo
    from ringtile.planner.images import ImageRows
    from ringtile.planner.setup import Setup
    from ringtile.planner.step import TrainingStep

    engine, model, size, seq_len, rows, checkpointing, keys, *grpo = case
    model, _, adapters = model.partition("+")
    setup = Setup(
        _config(model, SIZES[size]),
        devices=1 if engine == "single" else 2,
        engine={"single": "ddp", "experts": "fsdp2"}.get(engine, engine),
        expert_parallel_size=2 if engine == "experts" else 1,
        ringtile=Config(**keys),
        batch=rows,
        gradient_checkpointing=checkpointing,
        lora_rank=int(adapters.partition("lora")[2] or 0),
        load_in_4bit=adapters.startswith("q"),
        grpo=Grpo(*grpo) if grpo else None,
        images=ImageRows(NUM_IMAGES, (SIDE, SIDE)) if model in VISION else None,
    )
    with TrainingStep(setup) as step:
        return step.run(seq_len).parts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="parts of names of runs")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    args = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in _ENVIRONMENT.items()):  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_ENVIRONMENT})
    for name in _IMPORTS:
        importlib.import_module(name)
    results = []
    for case in CASES:
        name = name_of(case)
        if args.names and not any(part in name for part in args.names):
            continue
        began = time.monotonic()
        (parts,) = _results([_start(predict, case, environment={})])
        measured = _run(case)
        ratio = sum(parts.values()) / measured
        results.append({"run": name, "parts": parts, "predicted": sum(parts.values()), "measured": measured})
        said = f"{sum(parts.values()) / 2**20:7.0f} {measured / 2**20:7.0f} MiB {ratio:6.3f}"
        print(f"{name:60} {said}  {time.monotonic() - began:3.0f} s", flush=True)
    worst = max(results, key=lambda each: abs(each["predicted"] / each["measured"] - 1))
    within = sum(abs(each["predicted"] / each["measured"] - 1) <= 0.05 for each in results)
    print(f"{within} of {len(results)} within 5 %; worst {worst['run']} {worst['predicted'] / worst['measured']:.3f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.markdown:
        lines = ["| run | predicted, MiB | measured, MiB | ratio |", "| --- | ---: | ---: | ---: |"]
        lines += [
            f"| `{each['run']}` | {each['predicted'] / 2**20:.0f} | {each['measured'] / 2**20:.0f} | "
            f"{each['predicted'] / each['measured']:.3f} |"
            for each in results
        ]
        args.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
