"""Fine-tunes a model of images and text with TRL's SFTTrainer. README.md has the commands."""

import logging
import pathlib
import sys

import ringtile
import torch
import yaml
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from trl import SFTConfig, SFTTrainer

logging.basicConfig(format="%(message)s", level=logging.INFO)  # also shows what the first batch proves

MODEL = ""  # a folder or a hub name, such as "Qwen/Qwen3-VL-2B-Instruct"; empty: the tiny one of tiny_vlm.py


def row(number):
    """Images, a question and its answer: your own here. Rows may have several images, or an empty list."""
    color = ("red", "green", "blue")[number % 3]
    images = [Image.new("RGB", (32, 32), color) for _ in range(1 + number % 2)]
    asked, answered = ({"role": role, "content": text} for role, text in (("user", "Color? "), ("assistant", color)))
    return {"images": images, "prompt": [asked], "completion": [answered]}


folder = pathlib.Path(__file__).resolve().parent
keys = yaml.safe_load((folder / "training.yaml").read_text())
# Before the model, so that an engine can shard it. Without use_cpu, accelerate does not train on several CPU ranks.
args = SFTConfig(use_cpu=not torch.accelerator.is_available(), **keys)
if MODEL:
    model, processor = AutoModelForImageTextToText.from_pretrained(MODEL), AutoProcessor.from_pretrained(MODEL)
else:
    sys.path.append(str(folder.parent))
    from tiny_vlm import tiny_processor, tiny_vlm

    model, processor = tiny_vlm(), tiny_processor()

rows = Dataset.from_list([row(number) for number in range(200)])
trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=processor)
ringtile.enable(trainer, folder / "ringtile.yaml")
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
if args.save_strategy != "no":
    trainer.save_model()
