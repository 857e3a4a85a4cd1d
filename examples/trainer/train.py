"""Trains a causal language model with a Hugging Face Trainer. README.md has the commands."""

import logging
import pathlib
import sys

import ringtile
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

logging.basicConfig(format="%(message)s", level=logging.INFO)  # also shows what the first batch proves

MODEL = ""  # a folder or a hub name, such as "Qwen/Qwen3-0.6B"; empty: the tiny one of ../tiny_model.py
TEXT = pathlib.Path(__file__).read_text()  # what to train on: your own text here
SEQ_LEN = 256  # tokens of a row, before the ranks share it

folder = pathlib.Path(__file__).resolve().parent
settings = sys.argv[1] if len(sys.argv) > 1 else "training.yaml"  # or training_zero3.yaml, training_fsdp2.yaml
keys = yaml.safe_load((folder / settings).read_text())
# Before the model, so that an engine can shard it. Without use_cpu, accelerate does not train on several CPU ranks.
args = TrainingArguments(use_cpu=not torch.accelerator.is_available(), **keys)
if MODEL:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
else:
    sys.path.append(str(folder.parent))
    from tiny_model import tiny_model, tiny_tokenizer

    model, tokenizer = tiny_model(), tiny_tokenizer()
tokens = tokenizer(TEXT).input_ids
starts = range(0, len(tokens) - SEQ_LEN + 1, SEQ_LEN)
rows = [{"input_ids": tokens[i : i + SEQ_LEN], "labels": tokens[i : i + SEQ_LEN]} for i in starts]

trainer = Trainer(model=model, args=args, train_dataset=rows)
if args.fsdp and not trainer.is_fsdp_enabled:
    raise SystemExit("accelerate shards no weights on a CPU: run this on GPUs, or with training.yaml")
ringtile.enable(trainer, folder / "ringtile.yaml")
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
if args.save_strategy != "no":
    trainer.save_model()
