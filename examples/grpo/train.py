"""Trains a causal language model on a reward with TRL's GRPOTrainer. README.md has the commands."""

import logging
import pathlib
import sys

import ringtile
import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

logging.basicConfig(format="%(message)s", level=logging.INFO)  # also shows what the first batch proves

MODEL = ""  # a folder or a hub name, such as "Qwen/Qwen3-0.6B"; empty: the tiny one of ../tiny_model.py
ROWS = [{"prompt": f"{i} + {i} ="} for i in range(200)]  # your own prompts here


def reward(completions, **columns):
    """A number for each completion, your own here: the share of letters. columns: those of ROWS, and what TRL adds."""
    return [sum(map(str.isalpha, completion)) / max(len(completion), 1) for completion in completions]


folder = pathlib.Path(__file__).resolve().parent
settings = sys.argv[1] if len(sys.argv) > 1 else "training.yaml"  # or training_vllm.yaml
keys = yaml.safe_load((folder / settings).read_text())
# Before the model, so that an engine can shard it. Without use_cpu, accelerate does not train on several CPU ranks.
args = GRPOConfig(use_cpu=not torch.accelerator.is_available(), **keys)
if MODEL:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
else:
    sys.path.append(str(folder.parent))
    from tiny_model import tiny_model, tiny_tokenizer

    model, tokenizer = tiny_model(), tiny_tokenizer()

rows = Dataset.from_list(ROWS)
trainer = GRPOTrainer(model=model, reward_funcs=reward, args=args, train_dataset=rows, processing_class=tokenizer)
ringtile.enable(trainer, folder / "ringtile.yaml")
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
if args.save_strategy != "no":
    trainer.save_model()
