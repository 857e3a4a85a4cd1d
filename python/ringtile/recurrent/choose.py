"""Who computes the tokens of one device: ringtile's kernels on a CPU, flash-linear-attention on a GPU.

The library is used where it can compute the call, and where a small case agrees with the definition on this device
(self_test.py). Any other call on a GPU is refused, with what to install or change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ringtile import self_test
from ringtile.errors import RefusedError
from ringtile.recurrent import fla, kernels
from ringtile.recurrent import self_test as recurrent_self_test

LIBRARY = "flash-linear-attention"


def uses_libraries(device: torch.device) -> bool:
    """Return whether libraries compute there. They multiply numbers of the model's dtype, so nothing gains by wider."""
    return device.type not in ("cpu", "meta")


def function_for(op: str, x: Tensor, key_dim: int, by_channel: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return who computes a function of kernels.py for tensors like x, the one that its output is shaped like.

    key_dim: of q and k (B and C), or the width of a convolution. by_channel: whether channels of k decay differently.
    RefusedError: x is on a GPU, and the library cannot.
    """
    if isinstance(x, FakeTensor) or not uses_libraries(x.device):
        return getattr(kernels, op)  # type: ignore[no-any-return]
    if reason := why_not(op, x, key_dim, by_channel):
        raise RefusedError(f"{op} on {x.device} is computed by {LIBRARY}: {reason}")
    return getattr(fla, op)  # type: ignore[no-any-return]


def why_not(op: str, x: Tensor, key_dim: int, by_channel: bool = False) -> str:
    """Return why the library does not compute a function of kernels.py, "" if it does. As in `function_for`."""
    reason: str = fla.why_not(op, x, key_dim)
    if reason:
        return reason
    dims = (key_dim, x.size(-1) if x.dim() == 4 else 0)
    key = (LIBRARY, op, x.device, x.dtype, dims, by_channel)
    function = getattr(fla, op)
    wrong = self_test.why_not(
        key, lambda: recurrent_self_test.failure(function, op, x.dtype, x.device, dims, by_channel)
    )
    return wrong and f"it cannot be used for {x.dtype} with dims {dims}: it {wrong}"


def why_not_kind(kind: str, device: torch.device) -> str:
    """Return why the library does not compute one of kernels.KERNELS in bfloat16 on a device; "" if it does."""
    heads, channels = (torch.empty(1, 1, *size, dtype=torch.bfloat16, device=device) for size in ((2, 128), (128,)))
    questions: dict[str, tuple[str, torch.Tensor, int, bool]] = {
        "delta": ("gated_delta_rule", heads, 128, False),
        "kda": ("gated_delta_rule", heads, 128, True),
        "ssd": ("ssd", heads, 128, False),
        "selective": ("selective_scan", channels, 16, False),
        "convolution": ("causal_conv1d", channels, 4, False),
    }
    return why_not(*questions[kind])
