"""Reads accelerate's ParallelismConfig."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator


def parallelism_of(accelerator: Accelerator) -> Any:
    """The accelerator's ParallelismConfig, or None."""
    return getattr(accelerator, "parallelism_config", None)


def deepspeed_shards_sequences(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed shards the sequence (ALST / Ulysses through accelerate), and ringtile stands back."""
    parallelism = parallelism_of(accelerator)
    return parallelism is not None and (
        getattr(parallelism, "cp_backend", "torch") == "deepspeed" or bool(parallelism.sp_enabled)
    )


def accelerate_knows_groups(accelerator: Accelerator) -> bool:
    """Whether accelerate already gives the ranks of a group the same batches, and counts each batch once."""
    parallelism = parallelism_of(accelerator)
    return parallelism is not None and bool(parallelism.cp_enabled)
