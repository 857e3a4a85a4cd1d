"""GRPO on long prompts with TRL and LoRA: the ranks share each row, and each generates some of the completions.

    torchrun --nproc-per-node 2 examples/grpo_trl.py         # a tiny random model on a laptop, which learns nothing
    torchrun --nproc-per-node 8 examples/grpo_trl.py --model Qwen/Qwen3-8B --prompt 98304 --completion 1024

A prompt hides a key in a text; the reward is how much of a completion belongs to it. The KL term compares with the
model without its adapters. Needs `pip install 'ringtile[train]' trl peft`.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import ringtile
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def prompts(length: int, count: int = 64) -> Dataset:
    """Texts of about `length` characters, each with a key somewhere."""
    chance, rows = random.Random(0), []
    for _ in range(count):
        key = "".join(chance.choices("abcdefgh", k=8))
        words = ["."] * max(length - 40, 1)
        words.insert(chance.randrange(len(words)), f" The key is {key}. ")
        rows.append({"prompt": "".join(words) + " What is the key?", "key": key})
    return Dataset.from_list(rows)


def reward(completions: list[str], key: list[str], **columns: Any) -> list[float]:
    """The share of a completion's characters that its key has."""
    return [sum(c in one for c in text) / max(len(text), 1) for text, one in zip(completions, key, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with TRL, whose ranks share long rows.")
    parser.add_argument("--model", default="", help="a folder or a hub name; without: a tiny one")
    parser.add_argument("--cp", type=int, default=0, help="ranks that share a row (all)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=256, help="characters of a prompt")
    parser.add_argument("--completion", type=int, default=16, help="tokens of a completion")
    given = parser.parse_args()
    is_tiny, on_cpu = not given.model, not torch.accelerator.is_available()
    args = GRPOConfig(
        "out/grpo_trl",
        **{"max_steps": given.steps, "max_completion_length": given.completion},
        **{"per_device_train_batch_size": 8, "num_generations": 8, "beta": 0.01, "bf16": not on_cpu},
        **{"use_cpu": on_cpu, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True},
        learning_rate=0.03 if is_tiny else 1e-5,
    )
    if is_tiny:
        from tiny_model import tiny_model, tiny_tokenizer

        model, tokenizer = tiny_model(), tiny_tokenizer()
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(given.model), AutoTokenizer.from_pretrained(given.model)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=prompts(given.prompt),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    ringtile.enable(trainer, {"context_parallel_size": given.cp or args.world_size, "tiled_mlp": True})
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    if trainer.is_world_process_zero():
        print("rewards:", *(f"{each:.2f}" for each in rewards))


if __name__ == "__main__":
    main()
