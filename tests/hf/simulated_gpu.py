"""A GPU made of CPU tensors, which records what a GPU would do for a step: every operation, copy and wait.

A tensor on it holds numbers, and says that it is on "cuda:0": the code under test takes the branches that it takes on a
GPU. To torch it is a lazy tensor, whose backward runs in the thread of the CPU: a CPU build has no guard for CUDA
devices, and autograd would abort. Operations compute on the CPU tensors inside; those that mix both devices raise an
error.

It does not see what a kernel or a library does inside (a wait in NCCL, several launches of one operation), what an
engine adds (DDP, FSDP2), streams, or time. Kernels of a GPU are those of the CPU.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from ringtile import ops, self_test
from ringtile.recurrent.functions import PUBLIC
from ringtile.transport import groups
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
_NAME = "lazy"  # of the device, to torch
_HOST = torch.device("cpu")
# Operations whose result has a size that the host must know, and which therefore wait for the GPU.
_WAITING = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "_local_scalar_dense"}
_INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"}
# Of the product's ops, the arguments that are on the CPU also for tensors on a GPU.
_ON_HOST = {"attn_fwd_": {5}, "attn_bwd_": {5}, **{f"rows_{each}_": {1} for each in ("pack", "unpack", "add")}}
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "_grouped_mm": 0}  # the index of the left factor


class OnGpu(Tensor):
    """A tensor on the simulated GPU; host: its numbers."""

    host: Tensor
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor) -> OnGpu:
        strides, offset = host.stride(), host.storage_offset()
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls, host.size(), strides=strides, storage_offset=offset, dtype=host.dtype, device=_NAME
        )
        made.host = host
        return made

    def __repr__(self, *unused: Any) -> str:
        return f"OnGpu({self.host!r})"

    def record_stream(self, stream: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the simulated GPU")


class SimulatedGpu(TorchDispatchMode):
    """Inside, tensors may be on the device. launches: operations on it, by name; to_host, to_device: copies over which
    the host waits, by the line of code that asks for them; collectives; wide_products: products with a factor in
    float32, and the elements of the smaller factor."""

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self.forget()

    def forget(self) -> None:
        """Begin to record anew."""
        self.launches: Counter[str] = Counter()
        self.to_host: list[str] = []
        self.to_device: list[str] = []
        self.wide_products: list[tuple[str, int]] = []
        self.collectives: Counter[str] = Counter()

    def __enter__(self) -> SimulatedGpu:
        self._stack.enter_context(_stand_ins())
        self._stack.enter_context(_Devices())
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def move(self, module: nn.Module) -> None:
        """Move a module's parameters and buffers to the device."""
        moved: dict[int, Any] = {}
        for part in module.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None:
                    if id(parameter) not in moved:
                        moved[id(parameter)] = parameter, nn.Parameter(OnGpu(parameter.data), parameter.requires_grad)
                    part._parameters[name] = moved[id(parameter)][1]
            for name, buffer in list(part._buffers.items()):
                if buffer is not None:
                    part._buffers[name] = OnGpu(buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, target = func._schema.name.partition("::")[2], kwargs.get("device")
        tensors: list[Tensor] = []
        _map(lambda x: tensors.append(x) if isinstance(x, Tensor) else None, (args, kwargs))
        inputs = [x for x in tensors if isinstance(x, OnGpu)]
        to_gpu = target is not None and target.type == _NAME
        if not inputs and not to_gpu:
            return func(*args, **kwargs)
        if to_gpu:
            kwargs["device"] = _HOST
        out = _OTHERWISE.get(func, func)(*_map(_inner, args), **_map(_inner, kwargs))
        if target is not None and not to_gpu:
            self.to_host.append(f"{name} {_place()}")
            return out
        if func.namespace == "c10d":
            self.collectives[name] += 1
            return _map(lambda x: _outer(x, inputs), out)
        self._note(func, name, args, kwargs, tensors, inputs)
        return _map(lambda x: _outer(x, inputs), out)

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor], inputs: list[OnGpu]) -> None:
        if not func.is_view:
            self.launches[f"{func.namespace}.{name}"] += 1
        if name in _WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.to_host.append(f"{name} {_place()}")
        if name in _INDEXING and any(isinstance(x, OnGpu) and x.dtype == torch.bool for x in args[1] if x is not None):
            self.to_host.append(f"{name} by bool {_place()}")
        if name in PRODUCTS:
            left, right = args[PRODUCTS[name] : PRODUCTS[name] + 2]
            if torch.float32 in (left.dtype, right.dtype):
                self.wide_products.append((_place(), min(left.numel(), right.numel())))
        allowed = _ON_HOST.get(name, set()) if func.namespace == "ringtile" else set()
        on_host = [x for x in tensors if not isinstance(x, OnGpu) and not any(x is args[i] for i in allowed)]
        if name in ("_to_copy", "copy_") or name in _INDEXING:
            if not on_host or (kwargs.get("non_blocking") and getattr(on_host[0], "is_pinned_here", False)):
                return
            if name == "copy_" and args[0] is on_host[0]:
                self.to_host.append(f"{name} {_place()}")
            else:
                self.to_device.append(f"{name} {_place()}")
        elif mixed := [x for x in on_host if x.dim() > 0]:
            raise RuntimeError(
                f"{name} of tensors on the GPU and on the CPU, {tuple(mixed[0].shape)}: a GPU refuses it; {_place()}"
            )


