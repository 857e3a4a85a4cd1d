"""`ContextParallel`: one line in a parallelize plan makes a module's attention context-parallel.

Shape letters: B batch, H heads, N local tokens, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.attention.flex_attention import BlockMask

from ringtile.errors import InputError, RefusedError, shown
from ringtile.torch_context_parallel.flex import Origin
from ringtile.torch_context_parallel.group_layouts import check_layout, group_of
from ringtile.torch_context_parallel.mode import RingMode, keep_modes
from ringtile.torch_context_parallel.scope import AttentionScope


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
    queries attend all keys. A mask of one interval per query runs as a ring. With any other mask, and with a score_mod,
    the module must call `ringtile.flex_attention`.

    A `ContextParallelPlan.attention()` or `context_parallel` block around the call says which tokens the rank holds and
    brings a mask; without one the call raises InputError.
    """

    AttentionType = _AttentionType

    def __init__(
        self,
        seq_dim: int = 2,
        attention_type: _AttentionType = _AttentionType.SDPA,
    ) -> None:
        super().__init__()
        if seq_dim not in (2, -2):
            raise InputError(f"seq_dim is {seq_dim}; expected 2: attention takes (batch, heads, tokens, head_dim)")
        if not isinstance(attention_type, _AttentionType):
            raise InputError(
                f"attention_type is {shown(attention_type)}; expected ContextParallel.AttentionType.SDPA or FLEX"
            )
        self.attention_type = attention_type

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        keep_modes()
        scope = AttentionScope(group_of(device_mesh))
        if self.attention_type == _AttentionType.FLEX:
            module.forward = functools.partial(_run_flex, module.forward, scope)
        else:
            module.forward = functools.partial(_run_sdpa, module.forward, scope)
        return module


def _run_sdpa(forward: Callable[..., Any], scope: AttentionScope, *args: Any, **kwargs: Any) -> Any:
    with RingMode(scope):
        return forward(*args, **kwargs)


def _run_flex(forward: Callable[..., Any], scope: AttentionScope, *args: Any, **kwargs: Any) -> Any:
    """A mask that runs as a ring becomes the scope's, so that PyTorch's own function may be called without it."""
    masks = [x for x in (*args, *kwargs.values()) if isinstance(x, BlockMask)]
    origins: list[Origin | None] = [getattr(mask, "ringtile_origin", None) for mask in masks]
    if len(masks) > 1 or None in origins:
        raise scope.told(
            RefusedError(
                f"{len(masks)} BlockMasks, or one of another sequence, under ContextParallel; expected one, made "
                "by create_cp_block_mask or context_parallel_shard"
            )
        )
    for origin in origins:
        assert origin is not None
        check_layout(scope.group_name, origin.layout)
        if origin.sequence is not None:
            scope = AttentionScope(scope.group, sequence=origin.sequence, is_masked=True)
            args = tuple(None if x is masks[0] else x for x in args)
            kwargs = {name: None if x is masks[0] else x for name, x in kwargs.items()}
    return _run_sdpa(forward, scope, *args, **kwargs)
