"""How torch rounds the operands of float32 matrix products."""

from __future__ import annotations

import torch

_UNITS = {"tf32": 2.0**-11, "bf16": 2.0**-8}


def float32_rounding(device: torch.device) -> float:
    """Return the largest relative rounding of an operand of a float32 matrix product; 0.0: none is rounded.

    It follows torch.backends.*.fp32_precision, which torch.set_float32_matmul_precision and allow_tf32 set too.
    torch.get_float32_matmul_precision raises where both ways were used (TrainingArguments(tf32=True) is one).
    """
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return _UNITS.get(backend.matmul.fp32_precision, 0.0)
