"""Who computes the tokens of one device: ringtile's kernels on the CPU, torch operations elsewhere."""

from __future__ import annotations

from types import ModuleType

import torch

from ringtile.recurrent import kernels, torch_path


def computing_on(device: torch.device) -> ModuleType:
    """The module whose causal_conv1d, gated_delta_rule and ssd run there; both have the same ones."""
    return kernels if device.type == "cpu" else torch_path
