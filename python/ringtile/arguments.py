"""Checks of arguments, whatever the op: of types, devices, memory and numbers. Each raises InputError."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling

from ringtile.errors import InputError, shown

_PLAIN = (Tensor, torch.nn.Parameter)


def check_tensor(name: str, x: object) -> None:
    """InputError: x is no tensor, or none of dense numbers in memory."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} is a {type(x).__name__}; expected a tensor")
    check_storage(name, x)


def check_whole(**tensors: Any) -> None:
    """Check each as `check_tensor` does, at once those that are all of a storage of their own."""
    for name, x in tensors.items():
        if (
            type(x) not in _PLAIN
            or is_functorch_wrapped_tensor(x)
            or x.is_nested
            or x.is_quantized
            or x.layout is not torch.strided
            or not x.is_contiguous()
            or x.storage_offset() != 0
            or x.untyped_storage().nbytes() < x.nbytes
        ):
            check_tensor(name, x)


def check_storage(name: str, x: Tensor) -> None:
    """InputError for a tensor without strides, or with a storage smaller than shape and strides say, as FSDP leaves."""
    if is_compiling():
        return
    if x.is_nested or x.is_quantized or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout)
        raise InputError(f"{name} is {kind}; expected a dense tensor with strides: pad it, or call .to_dense()")
    if type(x) not in _PLAIN or is_functorch_wrapped_tensor(x):
        return  # with storages of its own
    stored = x.untyped_storage().nbytes()
    if x.numel() == 0 or (stored >= x.nbytes and x.is_contiguous() and x.storage_offset() == 0):
        return
    last = x.storage_offset() + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    if stored < (last + 1) * x.itemsize:
        raise InputError(
            f"{name} needs {(last + 1) * x.itemsize} bytes but its storage has {stored}: it was freed or resized; use "
            "the tensor while it exists (under FSDP, inside the forward of the module that owns it)"
        )


def check_on_cpu(name: str, x: object) -> None:
    """InputError: x, which the host reads, is no CPU tensor in memory."""
    check_tensor(name, x)
    assert isinstance(x, Tensor)
    if x.device.type != "cpu":
        raise InputError(f"{name} is on {x.device}; expected a CPU tensor: make it with device='cpu', or call .cpu()")


def check_dim(name: str, x: object, dim: int) -> int:
    """dim, not negative. InputError: x is no tensor in memory, or has no such dimension."""
    check_tensor(name, x)
    assert isinstance(x, Tensor)
    dim = check_int("dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise InputError(f"{name} is {tuple(x.shape)}, dim {shown(dim)}; expected one of its dims")
    return dim % x.dim()


def check_device(name: str, x: object) -> None:
    """InputError: x is no tensor, or on a device that ringtile does not know."""
    if not isinstance(x, Tensor):
        raise InputError(f"{name} is a {type(x).__name__}; expected a tensor")
    if not (x.is_cpu or x.is_cuda or x.is_meta):
        raise InputError(f"{name} is on {x.device}; expected a CPU or a CUDA tensor")


def check_devices(first_name: str, first: Tensor, **others: Tensor | None) -> None:
    """InputError: tensors that one call works on are on different devices."""
    for name, x in others.items():
        if x is not None and x.device != first.device:
            raise InputError(f"{name} is on {x.device} but {first_name} is on {first.device}; move them to one device")


def check_number(name: str, value: Any) -> float:
    """Return a number as a float. InputError: it is none, or a tensor whose gradient would be lost."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise InputError(
                f"{name} is a tensor that requires grad, which it would not get; apply it to the tensors yourself"
            )
        check_storage(name, value)
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        raise InputError(f"{name} is {shown(value)}; expected a number") from None


def check_int(name: str, value: Any) -> int:
    """Return a whole number as an int. InputError: it is none."""
    if isinstance(value, Tensor):
        check_storage(name, value)
    try:
        return int(operator.index(value))  # not a bool
    except (TypeError, RuntimeError):
        raise InputError(f"{name} is {shown(value)}; expected a whole number") from None


_LIMITS = torch.finfo(torch.float32), torch.finfo(torch.float64)  # of the state dtypes


def check_scale_and_softcap(dtype: torch.dtype, scale: float, softcap: float) -> None:
    """InputError: the kernels for dtype cannot hold both numbers, the inverse of the softcap, and sums of scores.

    A sum that overflows on its way is silently wrong: a softcap makes it finite again, and a key whose score is -inf is
    a masked one.
    """
    limits = _LIMITS[dtype == torch.float64]
    # From float32's least normal number to its inverse; float64's inverse is finite too.
    if abs(scale) <= limits.max**0.5 and (softcap == 0 or limits.tiny <= softcap <= 1 / limits.tiny):
        return
    raise InputError(
        f"scale is {scale} and softcap {softcap}; expected numbers of torch.{limits.dtype}: scale at most "
        f"{limits.max**0.5:.3g} in magnitude, and softcap 0 (off) or {limits.tiny:.3g}..{1 / limits.tiny:.3g}"
    )
