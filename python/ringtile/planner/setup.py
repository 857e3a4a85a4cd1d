"""What a planned training is, apart from the length of its sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import PretrainedConfig

from ringtile.hf.config import Config
from ringtile.planner.grpo import Grpo
from ringtile.planner.images import ImageRows


@dataclass(frozen=True)
class Setup:
    """A training, apart from the length of its sequences."""

    model: PretrainedConfig
    devices: int = 1
    engine: str = "ddp"  # of ENGINES
    ringtile: Config = field(default_factory=Config)
    batch: int = 1  # rows of a rank's batch
    gradient_checkpointing: bool = False
    dtype: torch.dtype = torch.float32  # of the weights
    bf16: bool = False  # mixed precision, as training.bf16
    on_gpu: bool = False
    memory_bytes: int = 80 << 30  # of a device, of which checkpointed layers keep a tenth
    lora_rank: int = 0  # of PEFT's adapters on every linear layer; 0: all weights are trained
    load_in_4bit: bool = False  # the linear layers below the adapters: bitsandbytes' nf4 with double quantization
    optimizer: str = "adamw"  # of OPTIMIZERS
    offload_optimizer: bool = False  # DeepSpeed's: its state, and what it updates, on the host
    grpo: Grpo | None = None  # a GRPO step, of rows of prompts and completions
    images: ImageRows | None = None  # of a model of images and text
    expert_parallel_size: int = 1  # ranks that hold all experts of a layer together, under fsdp2
