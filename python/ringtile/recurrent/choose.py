"""Who computes the tokens of one device: ringtile's kernels on a CPU; on a GPU a library, or torch operations.

A library is used where it can compute the call, and where a small case agrees with the definition on this device
(library_test.py). What it cannot compute torch operations do, with one warning for each reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ringtile import self_test
from ringtile.recurrent import fla, kernels, library_test, mamba, torch_path

logger = logging.getLogger(__name__)

LIBRARIES = {  # by function
    **dict.fromkeys(("causal_conv1d", "gated_delta_rule", "ssd"), ("flash-linear-attention", fla)),
    "selective_scan": ("mamba_ssm", mamba),
}
SLOWER = "an estimated 30 to 100 times slower than compiled kernels"
_warned: set[str] = set()


def uses_libraries(device: torch.device) -> bool:
    """Return whether libraries compute there. They multiply numbers of the model's dtype, so nothing gains by wider."""
    return device.type == "cuda"


def function_for(op: str, x: Tensor, key_dim: int, by_channel: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return who computes a function of kernels.py for tensors like x, the one that its output is shaped like.

    key_dim: of q and k (B and C), or the width of a convolution. by_channel: whether channels of k decay differently.
    """
    module: ModuleType = kernels if x.device.type == "cpu" else torch_path
    if uses_libraries(x.device):
        reason = why_not(op, x, key_dim, by_channel)
        module = torch_path if reason else LIBRARIES[op][1]
        if reason and not isinstance(x, FakeTensor):
            _warn_once(op, x.device, reason)
    return getattr(module, op)  # type: ignore[no-any-return]


def why_not(op: str, x: Tensor, key_dim: int, by_channel: bool = False) -> str:
    """Return why no library computes a function of kernels.py, "" if one does. Arguments as in `function_for`."""
    name, library = LIBRARIES[op]
    if isinstance(x, FakeTensor):
        return "fake tensors hold no numbers"
    reason: str = library.why_not(op, x, key_dim)
    if reason:
        return reason
    dims = (key_dim, x.size(-1) if x.dim() == 4 else 0)
    key = (name, op, x.device, x.dtype, dims, by_channel)
    function = getattr(library, op)
    wrong = self_test.why_not(key, lambda: library_test.failure(function, op, x.dtype, x.device, dims, by_channel))
    return wrong and f"{name} cannot be used for {x.dtype} with dims {dims}: it {wrong}"


def who_computes(device: torch.device) -> dict[str, str]:
    """Return who computes each of kernels.KERNELS in bfloat16 on a device with libraries, and why no library does."""
    heads, channels = (torch.empty(1, 1, *size, dtype=torch.bfloat16, device=device) for size in ((2, 128), (128,)))
    questions: dict[str, tuple[str, torch.Tensor, int, bool]] = {
        "delta": ("gated_delta_rule", heads, 128, False),
        "kda": ("gated_delta_rule", heads, 128, True),
        "ssd": ("ssd", heads, 128, False),
        "selective": ("selective_scan", channels, 16, False),
        "convolution": ("causal_conv1d", channels, 4, False),
    }
    found = {}
    for kind, question in questions.items():
        reason = why_not(*question)
        library = f"{LIBRARIES[question[0]][0]}, right for bfloat16"
        found[kernels.KERNELS[kind]] = f"torch operations, {SLOWER}: {reason}" if reason else library
    return found


def _warn_once(op: str, device: torch.device, reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        logger.warning("%s is computed by torch operations on %s, %s: %s", *(op, device, SLOWER, reason))
