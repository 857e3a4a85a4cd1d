"""`ContextParallel`: one line in a parallelize plan makes a module's attention context-parallel.

Shape letters: B batch, H heads, N local tokens, D head dim.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ringtile.errors import InputError, Refused
from ringtile.sequence.layout import Layout
from ringtile.torch_context_parallel.flex import Origin, gathered
from ringtile.torch_context_parallel.group_layouts import check_layout, group_of, layout_in_force
from ringtile.torch_context_parallel.mode import RingMode
from ringtile.torch_context_parallel.scope import AttentionScope
from ringtile.torch_context_parallel.sdpa import sdpa


class _AttentionType(Enum):
    """The attention function that the module calls."""

    SDPA = "scaled_dot_product_attention"
    FLEX = "flex_attention"


class ContextParallel(ParallelStyle):
    """A style for `parallelize_module`: attention called in the module's forward runs over all ranks of the mesh.

    parallelize_module(model, mesh["cp"], {"layers.*.attention.inner": ContextParallel(seq_dim=2)})

    The module takes local tensors; tensor parallelism may shard their heads over another dim of the mesh.

    seq_dim: 2, the dim of the tokens in (B, H, N, D).
    attention_type: SDPA if the module calls scaled_dot_product_attention, FLEX if it calls flex_attention. A FLEX
    module takes the BlockMask of `create_cp_block_mask` or `context_parallel_shard` in any argument; without one, all
    queries attend all keys. A mask of one interval per query runs as a ring. Any other mask, and a score_mod in an
    argument of that name, runs with gathered key and value: the second and third argument, or those of these names.
    layout: the name of the layout, if all ranks hold the same number of tokens. By default it is the layout that
    `context_parallel_shard` last used over this mesh to leave this rank as many tokens as the call has; after two
    layouts of one length the call raises InputError. A `context_parallel` block around the call overrides both
    layout and mask.
    """

    AttentionType = _AttentionType

    def __init__(
        self,
        seq_dim: int = 2,
        attention_type: _AttentionType = _AttentionType.SDPA,
        *,
        layout: str = "",
    ) -> None:
        super().__init__()
        if seq_dim not in (2, -2):
            raise InputError(f"seq_dim is {seq_dim}; expected 2: attention takes (batch, heads, tokens, head_dim)")
        self.attention_type = attention_type
        if layout:
            Layout.multiple(layout, 1)  # refuses an unknown name
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        scope = AttentionScope(group_of(device_mesh), layout_name=self.layout)
        run = _run_flex if self.attention_type == _AttentionType.FLEX else _run_sdpa
        module.forward = functools.partial(run, module.forward, scope)
        return module


def _run_sdpa(forward: Callable[..., Any], scope: AttentionScope, *args: Any, **kwargs: Any) -> Any:
    with RingMode(scope):
        return forward(*args, **kwargs)


def _run_flex(forward: Callable[..., Any], scope: AttentionScope, *args: Any, **kwargs: Any) -> Any:
    """Takes the mask out of the arguments and calls forward in a ring mode, or gives it gathered key and value."""
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    masks = [name for name, value in arguments.items() if isinstance(value, BlockMask)]
    score_mod = arguments.get("score_mod")
    origin: Origin | None = None
    for name in masks:
        origin = getattr(arguments[name], "ringtile_origin", None)
        if origin is None or len(masks) > 1:
            raise Refused(
                f"{len(masks)} BlockMasks, or one of another sequence, under ContextParallel; expected one, made by "
                "create_cp_block_mask or context_parallel_shard"
            )
    if origin is not None:
        check_layout(scope.group_name, origin.layout)
    if score_mod is None and (origin is None or origin.sequence is not None):
        if masks:
            arguments[masks[0]] = None
        if origin is not None:
            scope = AttentionScope(scope.group, sequence=origin.sequence, is_masked=True)
        with RingMode(scope):
            return _call(forward, arguments)
    key_name, value_name = (name if name in arguments else i + 1 for i, name in enumerate(("key", "value")))
    key, value = arguments[key_name], arguments[value_name]
    if origin is None:
        layout = layout_in_force(scope.group_name, scope.layout_name, key.size(2))
        origin = Origin(scope.group_name, layout, sequence=None)
    key, value, score_mod = gathered(origin, key, value, score_mod)
    arguments[key_name], arguments[value_name] = key, value
    for name in masks:
        arguments[name] = copy.copy(arguments[name])
        arguments[name].ringtile_origin = None  # so that ringtile's flex_attention does not gather once more
    if score_mod is not None:
        arguments["score_mod"] = score_mod
    return _call(forward, arguments)


def _call(forward: Callable[..., Any], arguments: dict[int | str, Any]) -> Any:
    args = [value for name, value in arguments.items() if isinstance(name, int)]
    kwargs = {name: value for name, value in arguments.items() if isinstance(name, str)}
    return forward(*args, **kwargs)


# ---- DTensors -----------------------------------------------------------------------------------


class _DispatcherMode(TorchFunctionMode):
    """Runs scaled_dot_product_attention of DTensors as a ring over the mesh dim that shards their dim 2."""

    def __torch_function__(
        self, func: Callable[..., Any], classes: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and isinstance(args[0] if args else kwargs["query"], DTensor):
            return _sdpa_of_dtensors(*args, **kwargs)
        return func(*args, **kwargs)


def _sdpa_of_dtensors(query: DTensor, key: DTensor, value: DTensor, *args: Any, **kwargs: Any) -> Any:
    placements, mesh = query.placements, query.device_mesh
    dims = [i for i, placement in enumerate(placements) if placement == Shard(2)]
    others = [placement for placement in placements if placement != Shard(2)]
    if not dims:
        return scaled_dot_product_attention(query, key, value, *args, **kwargs)
    if len(dims) > 1 or any(not (p.is_replicate() or p in (Shard(0), Shard(1))) for p in others):
        raise InputError(f"query is placed {placements}; expected Shard(2) once, else Shard(0), Shard(1), Replicate()")
    for name, x in (("key", key), ("value", value)):
        if not isinstance(x, DTensor) or x.placements != placements or x.device_mesh != mesh:
            raise InputError(f"{name} is not placed as query is, {placements} on {mesh}; redistribute it")
    group = mesh.get_group(dims[0])
    q, k, v = (x.to_local() for x in (query, key, value))
    out = sdpa(AttentionScope(group), q, k, v, *args, **kwargs)
    return DTensor.from_local(out, mesh, placements, run_check=False)


_entered = threading.local()


def enable_context_parallel_dispatcher() -> None:
    """From now on scaled_dot_product_attention of DTensors sharded in dim 2 runs as a ring, on this thread.

    The layout is the one that `context_parallel_shard` used, or that of the `context_parallel` block around the call.
    """
    modes = _entered.__dict__.setdefault("modes", [])
    modes.append(_DispatcherMode())
    modes[-1].__enter__()


def disable_context_parallel_dispatcher() -> None:
    """Undoes this thread's last `enable_context_parallel_dispatcher`.

    Raises InputError when there is none, or when function modes entered after it are still active.
    """
    modes = _entered.__dict__.get("modes", [])
    depth = torch._C._len_torch_function_stack()
    if not modes or not depth or torch._C._get_function_stack_at(depth - 1) is not modes[-1]:
        raise InputError("the dispatcher is not enabled on this thread, or other function modes were entered after it")
    modes.pop().__exit__(None, None, None)