class _Devices(TorchFunctionMode):
    """What the code under test calls cuda is a device that torch knows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:  # torch has none for tensors of a subclass
            return args[0].to(_HOST).tolist()
        if func is Tensor.pin_memory:
            pinned = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        if func in PUBLIC:  # a recurrence, whose code makes tensors
            with self:
                return inspect.unwrap(func)(*args, **(kwargs or {}))
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args, kwargs = _map(_known, args), _map(_known, dict(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == _NAME:  # of numbers on the host
            return func(*args, **{**kwargs, "device": _HOST}).to(_NAME)
        return func(*args, **kwargs)


_OTHERWISE: dict[Any, Any] = {  # what a CPU lacks
    torch.ops.aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    torch.ops.aten.histc.default: lambda x, *bins, **range: torch.histc(x.float(), *bins, **range).to(x.dtype),
}


def _map(function: Callable[[Any], Any], x: Any) -> Any:
    """What torch's tree_map returns for arguments and results of operations; with it, it was half of the time."""
    if type(x) is dict:
        return {name: _map(function, held) for name, held in x.items()}
    if not isinstance(x, tuple | list):
        return function(x)
    parts = [_map(function, held) for held in x]
    return parts if type(x) is list else type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)


def _known(x: Any) -> Any:
    named = x.type if isinstance(x, torch.device) else x
    return _NAME if isinstance(named, str) and named.partition(":")[0] == "cuda" else x


def _inner(x: Any) -> Any:
    return x.host if isinstance(x, OnGpu) else x


def _outer(x: Any, inputs: list[OnGpu]) -> Any:
    """The tensor on the GPU for one of its numbers: the same object where an operation has written to it."""
    if not isinstance(x, Tensor):
        return x
    same = [given for given in inputs if given.host is x]
    return same[0] if same else OnGpu(x)


def _place() -> str:
    """Where in the code of ringtile, else of the library that calls torch, an operation comes from."""
    frame: Any = sys._getframe(1)
    first = None
    while frame is not None:
        path = frame.f_code.co_filename
        if "/ringtile/" in path:
            return f"ringtile/{path.rpartition('/ringtile/')[2]}:{frame.f_lineno}"
        if first is None and "/torch/" not in path and not path.endswith("simulated_gpu.py"):
            first = f"{'/'.join(path.split('/')[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return first or "autograd"


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """For what only a CUDA build of torch has. gloo carries what NCCL would, in the order in which it is asked for."""
    run_backward = torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        with _Devices():  # which torch leaves out inside of a function that has met it
            return run_backward(*args, **kwargs)

    with (
        mock.patch.object(torch.autograd, "_engine_run_backward", backward),
        mock.patch.object(torch.cuda, "current_stream", return_value=mock.Mock(torch.cuda.Stream)),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=mock.Mock(total_memory=80 * 2**30)),
        mock.patch.object(torch.cuda, "get_rng_state", return_value=torch.get_rng_state()),
        mock.patch.object(torch.cuda, "set_rng_state"),
        mock.patch.object(ops, "why_not_on", return_value=""),
        mock.patch.object(self_test, "why_not", return_value=""),  # kernels of a GPU, which is not there
        mock.patch.object(groups, "backend_name", lambda g, d: "nccl" if d == "cuda" else None),
        mock.patch.object(groups, "_coalesces", return_value=False),
        mock.patch("ringtile.attn.attention.is_plain", return_value=True),  # as without a mode that looks on
        mock.patch("ringtile.tiled.glu.Tensor", OnGpu),  # the type of a weight on a GPU
    ):
        yield
