"""`ContextParallel`: one line in a parallelize plan makes a module's attention context-parallel.

Shape letters: B batch, H heads, N local tokens, D head dim.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.attention.flex_attention import BlockMask, noop_mask
from torch.nn.attention.flex_attention import _identity as identity
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ringtile.errors import InputError, RefusedError, shown
from ringtile.sequence.layout import Layout
from ringtile.torch_context_parallel.flex import (
    FlexCall,
    Origin,
    ScoreMod,
    check_call,
    flex_attention,
    gathered,
    of_local_queries,
)
from ringtile.torch_context_parallel.group_layouts import check_layout, group_of, sequence_in_force
from ringtile.torch_context_parallel.mode import RingMode, keep_modes
from ringtile.torch_context_parallel.scope import AttentionScope
from ringtile.torch_context_parallel.sdpa import sdpa_of_dtensors


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
        if not isinstance(attention_type, _AttentionType):
            raise InputError(
                f"attention_type is {shown(attention_type)}; expected ContextParallel.AttentionType.SDPA or FLEX"
            )
        self.attention_type = attention_type
        if layout:
            Layout.multiple(layout, 1)  # refuses an unknown name
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        keep_modes()
        scope = AttentionScope(group_of(device_mesh), layout_name=self.layout)
        if self.attention_type == _AttentionType.FLEX:
            module.forward = functools.partial(_run_flex, module.forward, _positional(module.forward), scope)
        else:
            module.forward = functools.partial(_run_sdpa, module.forward, scope)
        return module


def _positional(forward: Callable[..., Any]) -> list[str]:
    """The names of forward's positional arguments; *args are those of flex_attention."""
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        names += FlexCall._fields[len(names) : -1]
    return names


def _run_sdpa(forward: Callable[..., Any], scope: AttentionScope, *args: Any, **kwargs: Any) -> Any:
    with RingMode(scope):
        return forward(*args, **kwargs)


def _run_flex(
    forward: Callable[..., Any], positional: list[str], scope: AttentionScope, *args: Any, **kwargs: Any
) -> Any:
    """Takes the mask out of the arguments and calls forward in a ring mode, or gives it gathered key and value."""
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs)
    named: dict[str, int | str] = {name: i for i, name in enumerate(positional[: len(args)])}
    named.update((name, name) for name in kwargs)
    masks = [name for name, value in arguments.items() if isinstance(value, BlockMask)]
    score_mod = arguments[named["score_mod"]] if "score_mod" in named else None
    if score_mod is not None and not callable(score_mod):
        raise scope.told(InputError(f"score_mod is a {type(score_mod).__name__}; expected a function"))
    origin: Origin | None = None
    for name in masks:
        origin = getattr(arguments[name], "ringtile_origin", None)
        if origin is None or len(masks) > 1:
            raise scope.told(
                RefusedError(
                    f"{len(masks)} BlockMasks, or one of another sequence, under ContextParallel; expected one, made "
                    "by create_cp_block_mask or context_parallel_shard"
                )
            )
    if origin is not None:
        check_layout(scope.group_name, origin.layout)
    if score_mod is None and (origin is None or origin.sequence is not None):
        if masks:
            arguments[masks[0]] = None
        if origin is not None:
            scope = AttentionScope(scope.group, sequence=origin.sequence, is_masked=True)
        return _call(RingMode(scope), forward, arguments)
    if not isinstance(key := arguments.get(named.get("key", "key")), Tensor) or "value" not in named:
        raise scope.told(
            RefusedError(
                "a score_mod, or a mask of rows with gaps, for a module under ContextParallel whose forward takes no "
                "query, key and value; call ringtile.flex_attention inside context_parallel instead"
            )
        )
    if origin is None:
        layout = sequence_in_force(scope.group, scope.layout_name, key.size(2)).layout
        origin = Origin(scope.group_name, layout, sequence=None)
    arguments[named["key"]], arguments[named["value"]] = gathered(origin, key, arguments[named["value"]])
    block_mask: BlockMask | None = None
    for name in masks:
        block_mask = arguments[name] = copy.copy(arguments[name])
        arguments[name].ringtile_origin = None  # so that ringtile's flex_attention does not gather once more
    if score_mod is not None:
        score_mod = arguments[named["score_mod"]] = of_local_queries(origin, score_mod, key.device)
    return _call(GatheredMode(scope, origin, block_mask, score_mod), forward, arguments)


