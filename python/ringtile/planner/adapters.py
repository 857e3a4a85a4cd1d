"""LoRA on fake tensors: PEFT's own adapters on a model whose weights are frozen, and may be in 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from ringtile.errors import MissingPackageError, RefusedError
from ringtile.hf.patches import Patches


def add_lora(model: PreTrainedModel, rank: int, dtype: torch.dtype, load_in_4bit: bool, engine: str) -> int:
    """Put adapters of that rank and dtype on every linear layer but the head, in place, and freeze all other weights.

    load_in_4bit: puts these into 4 bits first. Returns how many numbers are not counted by the parameters any more.

    RefusedError: a model in which PEFT finds no linear layer. MissingPackageError: PEFT.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingPackageError("a plan with LoRA runs PEFT's adapters; expected it: pip install peft") from error
    missing = 0
    if load_in_4bit:
        from ringtile.planner import four_bit

        # FSDP2 shards weights of floating-point dtypes alone.
        missing = four_bit.quantize(model, torch.bfloat16 if engine == "fsdp2" else torch.uint8)
    config: Any = LoraConfig(r=rank, target_modules="all-linear")
    patches = Patches()
    # With it PEFT moves adapters to the device and dtype where they are made here; it cannot swap fake tensors.
    patches.set(nn.Module, "to", lambda module, *args, **keys: module)
    try:
        with local_torch_dtype(dtype):
            inject_adapter_in_model(config, model)
    except ValueError as error:
        raise RefusedError(f"PEFT puts no LoRA on a {type(model).__name__}: {error}") from error
    finally:
        patches.restore()
    if load_in_4bit:
        four_bit.adapt(model)
    return missing
