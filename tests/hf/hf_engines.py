"""Data-parallel engines on CPU ranks, as accelerate sets them up on GPUs.

accelerate ignores an FSDP plugin and starts DeepSpeed with one process where it sees no accelerator, so both are told
that this is one. Nothing else of them is changed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

# accelerate sees a device that is the CPU, DDP is given no device ids, DeepSpeed looks for no accelerator.
_VARIABLES = {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_BYPASS_DEVICE_MAP": "true", "DS_ACCELERATOR": "cpu"}


@contextlib.contextmanager
def engine(name: str) -> Iterator[dict[str, Any]]:
    """Inside, a Trainer with the TrainingArguments that are yielded trains under DDP, FSDP2 or ZeRO-1, -2, -3; under
    "mesh", as transformers has sharded the model while it loaded it."""
    kind, arguments = DistributedType.MULTI_CPU, {}
    if name == "FSDP2":
        kind, arguments = DistributedType.MULTI_GPU, {"use_cpu": False, "fsdp": True, "fsdp_config": {"version": 2}}
    elif name == "mesh":
        kind, arguments = DistributedType.MULTI_GPU, {"use_cpu": False}
    elif name != "DDP":
        arguments = {"use_cpu": False, "deepspeed": _zero(int(name[-1]))}
        with mock.patch.dict(os.environ, _VARIABLES):
            _without_compiling()
    backend = mock.patch.object(PartialState, "_prepare_backend", return_value=("gloo", kind))
    with mock.patch.dict(os.environ, _VARIABLES), backend if arguments else contextlib.nullcontext():
        try:
            yield arguments
        finally:
            unset_hf_deepspeed_config()  # under that of ZeRO-3 later models would be sharded


def needs_deepspeed() -> None:
    """Skips a test without DeepSpeed."""
    pytest.importorskip("deepspeed")


def _without_compiling() -> None:
    """Leaves DeepSpeed's collectives to gloo: its own for CPUs are compiled at first use, which takes a minute."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _zero(stage: int) -> dict[str, Any]:
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters in one piece, whatever shards them. A collective."""
    weights = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            value = parameter.full_tensor()
        elif hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                value = parameter.detach().clone()
        else:
            value = parameter
        weights[name.replace("_checkpoint_wrapped_module.", "")] = value.detach().clone()
    return weights