def _call(mode: TorchFunctionMode, forward: Callable[..., Any], arguments: dict[int | str, Any]) -> Any:
    args = [value for name, value in arguments.items() if isinstance(name, int)]
    kwargs = {name: value for name, value in arguments.items() if isinstance(name, str)}
    with mode:
        return forward(*args, **kwargs)


class GatheredMode(TorchFunctionMode):
    """Around a module that got the keys of all ranks: its flex_attention must use the mask and score_mod it was given.

    Others count local queries from 0. ringtile's flex_attention takes a score_mod of the module's own.
    """

    def __init__(
        self, scope: AttentionScope, origin: Origin, block_mask: BlockMask | None, score_mod: ScoreMod | None
    ) -> None:
        super().__init__()
        self.scope = scope
        self.origin = origin
        self.block_mask = block_mask
        self.score_mod = score_mod

    def __torch_function__(
        self, func: Callable[..., Any], classes: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is flex_attention:
            return self._flex_attention(FlexCall(*args, **kwargs))
        if func is flex_attention_hop and not isinstance(args[3], torch.fx.GraphModule):  # else checked while tracing
            score_mod, mask_mod = args[3], args[4][-1]
            is_given = score_mod is (identity if self.score_mod is None else self.score_mod)
            if not is_given or mask_mod is not (noop_mask if self.block_mask is None else self.block_mask.mask_mod):
                raise RefusedError(_NOT_GIVEN)
        elif func is scaled_dot_product_attention:
            raise self.scope.told(RefusedError(f"scaled_dot_product_attention on gathered keys; {_NOT_GIVEN}"))
        return func(*args, **kwargs)

    def _flex_attention(self, call: FlexCall) -> Any:
        check_call(self.scope, call)
        self.scope.check_scale(call.scale)
        if call.block_mask is not self.block_mask or call.key.size(2) != self.origin.layout.seq_len:
            raise self.scope.told(RefusedError(_NOT_GIVEN))
        score_mod = call.score_mod
        if score_mod is not self.score_mod:
            score_mod = of_local_queries(self.origin, score_mod, call.key.device)
        return call._replace(score_mod=score_mod).invoke(flex_attention)


_NOT_GIVEN = (
    "a module under ContextParallel with a score_mod, or a mask of rows with gaps, must call flex_attention with the "
    "key, value, block_mask and score_mod that its forward got; pass them as arguments of these names"
)


# ---- DTensors -----------------------------------------------------------------------------------


class _DispatcherMode(TorchFunctionMode):
    """Runs scaled_dot_product_attention of DTensors as a ring over the mesh dim that shards their dim 2."""

    def __torch_function__(
        self, func: Callable[..., Any], classes: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and isinstance(args[0] if args else kwargs["query"], DTensor):
            return sdpa_of_dtensors(None, *args, **kwargs)
        return func(*args, **kwargs)


_entered = threading.local()


def enable_context_parallel_dispatcher() -> None:
    """From now on scaled_dot_product_attention of DTensors sharded in dim 2 runs as a ring, on this thread.

    The layout is the one that `context_parallel_shard` used, or that of the `context_parallel` block around the call.
    """
    modes = _entered.__dict__.setdefault("modes", [])
    modes.append(_DispatcherMode())
    modes[-1].__enter__()


def disable_context_parallel_dispatcher() -> None:
    """Undo this thread's last `enable_context_parallel_dispatcher`.

    Raises InputError when there is none, or when function modes entered after it are still active.
    """
    modes = _entered.__dict__.get("modes", [])
    depth = torch._C._len_torch_function_stack()
    if not modes or not depth or torch._C._get_function_stack_at(depth - 1) is not modes[-1]:
        raise InputError("the dispatcher is not enabled on this thread, or other function modes were entered after it")
    modes.pop().__exit__(None, None, None)
