"""Fine-tunes a causal language model on prompts and completions with TRL's SFTTrainer. README.md has the commands."""

import logging
import pathlib
import sys

import ringtile
import torch
import yaml
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

logging.basicConfig(format="%(message)s", level=logging.INFO)  # also shows what the first batch proves

MODEL = ""  # a folder or a hub name, such as "Qwen/Qwen3-0.6B"; empty: the tiny one of ../tiny_model.py
ROWS = [{"prompt": f"{i} + {i} =", "completion": f" {i + i}"} for i in range(200)]  # your own examples here

folder = pathlib.Path(__file__).resolve().parent
keys = yaml.safe_load((folder / "training.yaml").read_text())
# Before the model, so that an engine can shard it. Without use_cpu, accelerate does not train on several CPU ranks.
args = SFTConfig(use_cpu=not torch.accelerator.is_available(), **keys)
if MODEL:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
else:
    sys.path.append(str(folder.parent))
    from tiny_model import tiny_model, tiny_tokenizer

    model, tokenizer = tiny_model(), tiny_tokenizer()

trainer = SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer)
ringtile.enable(trainer, folder / "ringtile.yaml")
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
if args.save_strategy != "no":
    trainer.save_model()
